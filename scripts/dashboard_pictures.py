#!/usr/bin/env python3
"""Draws docs/dashboards/*.png: what the Grafana dashboards show of a real server under a small load.

A server, a load and a Prometheus run for --seconds; then every panel's own queries are asked and drawn with matplotlib.
With --recorded the pages of /metrics in tests/operate/recorded are filled into Prometheus instead. There is no Grafana
in this: the data and the queries are real, the look is not Grafana's.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter
from PIL import Image

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "tests" / "operate"), str(REPOSITORY / "client" / "examples" / "python")]

from fleet import LAYERS, Caller, make_repository, server  # noqa: E402
from live import BLOCK, Load, PanelQuery, Prometheus, panel_queries, recorded_pages  # noqa: E402
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


def _percent(value: float, _position: object = None) -> str:
    return f"{100 * value:.3g} %"


UNITS: dict[str, Callable[[float, object], str]] = {
    "s": _seconds,
    "bytes": _scaled(1024, "iB"),
    "Bps": _scaled(1000, "B/s"),
    "flops": _scaled(1000, "FLOP/s"),
    "reqps": _scaled(1000, "req/s"),
    "ops": _scaled(1000, "/s"),
    "percentunit": _percent,
    "none": _scaled(1000, ""),
    "celsius": _scaled(1000, " °C"),
    "watt": _scaled(1000, "W"),
    "hertz": _scaled(1000, "Hz"),
}


def label_of(legend: str, labels: dict[str, str]) -> str:
    """Grafana's {{label}} templates filled in."""
    for name, value in labels.items():
        legend = legend.replace("{{" + name + "}}", value)
    return legend


@dataclass
class Span:
    """What a picture shows: the server, and from when to when."""

    server: str
    prefix: str
    start: float
    end: float


def draw(board: str, panels: dict[str, list[PanelQuery]], prometheus: Prometheus, span: Span) -> Path:
    """One picture of a board."""
    start, end = span.start, span.end
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
        axes.set_ylim(bottom=0, top=axes.dataLim.y1 * 1.15 if axes.dataLim.y1 > 0 else 1)
        if lines > 1 or queries[0].legend:
            axes.legend(fontsize=6, loc="upper left", framealpha=0.6, ncols=1 + (lines > 6))
    figure.suptitle(f"{board}: {end - start:.0f} s of a server on {span.server}, from Prometheus", fontsize=11)
    figure.tight_layout()
    path = OUTPUT / f"{span.prefix}{board.split(' / ')[1].lower().replace(' ', '-')}.png"
    figure.savefig(path, dpi=72)
    plt.close(figure)
    with Image.open(path) as image:
        small = image.convert("P", palette=Image.Palette.ADAPTIVE, colors=32)
    small.save(path, optimize=True)
    return path


def by_board() -> dict[str, dict[str, list[PanelQuery]]]:
    """The queries of every panel of every board."""
    boards: dict[str, dict[str, list[PanelQuery]]] = {}
    for query in panel_queries():
        boards.setdefault(query.board, {}).setdefault(query.title, []).append(query)
    return boards


def draw_recorded() -> None:
    """Pictures of the recording from an H200, of what a GPU shows differently."""
    pages = recorded_pages()
    prometheus = Prometheus([])
    end = prometheus.backfill(pages)
    span = Span("an H200", "h200-", end - len(pages) + 1, end)
    with prometheus:
        for board in ("spmmd / Kernels and HBM", "spmmd / GPU"):
            print(draw(board, by_board()[board], prometheus, span))


def draw_live(binary: Path, seconds: float) -> None:
    """Pictures of a server that runs here, on the CPU."""
    folder = Path(tempfile.mkdtemp())
    try:
        shutil.copy(BLOCK, folder / "block.safetensors")
        flags = [f"--model-repository={folder}", "--max-queue-bytes=1MiB"]
        flags += [f"--cache-dir={folder / 'cache'}", "--device-memory-fraction=0.002"]
        with LocalServer(binary, flags) as server, Prometheus([server.metrics]) as prometheus:

            def connect() -> spmmd.Client:
                return spmmd.Client(server.address)

            time.sleep(12)
            start = time.time() - 2
            # Little, then much, then little again.
            for callers, share in ((1, 0.3), (6, 0.4), (2, 0.3)):
                with Load(connect, callers=callers, pause=0.01, large=3) as load:
                    time.sleep(seconds * share)
                assert not load.failures, load.failures
            for board, panels in by_board().items():
                if board not in ("spmmd / GPU", "spmmd / Shards"):  # nothing to show on one server on the CPU
                    print(draw(board, panels, prometheus, Span("the CPU backend", "", start, time.time())))
    finally:
        shutil.rmtree(folder)


def draw_shards(binary: Path, seconds: float) -> None:
    """A picture of three shards on the CPU, the first with two replicas; the last one goes away at the end."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        repository = make_repository(Path(folder))
        fleet = [
            stack.enter_context(server(binary, repository, f"--shard-index={i}", "--shard-count=3"))
            for i in (0, 0, 1, 2)
        ]
        addresses = [[fleet[0].address, fleet[1].address], [fleet[2].address], [fleet[3].address]]
        prometheus = stack.enter_context(Prometheus([one.metrics for one in fleet]))
        client = stack.enter_context(spmmd.ShardedClient(addresses, timeout=5.0))
        time.sleep(12)
        start = time.time() - 2
        stray = next(layer for layer in LAYERS if spmmd.shard_of(layer, 3) != 1)
        with Caller(client), spmmd.Client(fleet[2].address) as lost:
            end = time.time() + seconds * 0.7
            while time.time() < end:  # and a caller that has the wrong address
                with contextlib.suppress(spmmd.FailedPreconditionError):
                    lost.get(stray)
                time.sleep(0.5)
            fleet[3].stop()
            time.sleep(seconds * 0.3)
        board = "spmmd / Shards"
        print(draw(board, by_board()[board], prometheus, Span("three shards on the CPU", "", start, time.time())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--binary", type=Path, default=REPOSITORY / "build" / "bin" / "spmmd")
    parser.add_argument("--recorded", action="store_true", help="draw the recording from an H200 instead")
    arguments = parser.parse_args()
    OUTPUT.mkdir(exist_ok=True)
    if arguments.recorded:
        draw_recorded()
    else:
        draw_live(arguments.binary, arguments.seconds)
        draw_shards(arguments.binary, arguments.seconds / 2)


if __name__ == "__main__":
    main()
