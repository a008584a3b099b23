"""The server under load with Prometheus beside it, started once for all tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import make_repository
from live import BLOCK, REPOSITORY, Live, Load, Prometheus, self_signed
from local_server import LocalServer

import spmmd


@pytest.fixture(scope="session")
def binary() -> Path:
    path = Path(os.environ.get("SPMMD_BIN", REPOSITORY / "build" / "bin" / "spmmd"))
    if not path.exists():
        pytest.fail(f"no server at {path}: build it, or name one in SPMMD_BIN", pytrace=False)
    return path


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fleet's model repository."""
    return make_repository(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def loaded(binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalServer, Load]]:
    """A server with TLS, a model repository, a queue short enough to refuse and little memory, and a load on it."""
    folder = tmp_path_factory.mktemp("live")
    shutil.copy(BLOCK, folder / "block.safetensors")
    pem, key = self_signed(folder)
    flags = [f"--model-repository={folder}", f"--tls-cert={pem}", f"--tls-key={key}", "--max-queue-bytes=1MiB"]
    flags += [f"--cache-dir={folder / 'cache'}", "--device-memory-fraction=0.002"]
    with LocalServer(binary, flags) as server:
        with Load(lambda: spmmd.Client(server.address, tls=spmmd.Tls(ca=pem), timeout=30.0), large=3) as load:
            yield server, load
        assert not load.failures, load.failures
        assert server.running, server.log()
    assert server.exit_code == 0


@pytest.fixture(scope="session")
def live(loaded: tuple[LocalServer, Load]) -> Iterator[Live]:
    """`loaded` scraped by Prometheus, once enough samples are there for rates over RATE_INTERVAL."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: scripts/setup.sh --ops")
    server, load = loaded
    with Prometheus([server.metrics]) as prometheus:

        def sampled() -> bool:
            counts = prometheus.query("count_over_time(spmmd_rejected_total[1m])")
            return bool(counts) and max(value for _, value in counts) >= 6

        prometheus.wait(sampled, 60, "no refusal was scraped")
        yield Live(server, prometheus, load)
