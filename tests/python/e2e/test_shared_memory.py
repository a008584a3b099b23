"""Regions, rings and large tensors through shared memory, against the real server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from local_server import LocalServer

import spmmd
from spmmd import shared
from spmmd._proto import sparse_matmul_pb2 as matmul_pb2
from spmmd._proto import types_pb2

M, K = 96, 160


@pytest.fixture(scope="module")
def shm_server(binary: Path) -> Iterator[LocalServer]:
    with LocalServer(binary, ["--shared-memory", "--max-rings=4"]) as server:
        yield server
        assert server.running, f"the server went down:\n{server.log()}"
    assert server.exit_code == 0


@pytest.fixture
def weight() -> np.ndarray:
    rng = np.random.default_rng(1)
    w = rng.standard_normal((M, K)).astype(np.float16)
    w[rng.random((M, K)) < 0.5] = 0
    return w


@pytest.fixture
def client(shm_server: LocalServer, weight: np.ndarray) -> Iterator[spmmd.Client]:
    with spmmd.Client(shm_server.address, timeout=30.0) as client:
        client.register("w", weight)
        yield client
        client.unregister("w", missing_ok=True)
    wait_for(shm_server, "spmmd_rings", 0)
    wait_for(shm_server, 'spmmd_shm_regions{kind="posix"}', 0)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"spmmd-{os.getpid()}-")]


def metric(server: LocalServer, series: str) -> float:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as response:
        text = response.read().decode()
    return next((float(line.split()[-1]) for line in text.splitlines() if line.startswith(series + " ")), 0.0)


def wait_for(server: LocalServer, series: str, value: float) -> None:
    deadline = time.monotonic() + 20
    while metric(server, series) != value and time.monotonic() < deadline:
        time.sleep(0.02)
    assert metric(server, series) == value


def activations(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, K)).astype(np.float32)


def check(y: np.ndarray, x: np.ndarray, weight: np.ndarray) -> None:
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    scale = np.abs(x).astype(np.float64) @ np.abs(weight).astype(np.float64).T
    assert np.all(np.abs(y - exact) <= 1e-5 + 1e-5 * scale)


def test_region_by_hand(client: spmmd.Client, weight: np.ndarray) -> None:
    with client.create_region(1 << 16) as region:
        x = region.array((4, K), "f32")
        y = region.array((4, M), "f32", offset=8192)
        x[:] = activations(4, 1)
        program = spmmd.Program()
        program.output(program.matmul("w", program.input("x"), name="y"))
        request = matmul_pb2.ExecuteRequest(program=program.to_proto())
        request.program.outputs[0].region.CopyFrom(region.slice(8192, y.nbytes))
        named = request.inputs.add(name="x")
        named.dense.dtype = types_pb2.DATA_TYPE_F32
        named.dense.shape[:] = [4, K]
        named.dense.region.CopyFrom(region.slice(0, x.nbytes))
        client._execute(request, None)
        check(y, x, weight)
        del x, y


def test_large_tensors_travel_through_regions(
    shm_server: LocalServer, client: spmmd.Client, weight: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "MIN_SHARED_BYTES", 4096)
    for seed in range(4):
        x = activations(64, seed)
        y = client.matmul("w", x)
        check(y, x, weight)
        assert y.flags.writeable
    assert metric(shm_server, 'spmmd_shm_regions{kind="posix"}') == 1, "one region, used again"
    placed = client._transport
    assert placed is not None
    assert not placed._off
    assert len(placed._widths) == 1
    # The layer changes its shape under the client: the answer is the new one's.
    client.register("w", weight[:50])
    check(client.matmul("w", x), x, weight[:50])
    check(client.matmul("w", x), x, weight[:50])
    # A region that the server has forgotten.
    placed._free[0]._memory.unregister(placed._free[0].name)
    check(client.matmul("w", x), x, weight[:50])
    with pytest.raises(spmmd.NotFoundError):
        client.matmul("nobody", x)
    program = spmmd.Program()
    h = program.input("x")
    program.output(program.matmul("w", h, name="a"), program.matmul("w", h, activation="relu", name="b"))
    for _ in range(2):
        outputs = client.execute(program, x)
        check(outputs["a"], x, weight[:50])
        np.testing.assert_array_equal(outputs["b"], np.maximum(outputs["a"], 0))


def test_ring(client: spmmd.Client, weight: np.ndarray) -> None:
    program = spmmd.Program()
    program.output(program.matmul("w", program.input("x"), name="y"))
    registered = client.register_program(program)
    with client.open_ring([registered], entries=8) as ring:
        for rows in (0, 1, 5):
            x = ring.array((rows, K), "f32")
            y = ring.array((rows, M), "f32", offset=65536)
            x[:] = activations(rows, rows)
            timing = ring.execute(rows, [spmmd.Slot(0, K)], [spmmd.Slot(65536, M)])
            assert timing.total >= timing.kernel
            check(y, x, weight)
        # Several in flight, more than once around.
        xs = ring.array((8, K), "f32")
        ys = ring.array((8, M), "f32", offset=65536)
        xs[:] = activations(8, 9)
        for _ in range(5):
            ys[:] = 0
            for i in range(8):
                ring.submit(1, [spmmd.Slot(i * K * 4, K)], [spmmd.Slot(65536 + i * M * 4, M)], user_data=i)
            with pytest.raises(BlockingIOError):
                ring.submit(1, [spmmd.Slot(0, K)], [spmmd.Slot(65536, M)])
            assert {ring.wait()[0] for _ in range(8)} == set(range(8))
            check(ys, xs, weight)
        with pytest.raises(TimeoutError):
            ring.wait(timeout=0.02)
        with pytest.raises(spmmd.InvalidArgumentError, match="overlap") as caught:
            ring.execute(1, [spmmd.Slot(0, K)], [spmmd.Slot(0, M)])
        assert caught.value.reason == "INVALID_FIELD"
        with pytest.raises(spmmd.DeadlineExceededError):
            ring.execute(1, [spmmd.Slot(0, K)], [spmmd.Slot(65536, M)], timeout=0)
        del x, y, xs, ys
    client.unregister_program(registered)


def test_a_ring_lasts(client: spmmd.Client) -> None:
    # A counter that is ever half written ends the ring: the server looks at it all the time. Such a ring lasted for
    # 3000 entries on average.
    program = spmmd.Program()
    program.output(program.matmul("w", program.input("x"), name="y"))
    with client.open_ring([client.register_program(program)], entries=8) as ring:
        for _ in range(30_000):
            ring.execute(1, [spmmd.Slot(0, K)], [spmmd.Slot(65536, M)])


def test_a_killed_owner_leaves_nothing(shm_server: LocalServer, client: spmmd.Client) -> None:
    script = (
        "import sys, time, spmmd\n"
        f"client = spmmd.Client({shm_server.address!r})\n"
        "program = spmmd.Program()\n"
        "program.output(program.matmul('w', program.input('x')))\n"
        "ring = client.open_ring([client.register_program(program)])\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        f"    ring.execute(1, [spmmd.Slot(0, {K})], [spmmd.Slot(65536, {M})])\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    assert metric(shm_server, "spmmd_rings") == 1
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    wait_for(shm_server, "spmmd_rings", 0)
    wait_for(shm_server, 'spmmd_shm_bytes{kind="posix"}', 0)
    assert client.health() == spmmd.HealthStatus.SERVING


def test_without_the_flag(server: LocalServer, monkeypatch: pytest.MonkeyPatch, weight: np.ndarray) -> None:
    monkeypatch.setattr(shared, "MIN_SHARED_BYTES", 4096)
    with spmmd.Client(server.address) as client:
        with pytest.raises(spmmd.FailedPreconditionError, match="--shared-memory"):
            client.create_region(4096)
        client.register("plain", weight)
        x = activations(64, 3)
        check(client.matmul("plain", x), x, weight)
        client.unregister("plain")
