"""Layers spread over several servers, for asyncio: the methods of spmmd.ShardedClient as coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from spmmd.aio import AsyncClient, AsyncStream
from spmmd.arrays import Array
from spmmd.errors import NotFoundError, SpmmdError
from spmmd.program import Outputs, Program, RegisteredProgram
from spmmd.sharding import Placement, ShardedProgram, merged, program_is_missing, removed_of, sharded_program
from spmmd.types import Layer, Removed

_T = TypeVar("_T")


class AsyncShardedClient:
    """One client over all shards, for one event loop; see spmmd.ShardedClient for arguments and methods."""

    def __init__(self, shards: Sequence[str | Sequence[str]], **options: Any) -> None:
        self._options = options
        self._clients: dict[str, AsyncClient] = {}
        self._placement = Placement(shards, options)
        self.reshard(shards)

    def reshard(self, shards: Sequence[str | Sequence[str]]) -> None:
        """See ShardedClient.reshard."""
        placement = Placement(shards, self._options)
        for target in placement.targets:
            if target not in self._clients:
                self._clients[target] = AsyncClient(target, balance=True, **self._options)
        self._placement = placement

    async def close(self) -> None:
        """Closes all connections; calls in flight are cancelled."""
        await asyncio.gather(*(client.close() for client in self._clients.values()))

    async def __aenter__(self) -> AsyncShardedClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def shard_of(self, layer: str) -> int:
        """Which shard holds a layer."""
        return self._placement.shard_of(layer)

    def client_of(self, layer: str) -> AsyncClient:
        """The client of a layer's shard, for whatever has no method here."""
        return self._clients[self._placement.target(layer)]

    # ---- data

    async def matmul(self, name: str, x: Any, **options: Any) -> Array:
        """See ShardedClient.matmul."""
        return await self.client_of(name).matmul(name, x, **options)

    async def execute(self, program: Program | ShardedProgram, inputs: Any, *, timeout: float | None = None) -> Outputs:
        """See ShardedClient.execute."""
        if isinstance(program, Program):
            return await self.client_of(self._placement.layer_of(program)).execute(program, inputs, timeout=timeout)
        layer = self._placement.layer_of(program.program)
        client = self.client_of(layer)
        if program.registered is not None:
            try:
                return await client.execute(program.registered, inputs, timeout=timeout)
            except NotFoundError as error:
                if not program_is_missing(error):
                    raise
            await self._register_again(layer, program.program, program.registered)
        return await client.execute(program.program, inputs, timeout=timeout)

    def stream(self, layer: str, *, max_in_flight: int = 64) -> AsyncStream:
        """See ShardedClient.stream; use it as `async with`."""
        return self.client_of(layer).stream(max_in_flight=max_in_flight)

    async def register_program(self, program: Program, *, timeout: float | None = None) -> ShardedProgram:
        """See ShardedClient.register_program."""
        layer = self._placement.layer_of(program)
        registered = await self._on_replicas(layer, lambda client: client.register_program(program, timeout=timeout))
        return sharded_program(program, registered)

    async def unregister_program(self, program: ShardedProgram, *, timeout: float | None = None) -> None:
        """See ShardedClient.unregister_program."""
        if (registered := program.registered) is None:
            return

        async def forget(client: AsyncClient) -> None:
            with suppress(NotFoundError):
                await client.unregister_program(registered, timeout=timeout)

        await self._on_replicas(self._placement.layer_of(program.program), forget)

    # ---- catalog

    async def register(self, name: str, weights: Any, **options: Any) -> Layer:
        """See ShardedClient.register."""
        return (await self._on_replicas(name, lambda client: client.register(name, weights, **options)))[0]

    async def register_file(self, name: str, path: str, **options: Any) -> Layer:
        """See ShardedClient.register_file."""
        return (await self._on_replicas(name, lambda client: client.register_file(name, path, **options)))[0]

    async def pin(self, name: str, pinned: bool = True, *, version: int = 0) -> Layer:
        """See ShardedClient.pin."""
        return (await self._on_replicas(name, lambda client: client.pin(name, pinned, version=version)))[0]

    async def warm(self, name: str, *, version: int = 0, timeout: float | None = None) -> Layer:
        """See ShardedClient.warm."""
        return (await self._on_replicas(name, lambda client: client.warm(name, version=version, timeout=timeout)))[0]

    async def unregister(self, name: str, *, version: int = 0, missing_ok: bool = False) -> Removed:
        """See ShardedClient.unregister."""
        removed = removed_of(
            await self._on_replicas(name, lambda client: client.unregister(name, version=version, missing_ok=True))
        )
        if not missing_ok and not removed.versions:
            await self.client_of(name).unregister(name, version=version)  # NotFoundError in the server's words
        return removed

    async def get(self, name: str, *, version: int = 0) -> Layer:
        """See ShardedClient.get."""
        return await self.client_of(name).get(name, version=version)

    async def list(self, prefix: str = "") -> list[Layer]:
        """See ShardedClient.list."""
        return merged(await asyncio.gather(*(self._clients[t].list(prefix) for t in self._placement.targets)))

    # ---- plumbing

    async def _on_replicas(self, layer: str, call: Callable[[AsyncClient], Awaitable[_T]]) -> Sequence[_T]:
        addresses, options = await asyncio.to_thread(self._placement.replicas, layer)
        results = []
        for address in addresses:
            async with AsyncClient(address, **options) as client:
                results.append(await call(client))
        return results

    async def _register_again(self, layer: str, program: Program, registered: RegisteredProgram) -> None:
        async def register(client: AsyncClient) -> None:
            with suppress(NotFoundError):
                await client.unregister_program(registered)
            await client.register_program(program)

        with suppress(SpmmdError):
            await self._on_replicas(layer, register)
