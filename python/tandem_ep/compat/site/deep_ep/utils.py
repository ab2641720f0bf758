"""Events, and small things that programs import from deep_ep.utils."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch


class EventHandle:
    """A point in the work of the current stream. On the CPU, where calls return when they are
    done, it has always been reached."""

    def __init__(self) -> None:
        self._event: Optional[torch.cuda.Event] = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._event = torch.cuda.Event()
            self._event.record()

    def current_stream_wait(self) -> None:
        """Lets the current stream wait for the event."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """An event, and tensors that live until it is dropped.

    As a context manager, it lets the current stream wait for the event at the end of the block.
    """

    def __init__(
        self,
        event: Optional[EventHandle] = None,
        extra_tensors: Optional[Sequence[torch.Tensor]] = None,
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Lets the current stream wait for the event."""
        if self.event is None:
            raise RuntimeError("there is no event: the operation was not called with async_finish")
        self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.event is not None:
            self.event.current_stream_wait()


def check_nvlink_connections(group: Any) -> None:
    """Nothing to check: ranks that cannot reach each other are named when a buffer is made."""
