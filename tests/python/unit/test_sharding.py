"""Which shard holds a layer, and where the client sends its calls."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from unit.fake_server import FakeServer

import spmmd
from spmmd.sharding import replicas_of, target_of

COUNTS = (1, 2, 3, 5, 8, 100)
# The same table is in tests/proto/shard_test.cc.
OWNERS = {
    "block0/up": (0, 0, 2, 3, 5, 5),
    "block0/down": (0, 0, 2, 3, 5, 5),
    "block1/up": (0, 1, 1, 1, 1, 40),
    "head": (0, 0, 0, 3, 7, 54),
    "model.layers.31.mlp.up_proj": (0, 0, 0, 3, 3, 13),
    "a": (0, 0, 0, 0, 0, 91),
    "0": (0, 0, 2, 2, 2, 87),
    "x-y_z.w": (0, 0, 0, 4, 5, 29),
}


@pytest.mark.parametrize("layer", OWNERS)
def test_the_rule_is_that_of_the_server(layer: str) -> None:
    assert tuple(spmmd.shard_of(layer, count) for count in COUNTS) == OWNERS[layer]


def test_a_new_shard_only_takes_and_takes_its_share() -> None:
    layers = [f"layer{i}" for i in range(2000)]
    for count in (1, 2, 3, 7):
        moved = spmmd.moves(layers, count, count + 1)
        assert {move.target for move in moved} == {count}
        assert 0.8 < len(moved) * (count + 1) / len(layers) < 1.2
        # The way back.
        back = spmmd.moves(layers, count + 1, count)
        assert {(move.layer, move.target) for move in back} == {(move.layer, move.source) for move in moved}


def test_no_shard_is_refused() -> None:
    with pytest.raises(ValueError, match="count"):
        spmmd.shard_of("a", 0)
    with pytest.raises(ValueError, match="shards"):
        spmmd.ShardedClient([])


def test_targets() -> None:
    assert target_of("dns:///spmmd-shard-0-headless:8500") == "dns:///spmmd-shard-0-headless:8500"
    assert target_of(["localhost:1"]) == "localhost:1"
    assert target_of(["127.0.0.1:1", "127.0.0.2:2"]) == "ipv4:127.0.0.1:1,127.0.0.2:2"
    assert target_of(["[::1]:1", "[::1]:2"]) == "ipv6:[::1]:1,[::1]:2"
    with pytest.raises(ValueError, match="'a:1' is no IP address"):
        target_of(["a:1", "b:1"])
    with pytest.raises(ValueError, match="one family"):
        target_of(["127.0.0.1:1", "[::1]:2"])
    with pytest.raises(ValueError, match="at least one"):
        target_of([])


def test_replicas_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolves_to(*addresses: str) -> Sequence[str]:
        found = [
            (socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 8500))
            for address in addresses
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: found)
        return replicas_of("dns:///spmmd-shard-0-headless.ns.svc:8500")

    assert resolves_to("10.0.0.2", "10.0.0.1") == ["10.0.0.1:8500", "10.0.0.2:8500"]
    # Every pod has an address of each family: once is enough.
    assert resolves_to("10.0.0.2", "10.0.0.1", "fd00::1", "fd00::2") == ["10.0.0.1:8500", "10.0.0.2:8500"]
    assert resolves_to("fd00::2", "fd00::1") == ["[fd00::1]:8500", "[fd00::2]:8500"]
    assert resolves_to("127.0.0.1", "::1") == ["dns:///spmmd-shard-0-headless.ns.svc:8500"]
    assert replicas_of("unix:/run/s") == ["unix:/run/s"]
    assert replicas_of(["a:1", "b:1"]) == ["a:1", "b:1"]

    def fails(*_args: object, **_options: object) -> None:
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    with pytest.raises(spmmd.UnavailableError, match="no such name"):
        replicas_of("nowhere:8500")


@pytest.fixture
def shards() -> Iterator[list[FakeServer]]:
    servers = [FakeServer() for _ in range(3)]
    yield servers
    for server in servers:
        server.stop()


def test_calls_go_to_the_layers_shard_and_say_which_layer(shards: list[FakeServer]) -> None:
    weight = np.eye(4, dtype=np.float32)
    with spmmd.ShardedClient([server.address for server in shards], timeout=30.0) as client:
        for layer, owners in OWNERS.items():
            owner = shards[owners[2]]
            for call in (
                lambda layer=layer: client.register(layer, weight),
                lambda layer=layer: client.matmul(layer, np.ones((1, 4), np.float32)),
                lambda layer=layer: client.get(layer),
            ):
                owner.metadata = {}
                call()
                assert owner.metadata["spmmd-layer"] == layer
        for i, server in enumerate(shards):
            assert set(server.layers) == {n for n, owners in OWNERS.items() if owners[2] == i}
        assert {layer.name for layer in client.list()} == set(OWNERS)


def test_a_program_over_several_shards_is_refused(shards: list[FakeServer]) -> None:
    def program(*layers: str) -> spmmd.Program:
        result = spmmd.Program()
        x = result.input("x")
        for layer in layers:
            x = result.matmul(layer, x)
        return result

    with spmmd.ShardedClient([server.address for server in shards], timeout=30.0) as client:
        for layer in ("block0/up", "block0/down", "head"):
            client.register(layer, np.eye(4, dtype=np.float32))
        x = np.ones((1, 4), np.float32)
        with pytest.raises(ValueError, match="several shards"):
            client.execute(program("block0/up", "head"), x)
