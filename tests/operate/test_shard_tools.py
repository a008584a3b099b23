"""spmmctl with shards: every command finds its server, and `apply` fills new, restarted and added ones."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet import LAYERS, Caller, X, assert_right
from live import free_port
from local_server import LocalServer

import spmmd


@dataclass
class Tool:
    """spmmctl against a list of shards."""

    binary: Path
    shards: str = ""

    def run(self, *arguments: str, fails: bool = False) -> Any:
        """Its answer in JSON; with `fails`, its error."""
        command = [str(self.binary), "--json", *([f"--shards={self.shards}"] if self.shards else []), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert (result.returncode != 0) == fails, result.stderr
        return json.loads(result.stderr if fails else result.stdout)

    def actions(self, *arguments: str) -> dict[tuple[str, str], str]:
        """What `apply` did, by layer and server."""
        answer = self.run("apply", *arguments)
        return {(action["layer"], action["server"]): action["action"] for action in answer["actions"]}


def target(addresses: list[str]) -> str:
    return "ipv4:" + ",".join(addresses)


@pytest.fixture
def tool(binary: Path) -> Tool:
    return Tool(binary.with_name("spmmctl"))


@pytest.fixture
def empty(repository: Path, tmp_path: Path) -> Path:
    """The layers' files without a manifest that servers would load by themselves."""
    folder = tmp_path / "models"
    shutil.copytree(repository, folder)
    (folder / "layers.textproto").rename(folder / "fleet.textproto")
    return folder


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as all_servers:
        yield all_servers


def start(stack: ExitStack, binary: Path, index: int, count: int, *flags: str, port: int = 0) -> LocalServer:
    flags = ("--cpu-threads=1", f"--shard-index={index}", f"--shard-count={count}", *flags)
    return stack.enter_context(LocalServer(binary, flags, listen=f"127.0.0.1:{port}"))


def names(address: str) -> set[str]:
    with spmmd.Client(address) as client:
        return {layer.name for layer in client.list()}


def test_commands_find_the_shard_and_all_its_replicas(
    tool: Tool, stack: ExitStack, binary: Path, empty: Path, tmp_path: Path
) -> None:
    fleet = [[start(stack, binary, i, 2).address for _ in range(2)] for i in range(2)]
    tool.shards = ";".join(target(replicas) for replicas in fleet)
    for layer in ("block1/up", "head"):
        file = layer.replace("/", "_")
        tool.run("register", layer, "--file", str(empty / f"{file}.npy"))
        shard = spmmd.shard_of(layer, 2)
        for i, replicas in enumerate(fleet):
            for address in replicas:
                assert (layer in names(address)) == (i == shard)
        np.save(tmp_path / "x.npy", X)
        tool.run("run", layer, "--input", str(tmp_path / "x.npy"), "--output", str(tmp_path / "y.npy"))
        assert_right(layer, np.load(tmp_path / "y.npy"))
        assert tool.run("describe", layer)["name"] == layer
        assert tool.run("pin", layer)["pinned"] is True
        assert tool.run("warm", layer)["name"] == layer
    assert [layer["name"] for layer in tool.run("list")["layers"]] == ["block1/up", "head"]
    status = tool.run("status")["shards"]
    for i, shard_status in enumerate(status):
        for replica, address in zip(shard_status["replicas"], fleet[i], strict=True):
            assert replica["address"] == address
            assert replica["healthy"] is True
            assert (replica["server"]["shard_index"], replica["server"]["shard_count"]) == (i, 2)
    tool.run("unregister", "head")
    assert not any("head" in names(address) for replicas in fleet for address in replicas)
    assert tool.run("unregister", "head", fails=True)["error"]["code"] == "NOT_FOUND"


def test_shards_in_a_wrong_order_are_told(tool: Tool, stack: ExitStack, binary: Path, empty: Path) -> None:
    addresses = [start(stack, binary, i, 2).address for i in (1, 0)]
    tool.shards = ";".join(addresses)
    error = tool.run("register", "head", "--file", str(empty / "head.npy"), fails=True)["error"]
    assert error["reason"] == "WRONG_SHARD"
    assert "this server is shard 1" in error["message"]


