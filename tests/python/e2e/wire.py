"""Calls below the client, to say on the wire what the client would not."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import grpc
import numpy as np

from spmmd._proto import layer_catalog_pb2 as catalog_pb2
from spmmd._proto import layer_catalog_pb2_grpc, sparse_matmul_pb2_grpc, types_pb2
from spmmd._proto import sparse_matmul_pb2 as matmul_pb2
from spmmd.errors import SpmmdError, from_rpc_error

TIMEOUT = 20.0
F32 = types_pb2.DATA_TYPE_F32
VALUES = catalog_pb2.CONTENT_PART_VALUES
GOOD = np.arange(1, 7, dtype=np.float32).tobytes()  # the content that spec() announces


class Wire:
    """Both services' stubs; failed calls are returned as SpmmdError."""

    def __init__(self, address: str) -> None:
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self.channel = grpc.insecure_channel(address, options=options)
        self.catalog: Any = layer_catalog_pb2_grpc.LayerCatalogStub(self.channel)  # type: ignore[no-untyped-call]
        self.matmul: Any = sparse_matmul_pb2_grpc.SparseMatmulStub(self.channel)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self.channel.close()

    def call(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=TIMEOUT)
        except grpc.RpcError as error:
            return from_rpc_error(error)

    def execute(self, request: matmul_pb2.ExecuteRequest) -> matmul_pb2.ExecuteResponse | SpmmdError:
        return self.call(self.matmul.Execute, request)  # type: ignore[no-any-return]

    def register(self, messages: Iterable[catalog_pb2.RegisterLayerRequest]) -> catalog_pb2.Layer | SpmmdError | None:
        """Sends all messages without waiting for `accepted`, half-closes, and returns the layer, the error, or None."""
        layer = None
        try:
            for event in self.catalog.RegisterLayer(iter(messages), timeout=TIMEOUT):
                if event.WhichOneof("event") == "layer":
                    layer = event.layer
        except grpc.RpcError as error:
            return from_rpc_error(error)
        return layer


def spec(**fields: Any) -> catalog_pb2.RegisterLayerRequest:
    """The spec of a valid 2 x 3 float32 layer "bad", with some fields replaced."""
    values: dict[str, Any] = {
        "name": "bad",
        "m": 2,
        "k": 3,
        "dtype": types_pb2.DATA_TYPE_F32,
        "encoding": catalog_pb2.SOURCE_ENCODING_DENSE,
    }
    values.update(fields)
    return catalog_pb2.RegisterLayerRequest(spec=catalog_pb2.LayerSpec(**values))


def chunk(part: int, data: bytes, offset: int = 0) -> catalog_pb2.RegisterLayerRequest:
    piece = catalog_pb2.ContentChunk(part=part, data=data, offset=offset)  # type: ignore[arg-type]
    return catalog_pb2.RegisterLayerRequest(chunk=piece)


def dense(rows: int = 1, columns: int = 3, **fields: Any) -> dict[str, Any]:
    return {"dtype": F32, "shape": [rows, columns], "data": bytes(4 * rows * columns), **fields}


def sparse(**fields: Any) -> dict[str, Any]:
    """Two rows of three columns: (0: 0, 2), (1: 1)."""
    return {
        "dtype": F32,
        "shape": [2, 3],
        "row_offsets": struct.pack("<3Q", 0, 2, 3),
        "indices": struct.pack("<3I", 0, 2, 1),
        "values": struct.pack("<3f", 1, 2, 3),
        **fields,
    }


def matmul(name: str = "y", input: str = "x", layer: str = "w", **fields: Any) -> dict[str, Any]:
    return {"name": name, "matmul": {"layer": {"name": layer}, "input": input, **fields}}


def request(
    inputs: Any = None, steps: Any = None, outputs: Any = None, names: Any = None, **fields: Any
) -> matmul_pb2.ExecuteRequest:
    program = {
        "inputs": ["x"] if names is None else names,
        "steps": [matmul()] if steps is None else steps,
        "outputs": [{"step": "y"}] if outputs is None else outputs,
    }
    given = [{"name": "x", "dense": dense()}] if inputs is None else inputs
    return matmul_pb2.ExecuteRequest(**{"program": program, "inputs": given, **fields})
