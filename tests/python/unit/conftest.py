from __future__ import annotations

from collections.abc import Iterator

import pytest
from unit.fake_server import FakeServer

import spmmd


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.stop()


@pytest.fixture
def client(server: FakeServer) -> Iterator[spmmd.Client]:
    with spmmd.Client(server.address, timeout=20.0, chunk_bytes=1000) as client:
        yield client
