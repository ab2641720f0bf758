"""One dispatch and combine of a case on every rank, checked against the oracle."""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

import tandem_ep
from frameworks import to_numpy
from oracle import DTYPES, Case, check_received, combined, expert_output, without


class Missed(Exception):
    """Somebody took no part who was to."""


def buffer_options(case: Case) -> dict[str, Any]:
    return {
        "num_experts": case.experts,
        "max_tokens": case.max_tokens,
        "max_hidden": case.hidden,
        "max_topk": case.topk,
        "widest_format": case.dtype,
        "expert_owners": case.owners,
        "timeout": 20.0,
    }


def outputs(case: Case, rank: int, received: dict[str, Optional[np.ndarray]],
            dtype: np.dtype) -> np.ndarray:  # fmt: skip
    """Expert outputs in the shape of the received rows; NaN where no token is."""
    x, counts, offsets = received["x"], received["counts"], received["offsets"]
    assert x is not None and counts is not None and offsets is not None
    y = np.full(x.shape, np.nan, np.float32).astype(dtype)
    flat = y.reshape(-1, case.hidden)
    for l, expert in enumerate(case.experts_of(rank)):
        for i, (source, token, _) in enumerate(case.rows_of(expert)):
            row = case.x[source][token]
            flat[offsets[l] + i] = expert_output(case, expert, row, dtype)
    return y


def run_pair(
    buffer: tandem_ep.Buffer,
    case: Case,
    framework: Any,
    *,
    format: Optional[str] = None,
    layout: str = "padded",
    alignment: int = 1,
    placement: str = "automatic",
    hook: bool = False,
    zero_copy: bool = False,
    partial_sums: bool = False,
    stream: Any = None,
    expected: Optional[list[bool]] = None,
) -> list[bool]:
    """Returns who took part, by rank, in the dispatch and the combine alike. Raises Missed if that
    is not who is expected; what came is judged where it is, or nobody is."""
    rank = buffer.rank
    x, idx = framework.array(case.x[rank]), framework.array(case.idx[rank])
    weights = framework.array(case.weights[rank])
    result = buffer.dispatch(
        x, idx, format=format, layout=layout, row_alignment=alignment, placement=placement,
        max_tokens=case.max_tokens, return_hook=hook, stream=stream,
        topk_weights=weights if partial_sums else None,
    )  # fmt: skip
    if hook:
        assert result.hook is not None
        result.hook()
    active = result.handle.active()
    if expected is not None and active != expected:
        raise Missed
    case = without(case, [other for other in range(case.ranks) if not active[other]])
    received = to_numpy(framework, result)
    check_received(case, rank, received, format or case.dtype, layout, alignment)

    dtype = DTYPES[case.dtype]
    y = framework.array(outputs(case, rank, received, dtype))
    if zero_copy:
        staging = buffer.next_combine_buffer(result.handle, case.dtype)
        framework.assign(staging, y)
        y = staging
    given = None if partial_sums else weights
    answer = buffer.combine(y, given, result.handle, return_hook=hook, stream=stream)
    if hook:
        answer, receive = answer
        receive()
    if result.handle.active() != active:
        raise Missed
    got = framework.to_numpy(answer)
    assert got.dtype == dtype
    assert got.tobytes() == combined(case, rank, dtype, partial_sums).tobytes()
    return active
