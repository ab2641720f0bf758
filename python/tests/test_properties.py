"""Any shape, routing and option: hypothesis draws them and prints what failed."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tandem_ep
from frameworks import Numpy, Torch
from oracle import Case
from pair import buffer_options, run_pair


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.integers(1, 4))
    max_tokens = draw(st.integers(1, 9))
    experts = draw(st.integers(1, 12))
    return Case(
        tokens=draw(st.lists(st.integers(0, max_tokens), min_size=ranks, max_size=ranks)),
        max_tokens=max_tokens,
        hidden=draw(st.integers(1, 600)),
        experts=experts,
        topk=draw(st.integers(1, 9)),
        seed=draw(st.integers(0, 2**16)),
        owners=draw(
            st.none() | st.lists(st.integers(0, ranks - 1), min_size=experts, max_size=experts)
        ),
        index=draw(st.sampled_from(["int32", "int64"])),
        dtype=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    case=cases(),
    format=st.sampled_from([None, "fp8", "fp8-pow2", "fp8-ue8m0"]),
    layout=st.sampled_from(["padded", "packed"]),
    alignment=st.integers(1, 5),
    hook=st.booleans(),
    zero_copy=st.booleans(),
    framework=st.sampled_from([Numpy, Torch]),
)
def test_any_pair(case, format, layout, alignment, hook, zero_copy, framework) -> None:
    def body(communicator: tandem_ep.Communicator) -> None:
        with tandem_ep.Buffer(communicator, **buffer_options(case)) as buffer:
            rows = sum(len(case.rows_of(e)) for e in case.experts_of(buffer.rank))
            aligned = rows + alignment * buffer.num_local_experts
            # Padding between experts may outgrow the worst case of rows without it.
            used = 1 if layout == "padded" or aligned > buffer.capacity_rows else alignment
            agreed = min(int.from_bytes(m, "little")
                         for m in communicator.all_gather(used.to_bytes(2, "little")))  # fmt: skip
            run_pair(
                buffer, case, framework, format=format, layout=layout, alignment=agreed,
                hook=hook, zero_copy=zero_copy,
            )  # fmt: skip

    tandem_ep.run_threads(case.ranks, body)
