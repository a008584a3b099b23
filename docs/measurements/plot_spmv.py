"""Draws docs/measurements/*.svg from the CSV files beside it: python docs/measurements/plot_spmv.py, with matplotlib."""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "spmmd"  # the same file for the same data
from matplotlib import pyplot as plt  # noqa: E402

HERE = Path(__file__).resolve().parent


def rows(name: str) -> list[dict[str, str]]:
    with open(HERE / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def config(row: dict[str, str]) -> dict[str, str]:
    return dict(part.split("=", 1) for part in row["config"].split(";") if "=" in part)


def draw(title: str, series: dict[str, dict[str, float]], target: str) -> None:
    shapes = list(next(iter(series.values())))
    figure, axes = plt.subplots(figsize=(9, 4))
    width = 0.8 / len(series)
    for i, (label, values) in enumerate(series.items()):
        places = [x + (i - (len(series) - 1) / 2) * width for x in range(len(shapes))]
        axes.bar(places, [values[shape] for shape in shapes], width, label=label)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(shapes)), shapes, rotation=20)
    axes.set_ylabel("times as fast as cublasGemmEx")
    axes.set_title(title)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(HERE / target, metadata={"Date": None})
    plt.close(figure)


def shape(row: dict[str, str]) -> str:
    return f"{row['M']}x{row['K']}"


def draw_celty() -> None:
    """The paper's figure 10: what columns a warp cost, which is how finely K is split."""
    columns = (64, 32, 16, 128, 256)  # of variants 2 i and 2 i + 1
    series: dict[str, dict[int, float]] = {}
    for row in rows("celty-splits.csv"):
        variant = int(config(row)["variant"])
        label = f"{shape(row)}, {'a buffer a warp' if variant % 2 else 'one buffer a block'}"
        series.setdefault(label, {})[columns[variant // 2]] = float(row["us_p50"])
    figure, axes = plt.subplots(figsize=(9, 4))
    for label, values in series.items():
        axes.plot(sorted(values), [values[c] for c in sorted(values)], marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(columns), [str(c) for c in sorted(columns)])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("columns a warp")
    axes.set_ylabel("us")
    axes.set_title("Celty as published, fp16, 50 % / 50 %, H200: split along K")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(HERE / "celty-splits.svg", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    draw_celty()
    for chained, title, target in (
        (False, "SpMV, N = 1, H200, no dependent launch", "spmv.svg"),
        (True, "SpMV, N = 1, H200, dependent launch (baseline without)", "spmv-chain.svg"),
    ):
        spmv: dict[str, dict[str, float]] = {}
        for row in rows("spmv.csv"):
            if row["kernel"] != "row_stream_spmv" or row["sparsity"] not in ("0.50", "0.70"):
                continue
            code = config(row)["code"]
            if (row["dtype"], code) not in (("fp16", "0"), ("bf16", "2")) or (config(row)["chain"] != "0") != chained:
                continue
            label = f"{row['dtype']}{' coded' if code == '2' else ''}, {float(row['sparsity']):.0%}"
            spmv.setdefault(label, {})[shape(row)] = float(row["ratio_vs_dense"])
        draw(title, spmv, target)

    spmspv: dict[str, dict[str, float]] = {}
    for row in rows("spmspv.csv"):
        if row["kernel"] != "column_piece_spmspv" or config(row)["chain"] != "0":
            continue
        mode = "accumulate" if config(row)["accumulate"] == "1" else "overwrite"
        label = f"{mode}, {float(row['sparsity']):.0%} / {float(row['activation_sparsity']):.0%}"
        spmspv.setdefault(label, {})[shape(row)] = float(row["ratio_vs_dense"])
    draw("SpMspV, fp16, weight / activation sparsity, H200, no dependent launch", spmspv, "spmspv.svg")


if __name__ == "__main__":
    main()
