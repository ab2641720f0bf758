"""Buffer: symmetric memory on every rank, and the two operations on it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

from . import _tandem
from ._communicator import Communicator
from ._error import Error
from ._frameworks import Framework, framework_of, parse_dtype, stream_handle
from ._tandem import DType, ErrorCode, Format, Layout, Placement

_FORMAT_OF = {
    DType.BFLOAT16: Format.BFLOAT16,
    DType.FLOAT16: Format.FLOAT16,
    DType.FLOAT32: Format.FLOAT32,
}
_DTYPE_OF = {value: key for key, value in _FORMAT_OF.items()}


def _parse(what: str, value: Any, names: dict[str, Any]) -> Any:
    if isinstance(value, str):
        if value not in names:
            message = f"{what} is {value!r}, must be one of {', '.join(names)}"
            raise Error(message, code=ErrorCode.INVALID_ARGUMENT)
        return names[value]
    return value


def _options(
    *,
    num_experts: int,
    max_tokens: int = 128,
    max_hidden: int = 7168,
    max_topk: int = 8,
    backend: str = "cpu",
    widest_format: str = "bf16",
    expert_owners: Optional[Sequence[int]] = None,
    packed_placement: bool = True,
    slotted_placement: bool = True,
    combine: bool = True,
    padded_layout: bool = True,
    capacity_rows: int = 0,
    timeout: float = 30.0,
    num_threads: int = 1,
    device: int = -1,
    num_sms: int = 0,
    first_epoch: int = 1,
) -> _tandem.BufferOptions:
    options = _tandem.BufferOptions()
    options.num_experts = num_experts
    options.max_tokens = max_tokens
    options.max_hidden = max_hidden
    options.max_topk = max_topk
    options.backend = _parse("backend", backend, _tandem.BACKENDS)
    options.widest_format = _parse("widest_format", widest_format, _tandem.FORMATS)
    options.expert_owners = list(expert_owners or ())
    options.packed_placement = packed_placement
    options.slotted_placement = slotted_placement
    options.combine = combine
    options.padded_layout = padded_layout
    options.capacity_rows = capacity_rows
    options.timeout = timeout
    options.num_threads = num_threads
    options.device = device
    options.num_sms = num_sms
    options.first_epoch = first_epoch
    return options


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


class Buffer:
    """Symmetric memory on every rank, and dispatch and combine on it.

        buffer = Buffer(communicator, num_experts=64, max_tokens=128, max_hidden=7168, max_topk=8)
        received = buffer.dispatch(x, topk_idx)
        y = buffer.next_combine_buffer(received.handle)
        ... run each local expert on its rows of received.x, writing to the same rows of y ...
        out = buffer.combine(y, topk_weights, received.handle)

    Making one is collective and allocates everything. The operations on one buffer are one
    sequence, the same on every rank; calls from several threads need the caller's lock. Waiting
    releases the interpreter's lock. Wrong arguments raise `Error` with INVALID_ARGUMENT before
    anything is sent and leave the buffer usable; after TIMEOUT or MISMATCH it is failed, and every
    later call says so with FAILED_BUFFER.

    On the GPU work is queued on the caller's current stream (torch's or CuPy's) or the one given,
    and results are ready for work queued there later. Inputs must not be freed to another stream
    before that stream has done the work.

    Args:
        communicator: the ranks.
        num_experts: E, over all ranks.
        max_tokens: M, the most tokens that any rank dispatches in one call.
        max_hidden: the largest H.
        max_topk: the largest K.
        backend: "cpu" or "cuda": where arrays must be.
        widest_format: the widest rows: "bf16", "fp16" or "fp32".
        expert_owners: rank that owns each expert, [E]; default contiguous, as even as possible.
        packed_placement, slotted_placement, combine, padded_layout: what the buffer is for;
            memory that only an excluded use needs is not allocated.
        capacity_rows: rows of the view and of the combine region; 0: the worst case.
        timeout: seconds that any wait may take; math.inf for no limit; may differ per rank.
        num_threads: CPU threads that this rank works with.
        device: CUDA device of this rank; -1: the current one.
        num_sms: CUDA multiprocessors that operations use; 0: a share of the device.
        first_epoch: for tests of wrap-around only.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        num_experts: int,
        max_tokens: int = 128,
        max_hidden: int = 7168,
        max_topk: int = 8,
        backend: str = "cpu",
        widest_format: str = "bf16",
        expert_owners: Optional[Sequence[int]] = None,
        packed_placement: bool = True,
        slotted_placement: bool = True,
        combine: bool = True,
        padded_layout: bool = True,
        capacity_rows: int = 0,
        timeout: float = 30.0,
        num_threads: int = 1,
        device: int = -1,
        num_sms: int = 0,
        first_epoch: int = 1,
    ) -> None:
        arguments = dict(locals())
        del arguments["self"], arguments["communicator"]
        self._inner = _tandem.Buffer(communicator._inner, _options(**arguments))
        options = self._inner.options
        self._local_experts = self._inner.local_experts
        self._rank, self._num_ranks = self._inner.rank, self._inner.num_ranks
        self._max_tokens = options.max_tokens
        self._on_gpu = options.backend == _tandem.Backend.CUDA

    @staticmethod
    def size_bytes(num_ranks: int, **options: Any) -> int:
        """Bytes of symmetric memory that a buffer with these options (as the constructor's) takes
        on each of num_ranks ranks: exactly what is allocated."""
        return _tandem.Buffer.size_bytes(_options(**options), num_ranks)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def num_ranks(self) -> int:
        """R."""
        return self._num_ranks

    @property
    def num_local_experts(self) -> int:
        """L, the number of experts on this rank."""
        return len(self._local_experts)

    @property
    def local_experts(self) -> list[int]:
        """Ids of this rank's experts, ascending: the order of L in every result."""
        return list(self._local_experts)

    @property
    def capacity_rows(self) -> int:
        """Rows of the view and of the combine region."""
        return self._inner.capacity_rows

    def dispatch(
        self,
        x: Any,
        topk_idx: Any,
        *,
        format: Optional[str] = None,
        placement: str = "automatic",
        layout: str = "padded",
        row_alignment: int = 1,
        max_tokens: int = 0,
        return_hook: bool = False,
        recv_x: Any = None,
        recv_scales: Any = None,
        stream: Any = None,
        num_sms: int = 0,
    ) -> DispatchResult:
        """Sends each token to the owners of its experts, and receives the tokens of this rank's.

        Args:
            x: [T, H] bf16, fp16 or fp32; rows may be strided; T may be 0 and differ per rank.
            topk_idx: [T, K] int32 or int64; negative selects nothing; a repeated expert is two
                rows.
            format: "bf16", "fp16" or "fp32" (x's own, the default), or "fp8", "fp8-pow2" or
                "fp8-ue8m0".
            placement: "packed" (results are views of the buffer; not with a hook), "slotted"
                (results are arrays of your own) or "automatic" (slotted with a hook).
            layout: "padded", x is [L, R * M, H]; or "packed", [rows, H], experts one after the
                other.
            row_alignment: packed layout: each expert's first row is a multiple of it.
            max_tokens: M of this call, the same on every rank; 0: the buffer's.
            return_hook: return when everything is sent; `result.hook()` receives.
            recv_x, recv_scales: slotted placement: arrays to receive into, with the shapes of
                DispatchResult and no gaps; made here if not given.
            stream: CUDA: a stream (object or number) instead of the caller's current one.
            num_sms: CUDA: multiprocessors to use; 0: the buffer's.
        """
        framework = framework_of(x)
        handle_of_stream = self._stream(stream, framework, x)
        x_in = framework.to_input(x, "x", stream=handle_of_stream)
        idx_in = framework_of(topk_idx).to_input(topk_idx, "topk_idx", stream=handle_of_stream)
        options = _tandem.DispatchOptions()
        if format is None:
            options.format = _FORMAT_OF.get(x_in.dtype, Format.BFLOAT16)
        else:
            options.format = _parse("format", format, _tandem.FORMATS)
        options.placement = _parse("placement", placement, _tandem.PLACEMENTS)
        options.layout = _parse("layout", layout, _tandem.LAYOUTS)
        options.row_alignment = row_alignment
        options.max_tokens = max_tokens
        options.return_hook = return_hook
        options.num_sms = num_sms

        slotted = options.placement == Placement.SLOTTED or (
            options.placement == Placement.AUTOMATIC and return_hook
        )
        if slotted:
            recv_x, recv_scales = self._outputs(framework, x, options, recv_x, recv_scales)
        inner = self._inner.dispatch(
            x_in,
            idx_in,
            options,
            self._output(recv_x, "recv_x", handle_of_stream),
            self._output(recv_scales, "recv_scales", handle_of_stream),
            handle_of_stream,
        )
        dtype = x_in.dtype if x_in.dtype in _FORMAT_OF else DType.BFLOAT16
        handle = DispatchHandle(inner, framework, x_in.device[1], dtype, topk_idx, tuple(x.shape))
        settle = functools.partial(framework.settle, inner)
        if return_hook:
            hook = Hook(inner.hook, (x, topk_idx, recv_x, recv_scales), settle)
            return DispatchResult(handle, hook, recv_x, recv_scales)
        settle()
        return DispatchResult(handle, None, recv_x, recv_scales)

    def next_combine_buffer(self, handle: DispatchHandle, dtype: Any = None) -> Any:
        """The memory that peers will read this handle's expert outputs from: a view
        [L, R * M, H] or [rows, H], in the shape of the dispatch's result. Writing y there and
        giving that array to combine copies nothing. Reserves the handle's half until its combine;
        calling it again gives the same memory.

        Args:
            handle: of the dispatch.
            dtype: bf16, fp16 or fp32 (a name or a framework's dtype); default: that of the
                dispatch's x.
        """
        if handle._framework.name == "jax":
            raise TypeError("JAX arrays cannot be written to: give combine an array instead")
        wanted = handle._dtype if dtype is None else parse_dtype(dtype)
        view = self._inner.next_combine_buffer(handle._inner, wanted)
        return handle._framework.from_view(view)

    def combine(
        self,
        y: Any,
        topk_weights: Any,
        handle: DispatchHandle,
        out: Any = None,
        *,
        return_hook: bool = False,
        stream: Any = None,
        num_sms: int = 0,
    ) -> Union[Any, tuple[Any, Hook]]:
        """Sends expert outputs home: out[t] = sum over k of topk_weights[t, k] * y(row of token
        t's k-th expert), in float32 in the order of k. Unselected k contribute nothing; a token
        that selected nothing gives zeros.

        Args:
            y: the array from next_combine_buffer (nothing is copied), or any of that shape.
            topk_weights: [T, K] float32, T and K of the dispatch.
            handle: of the dispatch.
            out: [T, H] of y's dtype, rows may be strided; made here if not given.
            return_hook: return when everything is sent; the hook receives.
            stream, num_sms: as dispatch's.

        Returns:
            out, or (out, hook) if return_hook.
        """
        framework = framework_of(y)
        handle_of_stream = self._stream(stream, framework, y)
        y_in = framework.to_input(y, "y", stream=handle_of_stream)
        if out is None:
            like = y if framework is handle._framework or framework.name != "dlpack" else None
            shape = (handle._shape[0], y.shape[-1])
            out = framework.empty(shape, y_in.dtype, like)
        weights_in = framework_of(topk_weights).to_input(
            topk_weights, "topk_weights", stream=handle_of_stream
        )
        out_in = self._output(out, "out", handle_of_stream)
        hook = self._inner.combine(
            y_in, weights_in, handle._inner, out_in, return_hook, handle_of_stream, num_sms
        )
        settle = functools.partial(framework.settle, handle._inner)
        if return_hook:
            return out, Hook(hook, (y, topk_weights, handle, out), settle)
        settle()
        return out

    def check(self) -> None:
        """Raises the error of an operation that has failed since, if one has: GPU ranks find out
        here without synchronising."""
        self._inner.check()

    def destroy(self) -> None:
        """Gives the buffer up; later calls are refused. Its memory goes with the last array that
        is a view of it. Also done by leaving a `with` block, or when the last reference goes.

        On GPU ranks that are processes, giving the memory back waits for the other ranks to do so
        too, at most for the communicator's timeout: nobody's kernels may still read it."""
        self._inner.destroy()

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.destroy()

    def __repr__(self) -> str:
        state = ", destroyed" if self._inner.is_destroyed else ""
        return f"Buffer(rank={self.rank}, num_ranks={self.num_ranks}{state})"

    def _stream(self, stream: Any, framework: Framework, array: Any) -> int:
        """The stream to work on: the one given or the framework's own; 0 where it has none."""
        if not self._on_gpu:
            return 0
        if stream is not None:
            return stream_handle(stream)
        device = getattr(getattr(array, "device", None), "index", None)
        return framework.current_stream(device if isinstance(device, int) else 0)

    def _output(self, array: Any, what: str, stream: int) -> Any:
        if array is None:
            return None
        return framework_of(array).to_input(array, what, writable=True, stream=stream)

    def _outputs(
        self, framework: Framework, x: Any, options: Any, recv_x: Any, recv_scales: Any
    ) -> tuple[Any, Any]:
        """What slotted placement receives into: what was given, made here where it was not."""
        hidden = x.shape[-1]
        rows: tuple[int, ...] = (self.capacity_rows,)
        if options.layout == Layout.PADDED:
            max_tokens = options.max_tokens or self._max_tokens
            rows = (self.num_local_experts, self.num_ranks * max_tokens)
        fp8 = options.format not in _DTYPE_OF
        if recv_x is None:
            dtype = DType.FLOAT8_E4M3 if fp8 else _DTYPE_OF[options.format]
            recv_x = framework.empty((*rows, hidden), dtype, x)
        if fp8 and recv_scales is None:
            packed = options.format == Format.FP8_UE8M0
            group, dtype = (512, DType.INT32) if packed else (128, DType.FLOAT32)
            recv_scales = framework.empty((*rows, -(-hidden // group)), dtype, x)
        return recv_x, recv_scales
