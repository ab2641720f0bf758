#!/usr/bin/python3
"""The CPU benchmark: Tandem beside MPI and the machine's memory bandwidth, in one run.

Runs tandem_cpu, mpi_baseline (OpenMPI with its default layer and with UCX) and memory_bandwidth,
in turn for each group of cases so that a drifting machine meets all alike, and the whole several
times over. A case's figures, of all contenders, are those of one round: the one in which Tandem's
lead is the median of the rounds'. Prints a table with ratios, writes JSON and a plot.
docs/performance.md says how times are taken.

Needs Python's standard library, and matplotlib (Debian: python3-matplotlib) for the plot.
"""

import argparse
import datetime
import json
import os
import pathlib
import shlex
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
CONTENDERS = ("tandem", "mpi_default", "mpi_ucx")
PROGRAM_TIMEOUT_S = 900


def parse_arguments():
    def numbers(text):
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true",
                        help="few small cases, shortly: shows that all runs and all results are "
                             "right; writes no file unless asked to")
    parser.add_argument("--json", metavar="FILE", help="default: bench/results/cpu.json")
    parser.add_argument("--plot", metavar="FILE", help="default: bench/results/cpu.png")
    parser.add_argument("--ranks", type=numbers, help="default: 2,4,8")
    parser.add_argument("--tokens", type=numbers, help="default: 1,8,32,128,512")
    parser.add_argument("--hidden", type=numbers, help="default: 2048,7168")
    parser.add_argument("--formats", type=lambda text: text.split(","), help="default: bf16,fp8")
    parser.add_argument("--seconds", type=float, help="to measure each case for, per round")
    parser.add_argument("--rounds", type=int, help="default: 5")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bin-dir", type=pathlib.Path,
                        default=HERE.parent / "build" / "bench" / "bench",
                        help="where the programs are (./dev bench builds them)")
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.ranks = arguments.ranks or ([2] if quick else [2, 4, 8])
    arguments.tokens = arguments.tokens or ([1, 8] if quick else [1, 8, 32, 128, 512])
    arguments.hidden = arguments.hidden or ([2048] if quick else [2048, 7168])
    arguments.formats = arguments.formats or ["bf16", "fp8"]
    arguments.seconds = arguments.seconds or (0.02 if quick else 0.3)
    arguments.rounds = arguments.rounds or (1 if quick else 5)
    if not quick:
        arguments.json = arguments.json or str(HERE / "results" / "cpu.json")
        arguments.plot = arguments.plot or str(HERE / "results" / "cpu.png")
    return arguments


# --- running the programs -------------------------------------------------------------------------


def progress(text):
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="" if text else "", file=sys.stderr, flush=True)


