#!/usr/bin/python3
"""What links between GPUs allow, to stand beside `tandem bench` on a host with several: copies from
one GPU to another (bandwidth and latency), and NCCL's all-to-all of as many bytes as a dispatch
carries, evenly spread, in captured graphs of 20.

    bench/peer_baseline.py --gpus 2,4,8 --tokens 1,8,128 --json FILE

One process a GPU. NVLink multicast is left off, as Tandem does without. Needs PyTorch with CUDA and
NCCL. Prints a line of JSON a result; FILE gets all of them. Times are medians of the slowest rank.
"""

import argparse
import datetime
import json
import os
import statistics

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

OPERATIONS = 20
REPLAYS = 30
COPIED_BYTES = 256 << 20


def parse_arguments():
    def numbers(text):
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--gpus", type=numbers, default=[2], help="default: 2")
    parser.add_argument("--tokens", type=numbers, default=[1, 8, 32, 128, 512, 4096])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def timed_us(graph, count):
    """The median time of one of the `count` operations of a graph."""
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    return statistics.median(times)


def captured(operation, count):
    """A graph of `count` operations; the first call, which may allocate, is outside."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        operation()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(count):
            operation()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def row_bytes(hidden, format_name):
    return 2 * hidden if format_name == "bf16" else hidden + 4 * ((hidden + 127) // 128)


def all_to_all(rank, num_gpus, port, arguments, results):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                            world_size=num_gpus, device_id=torch.device("cuda", rank),
                            timeout=datetime.timedelta(seconds=60))
    for format_name in ("bf16", "fp8"):
        for tokens in arguments.tokens:
            rows = max(tokens * arguments.topk // num_gpus, 1) * num_gpus
            sent = torch.ones(rows * row_bytes(arguments.hidden, format_name), dtype=torch.uint8,
                              device="cuda")
            received = torch.empty_like(sent)
            graph = captured(lambda: dist.all_to_all_single(received, sent), OPERATIONS)
            dist.barrier()
            slowest = torch.tensor([timed_us(graph, OPERATIONS)], device="cuda")
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if rank == 0:
                results.append({"kind": "nccl all-to-all", "gpus": num_gpus, "tokens": tokens,
                                "format": format_name, "bytes_per_rank": sent.numel(),
                                "us": round(slowest.item(), 2)})
            del graph
    dist.destroy_process_group()


def peer_copies(results):
    """From GPU 0 to the next, or within GPU 0 where it is alone."""
    target = "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"
    for size in (COPIED_BYTES, 8):
        source = torch.ones(size, dtype=torch.uint8, device="cuda:0")
        destination = torch.empty(size, dtype=torch.uint8, device=target)
        us = timed_us(captured(lambda: destination.copy_(source), OPERATIONS), OPERATIONS)
        results.append({"kind": "copy", "from": "cuda:0", "to": target, "bytes": size,
                        "us": round(us, 2), "gbs": round(size / us / 1e3, 2)})


def in_process(function, num_processes, *more):
    with multiprocessing.get_context("spawn").Manager() as manager:
        results = manager.list()
        multiprocessing.spawn(function, args=(*more, results), nprocs=num_processes)
        return list(results)


def first_process(_, results):
    peer_copies(results)


def main():
    arguments = parse_arguments()
    rows = in_process(first_process, 1)
    for number, num_gpus in enumerate(arguments.gpus):
        rows += in_process(all_to_all, num_gpus, num_gpus, 29600 + number, arguments)
    for row in rows:
        print(json.dumps(row))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M UTC}",
                       "device": torch.cuda.get_device_name(0), "rows": rows}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
