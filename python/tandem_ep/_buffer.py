"""Buffer: symmetric memory on every rank, and the two operations on it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Optional, Union, cast

from . import _tandem
from ._communicator import Communicator
from ._error import Error
from ._frameworks import Framework, framework_of, parse_dtype, stream_handle
from ._results import DispatchHandle, DispatchResult, Hook
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
    on_timeout: str = "fail",
    door: str = "",
    door_address: str = "",
    max_ranks: int = 0,
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
    options.on_timeout = _parse("on_timeout", on_timeout, _tandem.ON_TIMEOUT)
    options.door = door
    options.door_address = door_address
    options.max_ranks = max_ranks
    options.num_threads = num_threads
    options.device = device
    options.num_sms = num_sms
    options.first_epoch = first_epoch
    return options


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
    anything is sent and leave the buffer usable; after TIMEOUT, PEER_LOST or MISMATCH it is failed
    on every rank, and every later call says so with FAILED_BUFFER until all have called recover().

    Ranks may be lost and found again: mask, unmask, recover, on_timeout="mask", join
    (docs/failures.md). What concerns ranks goes by rank, in lists of length R.

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
        on_timeout: what becomes of an operation in which a rank misses the timeout or has ended:
            "fail", on every rank; or "mask": that rank is masked, and the operation ends without
            it.
        door: a name, any text, under which processes may join the buffer later. Empty: nobody may.
            Where all ranks are on one host: processes of this user, one buffer at a time a name. On
            CPUs of several hosts: one such buffer of a communicator. On GPUs of one host with
            on_timeout "mask", and ranks that are processes.
        door_address: where ranks are on several hosts, "host:port" where this rank can be asked by
            a process that wants to join. Empty: it cannot. May differ per rank.
        max_ranks: ranks that there may ever be; experts and memory are shared out among that many
            (R), and those beyond the communicator's count as masked until they join. 0: as many
            as it has. As for door.
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
        on_timeout: str = "fail",
        door: str = "",
        door_address: str = "",
        max_ranks: int = 0,
        num_threads: int = 1,
        device: int = -1,
        num_sms: int = 0,
        first_epoch: int = 1,
    ) -> None:
        arguments = dict(locals())
        del arguments["self"], arguments["communicator"]
        self._take(_tandem.Buffer(communicator._inner, _options(**arguments)))

    @classmethod
    def join(cls, rank: int, *, address: str = "", secret: str = "", **options: Any) -> Buffer:
        """The end of a process (or thread) that becomes `rank` of a running buffer: in place of one
        that has ended and been masked, or as a rank that has never been there.

        Blocks, without the interpreter's lock, until an active rank calls unmask(rank); the others
        go on meanwhile.

        Args:
            rank: which, in [0, R).
            address, secret: where ranks are on several hosts: the door_address of any rank that
                takes part, and the secret of the communicator. Memory is shared with no other rank
                then.
            options: as the constructor's: those of the others, with the name of their door.

        Raises:
            Error: INVALID_ARGUMENT (no door named, another secret, a rank that cannot be),
                MISMATCH (options that differ), ORDER (another process is this rank), TIMEOUT
                (nobody opens a door, the rank is not masked, or is not let in), RESOURCE,
                UNSUPPORTED (with an address: a build without the network, or GPUs; else on GPUs
                ranks that are threads, or on_timeout is not "mask").
        """
        buffer = cls.__new__(cls)
        if address:
            inner = _tandem.Buffer.join_across_hosts(address, secret, rank, _options(**options))
        else:
            inner = _tandem.Buffer.join(rank, _options(**options))
        buffer._take(inner)
        return buffer

    def _take(self, inner: _tandem.Buffer) -> None:
        self._inner = inner
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
        """R, with ranks that may yet join."""
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
        topk_weights: Any = None,
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
            topk_weights: [T, K] float32, on every rank or on none: this dispatch's combine is made
                of partial sums, and takes no weights (see combine). Across hosts it sends one row
                per token and rank instead of one per expert. CPU ranks only.
            recv_x, recv_scales: slotted placement: arrays to receive into, with the shapes of
                DispatchResult and no gaps; made here if not given.
            stream: CUDA: a stream (object or number) instead of the caller's current one.
            num_sms: CUDA: multiprocessors to use; 0: the buffer's.
        """
        framework = framework_of(x)
        handle_of_stream = self._stream(stream, framework, x)
        x_in = framework.to_input(x, "x", stream=handle_of_stream)
        idx_in = framework_of(topk_idx).to_input(topk_idx, "topk_idx", stream=handle_of_stream)
        weights_in = self._weights(topk_weights, handle_of_stream)
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
            weights_in,
            self._output(recv_x, "recv_x", handle_of_stream),
            self._output(recv_scales, "recv_scales", handle_of_stream),
            handle_of_stream,
        )
        dtype = x_in.dtype if x_in.dtype in _FORMAT_OF else DType.BFLOAT16
        handle = DispatchHandle(inner, framework, x_in.device[1], dtype, topk_idx, tuple(x.shape))
        settle = functools.partial(framework.settle, inner)
        if return_hook:
            hook = Hook(inner.hook, (x, topk_idx, topk_weights, recv_x, recv_scales), settle)
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
        that selected nothing gives zeros. After a dispatch with topk_weights: the same products
        summed by rank, each rank's rounded to y's dtype, then these, in the order of each rank's
        first k; rounded once more, and dependent on who owns which expert.

        Args:
            y: the array from next_combine_buffer (nothing is copied), or any of that shape.
            topk_weights: [T, K] float32, T and K of the dispatch; None if the dispatch had them.
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
        weights_in = self._weights(topk_weights, handle_of_stream)
        out_in = self._output(out, "out", handle_of_stream)
        hook = self._inner.combine(
            y_in, weights_in, handle._inner, out_in, return_hook, handle_of_stream, num_sms
        )
        settle = functools.partial(framework.settle, handle._inner)
        if return_hook:
            return out, Hook(hook, (y, topk_weights, handle, out), settle)
        settle()
        return out

    def mask(self, rank: int) -> None:
        """Masks a rank, on all ranks from their next operation at the latest, on GPUs from the
        caller's fifth on: it is neither written to nor waited for, its tokens are not received,
        and what selects its experts is dropped like a negative index. Weights are not
        renormalised; a token whose experts are all masked gives zeros. Called by any active rank,
        between operations; nothing if it is masked already.

        Raises:
            Error: INVALID_ARGUMENT (no such rank, or this one), ORDER (on GPUs a rank that has
                been let in lately).
        """
        self._inner.mask(rank)

    def unmask(self, rank: int) -> None:
        """Lets a masked rank take part again, on all ranks from the same operation on, at most
        three later (GPUs: five). Called by any active rank, between operations; nothing if it is
        active already.

        Raises:
            Error: ORDER unless that rank waits in recover() or join() (see waiting), and on GPUs
                if it was masked lately; INVALID_ARGUMENT (no such rank).
        """
        self._inner.unmask(rank)

    def active(self) -> list[bool]:
        """[R]: False for a rank that is masked, as far as this rank has noticed; True for all
        others, also one that unmask has let in and whose first operation is still to come."""
        return self._inner.active()

    def recover(self) -> list[bool]:
        """After a failure: a new start, collective over the active ranks. Waits for all of them,
        masks those that have ended or do not come within the timeout, and returns who is active,
        [R]. Handles of earlier dispatches are stale, hooks that have not run are void. Called
        while nothing has failed, it makes the operations of peers fail, since they have to come
        here too.

        A rank that is masked waits here until an active one calls unmask for it.

        Raises:
            Error: TIMEOUT (masked, and nobody lets it in).
        """
        return self._inner.recover()

    def waiting(self) -> list[int]:
        """Ranks that wait to be let in, ascending: those that are masked and have called recover or
        join."""
        return self._inner.waiting()

    def last_loss(self) -> Optional[Error]:
        """Why a rank was lost or operations have failed, as agreed between the ranks; None if the
        last change of who takes part was none of the kind. Returned, not raised."""
        return cast(Optional[Error], self._inner.last_loss())

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

    def _weights(self, array: Any, stream: int) -> Any:
        if array is None:
            return None
        return framework_of(array).to_input(array, "topk_weights", stream=stream)

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
