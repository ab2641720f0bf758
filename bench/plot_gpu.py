#!/usr/bin/python3
"""Draws the GPU benchmark: microseconds of a pair against tokens of a rank, with the floor that its
bytes give, a panel for each number of ranks.

    bench/plot_gpu.py bench/results/h200-one-gpu.json bench/results/h200-one-gpu.png

Needs matplotlib (Debian: python3-matplotlib).
"""

import argparse
import json

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

# What is drawn: label, colour, and the values that choose the rows.
SERIES = (
    ("bf16, packed, zero-copy", "tab:blue",
     {"format": "bf16", "placement": "packed", "staging": "zero-copy"}),
    ("fp8 dispatch, packed, zero-copy", "tab:green",
     {"format": "fp8", "placement": "packed", "staging": "zero-copy"}),
    ("bf16, slotted, staged", "tab:orange",
     {"format": "bf16", "placement": "slotted", "staging": "staged"}),
)


def draw(axes, rows, ranks):
    sms = 0
    for label, colour, chosen in SERIES:
        fitting = sorted(
            (row for row in rows
             if row["ranks"] == ranks and row["routing"] == "uniform"
             and all(row[key] == value for key, value in chosen.items())),
            key=lambda row: row["tokens"])
        if not fitting:
            continue
        sms = fitting[0]["sms_per_rank"]
        tokens = [row["tokens"] for row in fitting]
        axes.plot(tokens, [row["pair_us"] for row in fitting], "o-", color=colour, label=label)
        axes.plot(tokens, [row["floor_us"] for row in fitting], ":", color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(f"{ranks} rank{'s' if ranks > 1 else ''} x {sms} SMs")
    axes.set_xlabel("tokens of each rank")
    axes.grid(True, which="both", alpha=0.25)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("json")
    parser.add_argument("png")
    arguments = parser.parse_args()
    with open(arguments.json, encoding="utf-8") as file:
        data = json.load(file)
    rows = data["rows"]
    all_ranks = sorted({row["ranks"] for row in rows})
    figure, panels = plt.subplots(1, len(all_ranks), sharey=True, squeeze=False,
                                  figsize=(3.6 * len(all_ranks), 4.4))
    for axes, ranks in zip(panels[0], all_ranks):
        draw(axes, rows, ranks)
    panels[0][0].set_ylabel("microseconds of a dispatch and its combine")
    fullest = max(panels[0], key=lambda axes: len(axes.get_legend_handles_labels()[0]))
    fullest.legend(fontsize=7, loc="upper left")
    first = rows[0]
    figure.suptitle(f"{data['device']}: H = {first['hidden']}, K = {first['topk']}, "
                    f"E = {first['experts']}; medians, slowest rank; dotted: the bytes at "
                    f"{data['copy_gbs']:.0f} GB/s", fontsize=10)
    figure.tight_layout()
    figure.savefig(arguments.png, dpi=120)


if __name__ == "__main__":
    main()
