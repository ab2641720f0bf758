"""A program written against nothing but DeepEP V1's documented low-latency interface.

    python deep_ep_script.py --ranks 4 [--device cuda]

It covers every parameter of that interface, compares with values worked out from all ranks'
inputs, and exits with 0 only if all agree. Whatever `import deep_ep` finds is what it tests.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
from dataclasses import dataclass
from typing import Any, Optional

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import deep_ep


@dataclass
class Case:
    tokens: int  # of this rank
    max_tokens: int
    hidden: int
    experts: int
    topk: int
    seed: int = 0
    masked: bool = True


class Inputs:
    """One rank's tokens, and everybody's, as the expected values need them."""

    def __init__(self, case: Case, group: Any, device: str) -> None:
        rank = group.rank()
        generator = torch.Generator().manual_seed(1000 * case.seed + rank)
        self.case = case
        self.x = torch.randn(case.tokens, case.hidden, generator=generator).bfloat16().to(device)
        scores = torch.rand(case.tokens, case.experts, generator=generator)
        topk_idx = scores.topk(case.topk, dim=-1).indices
        if case.masked and case.tokens > 0:
            hidden = torch.rand(topk_idx.shape, generator=generator) < 0.2
            topk_idx = topk_idx.masked_fill(hidden, -1)
            topk_idx[-1] = -1
        self.topk_idx = topk_idx.to(deep_ep.topk_idx_t).to(device)
        self.weights = torch.rand(case.tokens, case.topk, generator=generator).to(device)
        everything: list[Any] = [None] * group.size()
        dist.all_gather_object(everything, (self.x.cpu(), self.topk_idx.cpu()), group)
        self.all = everything


def decode(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(count, begin) of each entry of a layout range."""
    return packed & 0xFFFFFFFF, packed >> 32


def dequantise(values: torch.Tensor, scales: torch.Tensor, use_ue8m0: bool) -> torch.Tensor:
    if use_ue8m0:
        exponents = torch.stack([scales >> 8 * byte & 255 for byte in range(4)], -1).flatten(-2)
        factors = torch.pow(2.0, exponents.float() - 127)
    else:
        factors = scales
    factors = factors.repeat_interleave(128, dim=-1)[..., : values.shape[-1]]
    return values.float() * factors


