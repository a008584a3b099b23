#!/usr/bin/env python3
"""Draws docs/dashboards/*.png: what the Grafana dashboards show of a real server under a small load.

A server, a load and a Prometheus run for --seconds; then every panel's own queries are asked and drawn with matplotlib.
There is no Grafana in this: the data and the queries are real, the look is not Grafana's.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter
from PIL import Image

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "tests" / "operate"), str(REPOSITORY / "client" / "examples" / "python")]

from live import BLOCK, Load, PanelQuery, Prometheus, panel_queries  # noqa: E402
from local_server import LocalServer  # noqa: E402

import spmmd  # noqa: E402

OUTPUT = REPOSITORY / "docs" / "dashboards"
RATE_INTERVAL = "10s"
COLUMNS = 3


def _scaled(base: float, suffix: str) -> Callable[[float, object], str]:
    def text(value: float, _position: object = None) -> str:
        if value == 0 or not math.isfinite(value):
            return f"0{suffix}"
        power = max(0, min(4, int(math.log(abs(value), base))))
        return f"{value / base**power:.3g} {['', 'k', 'M', 'G', 'T'][power]}{suffix}"

    return text


def _seconds(value: float, _position: object = None) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if abs(value) * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return "0 s" if value == 0 else f"{value * 1e6:.2g} µs"


UNITS: dict[str, Callable[[float, object], str]] = {
    "s": _seconds,
    "bytes": _scaled(1024, "iB"),
    "Bps": _scaled(1000, "B/s"),
    "flops": _scaled(1000, "FLOP/s"),
    "reqps": _scaled(1000, "req/s"),
    "ops": _scaled(1000, "/s"),
    "percentunit": lambda value, _position=None: f"{100 * value:.3g} %",
    "none": _scaled(1000, ""),
}


def label_of(legend: str, labels: dict[str, str]) -> str:
    """Grafana's {{label}} templates filled in."""
    for name, value in labels.items():
        legend = legend.replace("{{" + name + "}}", value)
    return legend


def draw(board: str, panels: dict[str, list[PanelQuery]], prometheus: Prometheus, start: float, end: float) -> Path:
    """One picture of a board."""
    rows = math.ceil(len(panels) / COLUMNS)
    figure, grid = plt.subplots(rows, COLUMNS, figsize=(5 * COLUMNS, 2.7 * rows), squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    for axes, (title, queries) in zip(grid.flat, panels.items(), strict=False):
        axes.set_title(title, fontsize=10, loc="left")
        axes.yaxis.set_major_formatter(FuncFormatter(UNITS[queries[0].unit]))
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8)
        lines = 0
        for query in queries:
            for labels, points in prometheus.query_range(query.runnable(RATE_INTERVAL), start, end, 1):
                values = [(t - start, v) for t, v in points if math.isfinite(v)]
                if values:
                    label = label_of(query.legend, labels) or title
                    axes.plot(*zip(*values, strict=True), linewidth=1.2, label=label)
                    lines += 1
        if lines == 0:
            raise SystemExit(f"{board} / {title}: no data")
        axes.set_ylim(bottom=0, top=max(axes.dataLim.y1, 1e-9) * 1.15)
        if lines > 1 or queries[0].legend:
            axes.legend(fontsize=6, loc="upper left", framealpha=0.6, ncols=1 + (lines > 6))
    figure.suptitle(f"{board}: {end - start:.0f} s of a server on the CPU backend, from Prometheus", fontsize=11)
    figure.tight_layout()
    path = OUTPUT / f"{board.split(' / ')[1].lower().replace(' ', '-')}.png"
    figure.savefig(path, dpi=72)
    plt.close(figure)
    with Image.open(path) as image:
        small = image.convert("P", palette=Image.Palette.ADAPTIVE, colors=32)
    small.save(path, optimize=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--binary", type=Path, default=REPOSITORY / "build" / "bin" / "spmmd")
    arguments = parser.parse_args()
    OUTPUT.mkdir(exist_ok=True)
    boards: dict[str, dict[str, list[PanelQuery]]] = {}
    for query in panel_queries():
        if query.board == "spmmd / GPU":
            continue  # nothing to show on the CPU backend
        boards.setdefault(query.board, {}).setdefault(query.title, []).append(query)
    folder = Path(tempfile.mkdtemp())
    try:
        shutil.copy(BLOCK, folder / "block.safetensors")
        flags = [f"--model-repository={folder}", "--max-queue-bytes=1MiB"]
        with LocalServer(arguments.binary, flags) as server, Prometheus([server.metrics]) as prometheus:

            def connect() -> spmmd.Client:
                return spmmd.Client(server.address)

            time.sleep(12)
            start = time.time() - 2
            # Little, then much, then little again.
            for callers, share in ((1, 0.3), (6, 0.4), (2, 0.3)):
                with Load(connect, callers=callers, pause=0.01) as load:
                    time.sleep(arguments.seconds * share)
                assert not load.failures, load.failures
            for board, panels in boards.items():
                print(draw(board, panels, prometheus, start, time.time()))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
