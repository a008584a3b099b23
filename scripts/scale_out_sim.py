#!/usr/bin/env python3
"""The numbers behind docs/scale-out.md: a fleet of GPUs that serves one large model through spmmd.

Layers are placed by the real rule (spmmd.shard_of). Failures are drawn at random with a fixed seed. `--write` puts the
tables into the page between its markers, `--check` compares. The rest is arithmetic on the model's shapes and the few
measured figures below.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import spmmd

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scale-out.md"
MARKERS = re.compile(r"(?s)(<!-- simulation: {name} -->\n).*?(<!-- end -->)".replace("{name}", r"(?P<name>[\w-]+)"))
GB = 1e9


@dataclass(frozen=True)
class Model:
    """Shapes of a decoder: the linear layers of its blocks are what spmmd serves."""

    name: str
    blocks: int
    hidden: int
    feed_forward: int
    kv: int  # columns of k and of v

    def weights(self) -> int:
        """Elements of a block's linear layers."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv
        return attention + 3 * self.hidden * self.feed_forward

    def traffic(self) -> int:
        """Bytes of activations for one token and block: q/k/v, o and the MLP as one call each, 2-byte elements."""
        elements = (self.hidden + self.hidden + 2 * self.kv) + 2 * self.hidden + 2 * self.hidden
        return 2 * elements


MODEL = Model("405B-class decoder", blocks=126, hidden=16384, feed_forward=53248, kv=1024)
GPUS = 1000
PER_NODE = 8
NODES_PER_RACK = 4
FRONTENDS = 250
SHARE_OF_DENSE = 0.61  # measured: 239 of 392 MiB for 28672x7168 at 50 % zeros in BITMAP_GPU
GPU_BYTES = 141 * GB * 0.9  # --device-memory-fraction
BANDWIDTH = 2.78e12  # bytes a second, measured: the same layer at 32 tokens on an H200
CALLS_PER_BLOCK = 3
BATCH = 32  # tokens in one launch
NETWORK = 50 * GB  # bytes a second each way of a node with 8 GPUs: 400 Gbit/s


def blocks_of(shards: int) -> list[int]:
    """Blocks on each shard."""
    counts = [0] * shards
    for block in range(MODEL.blocks):
        counts[spmmd.shard_of(f"block{block}/any", shards)] += 1
    return counts


def row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def block_bytes() -> float:
    return MODEL.weights() * 2 * SHARE_OF_DENSE


def replicas_for(counts: list[int], gpus: int) -> list[int]:
    """Replicas of each shard, in proportion to its blocks, at least two, together all GPUs."""
    total = sum(counts)
    replicas = [max(2, int(gpus * count / total)) for count in counts]
    while sum(replicas) < gpus:
        worst = max(range(len(counts)), key=lambda i: counts[i] / replicas[i])
        replicas[worst] += 1
    while sum(replicas) > gpus:
        best = min((i for i in range(len(counts)) if replicas[i] > 2), key=lambda i: counts[i] / replicas[i])
        replicas[best] -= 1
    return replicas


def tokens_per_second(counts: list[int], replicas: list[int]) -> float:
    """Of the whole fleet: the slowest shard's. A launch reads the weights once for BATCH tokens."""
    seconds = block_bytes() / BANDWIDTH  # of one block on one GPU
    return min(r * BATCH / (c * seconds) for c, r in zip(counts, replicas, strict=True) if c)


def memory() -> Iterator[str]:
    yield "| shards | GB of weights on a shard: mean / largest | of a GPU's budget | largest / mean |"
    yield "|---|---|---|---|"
    for shards in (4, 5, 6, 8, 10, 16):
        counts = blocks_of(shards)
        mean, largest = block_bytes() * MODEL.blocks / shards, block_bytes() * max(counts)
        fits = f"{100 * largest / GPU_BYTES:.0f} %" + ("" if largest <= GPU_BYTES else ": does not fit")
        yield f"| {shards} | {mean / GB:.0f} / {largest / GB:.0f} | {fits} | {largest / mean:.2f} |"


