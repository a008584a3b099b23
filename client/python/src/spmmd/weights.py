"""Weights to upload: encodings, content parts in wire order, their hash, and chunks."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from spmmd._proto import layer_catalog_pb2 as catalog_pb2
from spmmd.arrays import Array, as_array, as_index, canonical_csr, is_csr
from spmmd.types import (
    NM,
    DTypeLike,
    Format,
    FormatLike,
    Magnitude,
    Placement,
    PlacementLike,
    Prune,
    parse_dtype,
    parse_enum,
)

_ROW_OFFSETS = catalog_pb2.CONTENT_PART_ROW_OFFSETS
_ROW_INDICES = catalog_pb2.CONTENT_PART_ROW_INDICES
_COLUMN_INDICES = catalog_pb2.CONTENT_PART_COLUMN_INDICES
_BITMAP = catalog_pb2.CONTENT_PART_BITMAP
_VALUES = catalog_pb2.CONTENT_PART_VALUES
_BIAS = catalog_pb2.CONTENT_PART_BIAS


@dataclass(frozen=True)
class CSR:
    """W [M, K] by rows: offsets [M + 1], column indices strictly ascending within a row, values."""

    shape: tuple[int, int]
    row_offsets: Array
    column_indices: Array
    values: Array


@dataclass(frozen=True)
class COO:
    """W [M, K] by coordinates in any order, without duplicates."""

    shape: tuple[int, int]
    row_indices: Array
    column_indices: Array
    values: Array


@dataclass(frozen=True)
class Bitmap:
    """W [M, K] by one bit an element (row-major, least significant bit first) and the nonzeros in row-major order."""

    shape: tuple[int, int]
    bits: Array
    values: Array

    @classmethod
    def from_dense(cls, weights: Any) -> Bitmap:
        """From a dense matrix of a served dtype; zeros of either sign are left out."""
        dense = as_array(weights, "weights", narrow=False)
        if dense.ndim != 2:
            raise ValueError(f"weights: expected [M, K], got shape {list(dense.shape)}")
        mask = dense != 0
        bits = np.packbits(mask.reshape(-1), bitorder="little")
        return cls((dense.shape[0], dense.shape[1]), bits, dense[mask])


@dataclass(frozen=True)
class Content:
    """What an upload carries, still in the caller's memory."""

    shape: tuple[int, int]
    dtype: int
    encoding: int
    nnz: int
    has_bias: bool
    parts: tuple[tuple[int, memoryview], ...] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for _, part in self.parts)

    def xxh3(self) -> str:
        """XXH3-128 of the parts in order, 32 lower-case hex digits."""
        digest = xxhash.xxh3_128()
        for _, part in self.parts:
            digest.update(part)
        return digest.hexdigest()

    def chunks(
        self, chunk_bytes: int, received: Mapping[int, int] | None = None
    ) -> Iterator[catalog_pb2.ContentChunk]:
        """The parts in order, in pieces of at most chunk_bytes; without what the server has received of each."""
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes: must be at least 1, got {chunk_bytes}")
        for kind, part in self.parts:
            for offset in range((received or {}).get(kind, 0), part.nbytes, chunk_bytes):
                data = bytes(part[offset : offset + chunk_bytes])
                yield catalog_pb2.ContentChunk(part=kind, offset=offset, data=data)  # type: ignore[arg-type]


def _bytes(array: Array) -> memoryview:
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat)


