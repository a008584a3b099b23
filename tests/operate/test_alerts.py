"""A real alert from a real fault. The whole way with the rules' own waiting times: scripts/alert_walkthrough.py."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from live import RULES, Prometheus
from local_server import LocalServer


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed: scripts/setup.sh --ops")
def test_a_killed_server_fires_an_alert(binary: Path, tmp_path: Path) -> None:
    rules, count = re.subn(r"(?m)^(\s+for:) \d+[smh]$", r"\1 1s", RULES.read_text())
    assert count > 5
    (tmp_path / "rules.yaml").write_text(rules)
    with (
        LocalServer(binary) as server,
        Prometheus([server.metrics], rules=[tmp_path / "rules.yaml"]) as prometheus,
    ):
        prometheus.wait(lambda: bool(prometheus.query("spmmd_build_info")), 20, "nothing was scraped")
        assert not prometheus.alerts()
        os.kill(server.pid, signal.SIGKILL)

        def firing() -> set[str]:
            return {alert["labels"]["alertname"] for alert in prometheus.alerts() if alert["state"] == "firing"}

        prometheus.wait(lambda: "SpmmdDown" in firing(), 20, "no alert")
        assert firing() == {"SpmmdDown"}
