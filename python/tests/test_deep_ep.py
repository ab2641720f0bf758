"""The deep_ep drop-in: the script against the documented interface, and what is refused."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

import tandem_ep
import tandem_ep.compat
from launch import free_port

SCRIPT = pathlib.Path(__file__).with_name("deep_ep_script.py")


def run_python(*arguments: Any, drop_in: bool = True) -> subprocess.CompletedProcess[str]:
    package = str(pathlib.Path(tandem_ep.__file__).parents[1])
    path = [tandem_ep.compat.path(), package] if drop_in else [package]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_documented_interface(ranks: int) -> None:
    done = run_python(SCRIPT, "--ranks", ranks)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok: 144 dispatches and combines")
    assert tandem_ep.compat.path() in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_documented_interface_on_gpu(ranks: int) -> None:
    done = run_python(SCRIPT, "--ranks", ranks, "--device", "cuda")
    assert done.returncode == 0, done.stderr
    assert f"{ranks} ranks on cuda" in done.stdout


MASKS = """
import os, sys, time, torch, torch.distributed as dist, torch.multiprocessing as mp
import deep_ep, pytest, tandem_ep

LAST = 2

def run(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=3)
    deep_ep.Buffer.timeout_seconds = 20.0
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(9, 512, 3, 6)
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, size, True, enable_shrink=True)
    x = torch.full((4, 512), rank + 1.0, dtype=torch.bfloat16)
    idx = torch.tensor([[0, 2], [2, 4], [4, 0], [1, 5]])  # two experts on each rank

    def pair(tokens=8):
        recv_x, count, handle, _, _ = buffer.low_latency_dispatch(x, idx, tokens, 6, use_fp8=False)
        out, _, _ = buffer.low_latency_combine(recv_x, idx, torch.ones(4, 2), handle)
        return (out[:, 0] / x[:, 0]).tolist()  # the number of each token's experts

    def masked():
        status = torch.empty(3, dtype=torch.int)
        buffer.low_latency_query_mask_buffer(status)
        return status.tolist()

    whole, rest = [2, 2, 2, 2], [2, 1, 1, 1]
    assert pair(4) == whole and pair() == whole  # two inner buffers, masked alike
    dist.barrier()
    if rank == 0:
        buffer.low_latency_update_mask_buffer(LAST, True)
    dist.barrier()
    if rank == LAST:
        assert masked()[LAST] == 1
        with pytest.raises(tandem_ep.Error) as caught:
            pair()
        assert caught.value.code in (tandem_ep.ErrorCode.MASKED, tandem_ep.ErrorCode.FAILED_BUFFER)
        dist.barrier()
        if sys.argv[1] == "clean":
            buffer.low_latency_clean_mask_buffer()
        else:
            buffer.low_latency_update_mask_buffer(LAST, False)
        assert masked() == [0, 0, 0]
    else:
        assert pair() == rest and pair(4) == rest and masked() == [0, 0, 1]
        with pytest.raises(tandem_ep.Error, match="before any is masked, as now .2.") as caught:
            pair(9)
        assert caught.value.code == tandem_ep.ErrorCode.ORDER
        if rank == 0:
            with pytest.raises(tandem_ep.Error) as caught:
                buffer.low_latency_update_mask_buffer(LAST, False)  # it does not wait yet
            assert caught.value.code == tandem_ep.ErrorCode.ORDER
        dist.barrier()
        while rank == 0 and masked() != [0, 0, 0]:
            buffer.low_latency_clean_mask_buffer()
    dist.barrier()
    if rank != LAST:
        assert pair() == rest and pair(4) == rest  # from the dispatch after the next on
    assert pair() == whole and pair(4) == whole
    dist.barrier()

if __name__ == "__main__":
    mp.spawn(run, (sys.argv[2],), 3)
"""


@pytest.mark.parametrize("way", ["clean", "update"])
def test_masked_rank_is_let_in_again(way: str, tmp_path: pathlib.Path) -> None:
    program = tmp_path / "masks.py"
    program.write_text(MASKS)
    done = run_python(program, way, free_port())
    assert done.returncode == 0, done.stderr


def test_is_found_only_when_asked_for() -> None:
    nothing = run_python("-c", "import tandem_ep.compat, deep_ep", drop_in=False)
    assert "ModuleNotFoundError: No module named 'deep_ep'" in nothing.stderr
    asked = "import tandem_ep.compat as c; c.install(); c.install(); import deep_ep.utils"
    assert run_python("-c", asked, drop_in=False).returncode == 0
    path = run_python("-m", "tandem_ep.compat", drop_in=False)
    assert path.stdout.strip() == tandem_ep.compat.path()


def test_another_deep_ep_is_not_shadowed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "deep_ep.py").write_text("")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import deep_ep\n"
        "import tandem_ep.compat; tandem_ep.compat.install()"
    )
    assert "another deep_ep is imported" in run_python("-c", program, drop_in=False).stderr


REFUSALS = """
import os, torch, torch.distributed as dist, deep_ep, pytest, tandem_ep
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
size = deep_ep.Buffer.get_low_latency_rdma_size_hint(8, 512, 1, 4)
buffer = deep_ep.Buffer(group, 0, size, low_latency_mode=True)
x = torch.ones(4, 512, dtype=torch.bfloat16)
idx = torch.tensor([[0, 1], [1, 2], [2, 3], [3, -1]])
weights = torch.ones(4, 2)

