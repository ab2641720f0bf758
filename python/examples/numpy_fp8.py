"""numpy: ranks as threads of one process, tokens sent as fp8, experts in the packed layout."""

import ml_dtypes
import numpy as np

import tandem_ep

RANKS, EXPERTS, TOKENS, HIDDEN, TOPK = 4, 8, 16, 512, 2


def dequantise(rows: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Rows [n, H] of fp8 with a scale for each 128 channels, as float32."""
    return rows.astype(np.float32) * np.repeat(scales, 128, axis=1)[:, : rows.shape[1]]


def rank(communicator: tandem_ep.Communicator) -> float:
    rng = np.random.default_rng(communicator.rank)
    x = rng.standard_normal((TOKENS, HIDDEN)).astype(ml_dtypes.bfloat16)
    topk_idx = rng.permuted(np.tile(np.arange(EXPERTS), (TOKENS, 1)), axis=1)[:, :TOPK].copy()
    topk_weights = rng.random((TOKENS, TOPK), np.float32)

    with tandem_ep.Buffer(communicator, num_experts=EXPERTS, max_tokens=TOKENS,
                          max_hidden=HIDDEN, max_topk=TOPK) as buffer:  # fmt: skip
        received = buffer.dispatch(x, topk_idx, format="fp8", layout="packed", row_alignment=8)
        y = buffer.next_combine_buffer(received.handle)  # bf16, as x was
        for local, expert in enumerate(buffer.local_experts):
            begin = received.offsets[local]
            rows = slice(begin, begin + received.counts[local])
            y[rows] = dequantise(received.x[rows], received.scales[rows]) * (expert + 1)
        out = buffer.combine(y, topk_weights, received.handle)

    factors = ((topk_idx + 1) * topk_weights).sum(axis=1, keepdims=True)
    expected = x.astype(np.float32) * factors
    return float(np.abs(out - expected).max() / np.abs(expected).max())


errors = tandem_ep.run_threads(RANKS, rank)
assert max(errors) < 0.05, errors
print(f"ok: largest error {max(errors):.3f} of the largest value, as fp8 has it")
