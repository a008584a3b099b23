#!/usr/bin/env python3
"""Times a server's start over a model repository: cold (prunes and packs), and warm (from the packed cache).

Beside the times stands the rate at which the packed files can be read from the same directory, with and without the
page cache, which is what bounds a warm start. Writes a Markdown table to stdout.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "client" / "examples" / "python"))

from local_server import LocalServer  # noqa: E402


def make_repository(root: Path, layers: int, rows: int, cols: int) -> int:
    """Layers that differ, and the manifest that names them; the bytes of all of them."""
    rng = np.random.default_rng(1)
    tile = rng.standard_normal(rows * cols, dtype=np.float32).astype(np.float16).reshape(rows, cols)
    manifest = []
    for index in range(layers):
        np.save(root / f"w{index}.npy", np.roll(tile, index + 1, axis=0))
        manifest.append(
            f'layers {{ name: "w{index}" file {{ path: "w{index}.npy" }} '
            "magnitude { sparsity: 0.5 } format: FORMAT_BITMAP }"
        )
    (root / "layers.textproto").write_text("\n".join(manifest))
    return layers * tile.nbytes


def forget(directory: Path) -> None:
    """Takes the directory's files out of the page cache."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(directory: Path) -> tuple[float, int]:
    """Seconds to read every packed file, and their bytes."""
    buffer = bytearray(8 << 20)
    total = 0
    start = time.monotonic()
    for path in sorted(directory.glob("*.spmmd")):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return time.monotonic() - start, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", type=Path, default=REPOSITORY / "build" / "bin" / "spmmd")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--shape", default="8192x8192", help="rows x columns of each layer")
    parser.add_argument("--directory", type=Path, help="where to work; default: a temporary directory")
    parser.add_argument("--flag", action="append", default=[], help="a further flag of the server")
    arguments = parser.parse_args()
    rows, cols = (int(text) for text in arguments.shape.split("x"))
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        repository = Path(name) / "repository"
        cache = Path(name) / "cache"
        repository.mkdir()
        cache.mkdir()
        dense = make_repository(repository, arguments.layers, rows, cols)
        flags = [f"--model-repository={repository}", f"--cache-dir={cache}", *arguments.flag]

        def start() -> float:
            begin = time.monotonic()
            with LocalServer(arguments.binary, flags):
                return time.monotonic() - begin

        empty = time.monotonic()
        with LocalServer(arguments.binary, arguments.flag):
            empty = time.monotonic() - empty
        lines = [("cold: read, prune, pack, write", start(), dense)]
        _, packed = read_all(cache)
        lines.append(("warm, files in the page cache", start(), packed))
        lines.append(("reading the packed files from the page cache", *read_all(cache)))
        forget(cache)
        lines.append(("warm, files on disk", start(), packed))
        forget(cache)
        lines.append(("reading the packed files from disk", *read_all(cache)))
    print(f"{arguments.layers} layers of {rows}x{cols} fp16, {dense / 1e9:.2f} GB dense, {packed / 1e9:.2f} GB packed;")
    print(f"a server without layers is ready after {empty:.2f} s, which is part of the starts below.\n")
    print("| start | seconds | GB/s |\n|---|---|---|")
    for what, seconds, total in lines:
        print(f"| {what} | {seconds:.2f} | {total / seconds / 1e9:.2f} |")


if __name__ == "__main__":
    main()
