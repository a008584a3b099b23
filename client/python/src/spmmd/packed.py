"""Packed-layer files: read here, packed and inspected by the `spmmctl` program.

A packed-layer file holds one weight matrix in one of spmmd's formats (kernels/format/container.h is its specification).
PackedFile reads its header and its sections in Python. Packing, and the statistics that need a format's own code, run
in `spmmctl`, which is found in this order: the argument `spmmctl`, the environment variable SPMMCTL, PATH.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xxhash

from spmmd.arrays import Array, as_array
from spmmd.types import BFLOAT16, NM, DType, DTypeLike, Magnitude, Prune, Section, parse_dtype

StrPath = str | os.PathLike[str]

EXTENSION = ".spmmpk"
"""What `spmmctl pack` calls its files."""

_MAGIC = b"\x89SPMMPK\n"
_VERSION = 1
_PAGE = 4096
_ALIGNMENT = 64  # zero bytes behind every section
_HEADER = struct.Struct("<8sIIQQIIQBBHIqqq8q16s")
_ENTRY = struct.Struct("<IBBHQQQQ")
_MAX_SECTIONS = 64
_MAX_METADATA = 1 << 20
_BIAS_ROLE = 1
_DTYPES = {1: DType.F16, 2: DType.BF16, 3: DType.F32}
_DTYPE_NAMES = {"fp16": DType.F16, "bf16": DType.BF16, "fp32": DType.F32}
# What the formats' headers call their sections, by id.
_FORMATS: dict[int, tuple[str, dict[int, str]]] = {
    1: ("DENSE", {1: "values"}),
    2: (
        "THREE_LAYER",
        {
            1: "values",
            2: "metadata",
            3: "code_offsets",
            4: "codes",
            5: "residual_offsets",
            6: "residual_positions",
            7: "residual_values",
        },
    ),
    3: ("RLC_CSC", {1: "tile_units", 2: "column_offsets", 3: "runs", 4: "values"}),
    4: ("BITMAP", {1: "values", 2: "masks", 3: "tile_starts", 4: "column_starts"}),
    5: ("ROW_STREAM", {1: "stream", 2: "starts", 3: "tiles", 4: "bases", 5: "escapes", 6: "row_order"}),
    6: ("CSR", {1: "row_offsets", 2: "columns", 3: "values"}),
    7: ("COO", {1: "rows", 2: "columns", 3: "values"}),
    8: ("BITMAP_GPU", {1: "chunks", 2: "offsets"}),
    9: ("COLUMN_PIECE", {1: "pieces", 2: "descriptors", 3: "blocks"}),
}


class PackedFileError(ValueError):
    """A file that is no packed-layer file, or is cut off, damaged or inconsistent; or weights that cannot be packed."""


class PackedFile:
    """The header and the sections of a packed-layer file, mapped read-only.

    The header is always checked, checksum included; `verify()` checks the sections' checksums as well. What is inside
    the sections is the business of the format's own code: `inspect` runs it.

    Attributes:
      m, k: shape of W, [out_features, in_features].
      dtype: element type.
      nnz: nonzeros.
      format: "BITMAP", "THREE_LAYER", ...
      layout_version: of the format's byte layout.
      params: the format's eight numbers.
      sections: name, bytes and padding of each.
      metadata: free-form, for instance "source".
      file_bytes: size of the file.
    """

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path)
        with open(path, "rb") as file:
            self.file_bytes = os.fstat(file.fileno()).st_size
            self._check(self.file_bytes >= _HEADER.size, "is no packed-layer file: too short")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._read_header()
        except BaseException:
            self._map.close()
            raise

    def __enter__(self) -> PackedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps the file, unless arrays over it are still in use."""
        with contextlib.suppress(BufferError):  # else their last one does it
            self._map.close()

    @property
    def bytes(self) -> int:
        """Of all sections of the layer."""
        return sum(section.bytes for section in self.sections)

    @property
    def dense_bytes(self) -> int:
        """What the same matrix takes dense."""
        return self.m * self.k * self.dtype.numpy.itemsize

    @property
    def sparsity(self) -> float:
        """Share of zeros."""
        return 1.0 - self.nnz / (self.m * self.k)

    @property
    def bias(self) -> Array | None:
        """[M] float32, or None."""
        if self._bias is None:
            return None
        return self._array(*self._bias).view(np.float32)

    def section(self, name: str) -> Array:
        """The bytes of a section as uint8, mapped and not copied; KeyError when there is none of that name."""
        return self._array(*self._places[name])

    def verify(self) -> None:
        """Raises PackedFileError unless every section has the checksum that the header says."""
        for name, offset, extent, digest in self._checksums:
            with memoryview(self._map) as whole, whole[offset : offset + extent] as data:
                self._check(xxhash.xxh3_64_intdigest(data) == digest, f"section {name}: checksum mismatch")

    def _array(self, offset: int, size: int) -> Array:
        return np.frombuffer(self._map, np.uint8, size, offset)

    def _check(self, condition: bool, message: str) -> None:
        if not condition:
            raise PackedFileError(f"{self.path}: {message}")

    def _read_header(self) -> None:
        fields = _HEADER.unpack_from(self._map)
        magic, version, header_bytes, file_bytes, digest, sections, entries, metadata_bytes = fields[:8]
        self._check(magic == _MAGIC, "is no packed-layer file: wrong magic")
        self._check(version == _VERSION, f"container version {version}, and this reads {_VERSION}")
        self._check(file_bytes == self.file_bytes, f"has {self.file_bytes} bytes, its header says {file_bytes}")
        self._check(1 <= sections <= _MAX_SECTIONS and metadata_bytes <= _MAX_METADATA, "header: inconsistent sizes")
        used = _HEADER.size + sections * _ENTRY.size + metadata_bytes
        self._check(header_bytes == _pages(used) and header_bytes <= file_bytes, "header: inconsistent sizes")
        header = self._map[:header_bytes]
        self._check(
            xxhash.xxh3_64_intdigest(header[:24] + bytes(8) + header[32:]) == digest, "header: checksum mismatch"
        )
        format_id, dtype_id = fields[8], fields[9]
        self._check(format_id in _FORMATS and dtype_id in _DTYPES, f"format {format_id} or dtype {dtype_id} is unknown")
        self.format, names = _FORMATS[format_id]
        self.dtype = _DTYPES[dtype_id]
        self.layout_version: int = fields[11]
        self.m, self.k, self.nnz = (int(value) for value in fields[12:15])
        self.params: tuple[int, ...] = fields[15:23]
        self._check(
            self.m >= 1 and self.k >= 1 and 0 <= self.nnz <= self.m * self.k, "header: shape or nnz out of range"
        )
        self._read_table(header, sections, header_bytes, names)
        start = _HEADER.size + sections * _ENTRY.size
        self.metadata = self._read_metadata(header[start : start + metadata_bytes], entries)

    def _read_table(self, header: Any, count: int, offset: int, names: Mapping[int, str]) -> None:
        self.sections: tuple[Section, ...] = ()
        self._places: dict[str, tuple[int, int]] = {}
        self._bias: tuple[int, int] | None = None
        self._checksums: list[tuple[str, int, int, int]] = []
        for index in range(count):
            entry = _ENTRY.unpack_from(header, _HEADER.size + index * _ENTRY.size)
            section_id, _, role, _, start, size, padding, digest = entry
            name = "bias" if role == _BIAS_ROLE else names.get(section_id, f"section_{section_id}")
            extent = _pages(size + _ALIGNMENT)
            consistent = start == offset and padding <= size and start + extent <= self.file_bytes
            self._check(consistent and name not in self._places, f"section {name}: inconsistent offset or size")
            offset += extent
            self._checksums.append((name, start, extent, digest))
            if role == _BIAS_ROLE:
                self._check(self._bias is None and size == 4 * self.m, "bias: wrong size, or there twice")
                self._bias = (start, size)
            else:
                self.sections += (Section(name, size, padding),)
                self._places[name] = (start, size)
        self._check(offset == self.file_bytes, "has bytes behind its last section")

    def _read_metadata(self, data: Any, count: int) -> dict[str, str]:
        metadata: dict[str, str] = {}
        for _ in range(count):
            self._check(len(data) >= 8, "metadata: cut off")
            key_bytes, value_bytes = struct.unpack_from("<II", data)
            self._check(len(data) >= 8 + key_bytes + value_bytes, "metadata: cut off")
            key = data[8 : 8 + key_bytes].decode(errors="replace")
            metadata[key] = data[8 + key_bytes : 8 + key_bytes + value_bytes].decode(errors="replace")
            data = data[8 + key_bytes + value_bytes :]
        self._check(not data, "metadata: more bytes than entries")
        return metadata


