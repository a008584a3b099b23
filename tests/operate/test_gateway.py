"""docs/envoy.yaml in a real Envoy, for clients that do not shard by themselves."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import yaml
from fleet import LAYERS, Caller, X, assert_right, server
from live import REPOSITORY, free_port
from local_server import LocalServer

import spmmd

CONFIG = REPOSITORY / "docs" / "envoy.yaml"
ENVOY = shutil.which("envoy") or str(REPOSITORY / ".venv" / "bin" / "envoy")
pytestmark = pytest.mark.skipif(not os.access(ENVOY, os.X_OK), reason="envoy is not installed: scripts/setup.sh --ops")


def routes(config: Any) -> dict[str, set[str]]:
    """Regular expressions of layers by cluster."""
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    result: dict[str, set[str]] = {}
    for route in manager["route_config"]["virtual_hosts"][0]["routes"]:
        if "route" in route:
            regex = route["match"]["headers"][0]["string_match"]["safe_regex"]["regex"]
            result.setdefault(route["route"]["cluster"], set()).add(regex)
    return result


def test_the_routes_follow_the_rule_of_the_clients() -> None:
    by_cluster = routes(yaml.safe_load(CONFIG.read_text()))
    for layer in LAYERS:
        matching = [c for c, regexes in by_cluster.items() if all(re.fullmatch(regex, layer) for regex in regexes)]
        assert matching == [f"shard-{spmmd.shard_of(layer, len(by_cluster))}"]


@dataclass
class Gateway:
    address: str
    shards: list[list[LocalServer]]


@pytest.fixture(scope="module")
def gateway(binary: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Two shards of two replicas behind Envoy, which asks for their health more often than in the file."""
    tmp_path = tmp_path_factory.mktemp("envoy")
    with ExitStack() as stack:
        fleet = [
            [
                stack.enter_context(
                    server(binary, repository, f"--shard-index={i}", "--shard-count=2", "--drain-delay=1500ms")
                )
                for _ in range(2)
            ]
            for i in range(2)
        ]
        config = yaml.safe_load(CONFIG.read_text())
        listener, admin = free_port(), free_port()
        config["static_resources"]["listeners"][0]["address"]["socket_address"] = {
            "address": "127.0.0.1",
            "port_value": listener,
        }
        config["admin"]["address"]["socket_address"]["port_value"] = admin
        for cluster, replicas in zip(config["static_resources"]["clusters"], fleet, strict=True):
            cluster["health_checks"][0] |= {"interval": "0.3s", "no_traffic_interval": "0.3s"}
            hosts = [one.address.rpartition(":") for one in replicas]
            cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
                {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}
                for host, _, port in hosts
            ]
        (tmp_path / "envoy.yaml").write_text(yaml.safe_dump(config))
        with open(tmp_path / "log", "wb") as log:
            process = subprocess.Popen(
                [ENVOY, "-c", str(tmp_path / "envoy.yaml"), "--use-dynamic-base-id", "--concurrency", "1"],
                stdout=log,
                stderr=log,
            )
        try:
            with spmmd.Client(f"127.0.0.1:{listener}", timeout=20.0) as client:
                client.wait_ready()
            yield Gateway(f"127.0.0.1:{listener}", fleet)
            assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
        finally:
            process.terminate()
            process.wait(20)


def chain(*layers: str) -> spmmd.Program:
    program = spmmd.Program()
    x = program.input("x")
    for layer in layers:
        program.output(program.matmul(layer, x))
    return program


def test_every_call_on_a_layer_finds_its_shard(gateway: Gateway) -> None:
    with spmmd.Client(gateway.address, timeout=20.0) as client:
        for layer in LAYERS:
            assert_right(layer, client.matmul(layer, X))
            assert client.get(layer).name == layer
            with client.stream(layer=layer) as stream:
                assert_right(layer, stream.matmul(layer, X).result(20))
        program = client.register_program(chain("block1/up", "block1/down"))
        assert program.layer == "block1/up"
        with pytest.raises(spmmd.SpmmdError) as caught:
            client.matmul("no/such", X)
        assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED

    async def call() -> None:
        async with spmmd.AsyncClient(gateway.address, timeout=20.0) as client:
            for layer in LAYERS:
                assert_right(layer, await client.matmul(layer, X))
                async with client.stream(layer=layer) as stream:
                    assert_right(layer, await (await stream.matmul(layer, X)))

    asyncio.run(call())


def test_the_command_line_and_so_the_cpp_client_names_the_layer(gateway: Gateway, binary: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    for layer in ("block0/up", "block1/up", "head"):
        command = [str(binary.with_name("spmmctl")), f"--server={gateway.address}", "run", layer]
        command += ["--input", str(tmp_path / "x.npy"), "--output", str(tmp_path / "y.npy")]
        subprocess.run(command, check=True, capture_output=True)
        assert_right(layer, np.load(tmp_path / "y.npy"))


# Last: it ends two of the servers.
def test_a_killed_and_a_draining_replica_cost_no_error(gateway: Gateway) -> None:
    with spmmd.Client(gateway.address, timeout=20.0) as client, Caller(client) as caller:
        caller.wait()
        os.kill(gateway.shards[0][0].pid, signal.SIGKILL)
        os.kill(gateway.shards[1][0].pid, signal.SIGTERM)
        while gateway.shards[1][0].running:
            caller.wait(20)
        caller.wait()
        assert not caller.errors
