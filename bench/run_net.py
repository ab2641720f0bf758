#!/usr/bin/python3
"""The benchmark across hosts: Tandem beside MPI_Alltoallv and ucx_perftest, on the same links.

Two hosts are network namespaces of this machine (so it needs root), joined by a veth pair, left as
it is and shaped to 1 Gbit/s. On each link ucx_perftest is measured first, then Tandem, Tandem with
partial sums and OpenMPI over TCP in turn, several times over. A case's figures, of all, are those of
one round: the one in which Tandem's lead is the median of the rounds'. Prints a table with ratios and aims, writes JSON
and a plot.
"""

import argparse
import json
import math
import os
import pathlib
import re
import secrets
import shlex
import subprocess
import sys
import tempfile
import time

import run_cpu

HOSTS = ["tandem-bench-a", "tandem-bench-b"]
ADDRESSES = ["10.98.0.1", "10.98.0.2"]
LINKS = ("plain", "1gbit")
ROW_BYTES = {"bf16": 2 * 7168, "fp8": 7168 + 4 * 56}
TOPK = 8
EXPERTS = 64
WITH_PARTIAL_SUMS = " with partial sums"
# Of UCX over TCP, for both contenders' sake only where they use it: docs/network.md.
UCX = {"UCX_TLS": "tcp"}


def parse_arguments():
    def numbers(text):
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    here = pathlib.Path(__file__).resolve().parent
    parser.add_argument("--json", metavar="FILE", default=str(here / "results" / "net.json"))
    parser.add_argument("--plot", metavar="FILE", default=str(here / "results" / "net.png"))
    parser.add_argument("--tokens", type=numbers, default=[1, 8, 32, 128])
    parser.add_argument("--formats", type=lambda text: text.split(","), default=["bf16", "fp8"])
    parser.add_argument("--ranks-per-host", type=numbers, default=[1, 2])
    parser.add_argument("--links", type=lambda text: text.split(","), default=list(LINKS))
    parser.add_argument("--seconds", type=float, default=0.2,
                        help="to measure each case for, per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bin-dir", type=pathlib.Path,
                        default=here.parent / "build" / "bench" / "bench")
    return parser.parse_args()


# --- hosts ----------------------------------------------------------------------------------------


def on_host(host, command):
    return ["ip", "netns", "exec", HOSTS[host], *command]


def ip(*words):
    subprocess.run(["ip", *words], check=True)


def make_hosts():
    for host in HOSTS:
        ip("netns", "add", host)
    ip("link", "add", "eth0", "netns", HOSTS[0], "type", "veth", "peer", "name", "eth0", "netns",
       HOSTS[1])
    for host, address in zip(HOSTS, ADDRESSES):
        ip("-n", host, "address", "add", f"{address}/24", "dev", "eth0")
        ip("-n", host, "link", "set", "lo", "up")
        ip("-n", host, "link", "set", "eth0", "up")
        ip("-n", host, "route", "replace", "10.98.0.0/24", "dev", "eth0", "src", address, "congctl",
           "cubic")


def remove_hosts():
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], stderr=subprocess.DEVNULL, check=False)


# The burst is small: with 128 KB an operation begins with what the bucket has saved up, and whoever
# takes longer for a dispatch has the faster combine.
def shape(link):
    for host in (0, 1):
        if link == "1gbit":
            subprocess.run(on_host(host, ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate",
                                          "1gbit", "burst", "32kb", "latency", "20ms"]), check=True)
        else:
            subprocess.run(on_host(host, ["tc", "qdisc", "del", "dev", "eth0", "root"]),
                           stderr=subprocess.DEVNULL, check=False)


# --- contenders -----------------------------------------------------------------------------------


