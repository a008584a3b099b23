"""Multiplies with pruned matrices on a GPU of this process, without a server, through the C ABI of libspmmd_cuda.so.

from spmmd import local
with local.Device() as gpu, gpu.pack(weight) as layer:  # weight [M, K]: float16 or bfloat16
    y = layer.matmul(x, activation="gelu")               # x [N, K] or [K] -> float32

Weights become a BITMAP layer; the library takes the kernel that is made for the number of tokens. Inputs may be numpy
arrays, what numpy reads (torch tensors of the host too) or device memory with `__cuda_array_interface__`, which is used
where it lies. Failures raise `LocalError`; nothing here is thread-safe.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import numpy as np

from spmmd.arrays import Array, as_array
from spmmd.types import BFLOAT16

_ABI = 1
_DTYPES = {np.dtype(np.float16): 1, BFLOAT16: 2, np.dtype(np.float32): 3}
_ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
_CODES = {
    3: "INVALID_ARGUMENT",
    5: "NOT_FOUND",
    8: "RESOURCE_EXHAUSTED",
    9: "FAILED_PRECONDITION",
    12: "UNIMPLEMENTED",
    13: "INTERNAL",
    14: "UNAVAILABLE",
    15: "DATA_LOSS",
}
_LARGE_MATRIX = 50 << 20  # elements from which on the packer takes chunks of 256 columns


class LocalError(Exception):
    """A call that the library refused or failed: `code` is a canonical gRPC code's name, `message` the library's."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        self.message = message
        super().__init__(f"{code}: {message}")


class _DenseWeights(ctypes.Structure):  # spmmd_cuda_dense_weights
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("m", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("chunk_cols", ctypes.c_int32),
        ("allow_nonfinite", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class _Packed(ctypes.Structure):  # spmmd_cuda_packed_info
    _fields_ = (
        ("nnz", ctypes.c_int64),
        ("max_chunk_bytes", ctypes.c_int64),
        ("chunk_bytes", ctypes.c_uint64),
        ("offset_bytes", ctypes.c_uint64),
    )


class _Matmul(ctypes.Structure):  # spmmd_cuda_matmul
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("x_dtype", ctypes.c_int32),
        ("y_dtype", ctypes.c_int32),
        ("x_indices", ctypes.c_void_p),
        ("x_values", ctypes.c_void_p),
        ("x_nnz", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("activation", ctypes.c_int32),
        ("flags", ctypes.c_uint32),
        ("y", ctypes.c_void_p),
        ("y_stride", ctypes.c_int64),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_uint64),
        ("x_threshold", ctypes.c_float),
    )


_POINTER = ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "device_count": (ctypes.POINTER(ctypes.c_int32),),
    "device_open": (ctypes.c_int32, ctypes.POINTER(_POINTER)),
    "malloc": (_POINTER, ctypes.c_uint64, ctypes.POINTER(_POINTER)),
    "free": (_POINTER, _POINTER),
    "memcpy_async": (_POINTER, _POINTER, _POINTER, ctypes.c_uint64, _POINTER),
    "stream_create": (_POINTER, ctypes.POINTER(_POINTER)),
    "stream_destroy": (_POINTER, _POINTER),
    "stream_synchronize": (_POINTER, _POINTER),
    "pack_bitmap_gpu": (
        _POINTER,
        ctypes.POINTER(_DenseWeights),
        _POINTER,
        ctypes.POINTER(_Packed),
        ctypes.POINTER(_POINTER),
    ),
    "select_kernel": (_POINTER, ctypes.POINTER(_Matmul), ctypes.POINTER(ctypes.c_int32)),
    "workspace_bytes": (_POINTER, ctypes.c_int32, ctypes.POINTER(_Matmul), ctypes.POINTER(ctypes.c_uint64)),
    "workspace_init": (_POINTER, _POINTER, ctypes.c_uint64, _POINTER),
    "launch": (_POINTER, ctypes.c_int32, ctypes.POINTER(_Matmul), _POINTER),
}


def cuda_library_path() -> str:
    """SPMMD_CUDA_LIBRARY, else the one that the dynamic loader finds."""
    return os.environ.get("SPMMD_CUDA_LIBRARY") or "libspmmd_cuda.so"