def check_received(inputs: Inputs, group: Any, received: Any, use_fp8: bool, round_scale: bool,
                   use_ue8m0: bool) -> torch.Tensor:  # fmt: skip
    """Every received row, count, source and range; returns the rows in float32."""
    recv_x, recv_count, handle = received
    case, ranks = inputs.case, group.size()
    local = case.experts // ranks
    rows = ranks * case.max_tokens
    source_info, layout_range, max_tokens, hidden, experts = handle
    assert (max_tokens, hidden, experts) == (case.max_tokens, case.hidden, case.experts)
    assert source_info.shape == (local, rows) and source_info.dtype == torch.int32
    assert layout_range.shape == (local, ranks) and layout_range.dtype == torch.int64
    assert recv_count.shape == (local,) and recv_count.dtype == torch.int32
    if use_fp8:
        values, scales = recv_x
        assert values.dtype == torch.float8_e4m3fn
        if use_ue8m0:
            assert scales.shape == (local, rows, case.hidden // 512)
            assert scales.dtype == torch.int32
        else:
            assert scales.shape == (local, rows, case.hidden // 128)
            assert scales.dtype == torch.float32
        assert scales.stride(-2) == 1 and scales.stride(-1) == rows  # column-major
        rows_of = dequantise(values.cpu(), scales.cpu(), use_ue8m0)
    else:
        values = recv_x
        assert values.dtype == torch.bfloat16
        rows_of = values.cpu().float()
    assert values.shape == (local, rows, case.hidden) and values.is_contiguous()

    counts, begins = decode(layout_range.cpu())
    for l in range(local):
        expert = group.rank() * local + l
        total = 0
        for source, (x, topk_idx) in enumerate(inputs.all):
            wanted = (topk_idx == expert).any(dim=1).nonzero().flatten()
            count, begin = int(counts[l, source]), int(begins[l, source])
            assert count == len(wanted), (expert, source, count, len(wanted))
            tokens = source_info[l, begin : begin + count].cpu().long()
            assert torch.equal(tokens.sort().values, wanted)
            expected = x[tokens].float()
            got = rows_of[l, begin : begin + count]
            if not use_fp8:
                assert torch.equal(got, expected)
            elif count:
                groups = expected.view(count, -1, 128)
                scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
                if round_scale:
                    scale = torch.pow(2.0, scale.log2().ceil())
                bound = scale * 16.5  # half of e4m3's widest step
                assert ((got - expected).view(count, -1, 128).abs() <= bound).all()
            total += count
        assert int(recv_count[l]) == total
    return rows_of


def finish(event: Any, hook: Any, async_finish: bool, return_recv_hook: bool) -> None:
    if return_recv_hook:
        hook()
    elif async_finish:
        event.current_stream_wait()


def check_pair(buffer: Any, group: Any, inputs: Inputs, *, use_fp8: bool, round_scale: bool,
               use_ue8m0: bool, async_finish: bool, return_recv_hook: bool) -> int:  # fmt: skip
    """One dispatch and the combines of its handle."""
    case, ranks, device = inputs.case, group.size(), inputs.x.device
    local = case.experts // ranks
    stats = torch.full((local,), 3, dtype=torch.int32, device=device)
    waits = torch.zeros(ranks, dtype=torch.int64, device=device)
    recv_x, recv_count, handle, event, hook = buffer.low_latency_dispatch(
        inputs.x, inputs.topk_idx, case.max_tokens, case.experts,
        cumulative_local_expert_recv_stats=stats,
        dispatch_wait_recv_cost_stats=waits,
        use_fp8=use_fp8, round_scale=round_scale, use_ue8m0=use_ue8m0,
        async_finish=async_finish, return_recv_hook=return_recv_hook,
    )  # fmt: skip
    assert (hook is not None) == return_recv_hook
    finish(event, hook, async_finish, return_recv_hook)
    rows = check_received(
        inputs, group, (recv_x, recv_count, handle), use_fp8, round_scale, use_ue8m0
    )
    assert torch.equal(stats, recv_count + 3)
    assert (waits >= 0).all() and (ranks == 1 or waits.sum() > 0)

    # Expert e multiplies by e + 1; what it makes of rows without a token must not matter.
    expert_ids = torch.arange(group.rank() * local, (group.rank() + 1) * local)
    outputs = (rows * (expert_ids + 1).view(-1, 1, 1)).bfloat16()
    position = torch.arange(outputs.shape[1])
    outputs[position.expand(local, -1) >= recv_count.cpu().view(-1, 1)] = float("nan")
    outputs = outputs.to(device)

    everyone: list[Any] = [None] * ranks
    counts, begins = decode(handle[1].cpu())
    dist.all_gather_object(everyone, (outputs.cpu(), handle[0].cpu(), counts, begins), group)
    expected = torch.zeros(case.tokens, case.hidden)
    topk_idx, weights = inputs.topk_idx.cpu(), inputs.weights.cpu()
    for t, k in itertools.product(range(case.tokens), range(case.topk)):
        expert = int(topk_idx[t, k])
        if expert < 0:
            continue
        theirs, sources, their_counts, their_begins = everyone[expert // local]
        l = expert % local
        begin = int(their_begins[l, group.rank()])
        count = int(their_counts[l, group.rank()])
        slot = (sources[l, begin : begin + count] == t).nonzero()[0, 0]
        expected[t] += weights[t, k] * theirs[l, begin + slot].float()

    num_combined = 0
    for zero_copy, with_out in itertools.product((False, True), (False, True)):
        out = torch.empty_like(inputs.x) if with_out else None
        if zero_copy:
            staging = buffer.get_next_low_latency_combine_buffer(handle)
            assert staging.shape == outputs.shape and staging.dtype == torch.bfloat16
            staging[:, :, :] = outputs
        waits = torch.zeros(ranks, dtype=torch.int64, device=device)
        combined, event, hook = buffer.low_latency_combine(
            outputs, inputs.topk_idx, inputs.weights, handle, use_logfmt=False,
            zero_copy=zero_copy, async_finish=async_finish, return_recv_hook=return_recv_hook,
            out=out, combine_wait_recv_cost_stats=waits if with_out else None,
        )  # fmt: skip
        finish(event, hook, async_finish, return_recv_hook)
        if with_out:
            assert combined.data_ptr() == out.data_ptr()
            assert (waits >= 0).all()
        assert combined.shape == inputs.x.shape and combined.dtype == torch.bfloat16
        torch.testing.assert_close(combined.cpu(), expected.bfloat16(), rtol=1e-2, atol=1e-3)
        num_combined += 1
    return num_combined


def check_all_parameters(buffer: Any, group: Any, device: str) -> int:
    rank, checked = group.rank(), 0
    shapes = [
        Case(16, 16, 512, 8 * group.size(), 4),
        Case(rank % 3, 16, 1024, 2 * group.size(), 2),  # differs by rank, 0 on some
        Case(5, 7, 512, group.size(), 1),
    ]
    formats = [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]
    finishes = [(False, False), (True, False), (False, True)]
    for number, (case, (fp8, rounded, ue8m0), (async_finish, hook)) in enumerate(
        itertools.product(shapes, formats, finishes)
    ):
        case.seed = number
        if number % 5 == 0:
            buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.experts)
        checked += check_pair(
            buffer, group, Inputs(case, group, device), use_fp8=fp8, round_scale=rounded,
            use_ue8m0=ue8m0, async_finish=async_finish, return_recv_hook=hook,
        )  # fmt: skip
    return checked


def check_fresh_tensors(buffer: Any, group: Any, device: str) -> None:
    """What a dispatch returned is still there after two more."""
    case = Case(8, 16, 512, 8 * group.size(), 4)
    kept = []
    for seed in range(3):
        case = Case(8, 16, 512, 8 * group.size(), 4, seed=seed)
        inputs = Inputs(case, group, device)
        recv_x, recv_count, handle, _, _ = buffer.low_latency_dispatch(
            inputs.x, inputs.topk_idx, 16, case.experts, use_fp8=False
        )
        kept.append((inputs, (recv_x, recv_count, handle)))
    for inputs, received in kept:
        check_received(inputs, group, received, False, False, False)


def check_two_in_flight(buffer: Any, group: Any, device: str) -> None:
    """Two micro-batches, each one's send before the other's receive."""
    cases = [Case(8, 16, 512, 8 * group.size(), 4, seed=seed) for seed in (7, 8)]
    both = [Inputs(case, group, device) for case in cases]
    sent = [
        buffer.low_latency_dispatch(
            inputs.x, inputs.topk_idx, 16, inputs.case.experts, use_fp8=False,
            return_recv_hook=True,
        )
        for inputs in both
    ]  # fmt: skip
    combined = []
    for inputs, (recv_x, recv_count, handle, _, hook) in zip(both, sent, strict=False):
        hook()
        check_received(inputs, group, (recv_x, recv_count, handle), False, False, False)
    for inputs, (recv_x, _, handle, _, _) in zip(both, sent, strict=False):
        combined.append(
            buffer.low_latency_combine(
                recv_x, inputs.topk_idx, inputs.weights, handle, return_recv_hook=True
            )
        )
    for inputs, (out, _, hook) in zip(both, combined, strict=False):
        hook()
        total = torch.where(inputs.topk_idx >= 0, inputs.weights, 0).sum(1, keepdim=True)
        torch.testing.assert_close(out.float(), inputs.x.float() * total, rtol=2e-2, atol=1e-3)


def check_masks(group: Any, size: int, device: str) -> None:
    """The last rank is left out: it brings nothing, and what selects its experts gives nothing."""
    rank, ranks = group.rank(), group.size()
    last = ranks - 1
    buffer = deep_ep.Buffer(
        group, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=8, enable_shrink=True
    )
    inputs = Inputs(Case(8, 16, 512, 8 * ranks, 4, seed=30), group, device)

    def pair(present: list[int]) -> None:
        (recv_x, _, handle, _, _) = buffer.low_latency_dispatch(
            inputs.x, inputs.topk_idx, 16, inputs.case.experts, use_fp8=False
        )
        counts, _ = decode(handle[1].cpu())
        for l, source in itertools.product(range(8), range(ranks)):
            wanted = (inputs.all[source][1] == 8 * rank + l).sum() if source in present else 0
            assert counts[l, source] == wanted
        out, _, _ = buffer.low_latency_combine(recv_x, inputs.topk_idx, inputs.weights, handle)
        counted = (inputs.topk_idx >= 0) & (inputs.topk_idx // 8 < len(present))
        total = torch.where(counted, inputs.weights, 0).sum(1, keepdim=True)
        torch.testing.assert_close(out.float(), inputs.x.float() * total, rtol=2e-2, atol=1e-3)

    def masked() -> list[int]:
        status = torch.full((ranks,), 7, dtype=torch.int, device=device)
        buffer.low_latency_query_mask_buffer(status)
        return status.tolist()

    pair(list(range(ranks)))
    assert masked() == [0] * ranks
    dist.barrier(group)
    if rank != last:
        buffer.low_latency_update_mask_buffer(last, True)
        assert masked() == [0] * last + [1]
        pair(list(range(last)))
        assert masked() == [0] * last + [1]
    dist.barrier(group)


def check_graph(buffer: Any, group: Any) -> None:
    """A captured pair gives, replayed on other inputs, their results."""
    case = Case(16, 16, 512, 8 * group.size(), 4, seed=20)
    inputs = Inputs(case, group, "cuda")

    def pair() -> tuple[torch.Tensor, ...]:
        recv_x, recv_count, handle, _, hook = buffer.low_latency_dispatch(
            inputs.x, inputs.topk_idx, 16, case.experts, use_fp8=False, return_recv_hook=True
        )
        hook()
        out, _, hook = buffer.low_latency_combine(
            recv_x, inputs.topk_idx, inputs.weights, handle, return_recv_hook=True
        )
        hook()
        return out, recv_count

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        pair()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = pair()
    for seed in range(21, 26):
        other = Inputs(Case(16, 16, 512, case.experts, 4, seed=seed), group, "cuda")
        inputs.x.copy_(other.x)
        inputs.topk_idx.copy_(other.topk_idx)
        inputs.weights.copy_(other.weights)
        graph.replay()
        torch.cuda.synchronize()
        total = torch.where(other.topk_idx >= 0, other.weights, 0).sum(1, keepdim=True)
        torch.testing.assert_close(out.float(), other.x.float() * total, rtol=2e-2, atol=1e-3)
        dist.barrier(group)


def check_surface() -> None:
    """Static methods, attributes and classes."""
    before = deep_ep.Buffer.num_sms
    deep_ep.Buffer.set_num_sms(24)
    assert deep_ep.Buffer.num_sms == 24
    deep_ep.Buffer.set_num_sms(before)
    deep_ep.Buffer.capture().current_stream_wait()
    with deep_ep.Buffer.capture():
        pass
    assert deep_ep.EventOverlap(None).event is None
    for config in (deep_ep.Config(24, 8, 256), deep_ep.Buffer.get_dispatch_config(8),
                   deep_ep.Buffer.get_combine_config(8)):  # fmt: skip
        assert config.get_nvl_buffer_size_hint(7168 * 2, 8) >= 0
        assert config.get_rdma_buffer_size_hint(7168 * 2, 8) >= 0
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint
    assert 0 < hint(64, 512, 4, 32) < hint(128, 512, 4, 32) < hint(128, 7168, 4, 32)


def run(rank: int, ranks: int, device: str, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.zeros(1, device="cuda")
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    check_surface()
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(16, 1024, ranks, 8 * ranks)
    buffer: Optional[Any] = deep_ep.Buffer(
        group, num_nvl_bytes=0, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=8,
        allow_nvlink_for_low_latency_mode=True, explicitly_destroy=True,
    )  # fmt: skip
    assert buffer is not None
    assert (buffer.rank, buffer.group_size, buffer.group) == (rank, ranks, group)
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (0, size)
    checked = check_all_parameters(buffer, group, device)
    check_fresh_tensors(buffer, group, device)
    check_two_in_flight(buffer, group, device)
    if device == "cuda":
        check_graph(buffer, group)
    else:
        check_masks(group, size, device)
    dist.barrier()
    buffer.destroy()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(
            f"ok: {checked} dispatches and combines, {ranks} ranks on {device}, {deep_ep.__file__}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    with socket.socket() as holder:  # which keeps others from the port
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        mp.spawn(run, (arguments.ranks, arguments.device, port), arguments.ranks)


if __name__ == "__main__":
    main()
