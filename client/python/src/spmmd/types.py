"""The API's vocabulary: enumerations, and what the server tells of layers, devices and itself."""

from __future__ import annotations

import datetime
import enum
from dataclasses import dataclass
from typing import TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from spmmd._proto import layer_catalog_pb2, sparse_matmul_pb2, types_pb2

BFLOAT16: np.dtype[np.generic] = np.dtype(ml_dtypes.bfloat16)


class DType(enum.IntEnum):
    """Element type of a matrix."""

    F16 = 1
    BF16 = 2
    F32 = 3

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The numpy dtype (bfloat16 is ml_dtypes')."""
        return {DType.F16: np.dtype(np.float16), DType.BF16: BFLOAT16, DType.F32: np.dtype(np.float32)}[self]


class Format(enum.IntEnum):
    """How a layer is stored on its device; AUTO lets the server choose."""

    AUTO = 0
    DENSE = 1
    THREE_LAYER = 2
    RLC_CSC = 3
    BITMAP = 4
    ROW_STREAM = 5


class Activation(enum.IntEnum):
    """Element-wise function applied to the fp32 accumulator after the bias."""

    NONE = 0
    RELU = 1
    GELU = 2
    GELU_TANH = 3
    SILU = 4


class Placement(enum.IntEnum):
    """On which devices a layer lives."""

    DEFAULT = 0
    SINGLE = 1
    REPLICATED = 2
    SHARDED = 3


class LayerState(enum.IntEnum):
    """Where a layer is in its life."""

    UNSPECIFIED = 0
    UPLOADING = 1
    PACKING = 2
    READY = 3
    EVICTED = 4
    FAILED = 5


class HealthStatus(enum.IntEnum):
    """Answer of the health service."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


DTypeLike = DType | str | npt.DTypeLike
FormatLike = Format | str
ActivationLike = Activation | str
PlacementLike = Placement | str

_E = TypeVar("_E", bound=enum.IntEnum)


def parse_enum(cls: type[_E], value: _E | str | None, what: str) -> _E:
    """A member of `cls` from itself, its name in any case, or None for the zero member."""
    if value is None:
        return cls(0)
    if isinstance(value, cls):
        return value
    if isinstance(value, str) and value.upper() in cls.__members__:
        return cls[value.upper()]
    raise ValueError(f"{what}: {value!r} is not one of {', '.join(m.lower() for m in cls.__members__)}")


def parse_dtype(value: DTypeLike, what: str = "dtype") -> DType:
    """A DType from itself, its short name (f16, bf16, f32) or anything that numpy takes for a dtype."""
    if isinstance(value, DType):
        return value
    if isinstance(value, str):
        if value.upper() in DType.__members__:
            return DType[value.upper()]
        if value == "bfloat16":
            return DType.BF16
    try:
        dtype = np.dtype(value)
    except TypeError as error:
        raise TypeError(f"{what}: {value!r} is not an element type; use f16, bf16 or f32") from error
    for member in DType:
        if dtype.newbyteorder("=") == member.numpy:
            return member
    raise TypeError(f"{what}: {dtype} is not served; convert to float16, ml_dtypes.bfloat16 or float32")


def _from_wire(cls: type[_E], value: int) -> _E:
    """A member, or the zero member for a value of a newer server."""
    return cls(value) if value in cls._value2member_map_ else cls(0)


@dataclass(frozen=True)
class Magnitude:
    """Pruning by the server: the smallest magnitudes of the whole matrix become zero until this share of it is zero."""

    sparsity: float


@dataclass(frozen=True)
class NM:
    """Pruning by the server: the n largest of every m neighbours along K stay."""

    n: int
    m: int


Prune = float | Magnitude | NM


@dataclass(frozen=True)
class Progress:
    """An event of a registration."""

    state: LayerState
    """UPLOADING or PACKING."""
    received_bytes: int
    """Bytes of content that the server has received."""
    content_bytes: int
    """Bytes of the whole content."""
    content_needed: bool
    """False: the server has this content already, nothing is uploaded."""


@dataclass(frozen=True)
class Section:
    """Bytes of one section of a packed layer."""

    name: str
    bytes: int
    padding_bytes: int


@dataclass(frozen=True)
class Residency:
    """Rows [row_begin, row_end) of a layer, held by `device` in `bytes` bytes (0 when evicted)."""

    device: str
    row_begin: int
    row_end: int
    bytes: int


@dataclass(frozen=True)
class Speed:
    """Measured time of one layer at one batch width."""

    tokens: int
    format: Format
    kernel: str
    seconds_p50: float
    seconds_p10: float
    seconds_p90: float
    bytes: int
    bytes_per_second: float
    dense_seconds_p50: float
    """Median of the dense baseline on the same device; 0 when not measured."""

    @classmethod
    def from_proto(cls, proto: layer_catalog_pb2.LayerSpeed) -> Speed:
        return cls(
            tokens=proto.tokens,
            format=_from_wire(Format, proto.format),
            kernel=proto.kernel,
            seconds_p50=proto.seconds_p50,
            seconds_p10=proto.seconds_p10,
            seconds_p90=proto.seconds_p90,
            bytes=proto.bytes,
            bytes_per_second=proto.bytes_per_second,
            dense_seconds_p50=proto.dense_seconds_p50,
        )


@dataclass(frozen=True)
class Layer:
    """What the server knows of one version of a layer W of shape [m, k] = [out_features, in_features]."""

    name: str
    version: int
    m: int
    k: int
    dtype: DType | None
    nnz: int
    sparsity: float
    state: LayerState
    error: str
    format: Format
    format_reason: str
    sections: tuple[Section, ...]
    bytes: int
    dense_bytes: int
    has_bias: bool
    activation_threshold: float | None
    placement: Placement
    residency: tuple[Residency, ...]
    pinned: bool
    content_xxh3: str
    create_time: datetime.datetime
    pack_seconds: float
    speeds: tuple[Speed, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.m, self.k

    @classmethod
    def from_proto(cls, proto: layer_catalog_pb2.Layer) -> Layer:
        threshold = proto.activation_threshold if proto.HasField("activation_threshold") else None
        return cls(
            name=proto.name,
            version=proto.version,
            m=proto.m,
            k=proto.k,
            dtype=DType(proto.dtype) if proto.dtype in DType._value2member_map_ else None,
            nnz=proto.nnz,
            sparsity=proto.sparsity,
            state=_from_wire(LayerState, proto.state),
            error=proto.error,
            format=_from_wire(Format, proto.format),
            format_reason=proto.format_reason,
            sections=tuple(Section(s.name, s.bytes, s.padding_bytes) for s in proto.sections),
            bytes=proto.bytes,
            dense_bytes=proto.dense_bytes,
            has_bias=proto.has_bias,
            activation_threshold=threshold,
            placement=_from_wire(Placement, proto.placement),
            residency=tuple(Residency(r.device, r.row_begin, r.row_end, r.bytes) for r in proto.residency),
            pinned=proto.pinned,
            content_xxh3=proto.content_xxh3,
            create_time=proto.create_time.ToDatetime(datetime.timezone.utc),
            pack_seconds=proto.pack_seconds,
            speeds=tuple(Speed.from_proto(s) for s in proto.speeds),
        )


@dataclass(frozen=True)
class Removed:
    """What `unregister` removed."""

    versions: int
    freed_bytes: int


@dataclass(frozen=True)
class Limits:
    """Limits in force on the server."""

    max_message_bytes: int
    max_chunk_bytes: int
    max_tokens: int
    max_queue_depth: int
    max_batch_tokens: int
    max_queue_bytes: int


@dataclass(frozen=True)
class ServerInfo:
    """Who answers."""

    version: str
    revision: str
    backend: str
    extensions: tuple[str, ...]
    formats: tuple[Format, ...]
    limits: Limits
    shard_index: int
    shard_count: int

    @classmethod
    def from_proto(cls, proto: sparse_matmul_pb2.ServerInfoResponse) -> ServerInfo:
        limits = proto.limits
        return cls(
            version=proto.version,
            revision=proto.revision,
            backend=proto.backend,
            extensions=tuple(proto.extensions),
            formats=tuple(_from_wire(Format, f) for f in proto.formats),
            limits=Limits(
                max_message_bytes=limits.max_message_bytes,
                max_chunk_bytes=limits.max_chunk_bytes,
                max_tokens=limits.max_tokens,
                max_queue_depth=limits.max_queue_depth,
                max_batch_tokens=limits.max_batch_tokens,
                max_queue_bytes=limits.max_queue_bytes,
            ),
            shard_index=proto.shard_index,
            shard_count=max(1, proto.shard_count),  # 0: a server that did not tell yet
        )


@dataclass(frozen=True)
class Device:
    """One device of the server; memory in bytes."""

    id: str
    name: str
    backend: str
    uuid: str
    architecture: str
    memory_total_bytes: int
    memory_budget_bytes: int
    memory_weights_bytes: int
    memory_workspace_bytes: int
    memory_staging_bytes: int
    measured_bandwidth_bytes_per_second: float
    healthy: bool
    queue_depth: int

    @classmethod
    def from_proto(cls, proto: sparse_matmul_pb2.Device) -> Device:
        return cls(
            id=proto.id,
            name=proto.name,
            backend=proto.backend,
            uuid=proto.uuid,
            architecture=proto.architecture,
            memory_total_bytes=proto.memory_total_bytes,
            memory_budget_bytes=proto.memory_budget_bytes,
            memory_weights_bytes=proto.memory_weights_bytes,
            memory_workspace_bytes=proto.memory_workspace_bytes,
            memory_staging_bytes=proto.memory_staging_bytes,
            measured_bandwidth_bytes_per_second=proto.measured_bandwidth_bytes_per_second,
            healthy=proto.healthy,
            queue_depth=proto.queue_depth,
        )


@dataclass(frozen=True)
class Timing:
    """Time that a request spent in the server, in seconds."""

    queue: float
    kernel: float
    total: float


def layer_ref(name: str, version: int) -> types_pb2.LayerRef:
    return types_pb2.LayerRef(name=name, version=version)
