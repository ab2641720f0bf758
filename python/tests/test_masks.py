"""Losing ranks and finding them again: masks, recovery and ranks that join, over threads and
processes, with arrays of numpy and torch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any, Optional

import pytest

import tandem_ep
from frameworks import Numpy, Torch
from launch import join, run_ranks, start
from oracle import Case
from pair import Missed, buffer_options, run_pair
from tandem_ep import Buffer, Communicator, Error, ErrorCode

FRAMEWORKS = {"numpy": Numpy, "torch": Torch}
LAUNCHES = ["threads", "processes"]
VICTIM = 1
ALL = [True, True, True]
REST = [True, False, True]
CASE = Case([6, 5, 4], 6, 72, 7, 3)
# Every way that rows can travel.
WAYS: list[dict[str, Any]] = [
    {},
    {"layout": "packed", "format": "fp8", "zero_copy": True},
    {"format": "fp8-ue8m0", "hook": True},
]


def masking(**options: Any) -> dict[str, Any]:
    return {**buffer_options(CASE), "on_timeout": "mask", **options}


def pairs_until_there(
    buffer: Buffer, rank: int, framework: Any, way: Optional[dict[str, Any]] = None
) -> None:
    """The others run on; the first lets that rank in when it waits; two pairs with it."""
    together = 0
    deadline = time.monotonic() + 60
    while together < 2:
        assert time.monotonic() < deadline
        if buffer.rank == 0 and buffer.waiting() == [rank]:
            buffer.unmask(rank)
        together += run_pair(buffer, CASE, framework, **(way or {})) == ALL


def raises(code: ErrorCode, words: str, call: Callable[..., Any], *arguments: Any,
           **named: Any) -> Error:  # fmt: skip
    with pytest.raises(Error, match=words) as caught:
        call(*arguments, **named)
    assert caught.value.code == code
    return caught.value


def masked_and_let_in(communicator: Communicator, name: str) -> None:
    framework = FRAMEWORKS[name]
    for way in WAYS:
        with Buffer(communicator, **masking()) as buffer:
            assert run_pair(buffer, CASE, framework, **way) == ALL
            assert buffer.active() == ALL and buffer.last_loss() is None
            assert buffer.waiting() == []
            communicator.barrier()
            if buffer.rank == 0:
                buffer.mask(VICTIM)
                buffer.mask(VICTIM)  # nothing any more
            communicator.barrier()
            if buffer.rank == VICTIM:
                raises(
                    ErrorCode.MASKED, "has been masked", run_pair, buffer, CASE, framework, **way
                )
                assert buffer.active() == REST
                communicator.barrier()
                assert buffer.recover() == ALL
                for _ in range(2):
                    assert run_pair(buffer, CASE, framework, **way) == ALL
            else:
                for _ in range(2):
                    assert run_pair(buffer, CASE, framework, **way) == REST
                assert buffer.active() == REST
                loss = buffer.last_loss()
                assert loss is not None and loss.code == ErrorCode.MASKED
                assert loss.peer == VICTIM and "has called mask(1)" in str(loss)
                communicator.barrier()
                pairs_until_there(buffer, VICTIM, framework, way)
                assert buffer.active() == ALL and buffer.last_loss() is None
            communicator.barrier()


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_masked_rank_takes_no_part_until_it_is_let_in(launch: str, framework: str) -> None:
    run_ranks(launch, 3, masked_and_let_in, framework)


def everyone(communicator: Communicator, holds: bool) -> bool:
    return all(answer == b"yes" for answer in communicator.all_gather(b"yes" if holds else b"no"))


def is_missed_alone(communicator: Communicator, framework: Any, way: dict[str, Any],
                    timeout: float) -> bool:  # fmt: skip
    """The victim is late. False if others were missed too: the machine was too slow for this."""

    def is_pair_of(expected: list[bool]) -> bool:
        try:
            run_pair(buffer, CASE, framework, expected=expected, **way)
        except Missed:
            return False
        except Error as error:  # who was missed; who was to wait for it to be at rest
            assert error.code == ErrorCode.MASKED or error.phase == "membership", error
            return False
        return True

    with Buffer(communicator, **masking(timeout=timeout)) as buffer:
        if not everyone(communicator, is_pair_of(ALL)):
            return False
        # In that very step.
        if not everyone(communicator, buffer.rank == VICTIM or is_pair_of(REST)):
            return False
        if buffer.rank == VICTIM:
            raises(ErrorCode.MASKED, "has been masked", run_pair, buffer, CASE, framework, **way)
        else:
            loss = buffer.last_loss()
            assert loss is not None and loss.code == ErrorCode.TIMEOUT
            assert loss.peer == VICTIM and loss.limit == pytest.approx(timeout)
        communicator.barrier()
        return True


def late_rank(communicator: Communicator, name: str) -> None:
    for way in WAYS:
        assert any(
            is_missed_alone(communicator, FRAMEWORKS[name], way, timeout)
            for timeout in (0.3, 2.0, 10.0)
        )


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rank_that_misses_the_timeout_is_masked_in_that_step(launch: str, framework: str) -> None:
    run_ranks(launch, 3, late_rank, framework)


def joined(rank: int, options: dict[str, Any]) -> Buffer:
    """Becomes that rank once its predecessor has gone."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return Buffer.join(rank, **options)
        except Error as error:
            assert error.code == ErrorCode.ORDER and time.monotonic() < deadline, error
            time.sleep(0.001)


