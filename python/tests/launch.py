"""Ranks as processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any

import tandem_ep

_held_ports: list[socket.socket] = []


def free_port() -> int:
    """No other process is given it while this one lives: a socket that is bound and does not listen
    keeps it. Whoever is told of it may listen there, with SO_REUSEADDR as servers do."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _held_ports.append(holder)
    return int(holder.getsockname()[1])


def shared_memory_names() -> set[str]:
    """Tandem's; those of other programs come and go."""
    return {name for name in os.listdir("/dev/shm") if "tandem" in name}


def start(ranks: int, body: Callable[..., None], *arguments: Any) -> list[Any]:
    """Starts `body(rank, ranks, ...)` in processes of their own."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=body, args=(rank, ranks, *arguments)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return processes


def join(processes: list[Any]) -> list[int]:
    """Their exit codes."""
    for process in processes:
        process.join(120)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def run(ranks: int, body: Callable[..., None], *arguments: Any) -> None:
    """Runs `body(rank, ranks, ...)` in processes of their own; all must end well."""
    assert join(start(ranks, body, *arguments)) == [0] * ranks


def _meet(rank: int, ranks: int, name: str, body: Callable[..., None], *arguments: Any) -> None:
    body(tandem_ep.Communicator.connect(name, rank, ranks), *arguments)


def run_ranks(launch: str, ranks: int, body: Callable[..., None], *arguments: Any) -> None:
    """Runs `body(communicator, ...)` on every rank: "threads" or "processes"."""
    if launch == "threads":
        tandem_ep.run_threads(ranks, lambda communicator: body(communicator, *arguments))
    else:
        run(ranks, _meet, f"{body.__name__}-{os.getpid()}", body, *arguments)
