"""What a dispatch returns: its hook, its handle, and what has arrived."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

from . import _tandem
from ._frameworks import Framework
from ._tandem import DType


class Hook:
    """Runs an operation's receive phase when called: `hook()`.

    It runs once; calling it again does nothing. Hooks of one buffer run in the order of their
    operations. It keeps the operation's arrays, and the buffer, alive until then.
    """

    __slots__ = ("_keep", "_run", "_settle")

    def __init__(self, run: _tandem.Hook, keep: Any, settle: Optional[Callable[[], None]]) -> None:
        self._run = run
        self._keep = keep
        self._settle = settle

    def __call__(self) -> None:
        self._run()
        if self._settle is not None:
            self._settle()
        self._keep = self._settle = None


class DispatchHandle:
    """Ties a combine to its dispatch. Valid until its half of the buffer is taken by a later
    dispatch, normally the next but one; an older one is refused with STALE_HANDLE."""

    __slots__ = ("_device", "_dtype", "_framework", "_inner", "_shape", "_topk_idx")

    def __init__(self, inner: _tandem.Dispatched, framework: Framework, device: int,
                 dtype: DType, topk_idx: Any, shape: tuple[int, ...]) -> None:  # fmt: skip
        self._inner = inner
        self._framework = framework
        self._device = device
        self._dtype = dtype
        self._topk_idx = topk_idx  # read again by the combine
        self._shape = shape  # [T, H]

    def active(self) -> list[bool]:
        """Who took part, by rank, as of the last phase of its dispatch or combine that has run on
        this rank: False for a rank that was masked then, also one that was lost in that very
        phase."""
        return self._inner.active()


class DispatchResult:
    """What arrived at this rank. With a hook, valid once the hook has run.

    Arrays are of the framework of the dispatch's `x`, made when first asked for. All but `x` and
    `scales` are views of the buffer's memory and hold what they say as long as the handle is
    valid; so are `x` and `scales` under packed placement, while under slotted placement they are
    arrays of your own. (JAX: copies, taken when first asked for.) R ranks, L experts on this rank,
    M tokens at most per rank, H channels.

    Attributes:
        x: rows, [L, R * M, H] (padded layout) or [rows, H] (packed layout), of the format's
            element type: that of the dispatch's x, or fp8 e4m3.
        scales: fp8 only, else None: float32 [..., ceil(H / 128)]; for "fp8-ue8m0" int32
            [..., ceil(H / 512)] with four bytes each.
        counts: int32 [L], rows received for each local expert.
        offsets: int64 [L + 1], first row of each expert in x taken as [rows, H]; the last entry is
            the end of the last expert's space.
        ranges: int64 [L, R], rows of local expert l from rank r: count in the low 32 bits, first
            row (counted from offsets[l]) in the high 32 bits.
        source_tokens: int32 [rows], index on its source rank of each row's token; undefined in
            rows that hold no token.
        handle: for next_combine_buffer and combine.
        hook: the receive phase, or None unless return_hook was given.
    """

    __slots__ = ("_arrays", "_views", "handle", "hook")

    def __init__(
        self, handle: DispatchHandle, hook: Optional[Hook], x: Any = None, scales: Any = None
    ) -> None:
        self.handle = handle
        self.hook = hook
        self._arrays: dict[str, Any] = {}
        if x is not None:
            self._arrays["x"] = x
            self._arrays["scales"] = scales

    def _array(self, name: str) -> Any:
        if name not in self._arrays:
            view = getattr(self.handle._inner, name)
            self._arrays[name] = None if view is None else self.handle._framework.from_view(view)
        return self._arrays[name]

    @property
    def x(self) -> Any:
        """Rows, [L, R * M, H] or [rows, H]."""
        return self._array("x")

    @property
    def scales(self) -> Any:
        """fp8 only: [..., ceil(H / 128)] float32, or [..., ceil(H / 512)] int32."""
        return self._array("scales")

    @property
    def counts(self) -> Any:
        """int32 [L]."""
        return self._array("counts")

    @property
    def offsets(self) -> Any:
        """int64 [L + 1]."""
        return self._array("offsets")

    @property
    def ranges(self) -> Any:
        """int64 [L, R]."""
        return self._array("ranges")

    @property
    def source_tokens(self) -> Any:
        """int32 [rows]."""
        return self._array("source_tokens")