def newcomer(rank: int, options: dict[str, Any], framework: Any) -> None:
    with joined(rank, options) as buffer:
        assert (buffer.rank, buffer.num_ranks) == (rank, 3)
        assert buffer.local_experts == CASE.experts_of(rank)
        for _ in range(2):
            assert run_pair(buffer, CASE, framework) == ALL


def door() -> str:
    return f"test-masks-{os.getpid()}-{time.monotonic_ns()}"


def leaves_and_joins(communicator: Communicator, name: str, door: str) -> None:
    framework, options = FRAMEWORKS[name], masking(door=door)
    with Buffer(communicator, **options) as buffer:
        assert run_pair(buffer, CASE, framework) == ALL
        if buffer.rank == VICTIM:
            buffer.destroy()
            newcomer(VICTIM, options, framework)
        else:
            pairs_until_there(buffer, VICTIM, framework)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rank_that_has_left_is_replaced(launch: str, framework: str) -> None:
    run_ranks(launch, 3, leaves_and_joins, framework, door())


def one_more(communicator: Communicator, name: str, door: str) -> None:
    framework, options = FRAMEWORKS[name], masking(door=door, max_ranks=3)
    if communicator.rank == 2:
        newcomer(2, options, framework)
        return
    with Buffer(Communicator.connect(door, communicator.rank, 2), **options) as buffer:
        assert buffer.num_ranks == 3 and buffer.active() == [True, True, False]
        pairs_until_there(buffer, 2, framework)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rank_is_added_that_has_never_been_there(launch: str, framework: str) -> None:
    run_ranks(launch, 3, one_more, framework, door())


def killed(process: int, _: int, door: str) -> None:
    """Rank 1 dies in mid-operation; process 3 becomes it."""
    options = masking(door=door)
    if process == 3:
        return newcomer(VICTIM, options, Numpy)
    with Buffer(Communicator.connect(door, process, 3), **options) as buffer:
        run_pair(buffer, CASE, Numpy)
        if process == VICTIM:
            buffer.dispatch(CASE.x[process], CASE.idx[process], return_hook=True)
            os.kill(os.getpid(), signal.SIGKILL)
        result = buffer.dispatch(CASE.x[process], CASE.idx[process], return_hook=True)
        assert result.hook is not None
        result.hook()
        buffer.combine(result.x, CASE.weights[process], result.handle)
        assert result.handle.active() == REST
        loss = buffer.last_loss()
        assert loss is not None and (loss.code, loss.peer) == (ErrorCode.PEER_LOST, VICTIM)
        pairs_until_there(buffer, VICTIM, Numpy)


def test_killed_process_is_replaced_by_another() -> None:
    exits = join(start(4, killed, door()))
    assert exits == [0, -signal.SIGKILL, 0, 0]


