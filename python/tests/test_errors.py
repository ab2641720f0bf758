"""Errors: one class, with the fields of C++'s, and what stays usable after each kind."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tandem_ep
from oracle import BF16
from tandem_ep import Error, ErrorCode

OPTIONS = {"num_experts": 4, "max_tokens": 4, "max_hidden": 64, "max_topk": 2, "timeout": 20.0}


def x_of(tokens: int = 4, hidden: int = 64, dtype: Any = BF16) -> np.ndarray:
    return np.ones((tokens, hidden), dtype)


def idx_of(tokens: int = 4, topk: int = 2) -> np.ndarray:
    return np.tile(np.arange(topk), (tokens, 1))


def alone(call: Callable[[tandem_ep.Buffer], Any], **options: Any) -> Any:
    """Calls with a buffer of one rank."""
    return tandem_ep.run_threads(
        1, lambda communicator: call(tandem_ep.Buffer(communicator, **{**OPTIONS, **options}))
    )[0]


REFUSED: dict[str, tuple[Callable[[tandem_ep.Buffer], Any], str]] = {
    "too many tokens": (lambda b: b.dispatch(x_of(5), idx_of(5)), r"5, must be in \[0, 4\]"),
    "too wide": (lambda b: b.dispatch(x_of(4, 65), idx_of()), r"65, must be in \[1, 64\]"),
    "top-k": (lambda b: b.dispatch(x_of(), idx_of(4, 3)), r"3, must be in \[1, 2\]"),
    "index": (lambda b: b.dispatch(x_of(), idx_of() + 3), r"topk_idx\[0, 1\] is 4"),
    "length": (lambda b: b.dispatch(x_of(4), idx_of(3)), "topk_idx has shape"),
    "format": (lambda b: b.dispatch(x_of(), idx_of(), format="fp4"), "format is 'fp4'"),
    "dtype": (lambda b: b.dispatch(x_of(dtype="f4"), idx_of(), format="bf16"), "x is fp32"),
    "placement": (
        lambda b: b.dispatch(x_of(), idx_of(), placement="packed", return_hook=True),
        "use slotted placement",
    ),
    "unsigned": (lambda b: b.dispatch(x_of(), idx_of().astype("u8")), "topk_idx is uint64"),
    "doubles": (lambda b: b.dispatch(x_of(dtype="f8"), idx_of()), "x is float64"),
    "dimensions": (lambda b: b.dispatch(np.float32(1), idx_of()), "x has 0 dimensions"),
    "transposed": (lambda b: b.dispatch(x_of(64, 4).T, idx_of()), "stride"),
    "weights": (
        lambda b: b.combine(
            np.zeros((4, 4, 64), BF16), np.ones((3, 2), "f4"), b.dispatch(x_of(), idx_of()).handle
        ),
        "topk_weights has shape",
    ),
    "out": (
        lambda b: b.combine(
            np.zeros((4, 4, 64), BF16), np.ones((4, 2), "f4"), b.dispatch(x_of(), idx_of()).handle,
            np.zeros((4, 64), "f4"),
        ),
        "out is fp32, must be bf16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("call, message", REFUSED.values(), ids=REFUSED.keys())
def test_wrong_argument_is_refused_by_name_and_the_buffer_stays_usable(
    call: Callable[[tandem_ep.Buffer], Any], message: str
) -> None:
    def body(buffer: tandem_ep.Buffer) -> None:
        with pytest.raises(Error, match=message) as caught:
            call(buffer)
        assert caught.value.code == ErrorCode.INVALID_ARGUMENT
        received = buffer.dispatch(x_of(), idx_of())
        assert received.counts.tolist() == [4, 4, 0, 0]

    alone(body)


def test_array_of_no_framework_is_a_type_error() -> None:
    def body(buffer: tandem_ep.Buffer) -> None:
        with pytest.raises(TypeError, match="x is list, which has no __dlpack__"):
            buffer.dispatch([[1.0]], idx_of())
        with pytest.raises(TypeError, match=r"x is torch\.bool"):
            buffer.dispatch(torch.zeros(4, 64, dtype=torch.bool), idx_of())
        with pytest.raises(TypeError, match="device meta"):
            buffer.dispatch(torch.zeros(4, 64, device="meta"), idx_of())

    alone(body)


def test_read_only_output_is_refused() -> None:
    def body(buffer: tandem_ep.Buffer) -> None:
        received = buffer.dispatch(x_of(), idx_of())
        out = x_of()
        out.flags.writeable = False
        with pytest.raises(Error, match="out is read-only"):
            buffer.combine(received.x, np.ones((4, 2), "f4"), received.handle, out)

    alone(body)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_experts": 0}, "num_experts is 0"),
        ({"max_hidden": 65537}, "max_hidden is 65537"),
        ({"backend": "tpu"}, "backend is 'tpu'"),
        ({"timeout": 0}, "timeout"),
        ({"expert_owners": [0, 1, 0, 0]}, "expert"),
    ],
    ids=str,
)
def test_wrong_option_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Error, match=message) as caught:
        alone(lambda buffer: None, **options)
    assert caught.value.code == ErrorCode.INVALID_ARGUMENT


def test_missing_backend_says_so() -> None:
    cuda = next(b for b in tandem_ep.backends() if b.name == "cuda")
    if not cuda.usable:
        with pytest.raises(Error) as caught:
            alone(lambda buffer: None, backend="cuda")
        assert caught.value.code == ErrorCode.UNSUPPORTED
        assert cuda.why_not and cuda.why_not in str(caught.value)


def test_options_that_differ_are_named_on_every_rank() -> None:
    def body(communicator: tandem_ep.Communicator) -> None:
        with pytest.raises(Error, match="max_tokens is 4 on rank 0 and 5 on rank 1") as caught:
            tandem_ep.Buffer(communicator, **{**OPTIONS, "max_tokens": 4 + communicator.rank})
        assert caught.value.code == ErrorCode.MISMATCH

    tandem_ep.run_threads(2, body)


def test_absent_peer_is_named_within_the_timeout() -> None:
    def body(communicator: tandem_ep.Communicator) -> None:
        with tandem_ep.Buffer(communicator, **{**OPTIONS, "timeout": 0.3}) as buffer:
            if communicator.rank == 0:
                begin = time.monotonic()
                with pytest.raises(Error, match="rank 1") as caught:
                    buffer.dispatch(x_of(), idx_of())
                error = caught.value
                assert 0.3 <= time.monotonic() - begin < 10
                assert error.code == ErrorCode.TIMEOUT and error.peer == 1
                assert error.operation == "dispatch" and error.epoch == 1
                assert error.phase not in ("", "none")
                assert error.waited >= 0.3 and error.limit == pytest.approx(0.3)
                with pytest.raises(Error) as caught:
                    buffer.dispatch(x_of(), idx_of())
                assert caught.value.code == ErrorCode.FAILED_BUFFER
                with pytest.raises(Error) as caught:
                    buffer.check()
                assert caught.value.code == ErrorCode.FAILED_BUFFER
            communicator.barrier()

    tandem_ep.run_threads(2, body)


def test_stale_handle_is_refused() -> None:
    def body(buffer: tandem_ep.Buffer) -> None:
        first = buffer.dispatch(x_of(), idx_of())
        buffer.dispatch(x_of(), idx_of())
        buffer.dispatch(x_of(), idx_of())
        with pytest.raises(Error) as caught:
            buffer.next_combine_buffer(first.handle)
        assert caught.value.code == ErrorCode.STALE_HANDLE

    alone(body)


def test_third_operation_while_two_hooks_are_held_back_is_refused() -> None:
    def body(buffer: tandem_ep.Buffer) -> None:
        held = [buffer.dispatch(x_of(), idx_of(), return_hook=True) for _ in range(2)]
        with pytest.raises(Error) as caught:
            buffer.dispatch(x_of(), idx_of(), return_hook=True)
        assert caught.value.code == ErrorCode.ORDER
        assert held[0].hook is not None and held[1].hook is not None
        with pytest.raises(Error):
            held[1].hook()
        held[0].hook()
        held[1].hook()

    alone(body)


def test_what_does_not_fit_is_refused_on_every_rank() -> None:
    def body(communicator: tandem_ep.Communicator) -> None:
        options = {**OPTIONS, "capacity_rows": 8, "slotted_placement": False,
                   "padded_layout": False}  # fmt: skip
        with tandem_ep.Buffer(communicator, **options) as buffer:
            hot = np.zeros((4, 2), np.int64)
            with pytest.raises(Error) as caught:
                buffer.dispatch(x_of(), hot, layout="packed")
            assert caught.value.code == ErrorCode.CAPACITY
            few = buffer.dispatch(x_of(2), idx_of(2), layout="packed")
            assert few.counts.sum() == (8 if communicator.rank == 0 else 0)

    tandem_ep.run_threads(2, body)


def test_destroyed_buffer_refuses_and_ends_what_is_under_way() -> None:
    def body(buffer: tandem_ep.Buffer) -> None:
        received = buffer.dispatch(x_of(), idx_of(), return_hook=True)
        buffer.destroy()
        buffer.destroy()
        with pytest.raises(Error, match="destroyed"):
            buffer.dispatch(x_of(), idx_of())
        assert received.hook is not None
        received.hook()  # what is under way keeps the memory, and ends well
        assert received.counts.tolist() == [4, 4, 0, 0]
        assert "destroyed" in repr(buffer)

    alone(body)


def test_error_can_be_sent_to_another_process() -> None:
    error = Error("words", code=ErrorCode.TIMEOUT, peer=3, waited=1.5)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.code, copy.peer, copy.waited) == ("words", ErrorCode.TIMEOUT, 3, 1.5)


def test_waiting_lets_other_threads_run() -> None:
    """The rank that comes late comes from another thread, which needs the interpreter's lock."""

    def body(communicator: tandem_ep.Communicator) -> None:
        with tandem_ep.Buffer(communicator, **OPTIONS) as buffer:
            late = threading.Event()
            if communicator.rank == 1:
                thread = threading.Thread(target=lambda: (time.sleep(0.2), late.set()))
                thread.start()
                late.wait()
                thread.join()
            buffer.dispatch(x_of(), idx_of())

    tandem_ep.run_threads(2, body)


def test_first_exception_of_a_rank_is_raised() -> None:
    def body(communicator: tandem_ep.Communicator) -> None:
        if communicator.rank == 1:
            raise KeyError("rank 1")
        communicator.barrier()

    with pytest.raises(KeyError, match="rank 1"):
        tandem_ep.run_threads(2, body)
