"""Mixed load over more layers than fit, from callers that are killed: in the end everything is where it was.

Calls, streams, rings and regions; uploads, some given up; deadlines that are missed. SPMMD_CHURN_SECONDS makes it
longer than the few seconds of a test run, and `pytest -s` shows what was done.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
from churn_worker import COLS, shared_layer
from helpers import assert_product
from local_server import LocalServer

import spmmd

SECONDS = float(os.environ.get("SPMMD_CHURN_SECONDS", "4"))
WORKERS = 3
HERE = Path(__file__).resolve().parent


def metrics(address: str) -> dict[str, float]:
    """Every sample of a scrape by its series."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def ring_requests(samples: dict[str, float]) -> float:
    return samples.get('spmmd_requests_total{code="OK",rpc="spmm.v1.SparseMatmul/Ring"}', 0)


def status_of(pid: int) -> tuple[int, int]:
    """Open file descriptors and resident bytes."""
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(os.listdir(f"/proc/{pid}/fd")), resident


def usable_memory() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit).read_text()))
        except (OSError, ValueError):
            continue
    return total


class Callers:
    """Processes that call, one of which is killed now and then."""

    def __init__(self, address: str, layers: int) -> None:
        self._command = [sys.executable, str(HERE.parent / "churn_worker.py"), address]
        self._layers = layers
        self.started = 0  # all in all; also the next one's seed
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._running = [self._start() for _ in range(WORKERS)]

    def _start(self) -> subprocess.Popen[bytes]:
        self.started += 1
        command = [*self._command, str(self.started), str(self._layers)]
        return subprocess.Popen(command, env=self._environment, stderr=subprocess.PIPE)

    def kill_one(self) -> None:
        self._end(self._running.pop(random.randrange(len(self._running))))
        self._running.append(self._start())

    def kill_all(self) -> None:
        while self._running:
            self._end(self._running.pop())

    @staticmethod
    def _end(caller: subprocess.Popen[bytes]) -> None:
        ended = caller.poll() is not None
        caller.kill()
        assert caller.stderr is not None
        text = caller.stderr.read().decode()
        caller.stderr.close()
        caller.wait()
        assert not ended, f"a caller ended by itself:\n{text}"


def test_mixed_load_ends_at_the_baseline(binary: Path, tmp_path: Path) -> None:
    # The smallest budget that the server takes, and small layers to overfill it with.
    fraction = max(0.001, (12 << 20) / usable_memory())
    flags = [
        "--backend=cpu",
        f"--device-memory-fraction={fraction:.6f}",
        f"--cache-dir={tmp_path}",
        "--upload-resume-timeout=500ms",
        "--shared-memory",
    ]
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "1000000"}
    with LocalServer(binary, flags, environment=environment) as server, spmmd.Client(server.address) as client:
        budget = sum(device.memory_budget_bytes for device in client.device_info())
        size = client.register("shared0", shared_layer(0)).bytes
        layers = max(8, int(1.3 * budget / size))
        x = np.random.default_rng(0).standard_normal((2, COLS)).astype(np.float32)
        for index in range(layers):
            client.register(f"shared{index}", shared_layer(index))
        assert_product(client.matmul("shared0", x), x, shared_layer(0))
        before = metrics(server.metrics)
        files_before, resident_before = status_of(server.pid)

        callers = Callers(server.address, layers)
        try:
            patience = time.monotonic() + 30.0  # they need a moment to start
            while not ring_requests(metrics(server.metrics)) and time.monotonic() < patience:
                time.sleep(0.1)
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                callers.kill_one()
                time.sleep(min(1.5, SECONDS / 5))
        finally:
            callers.kill_all()

        for layer in client.list():
            if layer.name.startswith("own-"):
                client.unregister(layer.name, missing_ok=True)

        def settled() -> list[str]:
            """What is not yet as it should be."""
            now = metrics(server.metrics)
            wrong = []
            for series, value in now.items():
                name = series.partition("{")[0]
                if name in (
                    "spmmd_queue_depth",
                    "spmmd_queue_bytes",
                    "spmmd_upload_bytes",
                    "spmmd_requests_waiting_for_layers",
                    "spmmd_requests_running",
                    "spmmd_shm_regions",
                    "spmmd_shm_bytes",
                    "spmmd_rings",
                ) and value != before.get(series, 0):
                    wrong.append(f"{series} is {value}")
            if now['spmmd_layers{state="ready"}'] + now['spmmd_layers{state="evicted"}'] != layers:
                wrong.append("layers: " + str({k: v for k, v in now.items() if k.startswith("spmmd_layers")}))
            files, _ = status_of(server.pid)
            # This client's own connection may come and go.
            if files > files_before + 2:
                wrong.append(f"{files} open files, {files_before} before")
            return wrong

        deadline = time.monotonic() + 15.0
        while settled() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not settled(), f"{settled()}\n{server.log()}"

        after = metrics(server.metrics)
        for series in ('spmmd_layer_evictions_total{to="cache"}', 'spmmd_layer_loads_total{source="cache"}'):
            assert after[series] > before.get(series, 0), f"{series}: nothing happened"
        assert ring_requests(after) > 0
        # Every layer still gives its own product.
        for index in range(0, layers, max(1, layers // 8)):
            assert_product(client.matmul(f"shared{index}", x), x, shared_layer(index))
        for index in range(layers):
            client.unregister(f"shared{index}")
        assert sum(device.memory_weights_bytes for device in client.device_info()) == 0
        files, resident = status_of(server.pid)
        assert resident < resident_before + (24 << 20), f"grew from {resident_before} to {resident} bytes"
        print(f"{SECONDS:.0f} s, {callers.started - WORKERS} callers killed under way, {layers} layers")
        print(f"resident bytes: {resident_before} before, {resident} after")
        print(f"open files: {files_before} before, {files} after")
        for series, value in after.items():
            if series.startswith(("spmmd_requests_total", "spmmd_layer_evictions_total")):
                print(f"{series} {value:.0f}")
