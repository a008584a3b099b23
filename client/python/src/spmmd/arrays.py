"""Arrays in and out: numpy, ml_dtypes.bfloat16, torch and DLPack to wire bytes and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spmmd._proto import types_pb2
from spmmd.types import BFLOAT16, DType, parse_dtype

Array = npt.NDArray[Any]

_SERVED = (np.dtype(np.float16), np.dtype(np.float32), BFLOAT16)


def as_array(value: Any, what: str, *, narrow: bool) -> Array:
    """A C-contiguous array of float16, bfloat16 or float32 with the machine's byte order.

    Takes numpy arrays, nested lists, torch tensors (bfloat16 too; from any device) and whatever offers DLPack or
    `__array__`. With `narrow`, float64 becomes float32 (activations, biases); without it float64 is refused, so that
    weights never lose bits unasked.
    """
    array = _to_numpy(value)
    if array.dtype.byteorder not in "=|":
        array = array.astype(array.dtype.newbyteorder("="))
    if narrow and array.dtype == np.float64:
        array = array.astype(np.float32)
    if array.dtype not in _SERVED:
        raise TypeError(f"{what}: {array.dtype} is not served; convert to float16, ml_dtypes.bfloat16 or float32")
    return np.ascontiguousarray(array)


def _to_numpy(value: Any) -> Array:
    if isinstance(value, np.ndarray):
        return value
    if type(value).__module__.partition(".")[0] == "torch":
        tensor = value.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":  # numpy knows no bfloat16: hand the bits over
            bits: Array = tensor.contiguous().view(_torch_int16(tensor)).numpy()
            return bits.view(BFLOAT16)
        converted: Array = tensor.numpy()
        return converted
    if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
        return np.from_dlpack(value)
    return np.asarray(value)


def _torch_int16(tensor: Any) -> Any:
    import sys

    return sys.modules[type(tensor).__module__.partition(".")[0]].int16


@dataclass(frozen=True)
class SparseRows:
    """Activations by their nonzeros (CSR): rows [N, K], for SpMspV.

    Attributes:
      shape: (N, K).
      row_offsets: N + 1 offsets into indices and values.
      indices: column indices, strictly ascending within a row.
      values: float16, bfloat16 or float32.
    """

    shape: tuple[int, int]
    row_offsets: Array
    indices: Array
    values: Array

    @classmethod
    def from_dense(cls, x: Any, threshold: float = 0.0) -> SparseRows:
        """Keeps the elements of x, [N, K] or [K], with |x| > threshold."""
        dense = as_rows(x, "x")
        keep = np.abs(dense.astype(np.float32)) > threshold
        rows, columns = np.nonzero(keep)
        offsets = np.zeros(dense.shape[0] + 1, np.uint64)
        np.cumsum(keep.sum(axis=1), out=offsets[1:])
        return cls((dense.shape[0], dense.shape[1]), offsets, columns.astype(np.uint32), dense[rows, columns])

    @classmethod
    def from_csr(cls, matrix: Any) -> SparseRows:
        """From a CSR matrix as SciPy has it (attributes shape, indptr, indices, data)."""
        matrix = canonical_csr(matrix)
        rows, columns = matrix.shape
        return cls((int(rows), int(columns)), matrix.indptr, matrix.indices, matrix.data)

    def to_proto(self) -> types_pb2.SparseTensor:
        values = as_array(self.values, "x.values", narrow=True)
        return types_pb2.SparseTensor(
            dtype=parse_dtype(values.dtype).value,  # type: ignore[arg-type]
            shape=list(self.shape),
            row_offsets=as_index(self.row_offsets, np.uint64, "x.row_offsets").tobytes(),
            indices=as_index(self.indices, np.uint32, "x.indices").tobytes(),
            values=values.tobytes(),
        )


def is_csr(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("shape", "indptr", "indices", "data"))


def canonical_csr(matrix: Any) -> Any:
    """The matrix itself, or a copy with sorted, unique indices when it says that it lacks them (SciPy)."""
    if getattr(matrix, "format", "csr") != "csr":
        raise TypeError(f"expected CSR, got {matrix.format}; call .tocsr()")
    if getattr(matrix, "has_canonical_format", True):
        return matrix
    matrix = matrix.copy()
    matrix.sum_duplicates()
    return matrix


def as_index(value: Any, dtype: npt.DTypeLike, what: str) -> Array:
    """Indices as the wire wants them; negative or too large ones are refused rather than wrapped."""
    array = np.asarray(value)
    target = np.dtype(dtype)
    if array.dtype == target:
        return np.ascontiguousarray(array)
    if array.size == 0:
        return np.zeros(array.shape, target)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{what}: indices must be integers, got {array.dtype}")
    if int(array.min()) < 0 or int(array.max()) > np.iinfo(target).max:
        raise ValueError(f"{what}: an index does not fit {target}")
    return np.ascontiguousarray(array.astype(target))


def as_rows(x: Any, what: str) -> Array:
    """Activations as [N, K]; a vector [K] is one row."""
    array = as_array(x, what, narrow=True)
    if array.ndim == 1:
        return array.reshape(1, -1)
    if array.ndim != 2:
        raise ValueError(f"{what}: expected [N, K] or [K], got shape {list(array.shape)}")
    return array


def tensor_to_proto(array: Array) -> types_pb2.Tensor:
    """The wire form of a 2-D array of a served dtype."""
    return types_pb2.Tensor(
        dtype=parse_dtype(array.dtype).value,  # type: ignore[arg-type]
        shape=list(array.shape),
        data=array.tobytes(),
    )


def tensor_from_proto(proto: types_pb2.Tensor) -> Array:
    """A writable array of the tensor's shape and dtype."""
    dtype = DType(proto.dtype).numpy
    shape: Sequence[int] = tuple(proto.shape)
    return np.frombuffer(proto.data, dtype=dtype).reshape(shape).copy()