def refused(kind, words, call, *arguments, **named):
    with pytest.raises(kind, match=words):
        call(*arguments, **named)

status = torch.zeros(1, dtype=torch.int)
for call in (lambda: buffer.low_latency_update_mask_buffer(0, True),
             lambda: buffer.low_latency_query_mask_buffer(status),
             buffer.low_latency_clean_mask_buffer):
    refused(RuntimeError, "enable_shrink=True", call)
shrinking = deep_ep.Buffer(group, 0, size, True, enable_shrink=True)
update, query = shrinking.low_latency_update_mask_buffer, shrinking.low_latency_query_mask_buffer
refused(RuntimeError, "before the first dispatch", update, 0, True)
query(status)
assert status.tolist() == [0]
shrinking.low_latency_dispatch(x, idx, 8, 4)
refused(RuntimeError, "cannot mask itself", update, 0, True)
refused(RuntimeError, "rank is 1", update, 1, True)
refused(RuntimeError, "mask_status is", query, torch.zeros(2, dtype=torch.int))
refused(RuntimeError, "mask_status is", query, torch.zeros(1, dtype=torch.long))
for call in (buffer.dispatch, buffer.combine, buffer.get_dispatch_layout):
    refused(NotImplementedError, "high-throughput", call, x)
refused(NotImplementedError, "raw access", buffer.get_local_buffer_tensor, torch.int)
dispatch = buffer.low_latency_dispatch
both = {"async_finish": True, "return_recv_hook": True}
refused(RuntimeError, "both given", dispatch, x, idx, 8, 4, **both)
refused(RuntimeError, "needs round_scale", dispatch, x, idx, 8, 4, use_ue8m0=True)
refused(RuntimeError, "x is torch.float32", dispatch, x.float(), idx, 8, 4)
refused(RuntimeError, "topk_idx is torch.int32", dispatch, x, idx.int(), 8, 4)
refused(RuntimeError, "num_rdma_bytes is [0-9]+, must be at least", dispatch, x, idx, 64, 4)
refused(RuntimeError, "recv_stats is", dispatch, x, idx, 8, 4, torch.zeros(3, dtype=torch.int))
waits = torch.zeros(2, dtype=torch.long)
refused(RuntimeError, "cost_stats is", dispatch, x, idx, 8, 4, None, waits)
recv_x, count, handle, event, hook = dispatch(x, idx, 8, 4, use_fp8=False)
assert hook is None
refused(RuntimeError, "not called with async_finish", event.current_stream_wait)
combine = buffer.low_latency_combine
refused(NotImplementedError, "logfmt", combine, recv_x, idx, weights, handle, use_logfmt=True)
refused(RuntimeError, "topk_idx differs", combine, recv_x, idx.flip(0), weights, handle)
refused(RuntimeError, "topk_weights is", combine, recv_x, idx, weights[:3], handle)
refused(RuntimeError, "x is torch", combine, recv_x[:, :1], idx, weights, handle)
refused(RuntimeError, "not of a low_latency_dispatch", combine, recv_x, idx, weights,
        (handle[0].clone(), *handle[1:]))
out, _, _ = combine(recv_x, idx, weights, (*handle,))
assert (out[:3] == 2).all() and (out[3] == 1).all()
refused(RuntimeError, "explicitly_destroy", buffer.destroy)
refused(RuntimeError, "must be even", deep_ep.Buffer.set_num_sms, 3)
refused(RuntimeError, "neither group nor comm", deep_ep.Buffer)
plain = deep_ep.Buffer(group, 0, 0, explicitly_destroy=True)
refused(RuntimeError, "low_latency_mode", plain.low_latency_dispatch, x, idx, 8, 4)
plain.destroy()
refused(RuntimeError, "destroyed", plain.low_latency_dispatch, x, idx, 8, 4)
growing = deep_ep.Buffer(group, 0, 10 * size, low_latency_mode=True)
for number in range(1, 9):
    growing.low_latency_dispatch(x[:1], idx[:1], number, 4)
refused(RuntimeError, "begin with the largest", growing.low_latency_dispatch, x, idx, 9, 4)
growing.low_latency_dispatch(x[:1], idx[:1], 3, 4)  # served by one that is there
deep_ep.utils.check_nvlink_connections(group)
assert deep_ep.Buffer.is_sm90_compiled() in (True, False)
dist.destroy_process_group()
"""


def test_what_is_refused_and_how() -> None:
    done = run_python("-c", REFUSALS)
    assert done.returncode == 0, done.stderr