def content_of(weights: Any, bias: Any = None) -> Content:
    """The content of a dense matrix, a CSR/COO/Bitmap, or a SciPy-like CSR or COO matrix.

    Raises:
      TypeError: an element type that is not served.
      ValueError: not a matrix, or a bias that is not a vector.
    """
    parts: list[tuple[int, memoryview]] = []
    if is_csr(weights):
        weights = canonical_csr(weights)
        weights = CSR(tuple(weights.shape), weights.indptr, weights.indices, weights.data)
    elif all(hasattr(weights, name) for name in ("shape", "row", "col", "data")):
        weights = COO(tuple(weights.shape), weights.row, weights.col, weights.data)

    if isinstance(weights, CSR):
        encoding = catalog_pb2.SOURCE_ENCODING_CSR
        values = as_array(weights.values, "weights.values", narrow=False)
        parts.append((_ROW_OFFSETS, _bytes(as_index(weights.row_offsets, np.uint64, "weights.row_offsets"))))
        columns = as_index(weights.column_indices, np.uint32, "weights.column_indices")
        parts.append((_COLUMN_INDICES, _bytes(columns)))
    elif isinstance(weights, COO):
        encoding = catalog_pb2.SOURCE_ENCODING_COO
        values = as_array(weights.values, "weights.values", narrow=False)
        parts.append((_ROW_INDICES, _bytes(as_index(weights.row_indices, np.uint32, "weights.row_indices"))))
        columns = as_index(weights.column_indices, np.uint32, "weights.column_indices")
        parts.append((_COLUMN_INDICES, _bytes(columns)))
    elif isinstance(weights, Bitmap):
        encoding = catalog_pb2.SOURCE_ENCODING_BITMAP_UPLOAD
        values = as_array(weights.values, "weights.values", narrow=False)
        parts.append((_BITMAP, _bytes(as_index(weights.bits, np.uint8, "weights.bits"))))
    else:
        encoding = catalog_pb2.SOURCE_ENCODING_DENSE
        values = as_array(weights, "weights", narrow=False)
        if values.ndim != 2:
            raise ValueError(f"weights: expected [M, K], got shape {list(values.shape)}")
        weights = values
    parts.append((_VALUES, _bytes(values)))

    if bias is not None:
        vector = as_array(bias, "bias", narrow=True).astype(np.float32)
        if vector.ndim != 1:
            raise ValueError(f"bias: expected [M], got shape {list(vector.shape)}")
        parts.append((_BIAS, _bytes(vector)))

    rows, columns_count = weights.shape
    return Content(
        shape=(int(rows), int(columns_count)),
        dtype=parse_dtype(values.dtype).value,
        encoding=encoding,
        nnz=0 if encoding == catalog_pb2.SOURCE_ENCODING_DENSE else values.size,
        has_bias=bias is not None,
        parts=tuple(parts),
    )


@dataclass(frozen=True)
class Options:
    """How a layer is to be stored; the keyword arguments of register and register_file."""

    prune: Prune | None = None
    format: FormatLike = Format.AUTO
    store_dtype: DTypeLike | None = None
    placement: PlacementLike = Placement.DEFAULT
    activation_threshold: float | None = None
    pin: bool = False
    allow_nonfinite: bool = False

    def apply(self, spec: catalog_pb2.LayerSpec) -> None:
        if isinstance(self.prune, NM):
            spec.nm.n, spec.nm.m = self.prune.n, self.prune.m
        elif self.prune is not None:
            share = self.prune.sparsity if isinstance(self.prune, Magnitude) else self.prune
            if not isinstance(share, numbers.Real):
                raise TypeError(f"prune: expected a share of zeros such as 0.5, Magnitude or NM, got {share!r}")
            spec.magnitude.sparsity = float(share)
        spec.format = parse_enum(Format, self.format, "format").value  # type: ignore[assignment]
        if self.store_dtype is not None:
            spec.store_dtype = parse_dtype(self.store_dtype, "store_dtype").value  # type: ignore[assignment]
        spec.placement = parse_enum(Placement, self.placement, "placement").value  # type: ignore[assignment]
        if self.activation_threshold is not None:
            spec.activation_threshold = self.activation_threshold
        spec.pin = self.pin
        spec.allow_nonfinite = self.allow_nonfinite


def upload_spec(name: str, content: Content, options: Options) -> catalog_pb2.LayerSpec:
    """The spec that announces an upload, its hash included."""
    spec = catalog_pb2.LayerSpec(
        name=name,
        m=content.shape[0],
        k=content.shape[1],
        dtype=content.dtype,  # type: ignore[arg-type]
        encoding=content.encoding,  # type: ignore[arg-type]
        nnz=content.nnz,
        has_bias=content.has_bias,
        content_xxh3=content.xxh3(),
    )
    options.apply(spec)
    return spec


def file_spec(name: str, path: str, tensor: str, bias_tensor: str, options: Options) -> catalog_pb2.LayerSpec:
    """The spec of a layer that the server reads from its model repository."""
    file = catalog_pb2.FileSource(path=path, tensor=tensor, bias_tensor=bias_tensor)
    spec = catalog_pb2.LayerSpec(name=name, file=file, has_bias=bool(bias_tensor))
    options.apply(spec)
    return spec
