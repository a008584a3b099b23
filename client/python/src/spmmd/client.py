"""The synchronous client."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import grpc
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
from spmmd.errors import NotFoundError, from_rpc_error
from spmmd.program import (
    Outputs,
    Program,
    RegisteredProgram,
    execute_request,
    matmul_request,
    matmul_result,
    outputs_from_proto,
)
from spmmd.shared import Region, Ring, SharedMemory, Transport, is_local
from spmmd.stream import Stream
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
    Prune,
    Removed,
    ServerInfo,
    Speed,
    layer_ref,
)
from spmmd.weights import Content, Options, content_of, file_spec, upload_spec


class Client:
    """A connection to one server. Thread-safe; close it, or use it as a context manager.

    Every method that calls the server takes `timeout` in seconds: by default the client's for short calls, and none
    for those that take as long as the weights are large (register, register_file, warm, benchmark). Failures raise
    SpmmdError's subclasses.

    Args:
      address: "host:port" or "unix:/path".
      tls: True for TLS with the system's certificates, or a Tls; False for plain text.
      token: bearer token; over plain text it is sent as it is, so use TLS beyond the own host.
      timeout: seconds for short calls.
      chunk_bytes: size of upload messages; at most the server's limits.max_chunk_bytes.
      balance: use all addresses that the name resolves to, in turn, but those whose health is not SERVING, and send
        Execute again elsewhere when a server goes away. For replicas that hold the same layers by their manifests.
      shared_memory: let large tensors travel through shared memory when the server is on this host and allows it.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:8500",
        *,
        tls: Tls | bool = False,
        token: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        balance: bool = False,
        shared_memory: bool = True,
    ) -> None:
        settings = tls_of(tls)
        options = channel_options(settings, balance)
        if settings is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            self._channel = grpc.secure_channel(address, settings.credentials(), options=options)
        self._catalog: Any = layer_catalog_pb2_grpc.LayerCatalogStub(self._channel)  # type: ignore[no-untyped-call]
        self._matmul: Any = sparse_matmul_pb2_grpc.SparseMatmulStub(self._channel)  # type: ignore[no-untyped-call]
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._metadata = call_metadata(token)
        self._timeout = timeout
        self._chunk_bytes = chunk_bytes
        self._shared = SharedMemory(
            self._matmul, lambda method, request: self._call(method, request, None), self._metadata
        )
        self._transport = Transport(self._shared) if shared_memory and not balance and is_local(address) else None

    def close(self) -> None:
        """Closes the connection; calls in flight are cancelled."""
        if self._transport is not None:
            self._transport.close()
        self._shared.close()
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- catalog

    def register(
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
        """Registers W, or a new version of it, and returns when it is ready to be multiplied with.

        The content's hash goes first: what the server already holds is not uploaded again.

        Args:
          name: 1 to 256 characters of [A-Za-z0-9._/-].
          weights: W [M, K] of float16, bfloat16 or float32: an array, a torch tensor, a CSR, COO or Bitmap, or a CSR
            or COO matrix as SciPy has it.
          bias: [M], sent as float32.
          prune: pruned by the server before packing: a Magnitude (or its sparsity alone, 0.5), or an NM.
          format: AUTO lets the server choose.
          store_dtype: element type to store; None keeps the weights' own.
          placement: on which devices.
          activation_threshold: default of matmuls that set none: |x| <= this counts as zero (SpMspV).
          pin: never evict.
          allow_nonfinite: store NaN and infinite weights instead of refusing them.
          progress: called with each Progress; what it raises cancels the registration.
          timeout: seconds for everything, upload and packing included; None for no limit.
        """
        content = content_of(weights, bias)
        options = Options(prune, format, store_dtype, placement, activation_threshold, pin, allow_nonfinite)
        return self._register(upload_spec(name, content, options), content, progress, timeout)

    def register_file(
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
        """Registers a tensor of a file that lies under the server's model repository; nothing is uploaded.

        Args:
          path: relative to the model repository: a .safetensors file, its .index.json, or a .npy file.
          tensor, bias_tensor: names inside a .safetensors file.
          The others are register's.
        """
        options = Options(prune, format, store_dtype, placement, activation_threshold, pin, allow_nonfinite)
        return self._register(file_spec(name, path, tensor, bias_tensor, options), None, progress, timeout)

    def list(self, prefix: str = "", *, timeout: float | None = None) -> list[Layer]:
        """All layers whose names start with `prefix`, without sections and speeds; newest version first in a name."""
        layers: list[Layer] = []
        request = catalog_pb2.ListLayersRequest(name_prefix=prefix)
        while True:
            response: catalog_pb2.ListLayersResponse = self._call(self._catalog.ListLayers, request, timeout)
            layers += [Layer.from_proto(layer) for layer in response.layers]
            request.page_token = response.next_page_token
            if not request.page_token:
                return layers

    def get(self, name: str, *, version: int = 0, timeout: float | None = None) -> Layer:
        """One layer in full; version 0 is the newest."""
        request = catalog_pb2.GetLayerRequest(layer=layer_ref(name, version))
        response: catalog_pb2.GetLayerResponse = self._call(self._catalog.GetLayer, request, timeout)
        return Layer.from_proto(response.layer)

    def unregister(
        self, name: str, *, version: int = 0, missing_ok: bool = False, timeout: float | None = None
    ) -> Removed:
        """Removes a version, or with version 0 all of them; their memory is free when this returns."""
        request = catalog_pb2.UnregisterLayerRequest(layer=layer_ref(name, version))
        try:
            response: catalog_pb2.UnregisterLayerResponse = self._call(self._catalog.UnregisterLayer, request, timeout)
        except NotFoundError:
            if missing_ok:
                return Removed(0, 0)
            raise
        return Removed(response.removed_versions, response.freed_bytes)

    def pin(self, name: str, pinned: bool = True, *, version: int = 0, timeout: float | None = None) -> Layer:
        """Pins a layer on its devices, or releases the pin."""
        request = catalog_pb2.PinLayerRequest(layer=layer_ref(name, version), pinned=pinned)
        response: catalog_pb2.PinLayerResponse = self._call(self._catalog.PinLayer, request, timeout)
        return Layer.from_proto(response.layer)

    def warm(self, name: str, *, version: int = 0, timeout: float | None = None) -> Layer:
        """Brings a layer to its devices and runs it once for each class of batch widths."""
        request = catalog_pb2.WarmLayerRequest(layer=layer_ref(name, version))
        response: catalog_pb2.WarmLayerResponse = self._call(self._catalog.WarmLayer, request, timeout, long=True)
        return Layer.from_proto(response.layer)

    def benchmark(
        self,
        name: str,
        tokens: Sequence[int] = (),
        *,
        version: int = 0,
        repetitions: int = 0,
        dense: bool = True,
        timeout: float | None = None,
    ) -> Sequence[Speed]:
        """Times a layer for each batch width, beside the dense baseline unless dense=False.

        Args:
          tokens: batch widths; empty for 1, 2, 4, ..., 64.
          repetitions: timed launches for each width; 0 for 50.
        """
        request = catalog_pb2.BenchmarkRequest(
            layer=layer_ref(name, version), tokens=tokens, repetitions=repetitions, skip_dense=not dense
        )
        response: catalog_pb2.BenchmarkResponse = self._call(self._catalog.Benchmark, request, timeout, long=True)
        return [Speed.from_proto(speed) for speed in response.speeds]

    # ---- data

    def matmul(
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
        """activation(x * W^T + bias), as torch.nn.functional.linear.

        Args:
          name: a registered layer W [M, K].
          x: [..., K] of float16, bfloat16, float32 (or float64, narrowed to float32), or SparseRows or a SciPy-like
            CSR matrix [N, K].
          version: 0 for the newest.
          activation: none, relu, gelu, gelu_tanh or silu.
          threshold: |x| <= threshold counts as zero (SpMspV); None takes the layer's own default.
          bias: False leaves out the layer's bias.
          out_dtype: of the result.

        Returns:
          [..., M].
        """
        request, leading = matmul_request(
            name, x, version=version, activation=activation, threshold=threshold, bias=bias, out_dtype=out_dtype
        )
        return matmul_result(self._execute(request, timeout), leading)

    def execute(self, program: Program | RegisteredProgram, inputs: Any, *, timeout: float | None = None) -> Outputs:
        """Runs a program once.

        Args:
          program: built here, or registered before.
          inputs: a mapping from input names to [N, K] arrays or SparseRows, all with the same N; or the value itself
            when the program has one input.

        Returns:
          The outputs by step name, with `.timing`.
        """
        layer = getattr(program, "layer", "")
        return outputs_from_proto(self._execute(execute_request(program, inputs), timeout, layer))

    def register_program(self, program: Program, *, timeout: float | None = None) -> RegisteredProgram:
        """Has the server check and plan a program once."""
        request = matmul_pb2.RegisterProgramRequest(program=program.to_proto())
        response: matmul_pb2.RegisterProgramResponse = self._call(self._matmul.RegisterProgram, request, timeout)
        return RegisteredProgram(response.program_id, program.inputs, layer_of(request))

    def unregister_program(self, program: RegisteredProgram, *, timeout: float | None = None) -> None:
        """Forgets a program."""
        request = matmul_pb2.UnregisterProgramRequest(program_id=program.id)
        self._call(self._matmul.UnregisterProgram, request, timeout, layer=program.layer)

    def stream(self, *, max_in_flight: int = 64, layer: str = "") -> Stream:
        """A pipelined stream of requests, answered as they finish.

        Args:
          max_in_flight: submissions beyond this many unanswered ones wait.
          layer: what a gateway routes the stream by, to the layer's shard; without one it means nothing.
        """
        metadata = with_layer(self._metadata, layer)
        return Stream(
            lambda requests: self._matmul.ExecuteStream(requests, metadata=metadata), max_in_flight=max_in_flight
        )

    # ---- the server

    def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Version, limits and abilities of the server."""
        response = self._call(self._matmul.ServerInfo, matmul_pb2.ServerInfoRequest(), timeout)
        return ServerInfo.from_proto(response)

    def device_info(self, *, timeout: float | None = None) -> Sequence[Device]:
        """The devices, their memory and measured bandwidth."""
        response = self._call(self._matmul.DeviceInfo, matmul_pb2.DeviceInfoRequest(), timeout)
        return [Device.from_proto(device) for device in response.devices]

    def health(self, service: str = "", *, timeout: float | None = None) -> HealthStatus:
        """State of a service ("spmm.v1.SparseMatmul"), or of the whole server; NotFoundError for an unknown one."""
        request = health_pb2.HealthCheckRequest(service=service)
        response = self._call(self._health.Check, request, timeout)
        return HealthStatus(response.status)

    def wait_ready(self, timeout: float = 30.0) -> None:
        """Waits for the connection; TimeoutError when there is none after `timeout` seconds."""
        try:
            grpc.channel_ready_future(self._channel).result(timeout)
        except grpc.FutureTimeoutError as error:
            raise TimeoutError(f"no connection after {timeout:g} s") from error

    # ---- shared memory, on the server's host

    def create_region(self, size: int) -> Region:
        """Shared memory of `size` bytes that requests can name instead of carrying bytes.

        Raises FailedPreconditionError when the server does not allow it (--shared-memory) or is on another host,
        NotFoundError when it sees another /dev/shm (a container), and OSError when /dev/shm is full.
        """
        return self._shared.create(size)

    def open_ring(
        self,
        programs: Sequence[RegisteredProgram | str],
        *,
        tensor_bytes: int = 1 << 20,
        entries: int = 64,
        spin: float = 200e-6,
    ) -> Ring:
        """A ring: registered programs executed through shared memory, without a call for each.

        Args:
          programs: what entries can name, by position.
          tensor_bytes: room for inputs and outputs.
          entries: in flight at a time; a power of two.
          spin: seconds that wait() looks for a result before it sleeps.
        """
        return self._shared.open_ring(programs, tensor_bytes, entries, spin)

    # ---- plumbing

    def _execute(
        self, request: matmul_pb2.ExecuteRequest, timeout: float | None, layer: str = ""
    ) -> matmul_pb2.ExecuteResponse:
        def call(message: matmul_pb2.ExecuteRequest) -> matmul_pb2.ExecuteResponse:
            response: matmul_pb2.ExecuteResponse = self._call(self._matmul.Execute, message, timeout, layer=layer)
            return response

        return call(request) if self._transport is None else self._transport.run(request, call)

    def _call(self, method: Any, request: Any, timeout: float | None, *, long: bool = False, layer: str = "") -> Any:
        if timeout is None and not long:
            timeout = self._timeout
        try:
            return method(request, timeout=timeout, metadata=with_layer(self._metadata, layer or layer_of(request)))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def _register(
        self,
        spec: catalog_pb2.LayerSpec,
        content: Content | None,
        progress: ProgressCallback | None,
        timeout: float | None,
    ) -> Layer:
        return self._run_registration(Registration(spec, content, progress, self._chunk_bytes), timeout)

    def _run_registration(self, registration: Registration, timeout: float | None) -> Layer:
        metadata = with_layer(self._metadata, registration.layer)
        end = None if timeout is None else time.monotonic() + timeout

        def start(requests: Any) -> Any:
            left = None if end is None else max(0.0, end - time.monotonic())
            return self._catalog.RegisterLayer(requests, timeout=left, metadata=metadata)

        return registration.run(start)
