"""A real server under a small load and a real Prometheus that scrapes it, for as long as a `with` block lasts."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import socket
import subprocess
import tarfile
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from local_server import LocalServer

import spmmd

REPOSITORY = Path(__file__).resolve().parents[2]
RULES = REPOSITORY / "helm" / "spmmd" / "files" / "rules.yaml"
DASHBOARDS = REPOSITORY / "helm" / "spmmd" / "files" / "dashboards"
BLOCK = REPOSITORY / "tests" / "data" / "minilm-block0" / "block.safetensors"

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def http_get(url: str, timeout: float = 10.0) -> str:
    """The body of a page on this machine."""
    with urllib.request.urlopen(url, timeout=timeout) as response:
        return str(response.read().decode())


Scrape = tuple[dict[str, str], dict[str, str], list[tuple[str, dict[str, str], float]]]


def samples_of(page: str) -> list[tuple[str, dict[str, str], float]]:
    """Name, labels and value of every sample on a /metrics page."""
    matches = (_SAMPLE.match(line) for line in page.splitlines() if not line.startswith("#"))
    return [(m["name"], dict(_LABEL.findall(m["labels"] or "")), float(m["value"])) for m in matches if m]


def scrape(address: str) -> Scrape:
    """Types by family, help texts by family, and the samples of a /metrics page."""
    types: dict[str, str] = {}
    helps: dict[str, str] = {}
    page = http_get(f"http://{address}/metrics")
    for line in page.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ", 3)
            types[name] = kind
        elif line.startswith("# HELP "):
            _, _, name, text = line.split(" ", 3)
            helps[name] = text
    return types, helps, samples_of(page)


_ports = iter(range(20000 + os.getpid() % 8000, 32768))


def free_port() -> int:
    """A port that nobody listens on, below those that the kernel gives to outgoing connections: a client of another
    server could take one of them before the server that is to have it has started."""
    for port in _ports:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")


def self_signed(folder: Path, days: int = 2) -> tuple[Path, Path]:
    """A certificate for localhost, and its key."""
    pem, key = folder / "tls.crt", folder / "tls.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(pem), "-days", str(days), "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return pem, key


class Load:
    """Threads that use the server as frontends do, until the block is left; a failed call stops its thread and is kept.

    `refused` counts the refusals that the load provokes on purpose; they are no failures. `large` layers do not fit
    into the device's memory together, and are used in turn.
    """

    def __init__(
        self, connect: Callable[[], spmmd.Client], *, callers: int = 3, pause: float = 0.02, large: int = 0
    ) -> None:
        self._connect = connect
        self._large = [f"large{i}" for i in range(large)]
        self._pause = pause
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(self._multiply,)) for _ in range(callers)]
        self._threads.append(threading.Thread(target=self._run, args=(self._register,)))
        self._threads.append(threading.Thread(target=self._run, args=(self._misuse,)))
        self._threads.append(threading.Thread(target=self._run, args=(self._thrash,)))
        self.failures: list[BaseException] = []
        self.refused = 0

    def __enter__(self) -> Load:
        rng = np.random.default_rng(7)
        with self._connect() as client:
            for name, file in (("block0.up", "up.weight"), ("block0.down", "down.weight")):
                client.register_file(name, "block.safetensors", tensor=file, prune=0.5)
            client.register("dense", rng.standard_normal((64, 384)).astype(np.float16), format="dense")
            if self._large:
                # Each a third of the memory: at most two are resident at a time.
                budget = client.device_info()[0].memory_budget_bytes
                for name in self._large:  # each of its own: the same content would be held once
                    weight = rng.standard_normal((budget // 3 // 2 // 1024, 1024)).astype(np.float16)
                    client.register(name, weight, format="dense")
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, step: Callable[[spmmd.Client, np.random.Generator], None]) -> None:
        rng = np.random.default_rng(threading.get_ident() % 1000)
        try:
            with self._connect() as client:
                while not self._stop.wait(self._pause):
                    step(client, rng)
        except BaseException as error:
            self.failures.append(error)

    def _multiply(self, client: spmmd.Client, rng: np.random.Generator) -> None:
        x = rng.standard_normal((int(rng.choice([1, 4, 16])), 384)).astype(np.float32)
        try:
            client.matmul("dense", x)
            hidden = client.matmul("block0.up", x, activation="gelu")
            client.matmul("block0.down", hidden)
            with client.stream() as stream:
                stream.matmul("block0.up", x).result()
        except spmmd.ResourceExhaustedError:
            self.refused += 1

    def _register(self, client: spmmd.Client, rng: np.random.Generator) -> None:
        weight = (rng.standard_normal((256, 384)) * (rng.random((256, 384)) < 0.5)).astype(np.float16)
        client.register("rolling", weight, format="bitmap")
        client.unregister("rolling")
        client.list()
        self._stop.wait(0.3)

    def _thrash(self, client: spmmd.Client, rng: np.random.Generator) -> None:
        for name in self._large:
            try:
                client.matmul(name, rng.standard_normal((1, 1024)).astype(np.float32))
            except spmmd.ResourceExhaustedError:
                self.refused += 1
        self._stop.wait(0.5)

    def _misuse(self, client: spmmd.Client, rng: np.random.Generator) -> None:
        with contextlib.suppress(spmmd.NotFoundError):
            client.matmul("no-such-layer", np.ones((1, 4), np.float32))
        # Two at once, each larger than the queue may hold while the other runs.
        wide = rng.standard_normal((2048, 384)).astype(np.float32)

        def call() -> None:
            try:
                client.matmul("block0.up", wide)
            except spmmd.ResourceExhaustedError:
                self.refused += 1

        pair = [threading.Thread(target=call) for _ in range(3)]
        for thread in pair:
            thread.start()
        for thread in pair:
            thread.join()
        self._stop.wait(1.0)


class Prometheus:
    """Debian's Prometheus with our rules on a free loopback port; `targets` are metrics addresses."""

    def __init__(
        self,
        targets: Sequence[str],
        *,
        interval: str = "1s",
        rules: Sequence[Path] = (RULES,),
        binary: str | None = None,
        labels: str = 'namespace: "operate"',
        alertmanager: str = "",
        scrape_configs: str = "",
    ) -> None:
        found = binary or shutil.which("prometheus")
        if found is None:
            raise FileNotFoundError("prometheus is not installed (Debian package prometheus)")
        self._binary = found
        self._targets = list(targets)
        self._interval = interval
        self._rules = list(rules)
        self._labels = labels
        self._alertmanager = alertmanager
        self._scrape_configs = scrape_configs  # further ones, as lines of YAML
        self._folder = Path(tempfile.mkdtemp(prefix="spmmd-prometheus-"))
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"127.0.0.1:{free_port()}"

    def __enter__(self) -> Prometheus:
        config = f"""global: {{scrape_interval: {self._interval}, evaluation_interval: {self._interval}}}
rule_files: {json.dumps([str(rule) for rule in self._rules])}
scrape_configs:
  - job_name: spmmd
    static_configs: [{{targets: {json.dumps(self._targets)}, labels: {{{self._labels}}}}}]
{self._scrape_configs}
"""
        if self._alertmanager:
            config += f"alerting: {{alertmanagers: [{{static_configs: [{{targets: ['{self._alertmanager}']}}]}}]}}\n"
        (self._folder / "prometheus.yml").write_text(config)
        with open(self._folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                [
                    self._binary,
                    f"--config.file={self._folder}/prometheus.yml",
                    f"--storage.tsdb.path={self._folder}/data",
                    f"--web.listen-address={self.address}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=log,
            )
        self.wait(self._ready, 30, "Prometheus did not become ready")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def wait(self, condition: Callable[[], bool], seconds: float, message: str) -> None:
        """Polls until the condition holds; AssertionError with the message when it does not."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or (self._process is not None and self._process.poll() is not None):
                raise AssertionError(f"{message}\n{(self._folder / 'log').read_text()[-2000:]}")
            time.sleep(0.2)

    def backfill(self, scrapes: Sequence[str], interval: float = 1.0) -> float:
        """Before the block is entered: fills in recorded /metrics pages as if the last had been scraped now.

        Returns the time of the last.
        """
        end = time.time()
        lines = []
        for i, page in enumerate(scrapes):
            stamp = end - interval * (len(scrapes) - 1 - i)
            for name, labels, value in samples_of(page):
                labels = {**labels, "job": "spmmd", "instance": "recorded"}
                text = ",".join(f'{key}="{label}"' for key, label in labels.items())
                lines.append(f"{name}{{{text}}} {value} {stamp:.3f}\n")
        (self._folder / "recorded.txt").write_text("".join(lines) + "# EOF\n")
        command = ["promtool", "tsdb", "create-blocks-from", "openmetrics"]
        subprocess.run(
            [*command, str(self._folder / "recorded.txt"), str(self._folder / "data")], check=True, capture_output=True
        )
        return end

    def query(self, expression: str, at: float | None = None) -> list[tuple[dict[str, str], float]]:
        """An instant query's labels and values."""
        result = self._api("query", query=expression, **({} if at is None else {"time": at}))["result"]
        return [(sample["metric"], float(sample["value"][1])) for sample in result]

    def query_range(
        self, expression: str, start: float, end: float, step: float
    ) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """A range query's labels and points."""
        result = self._api("query_range", query=expression, start=start, end=end, step=step)["result"]
        return [(line["metric"], [(float(t), float(v)) for t, v in line["values"]]) for line in result]

    def alerts(self) -> list[dict[str, Any]]:
        """Pending and firing alerts, as the API gives them."""
        alerts: list[dict[str, Any]] = self._api("alerts")["alerts"]
        return alerts

    def rules(self) -> list[dict[str, Any]]:
        """All rules with their health."""
        return [rule for group in self._api("rules")["groups"] for rule in group["rules"]]

    def _ready(self) -> bool:
        try:
            http_get(f"http://{self.address}/-/ready", 2)
        except OSError:
            return False
        return True

    def _api(self, path: str, **parameters: Any) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            answer = json.loads(http_get(url))
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None
        assert answer["status"] == "success", answer
        return answer["data"]


@dataclass
class Live:
    """What runs: the server, Prometheus, the load."""

    server: LocalServer
    prometheus: Prometheus
    load: Load


# ---- dashboards


def recorded_pages() -> list[str]:
    """Pages of /metrics of a server on an H200, one a second: see recorded/README.md."""
    with tarfile.open(Path(__file__).parent / "recorded" / "h200.tar.xz") as tar:
        members = sorted((member for member in tar if member.isfile()), key=lambda member: member.name)
        return [tar.extractfile(member).read().decode() for member in members]  # type: ignore[union-attr]


class PanelQuery:
    """One query of a panel of a generated dashboard."""

    def __init__(self, board: str, title: str, unit: str, kind: str, expression: str, legend: str) -> None:
        self.board, self.title, self.unit, self.kind = board, title, unit, kind
        self.expression, self.legend = expression, legend

    def __str__(self) -> str:
        return f"{self.board} / {self.title}: {self.expression}"

    def runnable(self, rate_interval: str) -> str:
        """The expression with Grafana's variables filled in."""
        text = self.expression.replace("$__rate_interval", rate_interval)
        text = text.replace("$job", "spmmd").replace("$instance", ".*")
        assert "$" not in text, f"unknown variable in {text}"
        return text


def panel_queries(folder: Path = DASHBOARDS) -> Iterator[PanelQuery]:
    """Every query of every panel of the dashboards on disk."""
    for path in sorted(folder.glob("*.json")):
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "none")
            for target in panel["targets"]:
                yield PanelQuery(
                    board["title"], panel["title"], unit, panel["type"], target["expr"], target.get("legendFormat", "")
                )


def finite(samples: Sequence[tuple[dict[str, str], float]]) -> list[tuple[dict[str, str], float]]:
    """Those whose value is a number."""
    return [sample for sample in samples if math.isfinite(sample[1])]


def metric_names(expression: str) -> set[str]:
    """The spmmd series that a PromQL expression reads, recording rules included."""
    return set(re.findall(r"\bspmmd[_:][\w:]*", expression))
