"""Layers spread over several servers: models larger than one machine.

Which shard holds a layer follows from its name and the number of shards alone (rendezvous hashing), so that every
client finds it without asking anybody. Servers are told the same with --shard-index and --shard-count and refuse
what is not theirs; gateways route by the header `spmmd-layer`.
"""

from __future__ import annotations

import hashlib
import ipaddress
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from types import TracebackType
from typing import Any, TypeVar

import grpc

from spmmd._transport import Tls
from spmmd.arrays import Array
from spmmd.client import Client
from spmmd.errors import NotFoundError, SpmmdError, UnavailableError
from spmmd.program import Outputs, Program, RegisteredProgram
from spmmd.stream import Stream
from spmmd.types import Layer, Removed

_T = TypeVar("_T")


def shard_key(layer: str) -> str:
    """What is hashed of a layer's name: the part before the first "/".

    The layers "block7/q" and "block7/k" lie on one shard, and a program may use them together.
    """
    return layer.split("/", 1)[0]


@lru_cache(maxsize=1 << 16)
def _owner(key: str, count: int) -> int:
    return max(range(count), key=lambda shard: hashlib.sha256(f"{shard}/{key}".encode()).digest())


def shard_of(layer: str, count: int) -> int:
    """The shard of 0 .. count - 1 that holds a layer: the one with the greatest SHA-256 of "<shard>/<key>".

    When a shard is added, layers only move to it (one in count + 1); when the last one is removed, only its own move.
    """
    if count < 1:
        raise ValueError(f"count: {count} is less than 1")
    return _owner(shard_key(layer), count)


@dataclass(frozen=True)
class Move:
    """A layer whose shard changes with the number of shards."""

    layer: str
    source: int
    target: int


def moves(layers: Iterable[str], before: int, after: int) -> list[Move]:
    """What a change of the number of shards moves."""
    changes = (Move(layer, shard_of(layer, before), shard_of(layer, after)) for layer in layers)
    return [move for move in changes if move.source != move.target]


def target_of(shard: str | Sequence[str]) -> str:
    """The gRPC target of a shard's replicas; ValueError when gRPC cannot take them together."""
    if isinstance(shard, str):
        return shard
    if len(shard) == 1:
        return shard[0]
    families = set()
    for address in shard:
        host = address.rpartition(":")[0].strip("[]")
        try:
            families.add(ipaddress.ip_address(host).version)
        except ValueError:
            raise ValueError(
                f"shards: '{address}' is no IP address with a port; for names, give one that resolves to every replica"
            ) from None
    if len(families) != 1:
        raise ValueError(f"shards: {list(shard)} must be IP addresses of one family, at least one")
    return f"ipv{families.pop()}:{','.join(shard)}"


class Placement:
    """What the clients over all shards share: which shard is asked, and its replicas' addresses."""

    def __init__(self, shards: Sequence[str | Sequence[str]], options: Mapping[str, Any]) -> None:
        if not shards:
            raise ValueError("shards: at least one")
        self.shards = tuple(shards)
        self.targets = [target_of(shard) for shard in shards]
        self._options = options

    def shard_of(self, layer: str) -> int:
        return shard_of(layer, len(self.shards))

    def target(self, layer: str) -> str:
        """The gRPC target of a layer's shard."""
        return self.targets[self.shard_of(layer)]

    def layer_of(self, program: Program) -> str:
        """A layer of a program; ValueError when they lie on several shards."""
        names = [step.matmul.layer.name for step in program.to_proto().steps if step.WhichOneof("op") == "matmul"]
        owners = {self.shard_of(name): name for name in names}
        if len(owners) > 1:
            places = ", ".join(f"{name} on shard {shard}" for shard, name in sorted(owners.items()))
            raise ValueError(f"program: its layers lie on several shards ({places}); give them one name up to a '/'")
        return names[0] if names else ""

    def replicas(self, layer: str) -> tuple[Sequence[str], dict[str, Any]]:
        """Addresses of the layer's replicas that are there now, and the options to connect to each of them."""
        shard = self.shards[self.shard_of(layer)]
        options = dict(self._options)
        if isinstance(shard, str) and (tls := options.get("tls")) and not shard.startswith("unix:"):
            # The certificate is for the name, not for the addresses that it resolves to.
            settings = tls if isinstance(tls, Tls) else Tls()
            options["tls"] = replace(settings, server_name=settings.server_name or _host_and_port(shard)[0])
        return replicas_of(shard), options


