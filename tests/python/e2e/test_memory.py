"""Memory comes back: the server's own count exactly, the process's within what an allocator keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from helpers import assert_product, sparse_weight
from local_server import LocalServer

import spmmd


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def counted(client: spmmd.Client) -> list[tuple[str, int]]:
    return [(device.id, device.memory_weights_bytes) for device in client.device_info()]


def test_churn(binary: Path) -> None:
    rng = np.random.default_rng(3)
    weight = sparse_weight(rng, 1024, 1024)
    x = rng.standard_normal((4, 1024)).astype(np.float32)
    # A server of its own whose allocator gives large blocks back at once: what malloc keeps would hide a leak.
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "1000000"}
    with LocalServer(binary, environment=environment) as server, spmmd.Client(server.address) as client:
        baseline = counted(client)

        def cycle(rounds: int) -> None:
            for i in range(rounds):
                weight[i % 1024, 0] += np.float16(1)  # new content each time, so that nothing is taken from before
                layer = client.register("w", weight, format=("bitmap", "dense")[i % 2])
                assert sum(size for _, size in counted(client)) >= layer.bytes
                if i % 3 == 0:
                    assert_product(client.matmul("w", x), x, weight)
                    client.register("w", weight, prune=0.7)
                freed = client.unregister("w")
                assert freed.versions == (2 if i % 3 == 0 else 1)
                assert freed.freed_bytes >= layer.bytes
                assert counted(client) == baseline

        cycle(10)
        settled = resident_bytes(server.pid)
        cycle(30)
        grown = resident_bytes(server.pid) - settled
        # 30 rounds move more than 60 MB of weights: one layer left behind would show.
        assert grown < 4 << 20, f"the process grew by {grown} bytes over 30 rounds"


def test_refused_uploads_leave_no_memory(client: spmmd.Client, server: LocalServer) -> None:
    weight = np.ones((1024, 1024), np.float16)
    weight[-1, -1] = np.nan  # found only after the whole upload
    baseline = counted(client)
    for _ in range(5):
        try:
            client.register("w", weight)
        except spmmd.InvalidArgumentError:
            pass
        else:
            raise AssertionError("NaN was accepted")
    assert counted(client) == baseline
    assert client.list() == []
