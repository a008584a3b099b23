"""Several servers on loopback ports with the same model repository, and callers that check every answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from live import scrape
from local_server import LocalServer

import spmmd

LAYERS = [f"block{i}/{part}" for i in range(6) for part in ("up", "down")] + ["head"]
ROWS, COLUMNS = 24, 32


def weight_of(layer: str) -> Any:
    """A matrix of its own for every layer, small integers so that products are exact."""
    rng = np.random.default_rng(sum(layer.encode()))
    return rng.integers(-3, 4, (ROWS, COLUMNS)).astype(np.float32)


X = np.arange(3 * COLUMNS, dtype=np.float32).reshape(3, COLUMNS) % 7


def assert_right(layer: str, y: Any) -> None:
    np.testing.assert_array_equal(y, X @ weight_of(layer).T, err_msg=layer)


def make_repository(folder: Path) -> Path:
    """A model repository with the layers and the manifest that every server gets."""
    manifest = ""
    for layer in LAYERS:
        name = layer.replace("/", "_") + ".npy"
        np.save(folder / name, weight_of(layer))
        manifest += f'layers {{ name: "{layer}" file {{ path: "{name}" }} }}\n'
    (folder / "layers.textproto").write_text(manifest)
    return folder


def server(binary: Path, repository: Path, *flags: str, port: int = 0) -> LocalServer:
    return LocalServer(
        binary,
        [f"--model-repository={repository}", "--cpu-threads=1", *flags],
        listen=f"127.0.0.1:{port}",
    )


def executed(one: LocalServer) -> float:
    """Calls of Execute that a server has answered."""
    return sum(
        value
        for name, labels, value in scrape(one.metrics)[2]
        if name == "spmmd_requests_total" and labels["rpc"].endswith("/Execute") and labels["code"] == "OK"
    )


class Caller:
    """Multiplies with all layers in turn until the block is left; wrong answers and errors are kept."""

    def __init__(self, client: spmmd.ShardedClient | spmmd.Client, layers: list[str] | None = None) -> None:
        self._client = client
        self._layers = layers or LAYERS
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.calls = 0
        self.wrong: list[BaseException] = []
        self.errors: list[spmmd.SpmmdError] = []

    def __enter__(self) -> Caller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        assert not self.wrong, self.wrong[0]

    def _run(self) -> None:
        while not self._stop.is_set():
            layer = self._layers[self.calls % len(self._layers)]
            try:
                assert_right(layer, self._client.matmul(layer, X, timeout=20.0))
            except spmmd.SpmmdError as error:
                self.errors.append(error)
            except BaseException as error:
                self.wrong.append(error)
            self.calls += 1

    def wait(self, calls: int = 60) -> None:
        """Until that many further calls are done."""
        target = self.calls + calls
        deadline = time.monotonic() + 30
        while self.calls < target and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.calls >= target, "the caller makes no progress"


@contextmanager
def shards(binary: Path, repository: Path, counts: list[tuple[int, int]]) -> Iterator[list[LocalServer]]:
    """Servers for (index, count) pairs."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(server(binary, repository, f"--shard-index={i}", f"--shard-count={n}"))
            for i, n in counts
        ]
