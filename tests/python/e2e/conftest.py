"""The real server, started once for all tests, on free loopback ports."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers import BLOCK, REPOSITORY
from local_server import LocalServer

import spmmd


def server_binary() -> Path:
    binary = Path(os.environ.get("SPMMD_BIN", REPOSITORY / "build" / "bin" / "spmmd"))
    if not binary.exists():
        pytest.fail(f"no server at {binary}: build it, or name one in SPMMD_BIN", pytrace=False)
    return binary


@pytest.fixture(scope="session")
def binary() -> Path:
    return server_binary()


@pytest.fixture(scope="session")
def model_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good files, damaged files, and links that lead out."""
    root = tmp_path_factory.mktemp("repository")
    shutil.copy(BLOCK, root / "block.safetensors")
    (root / "sub").mkdir()
    np.save(root / "sub" / "w.npy", np.arange(12, dtype=np.float32).reshape(3, 4))
    np.save(root / "vector.npy", np.arange(12, dtype=np.float32))
    np.save(root / "strings.npy", np.array([["a", "b"]]))
    (root / "magic.npy").write_bytes(b"\x93NUMPX" + b"\0" * 200)
    (root / "magic.safetensors").write_bytes(b"not a safetensors file at all" * 10)
    (root / "cut.safetensors").write_bytes(BLOCK.read_bytes()[:4096])
    (root / "cut.npy").write_bytes((root / "sub" / "w.npy").read_bytes()[:-5])
    (root / "huge.safetensors").write_bytes((2**63 - 1).to_bytes(8, "little") + b"{}")
    (root / "empty.safetensors").write_bytes(b"")
    (root / "notes.txt").write_text("no weights in here")
    outside = tmp_path_factory.mktemp("outside") / "secret.npy"
    np.save(outside, np.ones((2, 2), np.float32))
    (root / "link.npy").symlink_to(outside)
    (root / "linked-folder").symlink_to(outside.parent)
    return root


@pytest.fixture(scope="session")
def server(binary: Path, model_repository: Path) -> Iterator[LocalServer]:
    with LocalServer(binary, [f"--model-repository={model_repository}"]) as server:
        yield server
        assert server.running, f"the server went down:\n{server.log()}"
    assert server.exit_code == 0


@pytest.fixture
def client(server: LocalServer) -> Iterator[spmmd.Client]:
    """A client; whatever its test leaves registered is removed, and no memory may stay taken."""
    with spmmd.Client(server.address, timeout=30.0) as client:
        baseline = weights_bytes(client)
        yield client
        for name in {layer.name for layer in client.list()}:
            client.unregister(name)
        # A caller that goes away is noticed a moment after it has gone.
        deadline = time.monotonic() + 5.0
        while weights_bytes(client) != baseline and time.monotonic() < deadline:
            time.sleep(0.01)
        assert weights_bytes(client) == baseline


def weights_bytes(client: spmmd.Client) -> int:
    return sum(device.memory_weights_bytes for device in client.device_info())
