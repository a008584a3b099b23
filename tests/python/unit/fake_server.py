"""A server in Python that follows the wire contract closely enough to test the client, and misbehaves when told to."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np
import xxhash
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from spmmd._proto import layer_catalog_pb2 as catalog_pb2
from spmmd._proto import layer_catalog_pb2_grpc, sparse_matmul_pb2_grpc, types_pb2
from spmmd._proto import sparse_matmul_pb2 as matmul_pb2
from spmmd.arrays import Array, tensor_from_proto, tensor_to_proto
from spmmd.types import DType

_PARTS = {
    catalog_pb2.SOURCE_ENCODING_DENSE: [catalog_pb2.CONTENT_PART_VALUES],
    catalog_pb2.SOURCE_ENCODING_CSR: [
        catalog_pb2.CONTENT_PART_ROW_OFFSETS,
        catalog_pb2.CONTENT_PART_COLUMN_INDICES,
        catalog_pb2.CONTENT_PART_VALUES,
    ],
    catalog_pb2.SOURCE_ENCODING_COO: [
        catalog_pb2.CONTENT_PART_ROW_INDICES,
        catalog_pb2.CONTENT_PART_COLUMN_INDICES,
        catalog_pb2.CONTENT_PART_VALUES,
    ],
    catalog_pb2.SOURCE_ENCODING_BITMAP_UPLOAD: [catalog_pb2.CONTENT_PART_BITMAP, catalog_pb2.CONTENT_PART_VALUES],
}

UNKNOWN_FORMAT: Any = 99  # of a newer server


def status(code: grpc.StatusCode, message: str, *details: Any) -> status_pb2.Status:
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return status_pb2.Status(code=code.value[0], message=message, details=packed)


def bad_field(path: str, problem: str) -> status_pb2.Status:
    violation = error_details_pb2.BadRequest.FieldViolation(field=path, description=problem)
    return status(
        grpc.StatusCode.INVALID_ARGUMENT,
        f"{path}: {problem}",
        error_details_pb2.ErrorInfo(reason="INVALID_FIELD", domain="spmmd", metadata={"k": "v"}),
        error_details_pb2.BadRequest(field_violations=[violation]),
    )


def queue_full() -> status_pb2.Status:
    return status(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "queue full",
        error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="spmmd"),
        error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=250_000_000)),
    )


def abort(context: grpc.ServicerContext, rpc_status: status_pb2.Status) -> None:
    context.set_trailing_metadata((("grpc-status-details-bin", rpc_status.SerializeToString()),))
    code = next(c for c in grpc.StatusCode if c.value[0] == rpc_status.code)
    context.abort(code, rpc_status.message)


class FakeServer(layer_catalog_pb2_grpc.LayerCatalogServicer, sparse_matmul_pb2_grpc.SparseMatmulServicer):
    """The services and the gRPC server around them.

    Attributes:
      layers: registered layers and, by name, the parts that were uploaded for them.
      chunks: every chunk received.
      metadata: the last call's.
      fail: the error of the next call, if any.
      lose_source: as many registrations are told that somebody else brings their content, and then that he does not.
      reorder: answers of a stream are held back until this many are there, then sent last first.
      break_after: a stream fails as a whole after this many requests.
    """

    def __init__(self) -> None:
        self.layers: dict[str, catalog_pb2.Layer] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.contents: dict[str, dict[int, bytes]] = {}
        self.chunks: list[catalog_pb2.ContentChunk] = []
        self.specs: list[catalog_pb2.LayerSpec] = []
        self.requests: list[matmul_pb2.ExecuteRequest] = []
        self.programs: dict[str, matmul_pb2.Program] = {}
        self.metadata: dict[str, Any] = {}
        self.fail: status_pb2.Status | None = None
        self.fail_after_chunks: tuple[int, status_pb2.Status] | None = None
        self.end_without_layer = False
        self.lose_source = 0
        self.break_uploads = 0
        self.received: dict[int, bytes] = {}
        self.reorder = 1
        self.break_after: int | None = None
        self.upload_ended = threading.Event()
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._server = grpc.server(futures.ThreadPoolExecutor(8), options=options)
        layer_catalog_pb2_grpc.add_LayerCatalogServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        sparse_matmul_pb2_grpc.add_SparseMatmulServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(_Health(), self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    # ---- LayerCatalog

    def RegisterLayer(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        self._enter(context)
        self.upload_ended.clear()
        context.add_callback(self.upload_ended.set)
        spec = next(requests).spec
        self.specs.append(spec)
        if self.lose_source > 0:
            self.lose_source -= 1
            yield catalog_pb2.RegisterLayerResponse(accepted=catalog_pb2.RegisterAccepted(content_needed=False))
            info = error_details_pb2.ErrorInfo(domain="spmmd", reason="CONTENT_SOURCE_LOST")
            abort(context, status(grpc.StatusCode.ABORTED, "try again", info))
        parts = self.contents.get(spec.content_xxh3)
        needed = parts is None and not spec.HasField("file")
        accepted = catalog_pb2.RegisterAccepted(content_needed=needed, content_bytes=1)
        for part, data in self.received.items():
            accepted.received.add(part=part, bytes=len(data))
        yield catalog_pb2.RegisterLayerResponse(accepted=accepted)
        if needed:
            parts = self.received
            self.received = {}
            for count, request in enumerate(requests, 1):
                chunk = request.chunk
                assert chunk.offset == len(parts.get(chunk.part, b""))
                parts[chunk.part] = parts.get(chunk.part, b"") + chunk.data
                self.chunks.append(chunk)
                progress = catalog_pb2.RegisterProgress(
                    state=catalog_pb2.LAYER_STATE_UPLOADING, received_bytes=sum(map(len, parts.values()))
                )
                yield catalog_pb2.RegisterLayerResponse(progress=progress)
                if self.break_uploads > 0:
                    self.break_uploads -= 1
                    self.received = parts
                    abort(context, status(grpc.StatusCode.UNAVAILABLE, "connection reset"))
                if self.fail_after_chunks is not None and count == self.fail_after_chunks[0]:
                    abort(context, self.fail_after_chunks[1])
            order = list(_PARTS[spec.encoding]) + ([catalog_pb2.CONTENT_PART_BIAS] if spec.has_bias else [])
            if list(parts) != order:
                abort(context, bad_field("chunk.part", f"parts {list(parts)} instead of {order}"))
            digest = xxhash.xxh3_128(b"".join(parts[part] for part in order)).hexdigest()
            if digest != spec.content_xxh3:
                abort(context, status(grpc.StatusCode.DATA_LOSS, "content does not match content_xxh3"))
            self.contents[digest] = parts
        if self.end_without_layer:
            return
        layer = catalog_pb2.Layer(
            name=spec.name,
            version=1,
            m=spec.m,
            k=spec.k,
            dtype=spec.dtype,
            format=UNKNOWN_FORMAT,
            content_xxh3=spec.content_xxh3,
        )
        layer.create_time.FromSeconds(1_700_000_000)
        self.layers[spec.name] = layer
        self.parts[spec.name] = parts or {}
        yield catalog_pb2.RegisterLayerResponse(layer=layer)

    def ListLayers(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self._enter(context)
        names = sorted(name for name in self.layers if name.startswith(request.name_prefix))
        first = int(request.page_token or 0)
        page = names[first : first + 2]
        token = str(first + 2) if first + 2 < len(names) else ""
        return catalog_pb2.ListLayersResponse(layers=[self.layers[n] for n in page], next_page_token=token)

    def GetLayer(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self._enter(context)
        if request.layer.name not in self.layers:
            info = error_details_pb2.ErrorInfo(reason="LAYER_NOT_FOUND", domain="spmmd")
            abort(context, status(grpc.StatusCode.NOT_FOUND, f"layer '{request.layer.name}' is unknown", info))
        return catalog_pb2.GetLayerResponse(layer=self.layers[request.layer.name])

    def UnregisterLayer(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self._enter(context)
        if self.layers.pop(request.layer.name, None) is None:
            abort(context, status(grpc.StatusCode.NOT_FOUND, "unknown"))
        return catalog_pb2.UnregisterLayerResponse(removed_versions=1, freed_bytes=7)

    # ---- SparseMatmul

    def Execute(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self._enter(context)
        return self._run(request)

    def ExecuteStream(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        self._enter(context)
        held: list[matmul_pb2.ExecuteStreamResponse] = []
        for count, request in enumerate(requests, 1):
            if self.break_after is not None and count > self.break_after:
                abort(context, status(grpc.StatusCode.UNAVAILABLE, "device lost"))
            held.append(self._answer(request))
            if len(held) == self.reorder:
                yield from reversed(held)
                held = []
        yield from reversed(held)

    def RegisterProgram(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self._enter(context)
        program_id = hashlib.sha1(request.SerializeToString()).hexdigest()
        self.programs[program_id] = request.program
        return matmul_pb2.RegisterProgramResponse(program_id=program_id)

    def UnregisterProgram(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self._enter(context)
        del self.programs[request.program_id]
        return matmul_pb2.UnregisterProgramResponse()

    # ---- inside

    def _enter(self, context: grpc.ServicerContext) -> None:
        self.metadata = dict(context.invocation_metadata())
        if self.fail is not None:
            failure, self.fail = self.fail, None
            abort(context, failure)

    def _answer(self, request: matmul_pb2.ExecuteStreamRequest) -> matmul_pb2.ExecuteStreamResponse:
        if any(i.name == "poison" for i in request.request.inputs):
            details = bad_field("request.inputs[0].name", "unknown")
            error = matmul_pb2.StreamError(
                code=details.code, message=details.message, status_details=details.SerializeToString()
            )
            return matmul_pb2.ExecuteStreamResponse(request_id=request.request_id, error=error)
        return matmul_pb2.ExecuteStreamResponse(request_id=request.request_id, response=self._run(request.request))

    def weight(self, name: str) -> Array:
        layer = self.layers[name]
        values = self.parts[name][catalog_pb2.CONTENT_PART_VALUES]
        return np.frombuffer(values, DType(layer.dtype).numpy).reshape(layer.m, layer.k).astype(np.float32)

    def _run(self, request: matmul_pb2.ExecuteRequest) -> matmul_pb2.ExecuteResponse:
        self.requests.append(request)
        program = self.programs[request.program_id] if request.program_id else request.program
        values: dict[str, Array] = {}
        for given in request.inputs:
            values[given.name] = _dense(given.sparse) if given.HasField("sparse") else tensor_from_proto(given.dense)
        for step in program.steps:
            if step.HasField("matmul"):
                x = values[step.matmul.input].astype(np.float32)
                if step.matmul.HasField("activation_threshold"):
                    x = np.where(np.abs(x) <= step.matmul.activation_threshold, np.float32(0), x)
                y = x @ self.weight(step.matmul.layer.name).T
                if step.matmul.activation == types_pb2.ACTIVATION_RELU:
                    y = np.maximum(y, 0)
            elif step.HasField("add"):
                y = values[step.add.left] + values[step.add.right]
            else:
                y = values[step.mul.left] * values[step.mul.right]
            values[step.name] = y
        response = matmul_pb2.ExecuteResponse()
        response.timing.kernel.nanos = 1500
        for output in program.outputs:
            dtype = DType(output.dtype or DType.F32).numpy
            tensor = tensor_to_proto(values[output.step].astype(dtype))
            response.outputs.append(matmul_pb2.NamedOutput(name=output.step, tensor=tensor))
        return response


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    def Check(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        if request.service not in ("", "spmm.v1.SparseMatmul"):
            context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


def _dense(sparse: types_pb2.SparseTensor) -> Array:
    dense = np.zeros(tuple(sparse.shape), np.float32)
    offsets = np.frombuffer(sparse.row_offsets, np.uint64).astype(np.int64)
    indices = np.frombuffer(sparse.indices, np.uint32)
    values = np.frombuffer(sparse.values, DType(sparse.dtype).numpy)
    for row in range(dense.shape[0]):
        span = slice(offsets[row], offsets[row + 1])
        dense[row, indices[span]] = values[span]
    return dense
