#!/usr/bin/env python3
"""From a running server to a firing alert, with the rules as they ship: what docs/operations.md shows.

Starts a server, Prometheus with helm/spmmd/files/rules.yaml and, where it is installed, Alertmanager; overloads the
server until SpmmdQueueDeep fires, then kills it until SpmmdDown fires. Five minutes, most of it the rules' own waiting.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "tests" / "operate"), str(REPOSITORY / "client" / "examples" / "python")]

from live import BLOCK, Prometheus, free_port, http_get  # noqa: E402
from local_server import LocalServer  # noqa: E402

import spmmd  # noqa: E402

_START = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - _START:5.0f} s] {text}", flush=True)


@contextlib.contextmanager
def alertmanager(folder: Path) -> Iterator[str]:
    """The address of an Alertmanager, empty when it is not installed."""
    binary = shutil.which("prometheus-alertmanager")
    if binary is None:
        yield ""
        return
    address = f"127.0.0.1:{free_port()}"
    (folder / "alertmanager.yml").write_text("route: {receiver: nobody, group_wait: 1s}\nreceivers: [{name: nobody}]\n")
    flags = [f"--config.file={folder}/alertmanager.yml", f"--storage.path={folder}/alertmanager"]
    flags += [f"--web.listen-address={address}", "--cluster.listen-address=", "--log.level=warn"]
    process = subprocess.Popen([binary, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield address
    finally:
        process.terminate()
        process.wait(10)


def follow(prometheus: Prometheus, name: str, until: str, work: Callable[[], None], seconds: float = 300) -> None:
    """Says each new state of an alert until it has one; `work` goes on meanwhile."""
    state = ""
    end = time.monotonic() + seconds
    while state != until:
        if time.monotonic() > end:
            raise SystemExit(f"{name} is {state or 'inactive'} after {seconds:.0f} s")
        work()
        for alert in prometheus.alerts():
            if alert["labels"]["alertname"] == name and alert["state"] != state:
                state = alert["state"]
                say(f"{name}: {state}. {alert['annotations']['summary']}")


def overload(server: LocalServer) -> tuple[Callable[[], None], Callable[[], None]]:
    """Keeps some 800 requests waiting: a function that tops them up, and one that stops."""
    client = spmmd.Client(server.address, timeout=None)
    client.register_file("up", "block.safetensors", tensor="up.weight", prune=0.5)
    streams = [client.stream(max_in_flight=70) for _ in range(14)]
    x = np.ones((256, 384), np.float32)
    pending: list[list[object]] = [[] for _ in streams]

    def top_up() -> None:
        for stream, futures in zip(streams, pending, strict=True):
            futures[:] = [future for future in futures if not future.done()]  # type: ignore[attr-defined]
            while len(futures) < 60:
                futures.append(stream.matmul("up", x))
        time.sleep(0.05)

    def stop() -> None:
        for stream in streams:
            stream.cancel()
        client.close()

    return top_up, stop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", type=Path, default=REPOSITORY / "build" / "bin" / "spmmd")
    folder = Path(tempfile.mkdtemp(prefix="spmmd-alerts-"))
    shutil.copy(BLOCK, folder / "block.safetensors")
    try:
        flags = [f"--model-repository={folder}", "--cpu-threads=1", "--max-queue-depth=2000"]
        with (
            alertmanager(folder) as receiver,
            LocalServer(parser.parse_args().binary, flags) as server,
            Prometheus([server.metrics], interval="5s", alertmanager=receiver) as prometheus,
        ):
            say(f"server at {server.address}, Prometheus with {len(prometheus.rules())} rules")
            top_up, stop = overload(server)
            say("overloading it")
            follow(prometheus, "SpmmdQueueDeep", "firing", top_up)
            depth = prometheus.query("spmmd_queue_depth")
            say(f"spmmd_queue_depth = {depth[0][1]:.0f} on {depth[0][0]['device']}")
            stop()
            prometheus.wait(
                lambda: all(alert["labels"]["alertname"] != "SpmmdQueueDeep" for alert in prometheus.alerts()),
                60,
                "the alert does not end",
            )
            say("the load has stopped; SpmmdQueueDeep: inactive")
            os.kill(server.pid, signal.SIGKILL)
            say("killed the server")
            follow(prometheus, "SpmmdDown", "firing", lambda: time.sleep(0.5))
            if receiver:

                def received() -> list[str]:
                    alerts = json.loads(http_get(f"http://{receiver}/api/v2/alerts"))
                    return [alert["labels"]["alertname"] for alert in alerts if not alert["status"]["silencedBy"]]

                prometheus.wait(lambda: "SpmmdDown" in received(), 30, "Alertmanager got nothing")
                say(f"Alertmanager holds: {', '.join(sorted(set(received())))}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