def throughput() -> Iterator[str]:
    yield row(
        "shards",
        "replicas of each shard",
        "tokens/s, equal replicas",
        "tokens/s, replicas by load",
        "activations of a GPU's server, GB/s each way",
        "share of the nodes' network",
    )
    yield "|---|---|---|---|---|---|"
    nodes = GPUS // PER_NODE
    for shards in (5, 6, 8, 10):
        counts = blocks_of(shards)
        even = tokens_per_second(counts, [GPUS // shards] * shards)
        replicas = replicas_for(counts, GPUS)
        best = tokens_per_second(counts, replicas)
        traffic = best * MODEL.traffic() * MODEL.blocks
        # A node sends about half of it and receives the other half.
        share = traffic / 2 / (nodes * NETWORK)
        each = traffic / 2 / GPUS / GB
        span = f"{min(replicas)}-{max(replicas)}"
        yield row(shards, span, f"{even:,.0f}", f"{best:,.0f}", f"{each:.1f}", f"{100 * share:.0f} %")


def connections() -> Iterator[str]:
    yield "| how clients connect | connections of a frontend | of a server | in all |"
    yield "|---|---|---|---|"
    yield f"| round robin to every replica | {GPUS} | {FRONTENDS} | {FRONTENDS * GPUS:,} |"
    cells = 10
    text = f"the same within one of {cells} cells"
    yield row(text, GPUS // cells, FRONTENDS // cells, f"{FRONTENDS * GPUS // cells:,}")
    gateways = 20
    text = f"{gateways} gateways that route by `spmmd-layer`"
    yield row(text, 2, gateways, f"{FRONTENDS * 2 + gateways * GPUS:,}")


def placement(replicas: list[int]) -> list[list[int]]:
    """The GPU indices of each shard's replicas, as topology spread constraints place them: few on any one node."""
    gpus = sorted(range(GPUS), key=lambda gpu: (gpu % PER_NODE, gpu // PER_NODE))
    iterator = iter(gpus)
    return [[next(iterator) for _ in range(r)] for r in replicas]


def failures(trials: int = 400) -> Iterator[str]:
    shards = 8
    counts = blocks_of(shards)
    replicas = replicas_for(counts, GPUS)
    full = tokens_per_second(counts, replicas)
    rng = random.Random(1)
    places = placement(replicas)
    yield row("what is lost at once", "throughput left: mean / worst", "trials in which some layer is served by nobody")
    yield "|---|---|---|"
    nodes = GPUS // PER_NODE
    racks = nodes // NODES_PER_RACK
    for text, size, groups, lost in (
        ("1 GPU", 1, GPUS, 1),
        ("10 GPUs", 1, GPUS, 10),
        ("1 node (8 GPUs)", PER_NODE, nodes, 1),
        ("5 nodes", PER_NODE, nodes, 5),
        ("1 rack (32 GPUs)", PER_NODE * NODES_PER_RACK, racks, 1),
        ("3 racks", PER_NODE * NODES_PER_RACK, racks, 3),
    ):
        left, gone = [], 0
        for _ in range(trials):
            dead = {gpu for group in rng.sample(range(groups), lost) for gpu in range(group * size, (group + 1) * size)}
            alive = [sum(gpu not in dead for gpu in place) for place in places]
            gone += 0 in alive
            left.append(tokens_per_second(counts, alive) / full if 0 not in alive else 0.0)
        yield f"| {text} | {100 * sum(left) / len(left):.1f} % / {100 * min(left):.1f} % | {gone} of {len(left)} |"


def small_fleet(trials: int = 20000) -> Iterator[str]:
    """What replicas are for: a small fleet where chance matters."""
    rng = random.Random(2)
    unavailable = 0.01  # share of the time that a GPU's pod is away: restarts, upgrades, faults
    yield row("replicas of each of 8 shards", "share of the time that some layer is served by nobody")
    yield "|---|---|"
    for replicas in (1, 2, 3):
        gone = sum(
            any(all(rng.random() < unavailable for _ in range(replicas)) for _ in range(8)) for _ in range(trials)
        )
        exact = 1 - (1 - unavailable**replicas) ** 8
        yield f"| {replicas} | {100 * gone / trials:.3f} % drawn, {100 * exact:.4f} % exact |"


def resharding() -> Iterator[str]:
    yield row("shards", "blocks that move", "GB that a replica of the new shard loads", "moves with block mod shards")
    yield "|---|---|---|---|"
    names = [f"block{block}/any" for block in range(MODEL.blocks)]
    for before in (5, 6, 8, 10):
        moved = spmmd.moves(names, before, before + 1)
        modulo = sum(block % before != block % (before + 1) for block in range(MODEL.blocks))
        loads = f"{len(moved) * block_bytes() / GB:.0f}"
        yield row(f"{before} to {before + 1}", f"{len(moved)} of {MODEL.blocks}", loads, f"{modulo} of {MODEL.blocks}")


TABLES = {
    "memory": memory,
    "throughput": throughput,
    "connections": connections,
    "failures": failures,
    "small-fleet": small_fleet,
    "resharding": resharding,
}


def page(text: str) -> str:
    """The page with its tables made anew."""
    found = [match["name"] for match in MARKERS.finditer(text)]
    if sorted(found) != sorted(TABLES):
        raise SystemExit(f"{PAGE}: tables {found}, expected {sorted(TABLES)}")
    return MARKERS.sub(lambda match: match[1] + "\n".join(TABLES[match["name"]]()) + "\n" + match[3], text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.write:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    elif arguments.check:
        text = PAGE.read_text(encoding="utf-8")
        if page(text) != text:
            print("docs/scale-out.md is stale: run scripts/scale_out_sim.py --write", file=sys.stderr)
            return 1
    else:
        for name, table in TABLES.items():
            print(f"\n{name}\n" + "\n".join(table()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
