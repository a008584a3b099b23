"""Draws gpu-spmm.svg and prints the tables of docs/measurements.md from gpu-spmm.csv beside it.

python docs/measurements/plot_gpu_spmm.py (needs matplotlib)
"""

from __future__ import annotations

import csv
from math import exp, log
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "spmmd"  # the same file for the same data
from matplotlib import pyplot as plt  # noqa: E402

HERE = Path(__file__).resolve().parent
Cell = tuple[str, int, float]  # shape, N, sparsity


def geomean(values: list[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


def read() -> dict[bool, dict[Cell, dict[str, str]]]:
    """The fastest BITMAP_GPU kernel of each cell, plain (False) and with dependent launch (True)."""
    best: dict[bool, dict[Cell, dict[str, str]]] = {False: {}, True: {}}
    with open(HERE / "gpu-spmm.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["format"] != "BITMAP_GPU" or "#" in row["kernel"]:
                continue
            cell = (f"{row['M']}x{row['K']}", int(row["N"]), float(row["sparsity"]))
            kept = best[row["kernel"].endswith("+chain")]
            if cell not in kept or float(row["us_p50"]) < float(kept[cell]["us_p50"]):
                kept[cell] = row
    return best


def main() -> None:
    best = read()
    plain = best[False]
    shapes = list(dict.fromkeys(cell[0] for cell in plain))
    tokens = sorted({cell[1] for cell in plain})
    sparsities = sorted({cell[2] for cell in plain})

    def ratio(cells: dict[Cell, dict[str, str]], shape: str, n: int, sparsity: float) -> float:
        return float(cells[shape, n, sparsity]["ratio_vs_dense"])

    for name, cells in (("plain launches", plain), ("dependent launch", best[True])):
        print(f"\nGeometric mean over {len(shapes)} shapes, {name}:\n")
        print("| zeros | " + " | ".join(f"N = {n}" for n in tokens) + " |")
        print("|---|" + "---|" * len(tokens))
        for s in sparsities:
            means = [geomean([ratio(cells, shape, n, s) for shape in shapes]) for n in tokens]
            print(f"| {s:.0%} | " + " | ".join(f"{mean:.2f}" for mean in means) + " |")
    for s in sparsities:
        print(f"\n{s:.0%} zeros, us (times as fast as cublasLt), plain launches:\n")
        print("| M x K | " + " | ".join(f"N = {n}" for n in tokens) + " |")
        print("|---|" + "---|" * len(tokens))
        for shape in shapes:
            row = [f"{float(plain[shape, n, s]['us_p50']):.1f} ({ratio(plain, shape, n, s):.2f})" for n in tokens]
            print(f"| {shape} | " + " | ".join(row) + " |")

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    for s in sparsities:
        means = [geomean([ratio(plain, shape, n, s) for shape in shapes]) for n in tokens]
        left.plot(tokens, means, marker="o", label=f"{s:.0%} zeros")
    left.axhline(1.0, color="black", linewidth=0.8)
    left.set_ylabel("times as fast as cublasLt")
    left.set_title(f"Geometric mean over {len(shapes)} shapes")
    for shape in shapes:
        share = [float(plain[shape, n, sparsities[0]]["ceiling_pct"]) for n in tokens]
        right.plot(tokens, share, marker=".", label=shape)
    right.set_ylabel("per cent of the read ceiling")
    right.set_title(f"Bytes a second, {sparsities[0]:.0%} zeros")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [str(n) for n in tokens])
        axes.set_xlabel("N")
        axes.legend(fontsize=7)
    figure.suptitle("SpMM, BITMAP_GPU, fp16, H200, plain launches")
    figure.tight_layout()
    figure.savefig(HERE / "gpu-spmm.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