def test_joining_across_hosts_asks_at_the_address_or_says_what_is_lacking() -> None:
    options = masking(door="of several hosts", timeout=0.2)
    with pytest.raises(Error, match=r"127\.0\.0\.1:9|TANDEM_NET") as caught:
        Buffer.join(VICTIM, address="127.0.0.1:9", secret="s", **options)  # nobody listens
    assert caught.value.code in (ErrorCode.TIMEOUT, ErrorCode.UNSUPPORTED)


def failed_and_recovered(communicator: Communicator) -> None:
    with Buffer(communicator, **masking(on_timeout="fail")) as buffer:
        x, idx = CASE.x[buffer.rank], CASE.idx[buffer.rank]
        raises(ErrorCode.MISMATCH, "row_alignment", buffer.dispatch, x, idx, layout="packed",
               row_alignment=1 + buffer.rank)  # fmt: skip
        raises(ErrorCode.FAILED_BUFFER, "row_alignment", buffer.dispatch, x, idx)
        assert buffer.recover() == ALL
        assert run_pair(buffer, CASE, Numpy) == ALL


@pytest.mark.parametrize("launch", LAUNCHES)
def test_all_recover_after_an_error(launch: str) -> None:
    run_ranks(launch, 3, failed_and_recovered)


def refusals(communicator: Communicator, door: str) -> None:
    options = masking(door=door, timeout=0.2)
    with Buffer(communicator, **options) as buffer:
        invalid = ErrorCode.INVALID_ARGUMENT
        raises(invalid, "cannot mask itself", buffer.mask, buffer.rank)
        raises(invalid, r"rank is 3; it must be in \[0, 3\)", buffer.mask, 3)
        raises(invalid, "rank is -1", buffer.unmask, -1)
        buffer.unmask(buffer.rank)  # is active: nothing to do
        communicator.barrier()
        if buffer.rank == 0:
            buffer.mask(VICTIM)
            raises(ErrorCode.ORDER, r"recover\(\) first", buffer.unmask, VICTIM)
            raises(invalid, "door is empty", Buffer.join, VICTIM, **masking())
            patient = {**options, "timeout": 20.0}
            other = {**patient, "max_hidden": 1000}
            raises(ErrorCode.MISMATCH, "max_hidden", Buffer.join, VICTIM, **other)
            raises(ErrorCode.ORDER, "another process", Buffer.join, VICTIM, **patient)
        communicator.barrier()
        if buffer.rank == VICTIM:
            error = raises(ErrorCode.TIMEOUT, r"unmask\(1\)", buffer.recover)
            assert error.limit == pytest.approx(0.2)
        communicator.barrier()
        buffer.destroy()
        for call in (buffer.active, buffer.recover, buffer.waiting, buffer.last_loss):
            raises(invalid, "destroyed", call)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_what_makes_no_sense_is_refused(launch: str) -> None:
    run_ranks(launch, 3, refusals, door())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"on_timeout": "retry"}, "on_timeout is 'retry', must be one of fail, mask"),
        ({"max_ranks": 2}, "max_ranks is 2"),
        ({"door": "a\nb"}, "control characters"),
    ],
    ids=str,
)
def test_wrong_option_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    def body(communicator: Communicator) -> None:
        raises(ErrorCode.INVALID_ARGUMENT, message, Buffer, communicator, **masking(**options))

    tandem_ep.run_threads(3, body)


def test_waiting_to_be_let_in_lets_other_threads_run() -> None:
    """All wait in C++ at once, and one interpreter has the lock."""

    def body(communicator: Communicator) -> None:
        with Buffer(communicator, **masking()) as buffer:
            if buffer.rank == 0:
                buffer.mask(VICTIM)
            communicator.barrier()
            if buffer.rank == VICTIM:
                assert buffer.recover() == ALL
            elif buffer.rank == 0:
                deadline = time.monotonic() + 60
                while buffer.waiting() != [VICTIM]:
                    assert time.monotonic() < deadline
                    time.sleep(0.001)
                buffer.unmask(VICTIM)
            communicator.barrier()

    tandem_ep.run_threads(3, body)
