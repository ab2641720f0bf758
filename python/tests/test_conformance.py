"""Whole operations through Python, against the oracle, on every framework of the CPU."""

from __future__ import annotations

from typing import Any

import pytest

import tandem_ep
from frameworks import Jax, Numpy, Torch
from oracle import BF16, Case, combined
from pair import buffer_options, run_pair

FRAMEWORKS = [Numpy, Torch]
FORMATS = [None, "fp8", "fp8-pow2", "fp8-ue8m0"]


def run(case: Case, framework: Any, **options: Any) -> None:
    """Twice, to meet both halves."""

    def body(communicator: tandem_ep.Communicator) -> None:
        with tandem_ep.Buffer(communicator, **buffer_options(case)) as buffer:
            for _ in range(2):
                run_pair(buffer, case, framework, **options)

    tandem_ep.run_threads(case.ranks, body)


@pytest.mark.parametrize("hook", [False, True], ids=["no-hook", "hook"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda f: f.name)
def test_every_format_and_layout(framework: Any, format: Any, layout: str, hook: bool) -> None:
    case = Case([5, 0, 8], 8, 300, 7, 3)
    run(case, framework, format=format, layout=layout, hook=hook, zero_copy=not hook, alignment=4)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda f: f.name)
def test_every_dtype(framework: Any, dtype: str) -> None:
    case = Case([4, 6], 6, 129, 5, 2, dtype=dtype)
    run(case, framework, zero_copy=True)
    run(case, framework, format="fp8", placement="slotted")


@pytest.mark.parametrize("hook", [False, True], ids=["no-hook", "hook"])
@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda f: f.name)
def test_partial_sums(framework: Any, hook: bool) -> None:
    case = Case([4, 0, 6], 6, 129, 7, 5)
    assert combined(case, 0, BF16).tobytes() != combined(case, 0, BF16, True).tobytes()
    run(case, framework, hook=hook, partial_sums=True)


def test_weights_go_with_the_dispatch_or_the_combine() -> None:
    case = Case([4, 4], 4, 64, 4, 2)

    def body(communicator: tandem_ep.Communicator) -> None:
        weights = case.weights[communicator.rank]
        with tandem_ep.Buffer(communicator, **buffer_options(case)) as buffer:
            x, idx = case.x[buffer.rank], case.idx[buffer.rank]
            for given, again in ((weights, weights), (None, None)):
                received = buffer.dispatch(x, idx, topk_weights=given)
                y = buffer.next_combine_buffer(received.handle)
                with pytest.raises(tandem_ep.Error, match="topk_weights"):
                    buffer.combine(y, again, received.handle)
                y[:] = 0
                buffer.combine(y, None if given is not None else weights, received.handle)

    tandem_ep.run_threads(case.ranks, body)


CASES = {
    "no tokens at all": Case([0, 0, 0], 4, 64, 6, 2),
    "one rank": Case([7], 8, 64, 3, 2),
    "one hot expert": Case([8, 8, 8], 8, 64, 6, 3, routing="hot"),
    "nothing selected": Case([3, 4], 4, 64, 4, 2, routing="none"),
    "the same expert twice": Case([2, 1], 8, 64, 4, 2, routing="repeated"),
    "an odd hidden size": Case([4, 3], 4, 1001, 4, 2),
    "one channel": Case([4, 3], 4, 1, 4, 2),
    "more choices than experts": Case([3, 2], 4, 40, 20, 33),
    "experts that do not divide": Case([5, 6, 7], 8, 48, 256, 6),
    "an expert map": Case([4, 4, 4], 4, 48, 6, 3, owners=[2, 0, 2, 2, 0, 2]),
    "int32 indices": Case([4, 4], 4, 48, 6, 3, index="int32"),
    "five ranks": Case([1, 0, 7, 3, 2], 8, 32, 10, 4),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda f: f.name)
def test_case(framework: Any, case: Case) -> None:
    run(case, framework)
    run(case, framework, hook=True, layout="packed")


@pytest.mark.parametrize("hook", [False, True], ids=["no-hook", "hook"])
@pytest.mark.parametrize("format", [None, "fp8"], ids=str)
def test_jax(format: Any, hook: bool) -> None:
    run(Case([5, 0, 3], 8, 300, 7, 3, index="int32"), Jax, format=format, hook=hook)


def test_shapes_change_from_call_to_call() -> None:
    cases = [
        Case([8, 3], 8, 256, 6, 4, seed=1),
        Case([1, 0], 1, 64, 6, 1, seed=2),
        Case([2, 5], 6, 200, 6, 3, seed=3),
    ]

    def body(communicator: tandem_ep.Communicator) -> None:
        with tandem_ep.Buffer(communicator, **buffer_options(cases[0])) as buffer:
            for turn in range(12):
                run_pair(buffer, cases[turn % 3], Numpy, hook=turn % 2 == 1)

    tandem_ep.run_threads(2, body)


def test_epochs_wrap_around() -> None:
    case = Case([3, 4], 4, 64, 4, 2)

    def body(communicator: tandem_ep.Communicator) -> None:
        options = {**buffer_options(case), "first_epoch": 0xFFFFFFFC}
        with tandem_ep.Buffer(communicator, **options) as buffer:
            for _ in range(6):
                run_pair(buffer, case, Numpy)

    tandem_ep.run_threads(2, body)


def test_two_operations_in_flight_with_hooks() -> None:
    cases = [Case([5, 8], 8, 64, 6, 2, seed=seed) for seed in (1, 2)]

    def body(communicator: tandem_ep.Communicator) -> None:
        from frameworks import to_numpy
        from oracle import check_received

        with tandem_ep.Buffer(communicator, **buffer_options(cases[0])) as buffer:
            rank = communicator.rank
            sent = [
                buffer.dispatch(case.x[rank], case.idx[rank], return_hook=True) for case in cases
            ]
            for case, result in zip(cases, sent, strict=False):
                assert result.hook is not None
                result.hook()
                result.hook()  # once more does nothing
                check_received(case, rank, to_numpy(Numpy, result), "bf16", "padded")

    tandem_ep.run_threads(2, body)


def test_strided_rows_are_taken_as_they_lie() -> None:
    case = Case([6, 6], 6, 64, 4, 2)

    def body(communicator: tandem_ep.Communicator) -> None:
        import numpy as np

        with tandem_ep.Buffer(communicator, **buffer_options(case)) as buffer:
            rank = communicator.rank
            wide = np.zeros((6, 200), case.x[rank].dtype)
            wide[:, 50:114] = case.x[rank]
            result = buffer.dispatch(wide[:, 50:114], case.idx[rank])
            out = np.zeros((12, 64), case.x[rank].dtype)
            given = buffer.combine(result.x, case.weights[rank], result.handle, out=out[::2])
            assert np.shares_memory(given, out)
            narrow = buffer.dispatch(case.x[rank], case.idx[rank])
            again = buffer.combine(narrow.x, case.weights[rank], narrow.handle)
            assert given.tobytes() == again.tobytes() and not out[1::2].any()

    tandem_ep.run_threads(2, body)