class _Library:
    def __init__(self, path: str) -> None:
        try:
            self._library = ctypes.CDLL(path)
            self._library.spmmd_cuda_abi_version.restype = ctypes.c_int32
            version = self._library.spmmd_cuda_abi_version()
            if version != _ABI:
                raise LocalError("FAILED_PRECONDITION", f"{path}: ABI version {version}, not {_ABI}")
            self._last_error = self._library.spmmd_cuda_last_error
            self._last_error.restype = ctypes.c_char_p
            self._functions: dict[str, Callable[..., int]] = {}
            for name, arguments in _SIGNATURES.items():
                function = getattr(self._library, f"spmmd_cuda_{name}")
                function.argtypes = arguments
                function.restype = ctypes.c_int32
                self._functions[name] = function
            for name in ("device_close", "layer_free"):
                function = getattr(self._library, f"spmmd_cuda_{name}")
                function.argtypes = (_POINTER,)
                function.restype = None
        except (OSError, AttributeError) as error:
            raise LocalError("UNAVAILABLE", f"{path}: {error}") from error
        self.device_close: Callable[[Any], None] = self._library.spmmd_cuda_device_close
        self.layer_free: Callable[[Any], None] = self._library.spmmd_cuda_layer_free

    def call(self, name: str, *arguments: Any) -> None:
        status = self._functions[name](*arguments)
        if status != 0:
            message = (self._last_error() or b"").decode(errors="replace")
            raise LocalError(_CODES.get(status, f"code {status}"), message or f"spmmd_cuda_{name} failed")


class _Handles:
    """The device and its stream. The finalizers of layers and memory hold it, so that it is closed after the last of
    them, even when a garbage collection finds them all in one cycle."""

    def __init__(self, index: int, library: str | None) -> None:
        self.cuda = _Library(library or cuda_library_path())
        count = ctypes.c_int32()
        self.cuda.call("device_count", ctypes.byref(count))
        if not 0 <= index < count.value:
            raise LocalError("NOT_FOUND", f"index: {index}, but there are {count.value} GPUs")
        self.device = _POINTER()
        self.stream = _POINTER()
        self.cuda.call("device_open", index, ctypes.byref(self.device))
        try:
            self.cuda.call("stream_create", self.device, ctypes.byref(self.stream))
        except LocalError:
            self.cuda.device_close(self.device)
            raise
        self._finalizer = weakref.finalize(self, _close, self.cuda, self.device, self.stream)

    def synchronize(self) -> None:
        self.cuda.call("stream_synchronize", self.device, self.stream)

    def upload(self, memory: _Memory, array: Array) -> None:
        if array.nbytes > 0:
            pointer = array.ctypes.data
            self.cuda.call("memcpy_async", self.device, memory.pointer, pointer, array.nbytes, self.stream)


def _close(library: _Library, device: Any, stream: Any) -> None:
    library.call("stream_destroy", device, stream)
    library.device_close(device)


def _free_memory(handles: _Handles, pointer: Any) -> None:
    handles.cuda.call("free", handles.device, pointer)


def _free_layer(handles: _Handles, layer: Any) -> None:
    handles.cuda.layer_free(layer)


class _Memory:
    """Device memory, freed with the object."""

    def __init__(self, handles: _Handles, nbytes: int) -> None:
        self.nbytes = nbytes
        self.pointer = _POINTER()
        handles.cuda.call("malloc", handles.device, max(nbytes, 1), ctypes.byref(self.pointer))
        self._finalizer = weakref.finalize(self, _free_memory, handles, self.pointer)

    def free(self) -> None:
        self._finalizer()


class Device:
    """A GPU. Layers may outlive it: the GPU is let go of with the last of them."""

    def __init__(self, index: int = 0, *, library: str | None = None) -> None:
        """Opens GPU `index`. `library`: path of libspmmd_cuda.so instead of what `cuda_library_path()` says."""
        self._handles: _Handles | None = _Handles(index, library)

    def __enter__(self) -> Device:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._handles = None

    def pack(self, weights: Any, *, bias: Any = None, allow_nonfinite: bool = False) -> Layer:
        """Packs weights [M, K], float16 or bfloat16, into a layer on this GPU. The caller's memory is not kept."""
        if self._handles is None:
            raise LocalError("FAILED_PRECONDITION", "the device is closed")
        return Layer(self._handles, weights, bias, allow_nonfinite)


