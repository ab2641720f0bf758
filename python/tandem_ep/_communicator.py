"""Communicator: which rank am I, of how many, and how ranks exchange messages during set-up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Optional

from . import _tandem


class Communicator:
    """One rank's connection to the others, for setting buffers up; no operation uses it.

    Made by one of the class methods below, collectively. Ranks are processes, on one host or
    several, or threads of one process (`run_threads`). It belongs to one thread at a time. Waiting
    releases the interpreter's lock, and is bounded by `timeout` (seconds, for ranks that do not
    come and for each later exchange): `Error` with code TIMEOUT names the missing ranks.
    """

    def __init__(self, inner: _tandem.Communicator) -> None:
        self._inner = inner

    @classmethod
    def from_environment(cls, *, timeout: float = 30.0) -> Communicator:
        """Rank, size and meeting point as torchrun, mpirun or srun set them, or as TANDEM_RANK,
        TANDEM_SIZE and TANDEM_RENDEZVOUS say, which come first."""
        return cls(_tandem.Communicator.from_environment(timeout))

    @classmethod
    def connect(cls, name: str, rank: int, size: int, *, timeout: float = 30.0) -> Communicator:
        """Meets the other ranks of this host under `name`, any text that they agree on."""
        return cls(_tandem.Communicator.connect(name, rank, size, timeout))

    @classmethod
    def from_all_gather(
        cls,
        rank: int,
        size: int,
        all_gather: Callable[[bytes], Iterable[bytes]],
        *,
        timeout: float = 30.0,
    ) -> Communicator:
        """Meets the others through `all_gather(message)`, which returns every rank's message in
        the order of ranks; it is called once."""
        return cls(_tandem.Communicator.from_all_gather(rank, size, all_gather, timeout))

    @classmethod
    def from_torch(cls, group: Any = None, *, timeout: float = 30.0) -> Communicator:
        """The ranks of a torch.distributed process group (default: all), of any backend."""
        import torch.distributed as dist

        def all_gather(message: bytes) -> list[bytes]:
            messages: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(messages, message, group)
            return messages

        rank, size = dist.get_rank(group), dist.get_world_size(group)
        return cls.from_all_gather(rank, size, all_gather, timeout=timeout)

    @classmethod
    def from_mpi(cls, comm: Any = None, *, timeout: float = 30.0) -> Communicator:
        """The ranks of an mpi4py communicator (default: MPI.COMM_WORLD)."""
        if comm is None:
            from mpi4py import MPI

            comm = MPI.COMM_WORLD
        return cls.from_all_gather(
            comm.Get_rank(), comm.Get_size(), comm.allgather, timeout=timeout
        )

    @property
    def rank(self) -> int:
        """This rank, in [0, size)."""
        return self._inner.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._inner.size

    def all_gather(self, message: bytes) -> list[bytes]:
        """Every rank's message, in the order of ranks. Collective."""
        return self._inner.all_gather(message)

    def barrier(self) -> None:
        """Returns when every rank has come here. Collective."""
        self._inner.barrier()

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size})"


def run_threads(
    num_ranks: int, body: Callable[[Communicator], Any], *, timeout: float = 30.0
) -> list[Any]:
    """Runs `body(communicator)` once per rank, each on a thread of its own, and returns what they
    returned, in the order of ranks. For tests and trying things out: operations run without the
    interpreter's lock, and so side by side, but Python code does not.

    If ranks raise, the exception that was raised first is raised here, when all have ended.
    """
    results: list[Any] = [None] * num_ranks
    errors: list[Optional[BaseException]] = []

    def run(inner: _tandem.Communicator) -> None:
        try:
            results[inner.rank] = body(Communicator(inner))
        except BaseException as error:
            errors.append(error)
            raise

    try:
        _tandem.run_threads(num_ranks, run, timeout)
    except BaseException:
        if errors and errors[0] is not None:
            raise errors[0] from None
        raise
    return results