@dataclass(frozen=True)
class Inspection:
    """What `spmmctl` says of a packed-layer file, every byte of which it has checked, or of weights.

    Attributes:
      format, layout_version, file_bytes: None for weights that are not packed.
      values_bytes, metadata_bytes, padding_bytes: of `bytes`, which is all sections together.
      shares: of the nonzeros, by what the format did with them ("slot_filled", "residual", "padding_entries", ...).
      numbers: the format's parameters and counts.
      density: share of nonzeros over a grid [rows, cols] laid on the matrix; None from `pack`.
      empty_rows, empty_cols: rows and columns of the matrix without a nonzero; None from `pack`.
    """

    m: int
    k: int
    dtype: DType
    nnz: int
    sparsity: float
    format: str | None
    layout_version: int | None
    has_bias: bool
    bytes: int
    dense_bytes: int
    values_bytes: int
    metadata_bytes: int
    padding_bytes: int
    file_bytes: int | None
    sections: tuple[Section, ...]
    shares: dict[str, float]
    numbers: dict[str, int]
    metadata: dict[str, str]
    density: Array | None = field(default=None, repr=False)
    empty_rows: int | None = None
    empty_cols: int | None = None


def inspect(file: StrPath, *, map_size: tuple[int, int] | None = None, spmmctl: StrPath | None = None) -> Inspection:
    """Sizes, sections, shares and a density map of a packed-layer file or of weights.

    Args:
      file: a packed-layer file, "W.npy", or "W.safetensors:TENSOR".
      map_size: cells of `density`, at most 1024 x 1024; fewer where the matrix is smaller. None: up to 32 x 64.
      spmmctl: the program to run; None searches for it.

    Raises:
      PackedFileError: what is wrong with the file.
    """
    size = [] if map_size is None else [f"--map-size={map_size[0]}x{map_size[1]}"]
    return _inspection(_run(spmmctl, ["inspect", *size, "--", os.fspath(file)]))