@dataclass(frozen=True)
class ShardedProgram:
    """A program that every replica of its shard has checked and planned.

    Attributes:
      registered: as the replicas know it; None when they disagree (two versions of the server side by side): then the
        program itself goes along with every call.
    """

    program: Program
    registered: RegisteredProgram | None


def sharded_program(program: Program, registered: Sequence[RegisteredProgram]) -> ShardedProgram:
    """What the replicas made of a program."""
    same = len({one.id for one in registered}) == 1
    return ShardedProgram(program, registered[0] if same else None)


def program_is_missing(error: NotFoundError) -> bool:
    """A replica that started after the program was registered, rather than a layer that is not there."""
    return error.reason == "PROGRAM_NOT_FOUND"


def merged(parts: Iterable[Iterable[Layer]]) -> list[Layer]:
    """The layers of all shards, by name, newest version first; one that two shards hold counts once."""
    layers: dict[tuple[str, int], Layer] = {}
    for part in parts:
        for layer in part:
            layers.setdefault((layer.name, -layer.version), layer)
    return [layers[key] for key in sorted(layers)]


def removed_of(parts: Sequence[Removed]) -> Removed:
    """Versions counted once, bytes of all replicas."""
    return Removed(max(one.versions for one in parts), sum(one.freed_bytes for one in parts))


