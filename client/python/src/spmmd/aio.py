"""The asyncio client: the methods of spmmd.Client as coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from spmmd._proto import layer_catalog_pb2 as catalog_pb2
from spmmd._proto import layer_catalog_pb2_grpc, sparse_matmul_pb2_grpc
from spmmd._proto import sparse_matmul_pb2 as matmul_pb2
from spmmd._registration import ProgressCallback, Registration
from spmmd._transport import (
    DEFAULT_CHUNK_BYTES,
    DEFAULT_TIMEOUT,
    Tls,
    call_metadata,
    channel_options,
    layer_of,
    tls_of,
    with_layer,
)
from spmmd.arrays import Array
from spmmd.client import Client
from spmmd.errors import NotFoundError, SpmmdError, UnavailableError, from_rpc_error
from spmmd.program import (
    Outputs,
    Program,
    RegisteredProgram,
    execute_request,
    matmul_request,
    matmul_result,
    outputs_from_proto,
)
from spmmd.stream import closed_error, settle
from spmmd.types import (
    Activation,
    ActivationLike,
    Device,
    DType,
    DTypeLike,
    Format,
    FormatLike,
    HealthStatus,
    Layer,
    Placement,
    PlacementLike,
    Progress,
    Prune,
    Removed,
    ServerInfo,
    Speed,
    layer_ref,
)
from spmmd.weights import Content, Options, content_of, file_spec, upload_spec

_T = TypeVar("_T")
_Convert = Callable[[matmul_pb2.ExecuteResponse], Any]


class AsyncClient:
    """A connection to one server, for one event loop; see spmmd.Client for arguments and methods."""

    def __init__(
        self,
        address: str = "127.0.0.1:8500",
        *,
        tls: Tls | bool = False,
        token: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        balance: bool = False,
    ) -> None:
        settings = tls_of(tls)
        options = channel_options(settings, balance)
        if settings is None:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        else:
            self._channel = grpc.aio.secure_channel(address, settings.credentials(), options=options)
        self._catalog: Any = layer_catalog_pb2_grpc.LayerCatalogStub(self._channel)  # type: ignore[no-untyped-call]
        self._matmul: Any = sparse_matmul_pb2_grpc.SparseMatmulStub(self._channel)  # type: ignore[no-untyped-call]
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._metadata = call_metadata(token)
        self._timeout = timeout
        self._chunk_bytes = chunk_bytes
        self._uploads = Client(address, tls=tls, token=token, timeout=timeout, chunk_bytes=chunk_bytes)

    async def close(self) -> None:
        """Closes the connection; calls in flight are cancelled."""
        self._uploads.close()
        await self._channel.close(None)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- catalog

    async def register(
        self,
        name: str,
        weights: Any,
        *,
        bias: Any = None,
        prune: Prune | None = None,
        format: FormatLike = Format.AUTO,
        store_dtype: DTypeLike | None = None,
        placement: PlacementLike = Placement.DEFAULT,
        activation_threshold: float | None = None,
        pin: bool = False,
        allow_nonfinite: bool = False,
        progress: ProgressCallback | None = None,
        timeout: float | None = None,
    ) -> Layer:
        """See Client.register."""
        # Hashing and copying large weights would hold up the event loop.
        content = await asyncio.to_thread(content_of, weights, bias)
        options = Options(prune, format, store_dtype, placement, activation_threshold, pin, allow_nonfinite)
        spec = await asyncio.to_thread(upload_spec, name, content, options)
        return await self._register(spec, content, progress, timeout)

    async def register_file(
        self,
        name: str,
        path: str,
        *,
        tensor: str = "",
        bias_tensor: str = "",
        prune: Prune | None = None,
        format: FormatLike = Format.AUTO,
        store_dtype: DTypeLike | None = None,
        placement: PlacementLike = Placement.DEFAULT,
        activation_threshold: float | None = None,
        pin: bool = False,
        allow_nonfinite: bool = False,
        progress: ProgressCallback | None = None,
        timeout: float | None = None,
    ) -> Layer:
        """See Client.register_file."""
        options = Options(prune, format, store_dtype, placement, activation_threshold, pin, allow_nonfinite)
        return await self._register(file_spec(name, path, tensor, bias_tensor, options), None, progress, timeout)

    async def list(self, prefix: str = "", *, timeout: float | None = None) -> list[Layer]:
        """See Client.list."""
        layers: list[Layer] = []
        request = catalog_pb2.ListLayersRequest(name_prefix=prefix)
        while True:
            response: catalog_pb2.ListLayersResponse = await self._call(self._catalog.ListLayers, request, timeout)
            layers += [Layer.from_proto(layer) for layer in response.layers]
            request.page_token = response.next_page_token
            if not request.page_token:
                return layers

    async def get(self, name: str, *, version: int = 0, timeout: float | None = None) -> Layer:
        """See Client.get."""
        request = catalog_pb2.GetLayerRequest(layer=layer_ref(name, version))
        response = await self._call(self._catalog.GetLayer, request, timeout)
        return Layer.from_proto(response.layer)

    async def unregister(
        self, name: str, *, version: int = 0, missing_ok: bool = False, timeout: float | None = None
    ) -> Removed:
        """See Client.unregister."""
        request = catalog_pb2.UnregisterLayerRequest(layer=layer_ref(name, version))
        try:
            response = await self._call(self._catalog.UnregisterLayer, request, timeout)
        except NotFoundError:
            if missing_ok:
                return Removed(0, 0)
            raise
        return Removed(response.removed_versions, response.freed_bytes)

    async def pin(self, name: str, pinned: bool = True, *, version: int = 0, timeout: float | None = None) -> Layer:
        """See Client.pin."""
        request = catalog_pb2.PinLayerRequest(layer=layer_ref(name, version), pinned=pinned)
        response = await self._call(self._catalog.PinLayer, request, timeout)
        return Layer.from_proto(response.layer)

    async def warm(self, name: str, *, version: int = 0, timeout: float | None = None) -> Layer:
        """See Client.warm."""
        request = catalog_pb2.WarmLayerRequest(layer=layer_ref(name, version))
        response = await self._call(self._catalog.WarmLayer, request, timeout, long=True)
        return Layer.from_proto(response.layer)

    async def benchmark(
        self,
        name: str,
        tokens: Sequence[int] = (),
        *,
        version: int = 0,
        repetitions: int = 0,
        dense: bool = True,
        timeout: float | None = None,
    ) -> Sequence[Speed]:
        """See Client.benchmark."""
        request = catalog_pb2.BenchmarkRequest(
            layer=layer_ref(name, version), tokens=tokens, repetitions=repetitions, skip_dense=not dense
        )
        response = await self._call(self._catalog.Benchmark, request, timeout, long=True)
        return [Speed.from_proto(speed) for speed in response.speeds]

    # ---- data

    async def matmul(
        self,
        name: str,
        x: Any,
        *,
        version: int = 0,
        activation: ActivationLike = Activation.NONE,
        threshold: float | None = None,
        bias: bool = True,
        out_dtype: DTypeLike = DType.F32,
        timeout: float | None = None,
    ) -> Array:
        """See Client.matmul."""
        request, leading = matmul_request(
            name, x, version=version, activation=activation, threshold=threshold, bias=bias, out_dtype=out_dtype
        )
        return matmul_result(await self._call(self._matmul.Execute, request, timeout), leading)

    async def execute(
        self, program: Program | RegisteredProgram, inputs: Any, *, timeout: float | None = None
    ) -> Outputs:
        """See Client.execute."""
        request = execute_request(program, inputs)
        layer = getattr(program, "layer", "")
        return outputs_from_proto(await self._call(self._matmul.Execute, request, timeout, layer=layer))

    async def register_program(self, program: Program, *, timeout: float | None = None) -> RegisteredProgram:
        """See Client.register_program."""
        request = matmul_pb2.RegisterProgramRequest(program=program.to_proto())
        response = await self._call(self._matmul.RegisterProgram, request, timeout)
        return RegisteredProgram(response.program_id, program.inputs, layer_of(request))

    async def unregister_program(self, program: RegisteredProgram, *, timeout: float | None = None) -> None:
        """See Client.unregister_program."""
        request = matmul_pb2.UnregisterProgramRequest(program_id=program.id)
        await self._call(self._matmul.UnregisterProgram, request, timeout, layer=program.layer)

    def stream(self, *, max_in_flight: int = 64, layer: str = "") -> AsyncStream:
        """A pipelined stream; use it as `async with`. See Client.stream."""
        metadata = with_layer(self._metadata, layer)
        return AsyncStream(
            lambda requests: self._matmul.ExecuteStream(requests, metadata=metadata), max_in_flight=max_in_flight
        )

    # ---- the server

    async def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """See Client.server_info."""
        response = await self._call(self._matmul.ServerInfo, matmul_pb2.ServerInfoRequest(), timeout)
        return ServerInfo.from_proto(response)

    async def device_info(self, *, timeout: float | None = None) -> Sequence[Device]:
        """See Client.device_info."""
        response = await self._call(self._matmul.DeviceInfo, matmul_pb2.DeviceInfoRequest(), timeout)
        return [Device.from_proto(device) for device in response.devices]

    async def health(self, service: str = "", *, timeout: float | None = None) -> HealthStatus:
        """See Client.health."""
        response = await self._call(self._health.Check, health_pb2.HealthCheckRequest(service=service), timeout)
        return HealthStatus(response.status)

    # ---- plumbing

    async def _call(
        self, method: Any, request: Any, timeout: float | None, *, long: bool = False, layer: str = ""
    ) -> Any:
        if timeout is None and not long:
            timeout = self._timeout
        try:
            metadata = with_layer(self._metadata, layer or layer_of(request))
            return await method(request, timeout=timeout, metadata=metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def _register(
        self,
        spec: catalog_pb2.LayerSpec,
        content: Content | None,
        progress: ProgressCallback | None,
        timeout: float | None,
    ) -> Layer:
        # On a thread and a channel of its own: hashing and copying large weights would hold up the event loop, and
        # grpc.aio loses the server's status when it fails an upload in the middle (the failed send overwrites it).
        loop = asyncio.get_running_loop()

        async def report(event: Progress) -> None:
            if progress is not None:
                progress(event)

        def forward(event: Progress) -> None:
            asyncio.run_coroutine_threadsafe(report(event), loop).result()

        registration = Registration(spec, content, None if progress is None else forward, self._chunk_bytes)
        done = loop.run_in_executor(None, self._uploads._run_registration, registration, timeout)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            registration.cancel()
            await asyncio.wait([done])
            done.exception()  # Its own cancellation; retrieved, so that asyncio does not log it.
            raise


class AsyncStream:
    """Requests in flight together on one stream; see spmmd.Stream. Made by AsyncClient.stream()."""

    def __init__(
        self, start: Callable[[AsyncIterator[matmul_pb2.ExecuteStreamRequest]], Any], *, max_in_flight: int
    ) -> None:
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight: must be at least 1, got {max_in_flight}")
        self._start = start
        self._slots = asyncio.Semaphore(max_in_flight)
        self._requests: asyncio.Queue[matmul_pb2.ExecuteStreamRequest | None] = asyncio.Queue()
        self._pending: dict[int, tuple[asyncio.Future[Any], _Convert]] = {}
        self._next_id = 1
        self._closed = True
        self._error: SpmmdError | None = None
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AsyncStream:
        self._closed = False
        self._call = self._start(self._outgoing())
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._requests.put_nowait(None)
        if kind is not None:
            self._call.cancel()
        if self._reader is not None:
            await self._reader

    async def submit(self, program: Program | RegisteredProgram, inputs: Any) -> asyncio.Future[Outputs]:
        """Sends a request; the future returned is its answer. Waits while max_in_flight are unanswered."""
        return await self._submit(execute_request(program, inputs), outputs_from_proto)

    async def matmul(
        self,
        name: str,
        x: Any,
        *,
        version: int = 0,
        activation: ActivationLike = Activation.NONE,
        threshold: float | None = None,
        bias: bool = True,
        out_dtype: DTypeLike = DType.F32,
    ) -> asyncio.Future[Array]:
        """Sends a Client.matmul; the future returned is its answer."""
        request, leading = matmul_request(
            name, x, version=version, activation=activation, threshold=threshold, bias=bias, out_dtype=out_dtype
        )
        return await self._submit(request, lambda response: matmul_result(response, leading))

    async def _submit(self, request: matmul_pb2.ExecuteRequest, convert: Callable[[Any], _T]) -> asyncio.Future[_T]:
        await self._slots.acquire()
        if self._error is not None or self._closed:
            self._slots.release()
            raise self._error or closed_error()
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        request_id = self._next_id
        self._next_id += 1
        self._pending[request_id] = (future, convert)
        self._requests.put_nowait(matmul_pb2.ExecuteStreamRequest(request_id=request_id, request=request))
        return future

    async def _outgoing(self) -> AsyncIterator[matmul_pb2.ExecuteStreamRequest]:
        while (request := await self._requests.get()) is not None:
            yield request

    async def _read(self) -> None:
        error: SpmmdError = UnavailableError(grpc.StatusCode.UNAVAILABLE, "the server ended the stream")
        try:
            async for response in self._call:
                entry = self._pending.pop(response.request_id, None)
                if entry is None:
                    continue
                self._slots.release()
                if not entry[0].cancelled():
                    settle(*entry, response)
        except grpc.RpcError as rpc_error:
            error = from_rpc_error(rpc_error)
            if error.message == "Internal error from Core":
                # A send that failed hides the status that ended the call: grpc.aio keeps the last of the two.
                error = UnavailableError(grpc.StatusCode.UNAVAILABLE, "the stream broke")
        except asyncio.CancelledError:
            # grpc.aio reports the call's own cancellation this way.
            error = closed_error()
        finally:
            self._error = error
            orphans = [future for future, _ in self._pending.values()]
            self._pending.clear()
            self._requests.put_nowait(None)
            for orphan in orphans:
                self._slots.release()
                if not orphan.done():
                    orphan.set_exception(error)
