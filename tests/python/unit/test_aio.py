"""The asyncio client against the fake server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from unit.fake_server import FakeServer, bad_field

import spmmd

WEIGHT = np.random.default_rng(1).standard_normal((30, 40)).astype(np.float16)
X = np.random.default_rng(2).standard_normal((5, 40)).astype(np.float32)
Y = X @ WEIGHT.astype(np.float32).T


@pytest_asyncio.fixture
async def aclient(server: FakeServer) -> AsyncIterator[spmmd.AsyncClient]:
    async with spmmd.AsyncClient(server.address, timeout=20.0, chunk_bytes=1000) as client:
        yield client


async def test_register_and_shortcut(aclient: spmmd.AsyncClient, server: FakeServer) -> None:
    events: list[spmmd.Progress] = []
    await aclient.register("w", WEIGHT, progress=events.append)
    assert [event.received_bytes for event in events] == [0, 1000, 2000, 2400]
    server.chunks.clear()
    await aclient.register("again", WEIGHT)
    assert server.chunks == []
    assert [layer.name for layer in await aclient.list()] == ["again", "w"]
    assert (await aclient.get("w")).shape == (30, 40)
    np.testing.assert_allclose(await aclient.matmul("again", X), Y, rtol=1e-5, atol=1e-5)


async def test_refused_upload(aclient: spmmd.AsyncClient, server: FakeServer) -> None:
    server.fail_after_chunks = (2, bad_field("chunk.data", "goes past the part"))
    with pytest.raises(spmmd.InvalidArgumentError) as caught:
        await aclient.register("w", np.ones((1000, 1000), np.float32))
    assert caught.value.field_violations[0].field == "chunk.data"


async def test_cancelled_registration_leaves_nothing(aclient: spmmd.AsyncClient, server: FakeServer) -> None:
    task = asyncio.create_task(aclient.register("w", np.ones((2000, 2000), np.float32)))
    while not server.chunks:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(server.upload_ended.wait, 10)
    assert "w" not in server.layers


async def test_errors(aclient: spmmd.AsyncClient) -> None:
    with pytest.raises(spmmd.NotFoundError) as caught:
        await aclient.get("nobody")
    assert caught.value.reason == "LAYER_NOT_FOUND"
    assert await aclient.health() == spmmd.HealthStatus.SERVING


async def test_programs(aclient: spmmd.AsyncClient) -> None:
    await aclient.register("w", WEIGHT)
    program = spmmd.Program()
    x = program.input("x")
    program.output(program.add(program.matmul("w", x), program.matmul("w", x), name="y"))
    registered = await aclient.register_program(program)
    for runnable in (program, registered):
        outputs = await aclient.execute(runnable, X)
        np.testing.assert_allclose(outputs["y"], 2 * Y, rtol=1e-5, atol=1e-5)
    await aclient.unregister_program(registered)


async def test_stream_out_of_order_and_bounded(aclient: spmmd.AsyncClient, server: FakeServer) -> None:
    await aclient.register("w", WEIGHT)
    server.reorder = 4
    async with aclient.stream(max_in_flight=4) as stream:
        futures = [await stream.matmul("w", X * i) for i in range(8)]
        for i, y in enumerate(await asyncio.gather(*futures)):
            np.testing.assert_allclose(y, Y * i, rtol=1e-5, atol=1e-4)
    with pytest.raises(spmmd.UnavailableError):
        await stream.matmul("w", X)


async def test_broken_stream(aclient: spmmd.AsyncClient, server: FakeServer) -> None:
    await aclient.register("w", WEIGHT)
    server.reorder, server.break_after = 100, 1
    async with aclient.stream() as stream:
        futures = [await stream.matmul("w", X) for _ in range(3)]
        results = await asyncio.gather(*futures, return_exceptions=True)
    assert all(isinstance(result, spmmd.UnavailableError) for result in results)


async def test_exception_in_the_block_cancels(aclient: spmmd.AsyncClient, server: FakeServer) -> None:
    await aclient.register("w", WEIGHT)
    server.reorder = 100
    futures = []

    async def run() -> None:
        async with aclient.stream() as stream:
            futures.append(await stream.matmul("w", X))
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        await run()
    with pytest.raises(spmmd.SpmmdError):
        await futures[0]


async def test_exception_from_progress_cancels(aclient: spmmd.AsyncClient, server: FakeServer) -> None:
    def stop(progress: spmmd.Progress) -> None:
        if progress.received_bytes:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        await aclient.register("w", np.ones((1000, 1000), np.float32), progress=stop)
    assert await asyncio.to_thread(server.upload_ended.wait, 10)
    assert "w" not in server.layers
