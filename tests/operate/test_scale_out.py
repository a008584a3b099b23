"""Replicas and shards: several servers on loopback ports; one is killed, one added, one drained."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from fleet import LAYERS, Caller, X, assert_right, executed, server, shards, weight_of
from live import REPOSITORY, free_port, scrape
from local_server import LocalServer

import spmmd

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


# ---- programs and asyncio


def gate(prefix: str) -> spmmd.Program:
    """up(x) * down(x) of one block."""
    program = spmmd.Program()
    x = program.input("x")
    program.mul(program.matmul(f"{prefix}/up", x), program.matmul(f"{prefix}/down", x))
    return program


def assert_gate(prefix: str, outputs: spmmd.Outputs) -> None:
    (y,) = outputs.values()
    np.testing.assert_array_equal(y, (X @ weight_of(f"{prefix}/up").T) * (X @ weight_of(f"{prefix}/down").T))


def test_registered_programs_run_on_every_replica_of_their_shard(binary: Path, repository: Path) -> None:
    with ExitStack() as stack:

        def start(index: int, port: int = 0) -> LocalServer:
            return stack.enter_context(
                server(binary, repository, f"--shard-index={index}", "--shard-count=2", port=port)
            )

        prefix = next(f"block{i}" for i in range(6) if spmmd.shard_of(f"block{i}/up", 2) == 1)
        late = free_port()
        first = start(1)
        addresses = [[start(0).address], [first.address, f"127.0.0.1:{late}"]]
        client = stack.enter_context(spmmd.ShardedClient([addresses[0], [first.address]], timeout=20.0))
        program = client.register_program(gate(prefix))
        assert program.registered is not None
        assert_gate(prefix, client.execute(program, X))
        # A replica that starts later does not know it: the call succeeds all the same, and the next ones by the id.
        second = start(1, late)
        client.reshard(addresses)
        deadline = time.monotonic() + 20
        while executed(second) < 5 and time.monotonic() < deadline:
            assert_gate(prefix, client.execute(program, X))
        assert executed(second) >= 5
        with spmmd.Client(second.address) as direct:
            assert_gate(prefix, direct.execute(program.registered, X))
        client.unregister_program(program)
        for one in (first, second):
            with spmmd.Client(one.address) as direct, pytest.raises(spmmd.NotFoundError):
                direct.execute(program.registered, X)
        over_two = gate(prefix)
        other = next(f"block{i}/up" for i in range(6) if spmmd.shard_of(f"block{i}/up", 2) == 0)
        over_two.matmul(other, spmmd.Value("x"))
        with pytest.raises(ValueError, match="several shards"):
            client.register_program(over_two)


def test_the_asyncio_client_knows_shards(binary: Path, repository: Path) -> None:
    async def call(fleet: list[list[LocalServer]]) -> None:
        addresses = [[one.address for one in replicas] for replicas in fleet]
        async with spmmd.AsyncShardedClient(addresses, timeout=20.0) as client:
            results = await asyncio.gather(*(client.matmul(layer, X) for layer in LAYERS))
            for layer, y in zip(LAYERS, results, strict=True):
                assert_right(layer, y)
            assert [layer.name for layer in await client.list()] == sorted(LAYERS)
            for layer in ("late/a", "other"):
                await client.register(layer, weight_of(layer))
                await client.pin(layer)
                await client.warm(layer)
                for address in addresses[client.shard_of(layer)]:
                    async with spmmd.AsyncClient(address) as direct:
                        assert_right(layer, await direct.matmul(layer, X))
                        assert (await direct.get(layer)).pinned
            assert (await client.unregister("other")).versions == 1
            with pytest.raises(spmmd.NotFoundError):
                await client.unregister("other")
            program = await client.register_program(gate("block1"))
            for _ in range(8):
                assert_gate("block1", await client.execute(program, X))
                assert_gate("block1", await client.execute(gate("block1"), X))
            await client.unregister_program(program)
            async with client.stream("head") as stream:
                assert_right("head", await (await stream.matmul("head", X)))
            # A replica that is gone costs nothing.
            os.kill(fleet[1][0].pid, signal.SIGKILL)
            for _ in range(4):
                for layer in LAYERS:
                    assert_right(layer, await client.matmul(layer, X))

    with ExitStack() as stack:
        fleet = [
            [stack.enter_context(server(binary, repository, f"--shard-index={i}", "--shard-count=2")) for _ in range(2)]
            for i in range(2)
        ]
        asyncio.run(call(fleet))


def test_a_server_tells_its_shard(binary: Path, repository: Path) -> None:
    flags = ("--shard-index=1", "--shard-count=3", "--shard-transition-from=2")
    with server(binary, repository, *flags) as one, spmmd.Client(one.address) as client:
        info = client.server_info()
        assert (info.shard_index, info.shard_count) == (1, 2), "while the number changes the smaller one holds"
        samples = [(labels, value) for name, labels, value in scrape(one.metrics)[2] if name == "spmmd_shard_count"]
        assert samples == [({"shard": "1"}, 2.0)]


def test_the_plan_is_what_the_simulation_says() -> None:
    subprocess.run([sys.executable, str(REPOSITORY / "scripts" / "scale_out_sim.py"), "--check"], check=True)
