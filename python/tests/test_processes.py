"""Ranks as processes, met through torch.distributed (gloo), the environment, a name, or any
function that gathers."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import tandem_ep
from frameworks import Numpy, Torch
from launch import free_port, join, run, shared_memory_names, start
from oracle import Case
from pair import buffer_options, run_pair

CASES = [
    Case([5, 0, 8], 8, 300, 7, 3),
    Case([8, 8, 8], 8, 64, 6, 3, routing="hot"),
    Case([4, 4, 4], 4, 48, 6, 3, owners=[2, 0, 2, 2, 0, 2]),
]
FORMATS = [None, "fp8", "fp8-pow2", "fp8-ue8m0"]


def run_cases(communicator: tandem_ep.Communicator, framework: Any) -> None:
    for case in CASES:
        with tandem_ep.Buffer(communicator, **buffer_options(case)) as buffer:
            for number, format in enumerate(FORMATS):
                hook = number % 2 == 1
                run_pair(
                    buffer, case, framework, format=format, hook=hook, zero_copy=not hook,
                    layout="packed" if number > 1 else "padded",
                )  # fmt: skip


def torch_rank(rank: int, ranks: int, port: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    run_cases(tandem_ep.Communicator.from_torch(), Torch)
    pair = dist.new_group([0, 2])
    if rank != 1:
        communicator = tandem_ep.Communicator.from_torch(pair)
        assert (communicator.rank, communicator.size) == (rank // 2, 2)
        case = Case([3, 4], 4, 64, 4, 2)
        with tandem_ep.Buffer(communicator, **buffer_options(case)) as buffer:
            run_pair(buffer, case, Torch)
    dist.barrier()
    dist.destroy_process_group()


def test_torch_gloo() -> None:
    run(3, torch_rank, free_port())


def environment_rank(rank: int, ranks: int, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))  # fmt: skip
    communicator = tandem_ep.Communicator.from_environment()
    assert (communicator.rank, communicator.size) == (rank, ranks)
    assert communicator.all_gather(b"%d" % rank) == [b"%d" % other for other in range(ranks)]
    run_cases(communicator, Numpy)


def test_environment_as_torchrun_sets_it() -> None:
    run(3, environment_rank, free_port())


class MpiLike:
    """As much of mpi4py's communicator as is used, over a folder."""

    def __init__(self, rank: int, size: int, folder: str) -> None:
        self.rank, self.size, self.folder = rank, size, folder

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def allgather(self, message: bytes) -> list[bytes]:
        own = os.path.join(self.folder, str(self.rank))
        with open(own + ".part", "wb") as file:
            file.write(message)
        os.rename(own + ".part", own)
        paths = [os.path.join(self.folder, str(rank)) for rank in range(self.size)]
        deadline = time.monotonic() + 60
        while not all(os.path.exists(path) for path in paths):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        messages = []
        for path in paths:
            with open(path, "rb") as file:
                messages.append(file.read())
        return messages


def mpi_rank(rank: int, ranks: int, folder: str) -> None:
    run_cases(tandem_ep.Communicator.from_mpi(MpiLike(rank, ranks, folder)), Numpy)


def test_any_function_that_gathers_as_mpi4py_does(tmp_path: Any) -> None:
    run(3, mpi_rank, str(tmp_path))


def survivor(rank: int, ranks: int, name: str) -> None:
    """Rank 1 dies in mid-operation; the others name it and end well."""
    communicator = tandem_ep.Communicator.connect(name, rank, ranks)
    case = Case([4] * ranks, 4, 64, 4, 2)
    buffer = tandem_ep.Buffer(communicator, **buffer_options(case))
    run_pair(buffer, case, Numpy)
    if rank == 1:
        buffer.dispatch(case.x[rank], case.idx[rank], return_hook=True)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(tandem_ep.Error, match="rank 1") as caught:
        for _ in range(3):
            result = buffer.dispatch(case.x[rank], case.idx[rank], placement="slotted")
            buffer.combine(result.x, case.weights[rank], result.handle)
    assert caught.value.code == tandem_ep.ErrorCode.PEER_LOST and caught.value.peer == 1
    buffer.destroy()


def test_killed_rank_is_named_and_leaves_nothing() -> None:
    before = shared_memory_names()
    processes = start(3, survivor, f"killed-rank-{os.getpid()}")
    assert join(processes) == [0, -signal.SIGKILL, 0]
    assert shared_memory_names() == before


def test_missing_rank_is_named_in_set_up() -> None:
    with pytest.raises(tandem_ep.Error, match="rank 1") as caught:
        tandem_ep.Communicator.connect(f"missing-rank-{os.getpid()}", 0, 2, timeout=0.3)
    assert caught.value.code == tandem_ep.ErrorCode.TIMEOUT


def test_communicator_says_who_it_is() -> None:
    def body(communicator: tandem_ep.Communicator) -> str:
        communicator.barrier()
        return repr(communicator)

    ranks = tandem_ep.run_threads(2, body)
    assert ranks == ["Communicator(rank=0, size=2)", "Communicator(rank=1, size=2)"]
    assert np.all([isinstance(rank, str) for rank in ranks])
