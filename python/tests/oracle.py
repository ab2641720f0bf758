"""What a dispatch and a combine must give, over numpy arrays of all ranks at once.

Written apart from the library and its own oracle, from docs/design.md: values in float32, rounded
where the library rounds, so that results are compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Optional

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
DTYPES = {"bf16": BF16, "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}


@dataclass
class Case:
    """Shapes of one operation. `tokens` by rank."""

    tokens: list[int]
    max_tokens: int
    hidden: int
    experts: int
    topk: int
    seed: int = 0
    owners: Optional[list[int]] = None
    routing: str = "random"  # random, hot, none, repeated
    dtype: str = "bf16"
    index: str = "int64"
    x: list[np.ndarray] = field(default_factory=list)
    idx: list[np.ndarray] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.x:
            return
        rng = np.random.default_rng(self.seed)
        for tokens in self.tokens:
            x = rng.standard_normal((tokens, self.hidden), np.float32)
            self.x.append(x.astype(DTYPES[self.dtype]))
            self.idx.append(self._route(rng, tokens).astype(self.index))
            self.weights.append(rng.random((tokens, self.topk), np.float32))

    def _route(self, rng: np.random.Generator, tokens: int) -> np.ndarray:
        shape = (tokens, self.topk)
        if self.routing == "none":
            return np.full(shape, -1)
        if self.routing == "hot":
            idx = np.full(shape, -1)
            idx[:, 0] = self.experts - 1
            return idx
        if self.routing == "repeated":
            return np.zeros(shape, int)
        idx = np.argsort(rng.random((tokens, max(self.experts, self.topk))), axis=1)
        idx = idx[:, : self.topk]
        idx[(idx >= self.experts) | (rng.random(shape) < 0.1)] = -7
        return idx

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    def experts_of(self, rank: int) -> list[int]:
        if self.owners is not None:
            return [e for e, owner in enumerate(self.owners) if owner == rank]
        each, more = divmod(self.experts, self.ranks)
        begin = rank * each + min(rank, more)
        return list(range(begin, begin + each + (rank < more)))

    def rows_of(self, expert: int) -> list[tuple[int, int, int]]:
        """(source rank, token, k) of an expert's rows, in their order."""
        return [
            (source, int(token), int(k))
            for source in range(self.ranks)
            for token, k in zip(*np.nonzero(self.idx[source] == expert), strict=False)
        ]


def without(case: Case, masked: Sequence[int]) -> Case:
    """The same inputs where these ranks are masked: they bring no tokens, and what selects their
    experts selects nothing."""
    gone = [expert for rank in masked for expert in case.experts_of(rank)]
    kept = [0 if rank in masked else tokens for rank, tokens in enumerate(case.tokens)]
    return replace(
        case,
        tokens=kept,
        x=[x[:tokens] for x, tokens in zip(case.x, kept, strict=True)],
        idx=[
            np.where(np.isin(idx[:tokens], gone), -1, idx[:tokens])
            for idx, tokens in zip(case.idx, kept, strict=True)
        ],
        weights=[w[:tokens] for w, tokens in zip(case.weights, kept, strict=True)],
    )


def quantise(x: np.ndarray, format: str) -> tuple[np.ndarray, np.ndarray]:
    """One row as fp8 and its scales, float32 or, for ue8m0, int32."""
    hidden = x.shape[0]
    num_groups = -(-hidden // 128)
    padded = np.zeros(num_groups * 128, np.float32)
    padded[:hidden] = x.astype(np.float32)
    groups = padded.reshape(num_groups, 128)
    floored = np.maximum(np.abs(groups).max(axis=1), np.float32(1e-4))
    scale = floored / np.float32(448)
    factor = np.float32(448) / floored
    if format != "fp8":
        bits = (scale.view(np.uint32) + np.uint32(0x7FFFFF)) & np.uint32(0x7F800000)
        scale = bits.view(np.float32)
        factor = np.float32(1) / scale
    scaled = np.clip(groups * factor[:, None], -448, 448)  # beyond 448, e4m3 saturates
    values = scaled.astype(FP8).reshape(-1)[:hidden]
    if format != "fp8-ue8m0":
        return values, scale
    packed = np.zeros(-(-num_groups // 4) * 4, np.uint8)
    packed[:num_groups] = scale.view(np.uint32) >> 23
    return values, packed.view("<i4")


def check_received(case: Case, rank: int, received: dict[str, Optional[np.ndarray]], format: str,
                   layout: str, alignment: int = 1) -> None:  # fmt: skip
    """Every row, count, offset, range and source index of one rank's result."""
    x, scales = received["x"], received["scales"]
    counts, offsets, ranges = received["counts"], received["offsets"], received["ranges"]
    sources = received["source_tokens"]
    assert x is not None and counts is not None and offsets is not None
    assert ranges is not None and sources is not None
    local = case.experts_of(rank)
    assert counts.dtype == np.int32 and counts.shape == (len(local),)
    assert offsets.dtype == np.int64 and offsets.shape == (len(local) + 1,)
    assert ranges.dtype == np.int64 and ranges.shape == (len(local), case.ranks)
    assert sources.dtype == np.int32
    if layout == "padded":
        assert x.shape == (len(local), case.ranks * case.max_tokens, case.hidden)
    flat = x.reshape(-1, case.hidden)
    flat_scales = None if scales is None else scales.reshape(-1, scales.shape[-1])
    assert sources.shape == (flat.shape[0],)
    begin = 0
    for l, expert in enumerate(local):
        rows = case.rows_of(expert)
        if layout == "padded":
            begin = l * case.ranks * case.max_tokens
        else:
            begin = -(-begin // alignment) * alignment
        assert offsets[l] == begin and counts[l] == len(rows)
        for source in range(case.ranks):
            positions = [i for i, row in enumerate(rows) if row[0] == source]
            assert ranges[l, source] & 0xFFFFFFFF == len(positions)
            if positions:
                assert ranges[l, source] >> 32 == positions[0]
        for i, (source, token, _) in enumerate(rows):
            assert sources[begin + i] == token
            row = case.x[source][token]
            if flat_scales is None:
                assert flat[begin + i].tobytes() == row.tobytes()
            else:
                values, wanted = quantise(row, format)
                assert flat[begin + i].tobytes() == values.tobytes()
                assert flat_scales[begin + i].tobytes() == wanted.tobytes()
        begin += len(rows)


def expert_output(case: Case, expert: int, row: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A stand-in for an expert."""
    return (row.astype(np.float32) * np.float32(1 + expert % 7)).astype(dtype)


def combined(case: Case, rank: int, dtype: np.dtype, partial_sums: bool = False) -> np.ndarray:
    """[T, H]: the sums in float32, in the order of k, each product and sum rounded; by partial sums
    those of each rank, rounded, in the order in which a token's choices name the ranks."""
    owner = {expert: r for r in range(case.ranks) for expert in case.experts_of(r)}
    out = np.zeros((case.tokens[rank], case.hidden), np.float32)
    for t in range(case.tokens[rank]):
        parts: dict[int, np.ndarray] = {}
        for k in range(case.topk):
            expert = int(case.idx[rank][t, k])
            if expert < 0:
                continue
            y = expert_output(case, expert, case.x[rank][t], dtype)
            part = parts.setdefault(
                owner[expert] if partial_sums else 0, np.zeros(case.hidden, np.float32)
            )
            part += case.weights[rank][t, k] * y.astype(np.float32)
        for part in parts.values():
            out[t] += part.astype(dtype).astype(np.float32) if partial_sums else part
    return out.astype(dtype)
