"""The buffers of tandem_ep behind one of deep_ep.

Tandem's buffers are made for one number of experts and largest sizes, DeepEP's calls name theirs;
so an inner buffer is made at the first call that no earlier one serves. That is collective, and
all ranks do it at the same call, since they pass the same sizes.
"""

from __future__ import annotations

from typing import Any

import torch

import tandem_ep
from tandem_ep import Error, ErrorCode

# Inner buffers of one Buffer; a program whose sizes keep growing should start with the largest.
_MAX_INNER_BUFFERS = 8
# The top-k that the size hint, which does not know it, allows for.
_TOPK_CAPACITY = 16


def refuse(message: str, code: ErrorCode = ErrorCode.INVALID_ARGUMENT) -> Error:
    return Error(f"deep_ep: {message}", code=code)


def _sizes(max_tokens: int, hidden: int, num_experts: int, topk: int) -> dict[str, Any]:
    capacity = _TOPK_CAPACITY
    while capacity < topk:
        capacity *= 2
    return {
        "num_experts": num_experts,
        "max_tokens": max_tokens,
        "max_hidden": hidden,
        "max_topk": min(capacity, tandem_ep.MAX_TOPK),
        "packed_placement": False,  # results go to tensors of the caller's
    }


def size_hint(num_ranks: int, max_tokens: int, hidden: int, num_experts: int) -> int:
    """Bytes on each rank for calls of at most these sizes, on whichever backend takes most."""
    options = _sizes(max_tokens, hidden, num_experts, 1)
    return max(
        tandem_ep.Buffer.size_bytes(num_ranks, backend=backend.name, **options)
        for backend in tandem_ep.backends()
        if backend.usable
    )


def _active(inner: tandem_ep.Buffer) -> list[bool]:
    """By rank, after a look at what has been decided since this one's last call."""
    try:
        inner.unmask(inner.rank)  # does nothing but look
    except Error as error:
        if error.code not in (ErrorCode.MASKED, ErrorCode.FAILED_BUFFER):
            raise
    return inner.active()


class InnerBuffers:
    """Made as calls need them, of at most `num_bytes` each by the size hint. `may_mask`: ranks that
    miss the timeout (seconds) are masked."""

    def __init__(
        self, communicator: tandem_ep.Communicator, num_bytes: int, may_mask: bool, timeout: float
    ) -> None:
        self._communicator = communicator
        self._may_mask = may_mask
        self._num_bytes = num_bytes
        self._options = {"timeout": timeout, "on_timeout": "mask" if may_mask else "fail"}
        self._made: list[tuple[str, dict[str, Any], tandem_ep.Buffer]] = []

    def destroy(self) -> None:
        for _, _, inner in self._made:
            inner.destroy()
        self._made.clear()

    def serve(
        self, x: torch.Tensor, max_tokens: int, num_experts: int, topk: int
    ) -> tandem_ep.Buffer:
        """The one for a call of these sizes, made if there is none."""
        backend, hidden = x.device.type, x.size(1)
        wanted = _sizes(max_tokens, hidden, num_experts, topk)
        for made_for, sizes, inner in self._made:
            if (
                made_for == backend
                and sizes["num_experts"] == num_experts
                and all(sizes[name] >= wanted[name] for name in wanted)
            ):
                return inner
        num_ranks = self._communicator.size
        hint = size_hint(num_ranks, max_tokens, hidden, num_experts)
        if self._num_bytes < hint:
            raise refuse(
                f"num_rdma_bytes is {self._num_bytes}, must be at least {hint} for "
                f"{max_tokens} tokens of {hidden} channels, {num_experts} experts and "
                f"{num_ranks} ranks (get_low_latency_rdma_size_hint)"
            )
        if len(self._made) == _MAX_INNER_BUFFERS:
            raise refuse(
                f"calls of more than {_MAX_INNER_BUFFERS} sizes, each larger than those before, "
                "on one buffer: begin with the largest",
                ErrorCode.CAPACITY,
            )
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise refuse(
                "the first call of a size allocates: make it once before capturing a graph",
                ErrorCode.ORDER,
            )
        if self._may_mask and self.masked():
            raise refuse(
                "the first call of a size is made by all ranks together: make it before any is "
                f"masked, as now {sorted(self.masked())}",
                ErrorCode.ORDER,
            )
        device = {"device": x.device.index} if x.is_cuda else {}
        inner = tandem_ep.Buffer(
            self._communicator, backend=backend, **self._options, **wanted, **device
        )
        self._made.append((backend, wanted, inner))
        return inner

    # --- masks: one for all of them ---

    def mask(self, rank: int) -> None:
        if not self._made:
            raise refuse("nobody can be masked before the first dispatch", ErrorCode.ORDER)
        for _, _, inner in self._made:
            inner.mask(rank)

    def let_in(self, rank: int) -> None:
        """Another rank, which waits for it; or this one, which waits here until it is."""
        for _, _, inner in self._made:
            if rank != inner.rank:
                inner.unmask(rank)
            elif not _active(inner)[rank]:
                inner.recover()

    def let_all_in(self) -> None:
        """This rank, which waits here if it is masked, and whoever waits for it now."""
        self.let_in(self._communicator.rank)
        for _, _, inner in self._made:
            for rank in inner.waiting():
                inner.unmask(rank)

    def masked(self) -> set[int]:
        """Ranks that are masked in any of them."""
        return {
            rank
            for _, _, inner in self._made
            for rank, is_active in enumerate(_active(inner))
            if not is_active
        }