def ucx_perftest(test, size, count):
    """(one-way latency in us, bandwidth in MB/s), overall."""
    environment = dict(os.environ, **UCX)
    with subprocess.Popen(on_host(0, ["ucx_perftest", "-p", "13337"]), env=environment,
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        time.sleep(0.5)
        done = subprocess.run(
            on_host(1, ["ucx_perftest", ADDRESSES[0], "-p", "13337", "-t", test, "-s", str(size),
                        "-n", str(count), "-w", str(max(count // 10, 5)), "-f"]),
            env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
        server.wait(timeout=20)
    figures = re.findall(r"[\d.]+", done.stdout.splitlines()[-1])
    return float(figures[3]), float(figures[5])


def measure_link(link):
    count = 100 if link == "1gbit" else 1000
    result = {}
    for name, test in (("am", "ucp_am"), ("put", "ucp_put")):
        result[f"{name}_latency_us"] = min(ucx_perftest(f"{test}_lat", 8, 5000)[0]
                                           for _ in range(3))
        result[f"{name}_mb_per_s"] = max(ucx_perftest(f"{test}_bw", 1 << 20, count)[1]
                                         for _ in range(2))
    return result


def options(text_format, arguments, area):
    return ["--tokens", ",".join(map(str, arguments.tokens)), "--hidden", "7168", "--format",
            text_format, "--seconds", str(arguments.seconds), "--area", area]


def run_partial(ranks_per_host, text_format, arguments, area):
    return run_tandem(ranks_per_host, text_format, arguments, area, ["--partial-sums"])


def run_tandem(ranks_per_host, text_format, arguments, area, flags=()):
    size = 2 * ranks_per_host
    secret = secrets.token_hex(16)
    port = 20000 + secrets.randbelow(10000)
    ranks = []
    for rank in range(size):
        environment = dict(os.environ, **UCX, TANDEM_RANK=str(rank), TANDEM_SIZE=str(size),
                           TANDEM_ADDRESS=f"{ADDRESSES[0]}:{port}", TANDEM_SECRET=secret)
        command = [str(arguments.bin_dir / "tandem_cpu"), *flags,
                   *options(text_format, arguments, area)]
        ranks.append(subprocess.Popen(on_host(rank // ranks_per_host, command), env=environment,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    for rank, (_, errors) in zip(ranks, outputs):
        if rank.returncode != 0:
            sys.exit(f"run_net.py: tandem_cpu: {errors}")
    return [json.loads(line) for line in outputs[0][0].splitlines()]


# What mpirun starts its daemons with, as it would ssh.
AGENT = """#!/bin/sh
host=$1
shift
exec ip netns exec "$host" sh -c "$*"
"""


def run_mpi(ranks_per_host, text_format, arguments, area):
    network = "10.98.0.0/24"
    with tempfile.TemporaryDirectory() as folder:
        agent = pathlib.Path(folder) / "agent"
        agent.write_text(AGENT, encoding="utf-8")
        agent.chmod(0o700)
        return run_mpi_with(str(agent), network, ranks_per_host,
                            options(text_format, arguments, area), arguments)


# OpenMPI's shared memory takes the two hosts, of one name, for one, and crashes: TCP everywhere.
def run_mpi_with(agent, network, ranks_per_host, case, arguments):
    command = ["mpirun", "-n", str(2 * ranks_per_host), "--host",
               ",".join(f"{host}:{ranks_per_host}" for host in HOSTS), "--map-by", "node",
               "--bind-to", "none", "--mca", "plm_rsh_agent", agent, "--mca", "rtc",
               "^hwloc", "--mca", "pml", "ob1", "--mca", "btl", "self,tcp", "--mca",
               "oob_tcp_if_include", network, "--mca", "btl_tcp_if_include", network]
    if 2 * ranks_per_host > os.cpu_count():
        command += ["--mca", "mpi_yield_when_idle", "1"]
    return run_cpu.run_program(
        on_host(0, [*command, str(arguments.bin_dir / "mpi_baseline"), *case]))


# --- results --------------------------------------------------------------------------------------


def lead(contenders):
    """How many times as fast as MPI a round has found Tandem, dispatch and combine together."""
    mpi, tandem = (sum(contenders[name][operation]["median"]
                       for operation in ("dispatch_us", "combine_us")) for name in ("mpi", "tandem"))
    return mpi / tandem


def measure(arguments):
    """Returns ({link: ucx_perftest's figures}, {case: {contender: figures}})."""
    links = {}
    rounds = {}
    contenders = {"tandem": run_tandem, "partial": run_partial, "mpi": run_mpi}
    for link in arguments.links:
        shape(link)
        links[link] = measure_link(link)
        for round_number in range(arguments.rounds):
            for ranks_per_host in arguments.ranks_per_host:
                for text_format in arguments.formats:
                    for name, run in contenders.items():
                        run_cpu.progress(f"{link}: round {round_number + 1}, {name}, "
                                         f"2 x {ranks_per_host}, {text_format}")
                        with tempfile.NamedTemporaryFile(dir="/dev/shm") as area:
                            lines = run(ranks_per_host, text_format, arguments, area.name)
                        for line in lines:
                            case = (link, ranks_per_host, text_format, line["tokens"])
                            of_case = rounds.setdefault(case, [])
                            if len(of_case) == round_number:
                                of_case.append({})
                            of_case[-1][name] = line
        shape("plain")
    run_cpu.progress("")
    figures = {case: run_cpu.median_round(of_case, lead)
               for case, of_case in rounds.items()}
    return links, figures


def rows_across(tokens, ranks_per_host):
    """Rows that Tandem sends from one host to the other, on average: a token's row once to each
    rank that owns at least one of its experts."""
    others = EXPERTS - EXPERTS // (2 * ranks_per_host)
    missed = math.comb(others, TOPK) / math.comb(EXPERTS, TOPK)
    return tokens * ranks_per_host * ranks_per_host * (1 - missed)


def make_rows(links, figures):
    rows = []
    for (link, ranks_per_host, text_format, tokens), by_name in sorted(figures.items()):
        row = {"link": link, "hosts": 2, "ranks_per_host": ranks_per_host, "format": text_format,
               "tokens": tokens, "hidden": 7168, "topk": TOPK, "experts": EXPERTS}
        for name, figure in by_name.items():
            row[name] = {key: figure[key]
                         for key in ("dispatch_us", "combine_us", "pair_us", "iterations")}
        own, mpi = by_name["tandem"], by_name["mpi"]
        row["times_as_fast_as_mpi"] = {
            f"{operation}{kind}": round(
                mpi[f"{operation}_us"]["median"] / by_name[name][f"{operation}_us"]["median"], 2)
            for name, kind in (("tandem", ""), ("partial", WITH_PARTIAL_SUMS))
            for operation in ("dispatch", "combine")}
        crossing = rows_across(tokens, ranks_per_host) * ROW_BYTES[text_format]
        speed = crossing / own["dispatch_us"]["median"] * 1e6 / (1 << 20)
        best = max(links[link]["am_mb_per_s"], links[link]["put_mb_per_s"])
        row["dispatch_mb_per_s_across"] = round(speed, 1)
        row["share_of_ucx_perftest"] = round(speed / best, 3)
        row["dispatch_in_put_latencies"] = round(
            own["dispatch_us"]["median"] / links[link]["put_latency_us"], 2)
        row["dispatch_in_am_latencies"] = round(
            own["dispatch_us"]["median"] / links[link]["am_latency_us"], 2)
        rows.append(row)
    return rows


def check_aims(rows):
    aims = []
    for row in rows:
        what = f"{row['link']}, 2 x {row['ranks_per_host']}, {row['format']}, T = {row['tokens']}"
        for operation, ratio in row["times_as_fast_as_mpi"].items():
            aims.append((f"{what}, {operation}: 1.5 times as fast as MPI", ratio, ratio >= 1.5))
        if row["link"] == "1gbit" and row["tokens"] == 128:
            share = row["share_of_ucx_perftest"]
            aims.append((f"{what}: 0.85 of ucx_perftest's bandwidth", share, share >= 0.85))
        if row["tokens"] == 1 and row["ranks_per_host"] == 1:
            for kind in ("put", "am"):
                value = row[f"dispatch_in_{kind}_latencies"]
                aims.append((f"{what}: dispatch in 4 latencies of ucx_perftest's {kind}", value,
                             value <= 4))
    return aims


def print_table(rows):
    print("Medians of the slowest rank in us, dispatch / combine; x: times as fast as MPI.\n")
    print(f"{'link':>6} {'ranks':>6} {'format':>6} {'T':>4}  {'Tandem':>19}  {'partial sums':>19}  "
          f"{'MPI':>19}  {'x':>12}  {'x, partial':>12}  {'MB/s':>7} {'of UCX':>6}")
    for row in rows:
        times = [f"{row[name]['dispatch_us']['median']:9.1f} /{row[name]['combine_us']['median']:8.1f}"
                 for name in ("tandem", "partial", "mpi")]
        ratio = list(row["times_as_fast_as_mpi"].values())
        print(f"{row['link']:>6} {'2 x ' + str(row['ranks_per_host']):>6} {row['format']:>6} "
              f"{row['tokens']:4}  {times[0]}  {times[1]}  {times[2]}  {ratio[0]:5.2f} /{ratio[1]:5.2f}"
              f"  {ratio[2]:5.2f} /{ratio[3]:5.2f}  {row['dispatch_mb_per_s_across']:7.1f} "
              f"{row['share_of_ucx_perftest']:6.2f}")


def draw(rows, path):
    from matplotlib import pyplot

    rows = [row for row in rows if row["format"] == rows[0]["format"]]
    groups = sorted({(row["link"], row["ranks_per_host"]) for row in rows}, reverse=True)
    figure, axes = pyplot.subplots(1, len(groups), figsize=(4 * len(groups), 4), sharey=True,
                                   squeeze=False)
    for plot, (link, ranks_per_host) in zip(axes[0], groups):
        chosen = [row for row in rows
                  if (row["link"], row["ranks_per_host"]) == (link, ranks_per_host)]
        tokens = [row["tokens"] for row in chosen]
        for name, label, colour in (("mpi", "MPI", "tab:gray"), ("tandem", "Tandem", "tab:blue"),
                                    ("partial", "partial sums", "tab:green")):
            for operation, style in (("dispatch", "-"), ("combine", "--")):
                plot.plot(tokens, [row[name][f"{operation}_us"]["median"] for row in chosen], style,
                          marker="o", color=colour, label=f"{label}, {operation}")
        plot.set_xscale("log", base=2)
        plot.set_yscale("log")
        plot.set_xticks(tokens, [str(count) for count in tokens])
        plot.set_title(f"{link} link, 2 hosts x {ranks_per_host}")
        plot.set_xlabel("tokens per rank")
        plot.grid(True, which="major", alpha=0.3)
    axes[0][0].set_ylabel("median of the slowest rank, us")
    axes[0][0].legend()
    figure.suptitle(f"H = 7168, {rows[0]['format']}, K = {TOPK}, E = 64, {os.cpu_count()} cores")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    arguments = parse_arguments()
    run_cpu.require_matplotlib()
    remove_hosts()  # of a run that was killed
    try:
        make_hosts()
        links, figures = measure(arguments)
    except subprocess.CalledProcessError as error:
        sys.exit(f"run_net.py: {shlex.join(error.cmd)} failed (namespaces need root)")
    finally:
        remove_hosts()
    rows = make_rows(links, figures)
    print_table(rows)
    for link, figure in links.items():
        print(f"\nucx_perftest, {link} link: {figure}")
    aims = check_aims(rows)
    print("\nAims missed:")
    for text, value, met in aims:
        if not met:
            print(f"  {value:6.2f}  {text}")
    run_cpu.write_results(arguments, aims, rows, ucx_perftest=links)
    draw(rows, arguments.plot)


if __name__ == "__main__":
    main()