def mpirun(num_ranks, with_ucx):
    """OpenMPI's launcher with what is fair to it: a core for each rank where there are enough,
    waiting that yields where there are not, and for UCX any transport it has."""
    command = ["mpirun", "-n", str(num_ranks)]
    if num_ranks <= os.cpu_count():
        command += ["--bind-to", "core"]
    else:
        command += ["--bind-to", "none", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
    if with_ucx:
        # Debian's OpenMPI offers its UCX layer for InfiniBand only, unless told that any will do.
        command += ["--mca", "pml", "ucx", "--mca", "opal_common_ucx_tls", "any",
                    "--mca", "opal_common_ucx_devices", "any", "-x", "UCX_TLS=all"]
    return command


def run_program(command):
    """Returns the objects that a program prints, one a line. Ends this program if it fails."""
    environment = dict(os.environ)
    if os.geteuid() == 0:  # OpenMPI refuses root otherwise
        environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, timeout=PROGRAM_TIMEOUT_S)
    except FileNotFoundError as error:
        sys.exit(f"run_cpu.py: {error.filename} is not there (./dev bench builds and installs it)")
    except subprocess.TimeoutExpired:
        sys.exit(f"run_cpu.py: took longer than {PROGRAM_TIMEOUT_S} s: {shlex.join(command)}")
    if done.returncode != 0:
        sys.exit(f"run_cpu.py: exit code {done.returncode}: {shlex.join(command)}\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def contender_command(contender, num_ranks, arguments):
    if contender == "tandem":
        return [str(arguments.bin_dir / "tandem_cpu"), "--ranks", str(num_ranks)]
    return mpirun(num_ranks, contender == "mpi_ucx") + [str(arguments.bin_dir / "mpi_baseline")]


def case_options(hidden, text_format, arguments):
    return ["--tokens", ",".join(map(str, arguments.tokens)), "--hidden", str(hidden),
            "--format", text_format, "--seed", str(arguments.seed)]


def time_us(figures, operation):
    figure = figures[operation]
    return figure if operation == "pair_us" else figure["median"]


def best_mpi_us(contenders, operation):
    return min(time_us(contenders[way], operation) for way in ("mpi_default", "mpi_ucx"))


def lead(contenders):
    """How many times as fast as MPI a round has found Tandem, dispatch and combine together."""
    def total(figures):
        return time_us(figures, "dispatch_us") + time_us(figures, "combine_us")

    return min(total(contenders[way]) for way in ("mpi_default", "mpi_ucx")) / total(
        contenders["tandem"])


def median_round(rounds, lead_of):
    """The round in which Tandem's lead is the median; of two, the lower."""
    return sorted(rounds, key=lead_of)[(len(rounds) - 1) // 2]


def measure(arguments):
    """Returns ({case: {contender: figures}}, {case without ranks: {kind, threads: us}},
    [nanoseconds that a line took between two cores, before each group of cases])."""
    rounds = {}
    bandwidth = {}
    handovers = []
    groups = [(hidden, text_format) for hidden in arguments.hidden
              for text_format in arguments.formats]
    for round_number in range(arguments.rounds):
        for hidden, text_format in groups:
            options = case_options(hidden, text_format, arguments)
            progress(f"round {round_number + 1}: memory bandwidth, H {hidden}, {text_format}")
            command = [str(arguments.bin_dir / "memory_bandwidth"), *options,
                       "--seconds", str(arguments.seconds / 4)]
            for line in run_program(command):
                key = (hidden, text_format, line["tokens"])
                kinds = bandwidth.setdefault(key, {})
                kind = f"{line['kind']}, {line['threads']}"
                if kind not in kinds or line["us"] < kinds[kind]["us"]:
                    kinds[kind] = line
            for num_ranks in arguments.ranks:
                (handover,) = run_program([command[0], "--handover"])
                handovers.append(round(handover["handover_ns"], 1))
                for contender in CONTENDERS:
                    progress(f"round {round_number + 1}: {contender}, {num_ranks} ranks, "
                             f"H {hidden}, {text_format}")
                    command_of = contender_command(contender, num_ranks, arguments)
                    for line in run_program(command_of + options
                                            + ["--seconds", str(arguments.seconds)]):
                        case = (num_ranks, hidden, text_format, line["tokens"])
                        of_case = rounds.setdefault(case, [])
                        if len(of_case) == round_number:
                            of_case.append({"handover_ns": handovers[-1]})
                        of_case[-1][contender] = line
    progress("")
    figures = {case: median_round(of_case, lead)
               for case, of_case in rounds.items()}
    return figures, bandwidth, handovers


class OtherLoad:
    """What share of the processors' time programs other than the benchmark's take from now on."""

    def __init__(self):
        self._begin = self._read()

    @staticmethod
    def _read():
        """(seconds of all processors, of them busy, of them ours), since the machine started."""
        with open("/proc/stat", encoding="utf-8") as stat:
            ticks = [int(word) for word in stat.readline().split()[1:9]]
        idle = ticks[3] + ticks[4]  # and waiting for disks
        hertz = os.sysconf("SC_CLK_TCK")
        own = os.times()
        return (sum(ticks) / hertz, (sum(ticks) - idle) / hertz,
                own.user + own.system + own.children_user + own.children_system)

    def share(self):
        total, busy, own = (now - then for now, then in zip(self._read(), self._begin))
        return max(0.0, busy - own) / total


# --- results --------------------------------------------------------------------------------------


def floor_us(kinds, num_ranks):
    """Time to write what a dispatch writes, on every rank, at the best bandwidth measured: with
    more ranks than threads were measured, the threads write the ranks' rows in turn."""
    best = {}
    for line in kinds.values():
        if line["kind"].startswith("write"):
            best[line["threads"]] = min(line["us"], best.get(line["threads"], line["us"]))
    threads = max(thread for thread in best if thread <= num_ranks)
    return best[threads] * num_ranks / threads


def make_rows(figures, bandwidth):
    rows = []
    for (num_ranks, hidden, text_format, tokens), by_contender in sorted(figures.items()):
        tandem = by_contender["tandem"]
        row = {key: tandem[key]
               for key in ("ranks", "tokens", "hidden", "topk", "experts", "format", "bytes")}
        for contender in CONTENDERS:
            figure = by_contender[contender]
            row[contender] = {key: figure[key]
                              for key in ("dispatch_us", "combine_us", "pair_us", "iterations")}
        row["handover_ns"] = by_contender["handover_ns"]
        mpi = {operation: best_mpi_us(by_contender, operation)
               for operation in ("dispatch_us", "combine_us", "pair_us")}
        own = [time_us(tandem, operation) for operation in ("dispatch_us", "combine_us")]
        row["times_as_fast_as_mpi"] = {
            "dispatch": round(mpi["dispatch_us"] / own[0], 2),
            "combine": round(mpi["combine_us"] / own[1], 2),
            "both": round((mpi["dispatch_us"] + mpi["combine_us"]) / sum(own), 2),
            "back_to_back": round(mpi["pair_us"] / tandem["pair_us"], 2),
        }
        row["write_floor_us"] = round(floor_us(bandwidth[hidden, text_format, tokens], num_ranks),
                                      2)
        row["dispatch_over_floor"] = round(own[0] / row["write_floor_us"], 2)
        rows.append(row)
    return rows


def check_aims(rows):
    """The aims of the project's plan that these rows can speak of: (text, value, met)."""
    aims = []
    for row in rows:
        if (row["hidden"], row["format"]) != (7168, "bf16"):
            continue
        ranks, tokens = row["ranks"], row["tokens"]
        if ranks in (2, 8):
            wanted = 4 if (ranks, tokens) == (2, 1) else 5
            for operation in ("dispatch", "combine", "both"):
                value = row["times_as_fast_as_mpi"][operation]
                aims.append((f"{ranks} ranks, T = {tokens}, {operation}: at least {wanted} times "
                             "as fast as MPI", value, value >= wanted))
        if ranks == 2 and tokens == 512:
            value = row["dispatch_over_floor"]
            aims.append(("2 ranks, T = 512: dispatch within 1.5 times the time to write its rows",
                         value, value <= 1.5))
    return aims


def print_table(rows):
    print("Medians of the slowest rank in us, dispatch / combine; x: times as fast as the better "
          "MPI way.\nfloor: time to write a dispatch's rows at the write bandwidth measured.\n")
    print(f"{'ranks':>5} {'H':>5} {'format':>6} {'T':>4}  {'Tandem':>17}  {'MPI':>17}  "
          f"{'MPI over UCX':>17}  {'x disp':>6} {'x comb':>6} {'x both':>6} {'x pair':>6}  "
          f"{'floor':>8} {'disp/floor':>10}")

    def times(figure):
        return (f"{figure['dispatch_us']['median']:8.1f} /"
                f"{figure['combine_us']['median']:7.1f}")

    for row in rows:
        ratio = row["times_as_fast_as_mpi"]
        print(f"{row['ranks']:5} {row['hidden']:5} {row['format']:>6} {row['tokens']:4}  "
              f"{times(row['tandem']):>17}  {times(row['mpi_default']):>17}  "
              f"{times(row['mpi_ucx']):>17}  {ratio['dispatch']:6.1f} {ratio['combine']:6.1f} "
              f"{ratio['both']:6.1f} {ratio['back_to_back']:6.1f}  {row['write_floor_us']:8.1f} "
              f"{row['dispatch_over_floor']:10.2f}")


def print_bandwidth(bandwidth):
    kinds = ("write", "write-streaming", "copy", "copy-streaming")
    print("\nMemory bandwidth, GB/s a thread (bytes written), by one thread / by each of two:\n")
    print(f"{'H':>5} {'format':>6} {'T':>4} {'MB':>7}  "
          + "  ".join(f"{kind:>15}" for kind in kinds))
    for (hidden, text_format, tokens), lines in sorted(bandwidth.items()):
        cells = []
        for kind in kinds:
            speeds = [f"{lines[f'{kind}, {threads}']['gbs_per_thread']:.1f}" for threads in (1, 2)
                      if f"{kind}, {threads}" in lines]
            cells.append(f"{' / '.join(speeds):>15}")
        size = next(iter(lines.values()))["bytes_per_thread"] / 1e6
        print(f"{hidden:5} {text_format:>6} {tokens:4} {size:7.2f}  " + "  ".join(cells))


def describe_device():
    model = "unknown"
    with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
        for line in cpuinfo:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    caches = {}
    for index in sorted(pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level = (index / "level").read_text().strip()
        if (index / "type").read_text().strip() != "Instruction":
            caches[f"L{level}"] = (index / "size").read_text().strip()
    return {"model": model, "cores": os.cpu_count(), "caches_of_core_0": caches}


def write_results(arguments, aims, rows, **more):
    """What a benchmark of this folder leaves behind, in arguments.json."""
    program = pathlib.Path(sys.argv[0]).name
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": describe_device(),
        "command": shlex.join([f"bench/{program}", *sys.argv[1:]]),
        "rounds": arguments.rounds,
        "seconds_per_case": arguments.seconds,
        "aims": [{"aim": text, "value": value, "met": met} for text, value, met in aims],
        "rows": rows,
        **more,
    }
    path = pathlib.Path(arguments.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def require_matplotlib():
    try:
        import matplotlib
    except ImportError:
        sys.exit("run_cpu.py: the plot needs matplotlib (Debian: python3-matplotlib)")
    matplotlib.use("Agg")


def draw(rows, path):
    from matplotlib import pyplot

    hidden = max(row["hidden"] for row in rows)
    rows = [row for row in rows if row["hidden"] == hidden and row["format"] == rows[0]["format"]]
    all_ranks = sorted({row["ranks"] for row in rows})
    figure, axes = pyplot.subplots(2, len(all_ranks), figsize=(4 * len(all_ranks) + 1, 7),
                                   sharex=True, sharey=True, squeeze=False)
    series = (("mpi_default", "MPI", "tab:gray", "s"), ("mpi_ucx", "MPI over UCX", "tab:brown", "^"),
              ("tandem", "Tandem", "tab:blue", "o"))
    for column, num_ranks in enumerate(all_ranks):
        chosen = [row for row in rows if row["ranks"] == num_ranks]
        tokens = [row["tokens"] for row in chosen]
        for line, operation in enumerate(("dispatch", "combine")):
            plot = axes[line][column]
            for key, label, colour, marker in series:
                plot.plot(tokens, [row[key][f"{operation}_us"]["median"] for row in chosen],
                          marker=marker, color=colour, label=label)
            if operation == "dispatch":
                plot.plot(tokens, [row["write_floor_us"] for row in chosen], linestyle=":",
                          color="black", label="writing the rows")
            plot.set_xscale("log", base=2)
            plot.set_yscale("log")
            plot.set_xticks(tokens, [str(count) for count in tokens])
            plot.grid(True, which="major", alpha=0.3)
            plot.set_title(f"{operation}, {num_ranks} ranks on {os.cpu_count()} cores")
            if column == 0:
                plot.set_ylabel("median of the slowest rank, us")
            if line == 1:
                plot.set_xlabel("tokens per rank")
    axes[0][0].legend()
    figure.suptitle(f"H = {hidden}, {rows[0]['format']}, K = {rows[0]['topk']}, "
                    f"E = {rows[0]['experts']}")
    figure.tight_layout()
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main():
    arguments = parse_arguments()
    if arguments.plot:
        require_matplotlib()  # before minutes of measuring, not after
    other_load = OtherLoad()
    figures, bandwidth, handovers = measure(arguments)
    others = other_load.share()
    rows = make_rows(figures, bandwidth)
    print_table(rows)
    print_bandwidth(bandwidth)
    print(f"\nOther programs took {100 * others:.0f}% of the processors' time meanwhile.")
    print(f"A line took {min(handovers):.0f} to {max(handovers):.0f} ns from one core to another.")
    aims = check_aims(rows)
    if aims:
        print("\nAims (bf16, H = 7168, K = 8, E = 64):")
        for text, value, met in aims:
            print(f"  {'met   ' if met else 'missed'} {value:6.2f}  {text}")
    if arguments.json:
        write_results(arguments, aims, rows, processor_time_of_others=round(others, 3),
                      handover_ns=handovers,
                      bandwidth=[line for lines in bandwidth.values() for line in lines.values()])
    if arguments.plot:
        draw(rows, arguments.plot)


if __name__ == "__main__":
    main()