def pack(
    weights: Any,
    output: StrPath,
    *,
    bias: Any = None,
    prune: Prune | None = None,
    format: str = "auto",
    store_dtype: DTypeLike | None = None,
    allow_nonfinite: bool = False,
    spmmctl: StrPath | None = None,
) -> Inspection:
    """Packs weights into a file, replacing it when it is there, and says what came out.

    Args:
      weights: W [M, K] of float16, bfloat16 or float32 (an array, a torch tensor), or a file: "W.npy",
        "W.safetensors:TENSOR". An array travels to `spmmctl` in a temporary file beside `output`.
      output: the packed-layer file to write.
      bias: [M]; or, with weights from a file, a file or the name of a tensor in it.
      prune: zeroes the smallest weights first: a share of zeros such as 0.5, a Magnitude, or an NM.
      format: "bitmap", "bitmap_gpu", "row_stream", "column_piece", "three_layer", "rlc_csc", "dense", "csr", "coo";
        "auto" is bitmap, or dense where that is no larger.
      store_dtype: element type to store; None keeps the weights' own.
      allow_nonfinite: store NaN and infinite weights instead of refusing them.
      spmmctl: the program to run; None searches for it.

    Raises:
      PackedFileError: what is wrong with the weights or the output.
      TypeError, ValueError: weights that are no matrix of a served element type.
    """
    arguments = ["pack", f"--output={os.fspath(output)}", f"--format={format}", f"--prune={_pruning(prune)}"]
    if store_dtype is not None:
        stored = parse_dtype(store_dtype, "store_dtype")
        arguments += [f"--store-dtype={name}" for name, dtype in _DTYPE_NAMES.items() if dtype == stored]
    if allow_nonfinite:
        arguments.append("--allow-nonfinite")
    if isinstance(weights, str | os.PathLike):
        if bias is not None:
            arguments.append(f"--bias={os.fspath(bias)}")
        return _inspection(_run(spmmctl, [*arguments, "--", os.fspath(weights)]))
    matrix = as_array(weights, "weights", narrow=False)
    if matrix.ndim != 2:
        raise ValueError(f"weights: expected [M, K], got shape {list(matrix.shape)}")
    with tempfile.TemporaryDirectory(prefix=".spmmd-pack-", dir=Path(output).absolute().parent) as directory:
        _save(Path(directory) / "weights.npy", matrix)
        if bias is not None:
            vector = as_array(bias, "bias", narrow=True).astype(np.float32)
            _save(Path(directory) / "bias.npy", vector)
            arguments.append(f"--bias={directory}/bias.npy")
        arguments.append("--source=array")
        return _inspection(_run(spmmctl, [*arguments, "--", f"{directory}/weights.npy"]))


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _pruning(prune: Prune | None) -> str:
    if prune is None:
        return "none"
    if isinstance(prune, NM):
        return f"nm:{prune.n}:{prune.m}"
    return f"magnitude:{prune.sparsity if isinstance(prune, Magnitude) else float(prune)!r}"


