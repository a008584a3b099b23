"""Replicas and shards: several servers on loopback ports; one is killed, one added, one drained."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from live import REPOSITORY, free_port, scrape
from local_server import LocalServer

import spmmd

LAYERS = [f"block{i}/{part}" for i in range(6) for part in ("up", "down")] + ["head"]
ROWS, COLUMNS = 24, 32


def weight_of(layer: str) -> Any:
    """A matrix of its own for every layer, small integers so that products are exact."""
    rng = np.random.default_rng(sum(layer.encode()))
    return rng.integers(-3, 4, (ROWS, COLUMNS)).astype(np.float32)


X = np.arange(3 * COLUMNS, dtype=np.float32).reshape(3, COLUMNS) % 7


def assert_right(layer: str, y: Any) -> None:
    np.testing.assert_array_equal(y, X @ weight_of(layer).T, err_msg=layer)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model repository with the layers and the manifest that every server gets."""
    folder = tmp_path_factory.mktemp("models")
    manifest = ""
    for layer in LAYERS:
        name = layer.replace("/", "_") + ".npy"
        np.save(folder / name, weight_of(layer))
        manifest += f'layers {{ name: "{layer}" file {{ path: "{name}" }} }}\n'
    (folder / "layers.textproto").write_text(manifest)
    return folder


def server(binary: Path, repository: Path, *flags: str, port: int = 0) -> LocalServer:
    return LocalServer(
        binary,
        [f"--model-repository={repository}", "--cpu-threads=1", *flags],
        listen=f"127.0.0.1:{port}",
    )


def executed(one: LocalServer) -> float:
    """Calls of Execute that a server has answered."""
    return sum(
        value
        for name, labels, value in scrape(one.metrics)[2]
        if name == "spmmd_requests_total" and labels["rpc"].endswith("/Execute") and labels["code"] == "OK"
    )


class Caller:
    """Multiplies with all layers in turn until the block is left; wrong answers and errors are kept."""

    def __init__(self, client: spmmd.ShardedClient | spmmd.Client, layers: list[str] | None = None) -> None:
        self._client = client
        self._layers = layers or LAYERS
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.calls = 0
        self.wrong: list[BaseException] = []
        self.errors: list[spmmd.SpmmdError] = []

    def __enter__(self) -> Caller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        assert not self.wrong, self.wrong[0]

    def _run(self) -> None:
        while not self._stop.is_set():
            layer = self._layers[self.calls % len(self._layers)]
            try:
                assert_right(layer, self._client.matmul(layer, X, timeout=20.0))
            except spmmd.SpmmdError as error:
                self.errors.append(error)
            except BaseException as error:
                self.wrong.append(error)
            self.calls += 1

    def wait(self, calls: int = 60) -> None:
        """Until that many further calls are done."""
        target = self.calls + calls
        deadline = time.monotonic() + 30
        while self.calls < target and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.calls >= target, "the caller makes no progress"


