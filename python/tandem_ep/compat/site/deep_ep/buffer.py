"""Buffer: DeepEP V1's class, its low-latency half carried out by tandem_ep."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Optional, Union

import torch
from torch.utils.weak import WeakTensorKeyDictionary

import tandem_ep

from ._clock import add_duration
from ._inner_buffers import InnerBuffers, refuse, size_hint
from .config import Config
from .utils import EventHandle, EventOverlap

Handle = tuple[torch.Tensor, torch.Tensor, int, int, int]
RecvX = Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


def _missing(what: str, instead: str) -> NotImplementedError:
    return NotImplementedError(f"deep_ep on Tandem has no {what}: {instead}")


def _require_tensor(what: str, tensor: torch.Tensor, dtype: torch.dtype, shape: Any) -> None:
    shape = tuple(shape)
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise refuse(f"{what} is {tensor.dtype} {tuple(tensor.shape)}, must be {dtype} {shape}")


@contextlib.contextmanager
def _on_stream(stream: Optional[torch.cuda.Stream]) -> Iterator[None]:
    if stream is None:
        yield
    else:
        with torch.cuda.stream(stream):
            yield


class Buffer:
    """Communication buffers of one rank.

    Attributes:
        num_sms: kept for programs that set it; Tandem shares the device out by itself.
        timeout_seconds: how long any wait may take (of the class; set it before making buffers).
        rank, group_size, group: of this rank.
        num_nvl_bytes, num_rdma_bytes: as given.
    """

    num_sms: int = 20
    timeout_seconds: float = 100.0

    def __init__(
        self,
        group: Any = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        """Meets the other ranks. Collective.

        Args:
            group: a torch.distributed process group.
            num_nvl_bytes: not used.
            num_rdma_bytes: at least what get_low_latency_rdma_size_hint says for every call.
            low_latency_mode: required for the low-latency methods.
            num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric:
                accepted, without effect.
            explicitly_destroy: destroy() will be called.
            enable_shrink: a rank that misses the timeout, or has ended, is masked, and operations
                end without it; and the mask functions may be called.
            comm: an mpi4py communicator, instead of group.
        """
        timeout = self.timeout_seconds
        if group is not None:
            self._communicator = tandem_ep.Communicator.from_torch(group, timeout=timeout)
        elif comm is not None:
            self._communicator = tandem_ep.Communicator.from_mpi(comm, timeout=timeout)
        else:
            raise refuse("neither group nor comm is given")
        self.rank = self._communicator.rank
        self.group_size = self._communicator.size
        self.group = group
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self._inner = InnerBuffers(self._communicator, num_rdma_bytes, enable_shrink, timeout)
        # What belongs to a handle, by its first tensor: programs may take handles apart.
        self._dispatches: Any = WeakTensorKeyDictionary()
        self._destroyed = False

    # --- what is not low-latency ---

    def destroy(self) -> None:
        """Gives the memory back; for buffers made with explicitly_destroy."""
        if not self.explicitly_destroy:
            raise refuse("destroy() is for buffers made with explicitly_destroy=True")
        self._inner.destroy()
        self._destroyed = True

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether this build has the GPU backend."""
        return any(backend.name == "cuda" and backend.built for backend in tandem_ep.backends())

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Keeps the number, which must be even, as programs expect."""
        if new_num_sms % 2 != 0:
            raise refuse(f"num_sms is {new_num_sms}, must be even")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event on the current stream."""
        return EventOverlap(EventHandle())

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream that work is queued on: the current one."""
        return torch.cuda.current_stream()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """A Config, for programs that ask it for sizes."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """A Config, for programs that ask it for sizes."""
        return Config(Buffer.num_sms)

    def get_dispatch_layout(self, *args: Any, **kwargs: Any) -> Any:
        raise _missing("high-throughput kernels", "use the low-latency methods")

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        raise _missing("high-throughput kernels", "use low_latency_dispatch")

    def combine(self, *args: Any, **kwargs: Any) -> Any:
        raise _missing("high-throughput kernels", "use low_latency_combine")

    def get_local_buffer_tensor(self, *args: Any, **kwargs: Any) -> Any:
        raise _missing("raw access to the buffer", "use get_next_low_latency_combine_buffer")

    # --- masks ---

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks a rank, or lets it in again: on all ranks, whichever calls it. Before a dispatch.

        Args:
            rank_to_mask: the rank.
            mask: True: it is neither sent to nor received from; refused for this rank. False: it
                takes part again, from the dispatch after the next on. It has to wait for that, in
                a call of its own of this function (for itself) or of
                low_latency_clean_mask_buffer; ORDER as long as it does not.
        """
        if mask:
            self._maskable().mask(rank_to_mask)
        else:
            self._maskable().let_in(rank_to_mask)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Fills mask_status, int32 [R]: 1 for a rank that is masked, 0 for the others."""
        _require_tensor("mask_status", mask_status, torch.int32, (self.group_size,))
        masked = self._maskable().masked()
        mask_status.copy_(torch.tensor([rank in masked for rank in range(self.group_size)]))

    def low_latency_clean_mask_buffer(self) -> None:
        """Lets in whoever waits for it; on a rank that is masked, waits until it is let in. Before
        a dispatch. Ranks that do not wait, such as those that have ended, stay masked."""
        self._maskable().let_all_in()

    def _maskable(self) -> InnerBuffers:
        if not self.enable_shrink:
            raise refuse("masks are for buffers made with enable_shrink=True")
        return self._inner

    # --- low latency ---

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of symmetric memory on each rank for calls of at most these sizes and a top-k of
        at most 16."""
        return size_hint(num_ranks, num_max_dispatch_tokens_per_rank, hidden, num_experts)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Nothing to do: words of earlier operations cannot be mistaken for later ones."""

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Optional[torch.Tensor] = None,
        dispatch_wait_recv_cost_stats: Optional[torch.Tensor] = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[RecvX, torch.Tensor, Handle, EventOverlap, Optional[Callable[[], None]]]:
        """Sends tokens to the ranks of their experts. (M max tokens, R ranks, L local experts.)

        Args:
            x: [T, H] bf16, T at most M.
            topk_idx: [T, K] int64, negative selects nothing.
            num_max_dispatch_tokens_per_rank: M, the same on every rank.
            num_experts: E, over all ranks.
            cumulative_local_expert_recv_stats: int32 [L]; the counts received are added.
            dispatch_wait_recv_cost_stats: int64 [R] (or [R, R], of which this rank's row is
                used); the nanoseconds of the receive phase are added for every other rank.
            use_fp8: rows as e4m3 with a scale per 128 channels.
            round_scale: scales rounded up to powers of two.
            use_ue8m0: scales as bytes, four to an int32; needs round_scale.
            async_finish: return an event on the current stream.
            return_recv_hook: return when everything is sent; the hook receives.

        Returns:
            recv_x: [L, R * M, H] bf16, or (e4m3 [L, R * M, H], scales): float32
                [L, R * M, ceil(H / 128)] or int32 [L, R * M, ceil(H / 512)], column-major in the
                last two dimensions. Fresh tensors.
            recv_count: int32 [L]; rows beyond it are undefined.
            handle: (source token of each row, int32 [L, R * M]; count in the low and first row in
                the high 32 bits for each rank, int64 [L, R]; M, H, E).
            event: valid with async_finish.
            hook: valid with return_recv_hook, else None.
        """
        if async_finish and return_recv_hook:
            raise refuse("async_finish and return_recv_hook are both given")
        if use_ue8m0 and not round_scale:
            raise refuse("use_ue8m0 needs round_scale")
        if x.dim() != 2 or x.dtype != torch.bfloat16:
            raise refuse(f"x is {x.dtype} {tuple(x.shape)}, must be torch.bfloat16 [T, H]")
        if topk_idx.dim() != 2 or topk_idx.dtype != torch.int64:
            raise refuse(
                f"topk_idx is {topk_idx.dtype} {tuple(topk_idx.shape)}, must be torch.int64 [T, K]"
            )
        max_tokens, hidden = num_max_dispatch_tokens_per_rank, x.size(1)
        if self._destroyed:
            raise refuse("the buffer was destroyed")
        if not self.low_latency_mode:
            raise refuse("the buffer was made with low_latency_mode=False")
        inner = self._inner.serve(x, max_tokens, num_experts, topk_idx.size(1))
        num_local, num_rows = inner.num_local_experts, self.group_size * max_tokens

        make = functools.partial(torch.empty, device=x.device)
        recv_count = make(num_local, dtype=torch.int32)
        source_info = make(num_local, num_rows, dtype=torch.int32)
        layout_range = make(num_local, self.group_size, dtype=torch.int64)
        row_scales = scales = None
        recv_x = make(
            num_local, num_rows, hidden, dtype=torch.float8_e4m3fn if use_fp8 else torch.bfloat16
        )
        if use_fp8:
            num_scales = -(-hidden // (512 if use_ue8m0 else 128))
            dtype = torch.int32 if use_ue8m0 else torch.float32
            row_scales = make(num_local, num_rows, num_scales, dtype=dtype)
            scales = make(num_local, num_scales, num_rows, dtype=dtype).transpose(1, 2)
        stats = cumulative_local_expert_recv_stats
        if stats is not None:
            _require_tensor("cumulative_local_expert_recv_stats", stats, torch.int32, (num_local,))
        waits = self._check_waits("dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats)

        pow2 = "fp8-ue8m0" if use_ue8m0 else "fp8-pow2" if round_scale else "fp8"
        result = inner.dispatch(
            x,
            topk_idx,
            format=pow2 if use_fp8 else "bf16",
            placement="slotted",
            max_tokens=max_tokens,
            return_hook=return_recv_hook or waits is not None,
            recv_x=recv_x,
            recv_scales=row_scales,
        )
        self._dispatches[source_info] = (inner, result.handle, topk_idx)

        def receive() -> None:
            self._run_receive(result.hook, waits)
            # The buffer's own arrays go with its half; the caller's stay.
            recv_count.copy_(result.counts)
            source_info.view(-1).copy_(result.source_tokens)
            layout_range.copy_(result.ranges)
            if scales is not None:
                scales.copy_(row_scales)
            if stats is not None:
                stats.add_(recv_count)

        event, hook = self._finish(receive, x, async_finish, return_recv_hook)
        handle = (source_info, layout_range, max_tokens, hidden, num_experts)
        received = recv_x if scales is None else (recv_x, scales)
        return received, recv_count, handle, event, hook

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Handle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Optional[torch.Tensor] = None,
        combine_wait_recv_cost_stats: Optional[torch.Tensor] = None,
    ) -> tuple[torch.Tensor, EventOverlap, Optional[Callable[[], None]]]:
        """Brings expert outputs home: the weighted sum of each token's rows.

        Args:
            x: [L, R * M, H] bf16; its contents do not matter with zero_copy.
            topk_idx: [T, K] int64, that of the dispatch.
            topk_weights: [T, K] float32.
            handle: of the dispatch.
            use_logfmt: refused.
            zero_copy: the outputs are in the tensor of get_next_low_latency_combine_buffer.
            async_finish, return_recv_hook: as the dispatch's.
            out: [T, H] bf16, made here if not given.
            combine_wait_recv_cost_stats: as dispatch_wait_recv_cost_stats.

        Returns:
            combined_x: out, [T, H]; event; hook.
        """
        if use_logfmt:
            raise _missing("logfmt", "combine sends bf16; use_logfmt must be False")
        if async_finish and return_recv_hook:
            raise refuse("async_finish and return_recv_hook are both given")
        inner, inner_handle, dispatched_idx = self._dispatch_of(handle)
        _, _, max_tokens, hidden, _ = handle
        _require_tensor(
            "x", x, torch.bfloat16,
            (inner.num_local_experts, self.group_size * max_tokens, hidden),
        )  # fmt: skip
        _require_tensor("topk_idx", topk_idx, torch.int64, dispatched_idx.shape)
        if not topk_idx.is_cuda and not torch.equal(topk_idx, dispatched_idx):
            raise refuse("topk_idx differs from that of the handle's dispatch")
        _require_tensor("topk_weights", topk_weights, torch.float32, topk_idx.shape)
        if out is None:
            out = torch.empty(topk_idx.size(0), hidden, dtype=torch.bfloat16, device=x.device)
        waits = self._check_waits("combine_wait_recv_cost_stats", combine_wait_recv_cost_stats)

        split = return_recv_hook or waits is not None
        combined = inner.combine(
            inner.next_combine_buffer(inner_handle, "bf16") if zero_copy else x,
            topk_weights,
            inner_handle,
            out,
            return_hook=split,
        )
        receive = functools.partial(self._run_receive, combined[1] if split else None, waits)
        event, hook = self._finish(receive, x, async_finish, return_recv_hook)
        return out, event, hook

    def get_next_low_latency_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """The memory that the combine of this handle reads, [L, R * M, H] bf16: fill it and give
        zero_copy to low_latency_combine."""
        inner, inner_handle, _ = self._dispatch_of(handle)
        return inner.next_combine_buffer(inner_handle, "bf16")

    # --- within ---

    def _dispatch_of(self, handle: Handle) -> tuple[tandem_ep.Buffer, Any, torch.Tensor]:
        found = self._dispatches.get(handle[0])
        if found is None:
            raise refuse("the handle is not of a low_latency_dispatch on this buffer")
        return found

    def _check_waits(self, what: str, stats: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        if stats is None:
            return None
        shape = (self.group_size,) * (2 if stats.dim() == 2 else 1)
        _require_tensor(what, stats, torch.int64, shape)
        return stats

    def _run_receive(
        self, hook: Optional[Callable[[], None]], waits: Optional[torch.Tensor]
    ) -> None:
        """The receive phase, where it was split off."""
        if hook is None:
            return
        with add_duration(waits, self.rank) if waits is not None else contextlib.nullcontext():
            hook()

    def _finish(
        self, receive: Callable[[], None], x: torch.Tensor, async_finish: bool, with_hook: bool
    ) -> tuple[EventOverlap, Optional[Callable[[], None]]]:
        """Receives now or in the hook that it returns; in either case once, and on the stream
        that the operation was called on."""
        if not with_hook:
            receive()
            return EventOverlap(EventHandle() if async_finish else None), None
        pending = [receive]
        stream = torch.cuda.current_stream() if x.is_cuda else None

        def hook() -> None:
            if pending:
                with _on_stream(stream):
                    pending[0]()
                pending.clear()

        return EventOverlap(None), hook