class Layer:
    """A packed matrix [M, K] on a GPU; made by `Device.pack`. Its memory goes with `close`, or with the object.

    Attributes: m, k; nnz, the nonzeros.
    """

    def __init__(self, handles: _Handles, weights: Any, bias: Any, allow_nonfinite: bool) -> None:
        self._handles = handles
        library = handles.cuda
        pointer, self._dtype, shape, keep = _operand(handles, weights, "weights")
        if len(shape) != 2 or min(shape) < 1:
            raise ValueError(f"weights: [M, K] with M, K >= 1, not {list(shape)}")
        if self._dtype == 3:
            raise TypeError("weights: float32 does not run on a GPU; convert to float16 or ml_dtypes.bfloat16")
        self.m, self.k = shape
        self._bias: _Memory | None = None
        if bias is not None:
            values = as_array(bias, "bias", narrow=True).astype(np.float32)
            if values.shape != (self.m,):
                raise ValueError(f"bias: [{self.m}], not {list(values.shape)}")
            self._bias = _Memory(handles, values.nbytes)
            handles.upload(self._bias, values)
        dense = _DenseWeights(
            data=pointer,
            m=self.m,
            k=self.k,
            row_stride=self.k,
            dtype=self._dtype,
            chunk_cols=256 if self.m * self.k >= _LARGE_MATRIX else 128,
            allow_nonfinite=int(allow_nonfinite),
        )
        packed = _Packed()
        layer = _POINTER()
        library.call(
            "pack_bitmap_gpu",
            handles.device,
            ctypes.byref(dense),
            handles.stream,
            ctypes.byref(packed),
            ctypes.byref(layer),
        )
        del keep
        self.nnz = int(packed.nnz)
        self._layer = layer
        self._workspace: _Memory | None = None
        self._finalizer = weakref.finalize(self, _free_layer, handles, layer)

    def __enter__(self) -> Layer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Frees the layer; `matmul` raises from here on."""
        self._finalizer()
        for memory in (self._bias, self._workspace):
            if memory is not None:
                memory.free()
        self._bias = self._workspace = None

    def matmul(self, x: Any, *, activation: str = "none") -> Array:
        """activation(x W^T + bias) in float32: x [N, K] gives [N, M], x [K] gives [M].

        x: float16, bfloat16 or float32 (float64 is narrowed). `activation`: none, relu, gelu, gelu_tanh or silu.
        """
        if not self._finalizer.alive:
            raise LocalError("FAILED_PRECONDITION", "the layer is closed")
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation: {activation!r} is none of {', '.join(_ACTIVATIONS)}")
        handles = self._handles
        library = handles.cuda
        pointer, dtype, shape, keep = _operand(handles, x, "x")
        if len(shape) not in (1, 2) or shape[-1] != self.k:
            raise ValueError(f"x: [N, {self.k}] or [{self.k}], not {list(shape)}")
        rows = 1 if len(shape) == 1 else shape[0]
        y = np.empty((rows, self.m), np.float32)
        if rows > 0:
            output = _Memory(handles, y.nbytes)
            call = _Matmul(
                x=pointer,
                n=rows,
                x_stride=self.k,
                x_dtype=dtype,
                y_dtype=_DTYPES[y.dtype],
                bias=None if self._bias is None else self._bias.pointer,
                activation=_ACTIVATIONS[activation],
                y=output.pointer,
                y_stride=self.m,
            )
            kernel = ctypes.c_int32()
            library.call("select_kernel", self._layer, ctypes.byref(call), ctypes.byref(kernel))
            self._reserve_workspace(kernel.value, call)
            try:
                library.call("launch", self._layer, kernel.value, ctypes.byref(call), handles.stream)
                library.call("memcpy_async", handles.device, y.ctypes.data, output.pointer, y.nbytes, handles.stream)
                handles.synchronize()
            except LocalError:
                self._workspace = None  # its counters may not be zero
                raise
        del keep
        return y.reshape(self.m) if len(shape) == 1 else y

    def _reserve_workspace(self, kernel: int, call: _Matmul) -> None:
        handles = self._handles
        needed = ctypes.c_uint64()
        handles.cuda.call("workspace_bytes", self._layer, kernel, ctypes.byref(call), ctypes.byref(needed))
        if self._workspace is None or self._workspace.nbytes < needed.value:
            self._workspace = _Memory(handles, needed.value)
            handles.cuda.call("workspace_init", handles.device, self._workspace.pointer, needed.value, handles.stream)
        call.workspace = self._workspace.pointer
        call.workspace_bytes = self._workspace.nbytes


def _operand(handles: _Handles, value: Any, what: str) -> tuple[Any, int, tuple[int, ...], object]:
    """Where it is on the device, its dtype's number, its shape, and what to keep until the launch is done."""
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is None:
        array = as_array(value, what, narrow=what != "weights")
        memory = _Memory(handles, array.nbytes)
        handles.upload(memory, array)
        handles.synchronize()
        return memory.pointer, _DTYPES[array.dtype], array.shape, memory
    shape = tuple(int(size) for size in interface["shape"])
    kind = interface["typestr"]
    numbers = {"<f2": 1, "<f4": 3}
    if kind not in numbers:
        raise TypeError(f"{what}: device memory of type {kind!r}; <f2 and <f4 are taken")
    strides = interface.get("strides")
    size = int(kind[2:])
    if strides is not None and tuple(strides) != _contiguous(shape, size):
        raise ValueError(f"{what}: device memory must be contiguous, its strides are {list(strides)} bytes")
    if interface.get("mask") is not None:
        raise ValueError(f"{what}: device memory with a mask is not taken")
    # Work of the caller's on a stream that it names by 1 (the default one) or by handle must have ended.
    if stream := interface.get("stream"):
        handles.cuda.call("stream_synchronize", handles.device, stream)
    return interface["data"][0], numbers[kind], shape, value


def _contiguous(shape: Iterable[int], size: int) -> tuple[int, ...]:
    strides: list[int] = []
    for extent in reversed(tuple(shape)):
        strides.insert(0, size)
        size *= max(extent, 1)
    return tuple(strides)