class ShardedClient:
    """One client over all shards. Thread-safe; close it, or use it as a context manager.

    Calls go to the shard of their layer, in turn to its replicas that are serving. What only multiplies is tried again
    on another replica when one goes away. Registrations, pins and removals go to every replica that is there now: one
    that starts later has what its own manifest says, so production layers belong into a manifest.

    Args:
      shards: for each shard, in the order of the servers' --shard-index: an address, whose name may resolve to several
        replicas (a headless service), or a list of the replicas' addresses (IP:PORT).
      options: of each Client: tls, token, timeout, chunk_bytes.
    """

    def __init__(self, shards: Sequence[str | Sequence[str]], **options: Any) -> None:
        self._options = options
        self._clients: dict[str, Client] = {}
        self._placement = Placement(shards, options)
        self.reshard(shards)

    def reshard(self, shards: Sequence[str | Sequence[str]]) -> None:
        """Goes over to other shards; calls in flight end where they are. See docs/scale-out.md for the order."""
        placement = Placement(shards, self._options)
        clients = dict(self._clients)
        for target in placement.targets:
            if target not in clients:
                clients[target] = Client(target, balance=True, **self._options)
        self._clients = clients
        self._placement = placement  # last, and at once: other threads see the old shards or the new ones

    def close(self) -> None:
        """Closes all connections; calls in flight are cancelled."""
        for client in self._clients.values():
            client.close()

    def __enter__(self) -> ShardedClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def shard_of(self, layer: str) -> int:
        """Which shard holds a layer."""
        return self._placement.shard_of(layer)

    def client_of(self, layer: str) -> Client:
        """The client of a layer's shard, for whatever has no method here."""
        return self._clients[self._placement.target(layer)]

    # ---- data

    def matmul(self, name: str, x: Any, **options: Any) -> Array:
        """Client.matmul on the layer's shard."""
        return self.client_of(name).matmul(name, x, **options)

    def execute(self, program: Program | ShardedProgram, inputs: Any, *, timeout: float | None = None) -> Outputs:
        """Client.execute; ValueError when the program's layers lie on several shards.

        Layers with the same name up to the first "/" lie together.
        """
        if isinstance(program, Program):
            return self.client_of(self._placement.layer_of(program)).execute(program, inputs, timeout=timeout)
        layer = self._placement.layer_of(program.program)
        client = self.client_of(layer)
        if program.registered is not None:
            try:
                return client.execute(program.registered, inputs, timeout=timeout)
            except NotFoundError as error:
                if not program_is_missing(error):
                    raise
            self._register_again(layer, program.program, program.registered)
        return client.execute(program.program, inputs, timeout=timeout)

    def stream(self, layer: str, *, max_in_flight: int = 64) -> Stream:
        """Client.stream to the shard of a layer; only layers of that shard may be used on it."""
        return self.client_of(layer).stream(max_in_flight=max_in_flight)

    def register_program(self, program: Program, *, timeout: float | None = None) -> ShardedProgram:
        """Client.register_program on every replica of the shard that holds its layers, for execute().

        A replica that starts later gets it when it is first asked for it.
        """
        layer = self._placement.layer_of(program)
        registered = self._on_replicas(layer, lambda client: client.register_program(program, timeout=timeout))
        return sharded_program(program, registered)

    def unregister_program(self, program: ShardedProgram, *, timeout: float | None = None) -> None:
        """Client.unregister_program on every replica; those that do not know it are passed over."""
        if (registered := program.registered) is None:
            return

        def forget(client: Client) -> None:
            with suppress(NotFoundError):
                client.unregister_program(registered, timeout=timeout)

        self._on_replicas(self._placement.layer_of(program.program), forget)

    # ---- catalog

    def register(self, name: str, weights: Any, **options: Any) -> Layer:
        """Client.register on every replica of the layer's shard."""
        return self._on_replicas(name, lambda client: client.register(name, weights, **options))[0]

    def register_file(self, name: str, path: str, **options: Any) -> Layer:
        """Client.register_file on every replica of the layer's shard."""
        return self._on_replicas(name, lambda client: client.register_file(name, path, **options))[0]

    def pin(self, name: str, pinned: bool = True, *, version: int = 0) -> Layer:
        """Client.pin on every replica of the layer's shard."""
        return self._on_replicas(name, lambda client: client.pin(name, pinned, version=version))[0]

    def warm(self, name: str, *, version: int = 0, timeout: float | None = None) -> Layer:
        """Client.warm on every replica of the layer's shard."""
        return self._on_replicas(name, lambda client: client.warm(name, version=version, timeout=timeout))[0]

    def unregister(self, name: str, *, version: int = 0, missing_ok: bool = False) -> Removed:
        """Client.unregister on every replica of the layer's shard; the sum of what was freed."""

        def remove(client: Client) -> Removed:
            return client.unregister(name, version=version, missing_ok=True)

        removed = removed_of(self._on_replicas(name, remove))
        if not missing_ok and not removed.versions:
            self.client_of(name).unregister(name, version=version)  # NotFoundError in the server's words
        return removed

    def get(self, name: str, *, version: int = 0) -> Layer:
        """Client.get on the layer's shard."""
        return self.client_of(name).get(name, version=version)

    def list(self, prefix: str = "") -> list[Layer]:
        """The layers of all shards, by name; while a shard is added, a layer that is on its way shows once."""
        return merged(self._clients[target].list(prefix) for target in self._placement.targets)

    # ---- plumbing

    def _on_replicas(self, layer: str, call: Callable[[Client], _T]) -> Sequence[_T]:
        addresses, options = self._placement.replicas(layer)
        results = []
        for address in addresses:
            with Client(address, **options) as client:
                results.append(call(client))
        return results

    def _register_again(self, layer: str, program: Program, registered: RegisteredProgram) -> None:
        def register(client: Client) -> None:
            with suppress(NotFoundError):  # where it is known the count of registrations stays
                client.unregister_program(registered)
            client.register_program(program)

        with suppress(SpmmdError):  # what this call needs goes along with it
            self._on_replicas(layer, register)


def _host_and_port(address: str) -> tuple[str, str]:
    host, _, port = address.removeprefix("dns:///").rpartition(":")
    return host.strip("[]"), port


def replicas_of(shard: str | Sequence[str]) -> Sequence[str]:
    """Addresses of the replicas that are there now."""
    if not isinstance(shard, str):
        return shard
    if shard.startswith("unix:"):
        return [shard]
    host, port = _host_and_port(shard)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise UnavailableError(grpc.StatusCode.UNAVAILABLE, f"shard '{shard}': {error}") from None
    v4 = {f"{a[4][0]}:{port}" for a in found if a[0] == socket.AF_INET}
    v6 = {f"[{a[4][0]}]:{port}" for a in found if a[0] == socket.AF_INET6}
    if len(v4) <= 1 and len(v6) <= 1:
        return [shard]  # one server, whatever its families
    return sorted(v4 or v6)
