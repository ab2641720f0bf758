"""Ranks as processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any

import tandem_ep


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