def test_shard_tells_what_a_change_moves(tool: Tool) -> None:
    answer = tool.run("shard", *LAYERS, "--count=5", "--from=4")["layers"]
    assert [entry["layer"] for entry in answer] == LAYERS
    for entry in answer:
        assert entry["shard"] == spmmd.shard_of(entry["layer"], 5)
        assert entry["before"] == spmmd.shard_of(entry["layer"], 4)


def test_apply_fills_servers_and_is_idempotent(tool: Tool, stack: ExitStack, binary: Path, empty: Path) -> None:
    ports = [free_port(), free_port()]
    fleet = [start(stack, binary, i, 2, port=port) for i, port in enumerate(ports)]
    tool.shards = ";".join(one.address for one in fleet)
    manifest = str(empty / "fleet.textproto")
    planned = tool.actions(manifest, "--dry-run")
    assert planned == {(layer, fleet[spmmd.shard_of(layer, 2)].address): "register" for layer in LAYERS}
    assert not names(fleet[0].address)
    assert tool.actions(manifest) == planned
    assert set(tool.actions(manifest).values()) == {"keep"}
    with spmmd.ShardedClient([one.address for one in fleet]) as client:
        for layer in LAYERS:
            assert_right(layer, client.matmul(layer, X))
            assert client.get(layer).version == 1
    # Other content is a new version; what is as it was stays.
    np.save(empty / "head.npy", np.load(empty / "head.npy") * 2)
    changed = tool.actions(manifest)
    assert [layer for (layer, _), action in changed.items() if action == "register"] == ["head"]
    # A restarted server has lost its uploads; the other keeps its own.
    fleet[1].stop()
    start(stack, binary, 1, 2, port=ports[1])
    again = tool.actions(manifest)
    assert {layer for (layer, _), action in again.items() if action == "register"} == {
        layer for layer in LAYERS if spmmd.shard_of(layer, 2) == 1
    }


def test_a_manifest_that_cannot_be_is_refused(tool: Tool, stack: ExitStack, binary: Path, tmp_path: Path) -> None:
    one = start(stack, binary, 0, 1)
    tool.shards = one.address
    manifest = tmp_path / "m.textproto"
    for text, message in (
        (
            'layers { name: "a" file { path: "a.npy" } } layers { name: "a" file { path: "b.npy" } }',
            "'a' is there twice",
        ),
        ('layers { name: "a" }', "layers[0].file must be set"),
        ("layers { nam: 1 }", ":1:13: Message type"),
        ('layers { name: "a" file { path: "none.npy" } }', "none.npy"),
    ):
        manifest.write_text(text)
        assert message in tool.run("apply", str(manifest), fails=True)["error"]["message"]
    assert "No such file" in tool.run("apply", str(tmp_path / "none.json"), fails=True)["error"]["message"]
    assert not names(one.address)


@pytest.mark.parametrize("remote", [False, True], ids=["uploaded", "remote"])
def test_uploaded_layers_move_when_a_shard_is_added_under_load(
    tool: Tool, stack: ExitStack, binary: Path, empty: Path, remote: bool
) -> None:
    """docs/scale-out.md, "Layers that were uploaded": from two shards to three, and no caller notices."""
    repository = (f"--model-repository={empty}",)
    old = [start(stack, binary, i, 3, "--shard-transition-from=2", *repository).address for i in range(2)]
    manifest = [str(empty / "fleet.textproto"), *(["--remote"] if remote else [])]
    tool.shards = ";".join(old)
    assert set(tool.actions(*manifest).values()) == {"register"}
    moved = {layer for layer in LAYERS if spmmd.shard_of(layer, 3) == 2}
    assert moved
    with spmmd.ShardedClient(old) as client, Caller(client) as caller:
        caller.wait(30)
        new = [*old, start(stack, binary, 2, 3, "--shard-transition-from=2", *repository).address]  # 1. the new shard
        tool.shards = ";".join(new)
        actions = tool.actions(*manifest)  # 2. what it is to hold
        assert {key for key, action in actions.items() if action == "register"} == {(layer, new[2]) for layer in moved}
        caller.wait(30)
        client.reshard(new)  # 3. the clients
        caller.wait(30)
        actions = tool.actions(*manifest, "--remove")  # 4. what the old ones need no more
        assert {layer for (layer, _), action in actions.items() if action == "remove"} == moved
        caller.wait(30)
        assert not caller.errors
    for i, address in enumerate(new):
        assert names(address) == {layer for layer in LAYERS if spmmd.shard_of(layer, 3) == i}
