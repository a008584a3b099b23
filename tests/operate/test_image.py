"""The files in docker/, as far as they can be checked without a container engine. See scripts/image_check.sh."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from live import DASHBOARDS, REPOSITORY, RULES
from local_server import LocalServer

DOCKER = REPOSITORY / "docker"


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"])


def test_hadolint() -> None:
    hadolint = shutil.which("hadolint") or str(REPOSITORY / ".venv" / "bin" / "hadolint")
    if not os.access(hadolint, os.X_OK):
        pytest.skip("hadolint is not installed: scripts/setup.sh --dev")
    subprocess.run([hadolint, str(DOCKER / "Dockerfile")], check=True)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_images_end_small_and_confined(target: str) -> None:
    text = (DOCKER / "Dockerfile").read_text()
    stage = re.search(rf"(?ms)^FROM scratch AS {target}\n(.*?)(?=^FROM|\Z)", text)
    assert stage is not None
    assert "\nUSER 65532:65532\n" in stage[1]
    assert "RUN" not in re.findall(r"(?m)^([A-Z]+)", stage[1])
    assert '"--health-check=127.0.0.1:8501"' in stage[1]


def test_the_image_configuration_is_taken_by_the_server(binary: Path, tmp_path: Path) -> None:
    text = (DOCKER / "spmmd.textproto").read_text()
    assert 'health_listen: "0.0.0.0:8501"' in text
    text = re.sub(r'"0\.0\.0\.0:\d+"', '"127.0.0.1:0"', text).replace('"/models"', f'"{tmp_path}"')
    (tmp_path / "spmmd.textproto").write_text(text)
    with LocalServer(binary, [f"--config={tmp_path}/spmmd.textproto"]) as server:
        assert server.running


def test_compose_mounts_what_exists_and_confines_the_server() -> None:
    services = compose()
    for service in services.values():
        assert service["cap_drop"] == ["ALL"]
        for volume in service["volumes"]:
            source = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", volume).split(":")[0]
            assert not source.startswith(".") or (DOCKER / source).exists(), source
    assert services["spmmd"]["read_only"] is True
    assert services["spmmd"]["user"] == "65532:65532"
    grace = int(str(services["spmmd"]["stop_grace_period"]).removesuffix("s"))
    drain = re.search(r'drain_timeout: "(\d+)s"', (DOCKER / "spmmd.textproto").read_text())
    assert drain is not None
    assert grace > int(drain[1])
    override = yaml.safe_load((DOCKER / "compose.cuda.yaml").read_text())["services"]
    assert set(override) <= set(services)


def test_what_grafana_is_given() -> None:
    mounts = [volume.split(":") for volume in compose()["grafana"]["volumes"]]
    provider = yaml.safe_load((DOCKER / "grafana/provisioning/dashboards/spmmd.yaml").read_text())["providers"][0]
    source = next(source for source, target, *_ in mounts if target == provider["options"]["path"])
    assert (DOCKER / source).resolve() == DASHBOARDS
    datasource = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    assert datasource["datasources"][0]["url"] == "http://prometheus:9090"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: scripts/setup.sh --ops")
def test_prometheus_configuration(tmp_path: Path) -> None:
    text = (DOCKER / "prometheus" / "prometheus.yml").read_text()
    assert "/etc/prometheus/rules.yaml" in text
    (tmp_path / "prometheus.yml").write_text(text.replace("/etc/prometheus/rules.yaml", str(RULES)))
    subprocess.run(["promtool", "check", "config", str(tmp_path / "prometheus.yml")], check=True, capture_output=True)


def test_the_build_context_holds_what_is_compiled() -> None:
    kept = [line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for path in kept:
        assert (REPOSITORY / path).exists(), path
    # Every folder that the top CMakeLists.txt adds, but the tests.
    folders = set(re.findall(r"add_subdirectory\((\w+)", (REPOSITORY / "CMakeLists.txt").read_text())) - {"tests"}
    assert folders <= {path.split("/")[0] for path in kept}
