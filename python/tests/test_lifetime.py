"""Who keeps what alive, and that nothing is left behind."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import torch

import tandem_ep
from launch import shared_memory_names
from oracle import BF16

OPTIONS = {"num_experts": 4, "max_tokens": 4, "max_hidden": 64, "max_topk": 2, "timeout": 20.0}


def alone(body: Any) -> Any:
    return tandem_ep.run_threads(1, body)[0]


def inputs() -> tuple[np.ndarray, np.ndarray]:
    return np.ones((4, 64), BF16), np.zeros((4, 2), np.int64) + [0, 1]


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_shared_mappings() -> int:
    gc.collect()  # what tests before this one have left to it
    with open("/proc/self/maps") as maps:
        return sum("memfd:tandem" in line for line in maps)


def test_view_outlives_its_buffer() -> None:
    def body(communicator: tandem_ep.Communicator) -> Any:
        x, idx = inputs()
        buffer = tandem_ep.Buffer(communicator, **OPTIONS)
        received = buffer.dispatch(x, idx)
        return received.x, received.counts, torch.from_dlpack(received.handle._inner.counts)

    rows, counts, same_counts = alone(body)
    gc.collect()
    assert (rows[0, :4] == 1).all()
    rows[...] = 2
    assert rows[3, 3, 63] == 2
    assert counts.tolist() == [4, 4, 0, 0] == same_counts.tolist()
    counts[0] = 9
    assert same_counts[0] == 9


def test_memory_goes_with_the_last_view() -> None:
    before = num_shared_mappings()

    def body(communicator: tandem_ep.Communicator) -> Any:
        x, idx = inputs()
        buffer = tandem_ep.Buffer(communicator, **OPTIONS)
        rows = buffer.dispatch(x, idx).x
        buffer.destroy()
        return rows[1:2, 2:]

    part = alone(body)
    held = num_shared_mappings()
    assert part[0, 0, 0] == 1
    del part
    assert num_shared_mappings() == before
    assert held >= before


def test_combine_buffer_is_the_memory_that_peers_read() -> None:
    def body(communicator: tandem_ep.Communicator) -> None:
        x, idx = inputs()
        with tandem_ep.Buffer(communicator, **OPTIONS) as buffer:
            received = buffer.dispatch(x, idx)
            first = buffer.next_combine_buffer(received.handle)
            second = buffer.next_combine_buffer(received.handle, np.dtype(BF16))
            as_torch = torch.from_dlpack(
                buffer._inner.next_combine_buffer(received.handle._inner, first_dtype())
            )
            assert np.shares_memory(first, second) and first.shape == (4, 4, 64)
            first[...] = 3
            second[0, 1] = 5
            as_torch[1, 1] = 7
            out = buffer.combine(first, np.ones((4, 2), np.float32), received.handle)
            assert out[:, 0].astype(float).tolist() == [6, 12, 6, 6]

    def first_dtype() -> Any:
        return tandem_ep._buffer.DType.BFLOAT16

    alone(body)


def test_inputs_are_let_go() -> None:
    def body(communicator: tandem_ep.Communicator) -> None:
        with tandem_ep.Buffer(communicator, **OPTIONS) as buffer:
            for make in (np.asarray, lambda a: torch.ones(a.shape, dtype=torch.float16)):
                x = make(np.ones((4, 64), np.float16))
                _, idx = inputs()
                weights, out = np.ones((4, 2), np.float32), make(np.ones((4, 64), np.float16))
                before = [sys.getrefcount(a) for a in (x, idx, weights, out)]
                for _ in range(3):
                    received = buffer.dispatch(x, idx)
                    y = received.x
                    buffer.combine(y, weights, received.handle, out)
                del received, y
                gc.collect()
                assert [sys.getrefcount(a) for a in (x, idx, weights, out)] == before

    alone(body)


def test_hook_keeps_its_arrays_until_it_has_run() -> None:
    def body(communicator: tandem_ep.Communicator) -> None:
        with tandem_ep.Buffer(communicator, **OPTIONS) as buffer:
            x, idx = torch.ones(4, 64, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 4)
            alive = weakref.ref(x)
            received = buffer.dispatch(x, idx, return_hook=True)
            del x
            gc.collect()
            assert alive() is not None and received.hook is not None
            received.hook()
            gc.collect()
            assert alive() is None

    alone(body)


def test_capsule_that_nobody_takes_frees_its_share() -> None:
    before = num_shared_mappings()

    def body(communicator: tandem_ep.Communicator) -> None:
        x, idx = inputs()
        buffer = tandem_ep.Buffer(communicator, **OPTIONS)
        view = buffer.dispatch(x, idx).handle._inner.x
        assert view is not None
        for version in (None, (1, 0), (0, 8)):
            capsule = view.__dlpack__(max_version=version)
            del capsule
        with pytest.raises(BufferError):
            view.__dlpack__(copy=True)
        assert view.__dlpack_device__() == (1, 0)
        assert not hasattr(view, "__cuda_array_interface__")

    alone(body)
    assert num_shared_mappings() == before


def test_fifty_buffers_leave_nothing() -> None:
    def body(communicator: tandem_ep.Communicator) -> None:
        x, idx = inputs()
        with tandem_ep.Buffer(communicator, **OPTIONS) as buffer:
            received = buffer.dispatch(x, idx, format="fp8")
            buffer.combine(np.ones((*received.x.shape[:2], 64), BF16),
                           np.ones((4, 2), np.float32), received.handle)  # fmt: skip

    shared = shared_memory_names()
    tandem_ep.run_threads(2, lambda c: body(c) if c.size == 1 else None)
    alone(body)
    mappings, descriptors = num_shared_mappings(), num_descriptors()
    for _ in range(50):
        alone(body)
    assert num_shared_mappings() == mappings
    assert num_descriptors() == descriptors
    assert shared_memory_names() == shared


def test_two_buffers_side_by_side() -> None:
    def body(communicator: tandem_ep.Communicator) -> None:
        x, idx = inputs()
        weights = np.ones((4, 2), np.float32)
        first = tandem_ep.Buffer(communicator, **OPTIONS)
        second = tandem_ep.Buffer(communicator, **OPTIONS)
        a = first.dispatch(x, idx)
        b = second.dispatch(x + x, idx)
        assert (second.combine(b.x, weights, b.handle) == 4).all()
        assert (first.combine(a.x, weights, a.handle) == 2).all()
        with pytest.raises(tandem_ep.Error, match="another buffer"):
            second.combine(a.x, weights, a.handle)

    tandem_ep.run_threads(2, body)


def test_sizes_are_what_is_allocated() -> None:
    size = tandem_ep.Buffer.size_bytes(8, num_experts=64, max_tokens=128, max_hidden=7168)
    small = tandem_ep.Buffer.size_bytes(
        8, num_experts=64, max_tokens=128, max_hidden=7168, padded_layout=False, combine=False
    )
    assert 0 < small < size
    with pytest.raises(tandem_ep.Error, match="num_experts"):
        tandem_ep.Buffer.size_bytes(8, num_experts=0)
