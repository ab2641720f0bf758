"""The one exception of the library."""

from __future__ import annotations

from typing import Any


class Error(RuntimeError):
    """What failed, where, and who was missing: the fields of C++'s tandem::Error.

    Attributes:
        code: kind of error, an `ErrorCode`.
        operation: "none" (set-up), "dispatch" or "combine".
        epoch: number of the operation on its buffer, 0 if none.
        phase: where the operation stood, as docs/design.md names the phases.
        peer: rank of the culprit, -1 if none.
        expected: what the wait or check wanted.
        seen: what it found.
        waited: seconds that it waited.
        limit: seconds that it was allowed to wait.
        where: file and line of the library that found out.
    """

    def __init__(
        self,
        message: str,
        *,
        code: Any,
        operation: str = "none",
        epoch: int = 0,
        phase: str = "none",
        peer: int = -1,
        expected: int = 0,
        seen: int = 0,
        waited: float = 0.0,
        limit: float = 0.0,
        where: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        self.operation = operation
        self.epoch = epoch
        self.phase = phase
        self.peer = peer
        self.expected = expected
        self.seen = seen
        self.waited = waited
        self.limit = limit
        self.where = where

    def __reduce__(self) -> Any:
        return (_rebuild, (self.args[0], dict(self.__dict__)))


def _rebuild(message: str, fields: dict[str, Any]) -> Error:
    return Error(message, **fields)