@contextmanager
def shards(binary: Path, repository: Path, counts: list[tuple[int, int]]) -> Iterator[list[LocalServer]]:
    """Servers for (index, count) pairs."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(server(binary, repository, f"--shard-index={i}", f"--shard-count={n}"))
            for i, n in counts
        ]


# ---- replicas


def test_killed_and_drained_replicas_cost_no_wrong_answer_and_no_error(binary: Path, repository: Path) -> None:
    with ExitStack() as stack:
        replicas = [stack.enter_context(server(binary, repository, "--drain-delay=4s")) for _ in range(3)]
        target = "ipv4:" + ",".join(replica.address for replica in replicas)
        client = stack.enter_context(spmmd.Client(target, balance=True, timeout=20.0))
        client.wait_ready()
        with Caller(client) as caller:
            caller.wait()
            os.kill(replicas[0].pid, signal.SIGKILL)
            caller.wait(200)
            assert not caller.errors
            os.kill(replicas[1].pid, signal.SIGTERM)
            time.sleep(1.0)
            before = executed(replicas[1])
            caller.wait(60)
            assert executed(replicas[1]) == before > 0, "a draining server still takes calls, and gets none"
            while replicas[1].running:
                caller.wait(10)
            caller.wait()
            assert not caller.errors
    assert replicas[1].exit_code == 0


def test_the_asyncio_client_leaves_out_a_killed_replica(binary: Path, repository: Path) -> None:
    async def call(target: str, victim: LocalServer) -> None:
        async with spmmd.AsyncClient(target, balance=True, timeout=20.0) as client:
            for i in range(60):
                if i == 20:
                    os.kill(victim.pid, signal.SIGKILL)
                assert_right("head", await client.matmul("head", X))

    with ExitStack() as stack:
        replicas = [stack.enter_context(server(binary, repository)) for _ in range(2)]
        asyncio.run(call("ipv4:" + ",".join(replica.address for replica in replicas), replicas[0]))


def test_a_new_replica_gets_its_share_when_connections_age(binary: Path, repository: Path) -> None:
    age = ("--max-connection-age=500ms", "--max-connection-age-grace=10s")
    first, second = free_port(), free_port()
    with ExitStack() as stack:
        stack.enter_context(server(binary, repository, *age, port=first))
        client = stack.enter_context(
            spmmd.Client(f"ipv4:127.0.0.1:{first},127.0.0.1:{second}", balance=True, timeout=20.0)
        )
        client.wait_ready()
        with Caller(client) as caller:
            caller.wait()
            late = stack.enter_context(server(binary, repository, *age, port=second))

            deadline = time.monotonic() + 20
            while executed(late) < 50 and time.monotonic() < deadline:
                caller.wait(20)
            assert executed(late) >= 50
            assert not caller.errors


# ---- shards


def test_every_shard_loads_its_own_and_answers_right(binary: Path, repository: Path) -> None:
    with shards(binary, repository, [(i, 3) for i in range(3)]) as servers:
        for i, one in enumerate(servers):
            with spmmd.Client(one.address) as direct:
                assert {layer.name for layer in direct.list()} == {n for n in LAYERS if spmmd.shard_of(n, 3) == i}
        with spmmd.ShardedClient([one.address for one in servers]) as client:
            for layer in LAYERS:
                assert_right(layer, client.matmul(layer, X))
            assert [layer.name for layer in client.list()] == sorted(LAYERS)
            with client.stream("head") as stream:
                assert_right("head", stream.matmul("head", X).result(20))


def test_a_foreign_layer_is_refused_with_its_shard(binary: Path, repository: Path) -> None:
    layer = next(name for name in LAYERS if spmmd.shard_of(name, 2) == 1)
    foreign = next(f"new{i}" for i in range(100) if spmmd.shard_of(f"new{i}", 2) == 1)
    with shards(binary, repository, [(0, 2)]) as servers, spmmd.Client(servers[0].address) as client:
        for call in (
            lambda: client.matmul(layer, X),
            lambda: client.get(layer),
            lambda: client.register(foreign, weight_of(foreign)),
            lambda: client.register_file(foreign, "head.npy"),
        ):
            with pytest.raises(spmmd.FailedPreconditionError, match="belongs to shard 1 of 2") as caught:
                call()
            assert caught.value.reason == "WRONG_SHARD"
            assert caught.value.metadata["shard"] == "1"
            assert caught.value.metadata["shard_count"] == "2"


def test_a_killed_shard_fails_its_own_layers_only_and_comes_back(binary: Path, repository: Path) -> None:
    port = free_port()
    with ExitStack() as stack:
        servers = stack.enter_context(shards(binary, repository, [(0, 2)]))
        flags = ("--shard-index=1", "--shard-count=2")
        victim = stack.enter_context(server(binary, repository, *flags, port=port))
        client = stack.enter_context(spmmd.ShardedClient([servers[0].address, victim.address]))
        lost = next(name for name in LAYERS if client.shard_of(name) == 1)
        kept = [name for name in LAYERS if client.shard_of(name) == 0]
        with Caller(client, kept) as caller:
            caller.wait()
            os.kill(victim.pid, signal.SIGKILL)
            started = time.monotonic()
            with pytest.raises(spmmd.UnavailableError):
                client.matmul(lost, X, timeout=20.0)
            assert time.monotonic() - started < 10, "a lost shard is told at once, not at the deadline"
            caller.wait()
            assert not caller.errors
            stack.enter_context(server(binary, repository, *flags, port=port))
            deadline = time.monotonic() + 20
            while True:
                try:
                    assert_right(lost, client.matmul(lost, X))
                    break
                except spmmd.UnavailableError:
                    assert time.monotonic() < deadline
                    time.sleep(0.1)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)], ids=["add", "remove"])
def test_the_number_of_shards_changes_under_load(binary: Path, repository: Path, before: int, after: int) -> None:
    """What the chart does with sharding.transitionFrom: those of the smaller number keep to it."""
    low, high = min(before, after), max(before, after)
    during = [(i, low if i < low else high) for i in range(high)]
    with shards(binary, repository, during) as servers, ExitStack() as stack:
        addresses = [one.address for one in servers]
        clients = [stack.enter_context(spmmd.ShardedClient(addresses[:count])) for count in (before, after)]
        # Both kinds of clients find every layer at the same time ...
        with Caller(clients[0]) as old, Caller(clients[1]) as new:
            old.wait()
            new.wait()
            # ... and one that goes over does not notice.
            clients[0].reshard(addresses[:after])
            old.wait()
            if after < before:
                servers[-1].stop()  # nobody needs it any more
                old.wait()
                new.wait()
        assert not old.errors
        assert not new.errors
        assert len({clients[0].shard_of(layer) for layer in LAYERS}) == after


def test_the_whole_way_from_two_shards_to_three(binary: Path, repository: Path) -> None:
    """The steps of docs/scale-out.md with two replicas of each shard, under load: no caller notices."""
    with ExitStack() as stack:

        def start(index: int, count: int, port: int) -> LocalServer:
            flags = (f"--shard-index={index}", f"--shard-count={count}", "--drain-delay=1s")
            return stack.enter_context(server(binary, repository, *flags, port=port))

        ports = [[free_port(), free_port()] for _ in range(3)]
        addresses = [[f"127.0.0.1:{port}" for port in pair] for pair in ports]
        running = {(i, port): start(i, 2, port) for i in (0, 1) for port in ports[i]}
        client = stack.enter_context(spmmd.ShardedClient(addresses[:2]))
        with Caller(client) as caller:
            caller.wait(30)
            for port in ports[2]:  # 1. the new shard, beside the old ones
                running[2, port] = start(2, 3, port)
            caller.wait(30)
            client.reshard(addresses)  # 2. the clients
            caller.wait(30)
            for port in ports[0]:  # 3. an old shard (the other goes the same way), one pod after the other
                running[0, port].stop()
                one = running[0, port] = start(0, 3, port)
                while executed(one) == 0:  # what minReadySeconds is for: clients find it
                    caller.wait(10)
            assert not caller.errors
        for (i, _), one in running.items():
            with spmmd.Client(one.address) as direct:
                count = 2 if i == 1 else 3
                assert {layer.name for layer in direct.list()} == {n for n in LAYERS if spmmd.shard_of(n, count) == i}


def test_uploads_go_to_every_replica_of_the_shard(binary: Path, repository: Path) -> None:
    with ExitStack() as stack:
        addresses = [
            [
                stack.enter_context(server(binary, repository, f"--shard-index={i}", "--shard-count=2")).address
                for _ in range(2)
            ]
            for i in range(2)
        ]
        client = stack.enter_context(spmmd.ShardedClient(addresses))
        for layer in ("late/a", "other"):
            client.register(layer, weight_of(layer))
            for address in addresses[client.shard_of(layer)]:
                with spmmd.Client(address) as direct:
                    assert_right(layer, direct.matmul(layer, X))
        removed = client.unregister("other")
        assert removed.versions == 1
        with pytest.raises(spmmd.NotFoundError):
            client.unregister("other")


# ---- a gateway for clients that do not shard


def test_a_gateway_routes_by_header(binary: Path, repository: Path, tmp_path: Path) -> None:
    """With nginx, as Envoy is not to be had here: the same rule, a table from the layer's name to its shard."""
    nginx = shutil.which("nginx") or "/usr/sbin/nginx"
    if not os.access(nginx, os.X_OK):
        pytest.skip(
            "nginx is not installed: apt-get install nginx-light (it starts a web server, so no script of ours does)"
        )
    with shards(binary, repository, [(i, 2) for i in range(2)]) as servers:
        port = free_port()
        table = "".join(f'"{layer}" shard{spmmd.shard_of(layer, 2)};' for layer in LAYERS)
        upstreams = "".join(f"upstream shard{i} {{ server {one.address}; }}" for i, one in enumerate(servers))
        (tmp_path / "nginx.conf").write_text(
            f"""daemon off; pid {tmp_path}/pid; error_log {tmp_path}/error.log;
            events {{}}
            http {{
              access_log off; client_max_body_size 0; client_body_temp_path {tmp_path}/body;
              {upstreams}
              map $http_spmmd_layer $shard {{ default ""; {table} }}
              server {{
                listen 127.0.0.1:{port} http2;
                location / {{
                  if ($shard = "") {{ return 404; }}
                  grpc_pass grpc://$shard;
                }}
              }}
            }}"""
        )
        process = subprocess.Popen([nginx, "-c", str(tmp_path / "nginx.conf"), "-e", str(tmp_path / "error.log")])
        try:
            with spmmd.Client(f"127.0.0.1:{port}", timeout=20.0) as client:
                client.wait_ready()
                for layer in LAYERS:
                    assert_right(layer, client.matmul(layer, X))
                    assert client.get(layer).name == layer
                    with client.stream(layer=layer) as stream:
                        assert_right(layer, stream.matmul(layer, X).result(20))
                with pytest.raises(spmmd.SpmmdError) as caught:
                    client.matmul("no/such", X)
                assert caught.value.code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNKNOWN)
        finally:
            process.terminate()
            process.wait(10)


def test_the_plan_is_what_the_simulation_says() -> None:
    subprocess.run([sys.executable, str(REPOSITORY / "scripts" / "scale_out_sim.py"), "--check"], check=True)