def _save(path: Path, array: Array) -> None:
    # numpy writes ml_dtypes' bfloat16 as two opaque bytes, which is what spmmctl reads as bfloat16.
    np.save(path, array.view("V2") if array.dtype == BFLOAT16 else array)


def _program(spmmctl: StrPath | None) -> str:
    if spmmctl is not None:
        return os.fspath(spmmctl)
    found = os.environ.get("SPMMCTL") or shutil.which("spmmctl")
    if found is None:
        raise FileNotFoundError("no spmmctl in PATH: install it, or name it by SPMMCTL or the argument spmmctl")
    return found


def _run(spmmctl: StrPath | None, arguments: list[str]) -> dict[str, Any]:
    done = subprocess.run([_program(spmmctl), "--json", *arguments], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        report: dict[str, Any] = json.loads(done.stdout)
        return report
    try:
        message = json.loads(done.stderr)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = done.stderr.strip() or f"spmmctl ended with exit code {done.returncode}"
    raise PackedFileError(message)


def _inspection(report: dict[str, Any]) -> Inspection:
    density = report.get("density")
    return Inspection(
        m=report["m"],
        k=report["k"],
        dtype=_DTYPE_NAMES[report["dtype"]],
        nnz=report["nnz"],
        sparsity=report["sparsity"],
        format=report["format"],
        layout_version=report["layout_version"],
        has_bias=report["has_bias"],
        bytes=report["bytes"],
        dense_bytes=report["dense_bytes"],
        values_bytes=report["values_bytes"],
        metadata_bytes=report["metadata_bytes"],
        padding_bytes=report["padding_bytes"],
        file_bytes=report["file_bytes"],
        sections=tuple(Section(s["name"], s["bytes"], s["padding_bytes"]) for s in report["sections"]),
        shares=report["shares"],
        numbers=report["numbers"],
        metadata=report["metadata"],
        density=None if density is None else np.array(density["cells"], np.float64),
        empty_rows=None if density is None else density["empty_rows"],
        empty_cols=None if density is None else density["empty_cols"],
    )
