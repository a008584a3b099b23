from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import spmmd

sys.path.insert(0, str(Path(__file__).parent))

from fake_server import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.stop()


@pytest.fixture
def client(server: FakeServer) -> Iterator[spmmd.Client]:
    with spmmd.Client(server.address, timeout=20.0, chunk_bytes=1000) as client:
        yield client
