"""Client of spmmd, the server that multiplies with pruned LLM weight matrices.

import spmmd
with spmmd.Client("127.0.0.1:8500") as client:
    client.register("block.0.up", weights, prune=0.5)
    y = client.matmul("block.0.up", x, activation="gelu")
"""

from spmmd._registration import ProgressCallback
from spmmd._transport import Tls
from spmmd._version import __version__
from spmmd.aio import AsyncClient, AsyncStream
from spmmd.aio_sharding import AsyncShardedClient
from spmmd.arrays import SparseRows
from spmmd.client import Client
from spmmd.errors import (
    AlreadyExistsError,
    CancelledError,
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    FieldViolation,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    SpmmdError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from spmmd.packed import Inspection, PackedFile, PackedFileError, inspect, pack
from spmmd.program import Outputs, Program, RegisteredProgram, Value
from spmmd.sharding import Move, ShardedClient, ShardedProgram, moves, shard_key, shard_of
from spmmd.shared import Region, Ring, Slot
from spmmd.stream import Stream
from spmmd.types import (
    NM,
    Activation,
    Device,
    DType,
    Format,
    HealthStatus,
    Layer,
    LayerState,
    Limits,
    Magnitude,
    Placement,
    Progress,
    Residency,
    Section,
    ServerInfo,
    Speed,
    Timing,
)
from spmmd.weights import COO, CSR, Bitmap

__all__ = [
    "COO",
    "CSR",
    "NM",
    "Activation",
    "AlreadyExistsError",
    "AsyncClient",
    "AsyncShardedClient",
    "AsyncStream",
    "Bitmap",
    "CancelledError",
    "Client",
    "DType",
    "DataLossError",
    "DeadlineExceededError",
    "Device",
    "FailedPreconditionError",
    "FieldViolation",
    "Format",
    "HealthStatus",
    "Inspection",
    "InternalError",
    "InvalidArgumentError",
    "Layer",
    "LayerState",
    "Limits",
    "Magnitude",
    "Move",
    "NotFoundError",
    "Outputs",
    "PackedFile",
    "PackedFileError",
    "PermissionDeniedError",
    "Placement",
    "Program",
    "Progress",
    "ProgressCallback",
    "Region",
    "RegisteredProgram",
    "Residency",
    "ResourceExhaustedError",
    "Ring",
    "Section",
    "ServerInfo",
    "ShardedClient",
    "ShardedProgram",
    "Slot",
    "SparseRows",
    "Speed",
    "SpmmdError",
    "Stream",
    "Timing",
    "Tls",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "Value",
    "__version__",
    "inspect",
    "moves",
    "pack",
    "shard_key",
    "shard_of",
]
