"""Uploads over a connection that breaks in the middle."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from helpers import assert_product
from local_server import LocalServer

import spmmd

ROWS, COLS = 1024, 1024


class CuttingProxy:
    """Passes bytes on; its first `breaks` connections break after `limit` bytes towards the server."""

    def __init__(self, server: str, breaks: int, limit: int) -> None:
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self._breaks = breaks
        self._limit = limit
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self.passed = 0  # bytes towards the server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with self._lock:
            sockets = [*self._sockets, self._listener]
        for one in sockets:
            self._end(one)

    @staticmethod
    def _end(one: socket.socket) -> None:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                with self._lock:
                    breaks = self._breaks > 0
                    self._breaks -= 1
                    self._sockets += [caller, server]
                limit = self._limit if breaks else None
                for pair in ((caller, server, limit), (server, caller, None)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, limit: int | None) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(16 << 10):
                target.sendall(data)
                passed += len(data)
                if target.getpeername() == self._server:
                    with self._lock:
                        self.passed += len(data)
                if limit is not None and passed >= limit:
                    break
        self._end(source)
        self._end(target)


@contextlib.contextmanager
def cutting_proxy(server: LocalServer, breaks: int, limit: int) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(server.address, breaks, limit)
    try:
        yield proxy
    finally:
        proxy.close()


def weights(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((ROWS, COLS)).astype(np.float16)


def test_the_python_client_goes_on(server: LocalServer, client: spmmd.Client) -> None:
    weight = weights(11)
    with (
        cutting_proxy(server, breaks=2, limit=weight.nbytes // 3) as proxy,
        spmmd.Client(proxy.address, chunk_bytes=64 << 10) as caller,
    ):
        caller.register("w", weight, timeout=60)
    assert proxy.passed < 1.5 * weight.nbytes, "what the server had was sent again"
    x = np.random.default_rng(1).standard_normal((2, COLS)).astype(np.float32)
    assert_product(client.matmul("w", x), x, weight)


def test_the_cpp_client_goes_on(binary: Path, server: LocalServer, client: spmmd.Client, tmp_path: Path) -> None:
    spmmctl = Path(os.environ.get("SPMMCTL_BIN", binary.parent / "spmmctl"))
    weight = weights(12)
    np.save(tmp_path / "w.npy", weight)
    with cutting_proxy(server, breaks=2, limit=weight.nbytes // 3) as proxy:
        command = [str(spmmctl), f"--server={proxy.address}", "register", "w", "--file", str(tmp_path / "w.npy")]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    x = np.random.default_rng(1).standard_normal((2, COLS)).astype(np.float32)
    assert_product(client.matmul("w", x), x, weight)
