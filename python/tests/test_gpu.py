"""The same conformance on the GPU: torch, CuPy and JAX; streams; graphs captured by torch.

Ranks that share a GPU are processes: frameworks allocate and copy when they like, which threads of
one process could wait for each other over (docs/design.md, "One GPU, many ranks").
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from test_processes import CASES, FORMATS, run

import frameworks
import tandem_ep
from oracle import BF16, Case, check_received
from pair import buffer_options, run_pair

pytestmark = pytest.mark.gpu
MORE_CASES = [
    Case([128, 100], 128, 7168, 16, 8),
    Case([7, 0], 8, 1001, 5, 3),
    Case([3, 4], 4, 64, 20, 33),
    Case([4, 4], 4, 48, 6, 3, index="int32", dtype="fp16"),
    Case([4, 4], 4, 48, 6, 3, dtype="fp32"),
]


def gpu_rank(rank: int, ranks: int, name: str, framework: str) -> None:
    communicator = tandem_ep.Communicator.connect(name, rank, ranks)
    arrays = getattr(frameworks, framework)
    cases = CASES if ranks == 3 else MORE_CASES
    for case in cases:
        with tandem_ep.Buffer(communicator, backend="cuda", **buffer_options(case)) as buffer:
            for number, format in enumerate(FORMATS):
                hook = number % 2 == 1
                run_pair(
                    buffer,
                    case,
                    arrays,
                    format=format,
                    hook=hook,
                    zero_copy=not hook and framework != "Jax",
                    layout="packed" if number > 1 else "padded",
                )


@pytest.mark.parametrize("framework", ["TorchCuda", "Cupy", "Jax"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_conformance(framework: str, ranks: int) -> None:
    if framework == "Jax" and ranks == 3:
        ranks = 2  # three processes' worth of JAX's memory is too much of a good thing
    run(ranks, gpu_rank, f"gpu-{framework}-{ranks}-{os.getpid()}", framework)


def stream_rank(rank: int, ranks: int, name: str) -> None:
    """Work is ordered by the caller's stream alone: the input is late, the output used at once."""
    import torch

    communicator = tandem_ep.Communicator.connect(name, rank, ranks)
    case = Case([64] * ranks, 64, 1024, 8, 4)
    x, idx = (frameworks.TorchCuda.array(a[rank]) for a in (case.x, case.idx))
    weights = frameworks.TorchCuda.array(case.weights[rank])
    expected = x.float() * torch.where(idx >= 0, weights, 0).sum(1, keepdim=True)
    with tandem_ep.Buffer(communicator, backend="cuda", **buffer_options(case)) as buffer:
        for given in (False, True):
            late, side = torch.zeros_like(x), torch.cuda.Stream()
            option = {"stream": side} if given else {}
            torch.cuda.synchronize()
            communicator.barrier()
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
                late.copy_(x)
                received = buffer.dispatch(late, idx, **option)
                y = buffer.next_combine_buffer(received.handle)
                y.copy_(received.x)
                out = buffer.combine(y, weights, received.handle, **option)
                total = out.float() * 1
            side.synchronize()
            torch.testing.assert_close(total, expected, rtol=2e-2, atol=1e-2)
            buffer.check()


def test_streams() -> None:
    run(2, stream_rank, f"gpu-streams-{os.getpid()}")


def graph_rank(rank: int, ranks: int, name: str) -> None:
    """Two captured pairs of different shapes, replayed in turn with eager calls between."""
    import torch

    communicator = tandem_ep.Communicator.connect(name, rank, ranks)
    largest = Case([32] * ranks, 32, 512, 8, 4)
    shapes = [(32, 4), (3, 2)]
    with tandem_ep.Buffer(communicator, backend="cuda", **buffer_options(largest)) as buffer:
        captured = []
        for tokens, topk in shapes:
            x = torch.zeros(tokens, 512, dtype=torch.bfloat16, device="cuda")
            idx = torch.full((tokens, topk), -1, dtype=torch.int64, device="cuda")
            weights = torch.zeros(tokens, topk, device="cuda")
            out = torch.zeros_like(x)

            def pair(x: Any = x, idx: Any = idx, weights: Any = weights, out: Any = out) -> None:
                received = buffer.dispatch(x, idx)
                y = buffer.next_combine_buffer(received.handle)
                y.copy_(received.x)
                buffer.combine(y, weights, received.handle, out)

            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                pair()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                pair()
            captured.append((graph, pair, x, idx, weights, out))
        for turn in range(12):
            graph, pair, x, idx, weights, out = captured[turn % 2]
            tokens, topk = shapes[turn % 2]
            case = Case([tokens] * ranks, 32, 512, 8, topk, seed=turn)
            x.copy_(frameworks.TorchCuda.array(case.x[rank]))
            idx.copy_(frameworks.TorchCuda.array(case.idx[rank]))
            weights.copy_(frameworks.TorchCuda.array(case.weights[rank]))
            if turn % 5 == 4:
                pair()
            else:
                graph.replay()
            torch.cuda.synchronize()
            total = torch.where(idx >= 0, weights, 0).sum(1, keepdim=True)
            torch.testing.assert_close(out.float(), x.float() * total, rtol=2e-2, atol=1e-2)
            buffer.check()
            communicator.barrier()


def test_graphs_captured_by_torch() -> None:
    run(2, graph_rank, f"gpu-graphs-{os.getpid()}")


def timeout_rank(rank: int, ranks: int, name: str) -> None:
    """A rank that does not come is named, and the context lives."""
    import torch

    communicator = tandem_ep.Communicator.connect(name, rank, ranks)
    case = Case([4] * ranks, 4, 64, 4, 2)
    options = {**buffer_options(case), "timeout": 1.0}
    buffer = tandem_ep.Buffer(communicator, backend="cuda", **options)
    if rank == 0:
        x, idx = (frameworks.TorchCuda.array(a[rank]) for a in (case.x, case.idx))
        buffer.dispatch(x, idx)
        torch.cuda.synchronize()
        with pytest.raises(tandem_ep.Error, match="rank 1") as caught:
            buffer.check()
        assert caught.value.code == tandem_ep.ErrorCode.TIMEOUT and caught.value.peer == 1
        assert torch.ones(3, device="cuda").sum().item() == 3
    communicator.barrier()
    buffer.destroy()


def test_missing_rank_is_named_and_the_context_lives() -> None:
    run(2, timeout_rank, f"gpu-timeout-{os.getpid()}")


def test_views_are_views() -> None:
    import torch

    def body(communicator: tandem_ep.Communicator) -> Any:
        case = Case([4], 4, 64, 4, 2)
        buffer = tandem_ep.Buffer(communicator, backend="cuda", **buffer_options(case))
        x, idx = (frameworks.TorchCuda.array(a[0]) for a in (case.x, case.idx))
        received = buffer.dispatch(x, idx)
        arrays = frameworks.to_numpy(frameworks.TorchCuda, received)
        check_received(case, 0, arrays, "bf16", "padded")
        y = buffer.next_combine_buffer(received.handle)
        again = buffer.next_combine_buffer(received.handle, torch.bfloat16)
        y.fill_(2)
        assert again.data_ptr() == y.data_ptr() and bool((again == 2).all())
        with pytest.raises(tandem_ep.Error, match="x is in CPU memory"):
            buffer.dispatch(case.x[0], idx)
        assert case.x[0].dtype == BF16
        return received.x

    rows = tandem_ep.run_threads(1, body)[0]
    rows.fill_(3)  # the memory lives as long as its view
    assert np.all(frameworks.TorchCuda.to_numpy(rows).astype(np.float32) == 3)
