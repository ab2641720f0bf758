"""How long a receive phase took, added to a tensor without waiting for the device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def add_duration(stats: torch.Tensor, rank: int) -> Iterator[None]:
    """Adds the nanoseconds that the block's work takes to `stats`, [R] int64, for every rank but
    this one, or to this rank's row if it is [R, R]."""
    row = stats if stats.dim() == 1 else stats[rank]
    others = torch.ones_like(row)
    others[rank] = 0
    if not stats.is_cuda:
        begin = time.perf_counter_ns()
        yield
        row.add_(others, alpha=time.perf_counter_ns() - begin)
        return
    try:
        from ._device_clock import store_time
    except ImportError as error:
        raise NotImplementedError(
            "wait_recv_cost_stats on the GPU read the device's clock through the package triton"
        ) from error
    times = torch.empty(2, dtype=torch.int64, device=stats.device)
    store_time[(1,)](times[0:1])
    yield
    store_time[(1,)](times[1:2])
    row.add_(others * (times[1] - times[0]))
