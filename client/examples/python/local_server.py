"""Starts an spmmd binary on free loopback ports for as long as a `with` block lasts."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

_READY = re.compile(r"^spmmd ready grpc=(\S+) metrics=(\S+) backend=(\S+) devices=(\S+)")


class LocalServer:
    """A server process; `with LocalServer(binary) as server:` gives one that serves.

    Leaving the block sends SIGTERM and waits for the drain; a server that does not end is killed and reported.

    Attributes:
      address: where it answers gRPC; metrics: where it answers Prometheus; backend, devices: as it says itself.
      exit_code: once the block is left; 0 after a clean drain.
    """

    address = ""
    metrics = ""
    backend = ""
    devices = ""
    exit_code: int | None = None

    def __init__(
        self,
        binary: Path,
        flags: Sequence[str] = (),
        *,
        listen: str = "127.0.0.1:0",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = [str(binary), f"--listen={listen}", "--metrics-listen=127.0.0.1:0", *flags]
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[Any] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self, lines: int = 30) -> str:
        """The end of what the server wrote on stderr."""
        if self._log is None:
            return ""
        self._log.seek(0)
        return "".join(self._log.readlines()[-lines:])

    def start(self, timeout: float = 60.0) -> None:
        """Starts the process and waits for its ready line; RuntimeError with its log when it does not come."""
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=self._log, text=True, env=self._environment
        )
        deadline = time.monotonic() + timeout
        assert self._process.stdout is not None
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self._process.stdout], [], [], left)[0]:
                break
            line = self._process.stdout.readline()
            if match := _READY.match(line):
                self.address, self.metrics, self.backend, self.devices = match.groups()
                return
            if not line:
                break
        code = self._process.poll()
        text = self.log()
        self.stop()
        raise RuntimeError(f"{self._command[0]} did not become ready (exit code {code}):\n{text}")

    def stop(self, timeout: float = 30.0) -> int:
        """SIGTERM, then the exit code; a server that outlives `timeout` is killed."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self.exit_code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self.exit_code = self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return self.exit_code

    def __enter__(self) -> LocalServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._log is not None:
            self._log.close()
            self._log = None
