"""Triton's load generator, unchanged: it asks for metadata, configuration and statistics, and reports them."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

import pytest
from conftest import Layers
from local_server import LocalServer
from wire import REPOSITORY

HOME = REPOSITORY / ".venv" / "triton" / "perf_analyzer"
PROGRAM = HOME / "bin" / "perf_analyzer"

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="perf_analyzer comes for x86-64 only")


@pytest.mark.parametrize(
    "flags",
    [
        ["--concurrency-range=4", "-b", "2"],
        ["--streaming", "--shared-memory=system", "--concurrency-range=2"],
        ["--async", "--request-rate-range=100"],
    ],
    ids=["unary", "stream-with-shared-memory", "async-at-a-rate"],
)
@pytest.mark.parametrize("model", ["block.0/mlp/up.weight", "fp32"])
def test_perf_analyzer(server: LocalServer, layers: Layers, model: str, flags: list[str], tmp_path: Path) -> None:
    csv = tmp_path / "out.csv"
    # It wants three windows that agree within -s percent; how steady the figures are does not matter here.
    command = [PROGRAM, "-i", "grpc", "-u", server.address, "-m", model, "-f", csv, *flags]
    command += ["--measurement-mode=count_windows", "--measurement-request-count=20", "-r", "10", "-s", "999"]
    libraries = HOME / "nvidia" / "cuda_runtime" / "lib"
    run = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    text = run.stdout + run.stderr
    assert run.returncode == 0, text
    for name in ("Inference count", "Execution count", "Successful request count"):
        counted = re.search(rf"{name}: (\d+)", text)
        assert counted is not None, text
        assert int(counted[1]) > 0, text
    assert "compute infer" in text
    header, line = csv.read_text().splitlines()[:2]
    row = dict(zip(header.split(","), line.split(","), strict=True))
    assert float(row["Inferences/Second"]) > 0
    assert "Server Compute Infer" in row
