"""The in-process path against the library of SPMMD_TEST_CUDA_LIBRARY: the stand-in (`make test`), or a GPU's."""

from __future__ import annotations

import os
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from spmmd import local

_LIBRARY = os.environ.get("SPMMD_TEST_CUDA_LIBRARY", "")

needs_library = pytest.mark.skipif(not _LIBRARY, reason="SPMMD_TEST_CUDA_LIBRARY is not set")


@pytest.fixture
def gpu() -> Iterator[local.Device]:
    with local.Device(library=_LIBRARY) as device:
        yield device


def _pruned(m: int, k: int, dtype: type, seed: int = 1) -> np.ndarray:
    random = np.random.default_rng(seed)
    weights = random.standard_normal((m, k)) * (random.random((m, k)) < 0.5)
    return weights.astype(dtype)


def _expect(y: np.ndarray, weights: np.ndarray, x: np.ndarray, bias: np.ndarray | float = 0) -> None:
    w, tokens = weights.astype(np.float64), x.astype(np.float64)
    scale = np.abs(tokens) @ np.abs(w).T + np.abs(bias) + 1e-30
    assert np.max(np.abs(y - (tokens @ w.T + bias)) / scale) < 1e-3


class DeviceArray:
    """Device memory as other libraries show theirs."""

    def __init__(self, device: local.Device, array: np.ndarray, **changes: object) -> None:
        assert device._handles is not None
        self._memory = local._Memory(device._handles, array.nbytes)
        device._handles.upload(self._memory, array)
        device._handles.synchronize()
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (self._memory.pointer.value, False),
            "strides": None,
            "version": 3,
        } | changes


@needs_library
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("n", [1, 5, 17, 130])
def test_products_match_float64(gpu: local.Device, dtype: type, n: int) -> None:
    weights = _pruned(67, 131, dtype)
    bias = np.arange(67, dtype=np.float32)
    with gpu.pack(weights, bias=bias) as layer:
        assert (layer.m, layer.k) == (67, 131)
        for x_type in (np.float16, np.float32, np.float64):
            x = np.random.default_rng(n).standard_normal((n, 131)).astype(x_type)
            y = layer.matmul(x)
            assert y.dtype == np.float32
            assert y.shape == (n, 67)
            _expect(y, weights, x, bias)


@needs_library
def test_vectors_empty_batches_and_activations(gpu: local.Device) -> None:
    weights = _pruned(20, 40, np.float16)
    layer = gpu.pack(weights)
    x = np.random.default_rng(0).standard_normal(40).astype(np.float32)
    y = layer.matmul(x)
    assert y.shape == (20,)
    np.testing.assert_allclose(layer.matmul(x, activation="relu"), np.maximum(y, 0), rtol=1e-6)
    assert layer.matmul(np.empty((0, 40), np.float16)).shape == (0, 20)


@needs_library
def test_device_memory_is_used_where_it_lies(gpu: local.Device) -> None:
    weights = _pruned(24, 48, np.float16)
    x = np.random.default_rng(3).standard_normal((4, 48)).astype(np.float32)
    with gpu.pack(DeviceArray(gpu, weights)) as layer:
        _expect(layer.matmul(DeviceArray(gpu, x)), weights, x)
        with pytest.raises(ValueError, match="x: device memory must be contiguous"):
            layer.matmul(DeviceArray(gpu, x, strides=(400, 4)))
        with pytest.raises(TypeError, match="x: device memory of type '<i4'"):
            layer.matmul(DeviceArray(gpu, x, typestr="<i4"))


@needs_library
def test_errors_name_field_and_limit(gpu: local.Device) -> None:
    weights = _pruned(8, 16, np.float16)
    with pytest.raises(TypeError, match="weights: float32"):
        gpu.pack(weights.astype(np.float32))
    with pytest.raises(ValueError, match=r"weights: \[M, K\]"):
        gpu.pack(weights[0])
    with pytest.raises(ValueError, match=r"bias: \[8\], not \[7\]"):
        gpu.pack(weights, bias=np.zeros(7))
    bad = weights.copy()
    bad[3, 4] = np.nan
    with pytest.raises(local.LocalError) as refused:
        gpu.pack(bad)
    assert refused.value.code == "INVALID_ARGUMENT"
    layer = gpu.pack(weights)
    with pytest.raises(ValueError, match=r"x: \[N, 16\] or \[16\], not \[2, 15\]"):
        layer.matmul(np.zeros((2, 15), np.float32))
    with pytest.raises(ValueError, match="activation: 'tanh'"):
        layer.matmul(np.zeros(16, np.float32), activation="tanh")
    with pytest.raises(local.LocalError, match="index: 99, but there are"):
        local.Device(99, library=_LIBRARY)


@needs_library
def test_layers_close_and_outlive_their_device() -> None:
    weights = _pruned(8, 16, np.float16)
    x = np.ones(16, np.float32)
    device = local.Device(library=_LIBRARY)
    kept, closed = device.pack(weights), device.pack(weights)
    closed.close()
    closed.close()
    with pytest.raises(local.LocalError, match="the layer is closed"):
        closed.matmul(x)
    device.close()
    with pytest.raises(local.LocalError, match="the device is closed"):
        device.pack(weights)
    _expect(kept.matmul(x), weights, x)


@needs_library
def test_memory_comes_back_without_close(gpu: local.Device) -> None:
    """More than the fake library's gigabyte in all."""
    weights = np.ones((512, 1024), np.float16)
    x = np.ones((64, 1024), np.float32)
    for _ in range(6):
        gpu.pack(weights).matmul(x)
    handles = gpu._handles
    assert handles is not None
    for _ in range(40):
        local._Memory(handles, 100 << 20)


def test_missing_libraries_are_named() -> None:
    with pytest.raises(local.LocalError, match=r"UNAVAILABLE: /nowhere/libspmmd_cuda.so"):
        local.Device(library="/nowhere/libspmmd_cuda.so")


def test_library_path_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMMD_CUDA_LIBRARY", "/some/where.so")
    assert local.cuda_library_path() == "/some/where.so"
    monkeypatch.delenv("SPMMD_CUDA_LIBRARY")
    assert local.cuda_library_path() == "libspmmd_cuda.so"
