"""Dashboards and rules, run by a real Prometheus that scrapes a real server."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import (
    DASHBOARDS,
    REPOSITORY,
    RULES,
    Live,
    PanelQuery,
    Prometheus,
    finite,
    metric_names,
    panel_queries,
    recorded_pages,
    samples_of,
)

RATE_INTERVAL = "10s"

# Dashboards that stay empty without a GPU.
NEEDS_GPU = {"spmmd / GPU": "its metrics are NVML's, absent without a GPU"}


@pytest.mark.parametrize(
    "query", list(panel_queries()), ids=lambda query: f"{query.board}/{query.title}/{query.legend}"
)
def test_every_panel_shows_data(live: Live, query: PanelQuery) -> None:
    expression = query.runnable(RATE_INTERVAL)
    if query.board in NEEDS_GPU:
        assert live.prometheus.query(expression) == []  # and the query is well-formed
        return
    live.prometheus.wait(lambda: bool(finite(live.prometheus.query(expression))), 15, f"no data for {expression}")


@pytest.fixture(scope="module")
def gpu() -> Iterator[tuple[Prometheus, float]]:
    """Prometheus with what a server on an H200 exposed, and when it ended."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: scripts/setup.sh --ops")
    prometheus = Prometheus([], rules=[])
    end = prometheus.backfill(recorded_pages())
    with prometheus:
        yield prometheus, end


# Metrics that are newer than the recording of the GPU: the server under load above shows them.
SINCE_THE_RECORDING = (
    "spmmd_shard_count",
    "spmmd_shm_",
    "spmmd_rings",
    "spmmd_cache_",
    "spmmd_host_layer_bytes",
    "spmmd_requests_waiting_for_layers",
    "spmmd_layer_eviction_duration_seconds",
    "spmmd_layer_reload_duration_seconds",
)


def recorded_queries() -> list[PanelQuery]:
    """The panels whose metrics the recording has."""
    return [
        query
        for query in panel_queries()
        if not any(name.startswith(SINCE_THE_RECORDING) for name in metric_names(query.expression))
    ]


def test_what_is_newer_than_the_recording_is_not_in_it() -> None:
    names = {name for name, _, _ in samples_of(recorded_pages()[-1])}
    assert not [name for name in names if name.startswith(SINCE_THE_RECORDING)]
    assert len(recorded_queries()) > 35


@pytest.mark.parametrize("query", recorded_queries(), ids=lambda q: f"{q.board}/{q.title}/{q.legend}")
def test_every_panel_shows_data_of_a_gpu(gpu: tuple[Prometheus, float], query: PanelQuery) -> None:
    prometheus, end = gpu
    assert finite(prometheus.query(query.runnable("30s"), end))


def test_rules_load_and_evaluate_without_error(live: Live) -> None:
    rules = live.prometheus.rules()
    assert {rule["type"] for rule in rules} == {"recording", "alerting"}
    live.prometheus.wait(
        lambda: all(rule["health"] == "ok" for rule in live.prometheus.rules()),
        15,
        f"unhealthy: {[rule for rule in rules if rule['health'] != 'ok']}",
    )
    assert finite(live.prometheus.query("spmmd:device_memory_used:ratio"))


def test_a_certificate_that_ends_in_two_days_is_pending_as_an_alert(live: Live) -> None:
    names = {"pending": 0, "firing": 0}

    def noticed() -> bool:
        for alert in live.prometheus.alerts():
            if alert["labels"]["alertname"] == "SpmmdCertificateExpiresSoon":
                names[alert["state"]] += 1
        return sum(names.values()) > 0

    live.prometheus.wait(noticed, 15, "the certificate of two days raised nothing")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: scripts/setup.sh --ops")
def test_rule_unit_tests(tmp_path: Path) -> None:
    shutil.copy(RULES, tmp_path / "rules.yaml")
    shutil.copy(Path(__file__).with_name("rules_test.yaml"), tmp_path)
    subprocess.run(["promtool", "check", "rules", "rules.yaml"], cwd=tmp_path, check=True)
    subprocess.run(["promtool", "test", "rules", "rules_test.yaml"], cwd=tmp_path, check=True)


def test_dashboards_are_those_of_the_generator() -> None:
    if importlib.util.find_spec("grafana_foundation_sdk") is None:
        pytest.skip("grafana-foundation-sdk is not installed: scripts/setup.sh --ops")
    subprocess.run([sys.executable, str(REPOSITORY / "helm" / "dashboards" / "generate.py"), "--check"], check=True)


@pytest.mark.parametrize("path", sorted(DASHBOARDS.glob("*.json")), ids=lambda path: path.stem)
def test_dashboards_are_portable(path: Path) -> None:
    board = json.loads(path.read_text())
    assert board["uid"] == path.stem
    assert board.get("id") is None
    variables = {variable["name"]: variable["type"] for variable in board["templating"]["list"]}
    assert variables["datasource"] == "datasource"
    for panel in board["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        assert panel["description"], panel["title"]
        for target in panel["targets"]:
            if "rate(" in target["expr"]:
                assert "$__rate_interval" in target["expr"], panel["title"]
