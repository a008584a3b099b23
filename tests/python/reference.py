"""What results are compared with: products in float64, and the error that fp32 accumulation may leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCK = REPOSITORY / "tests" / "data" / "minilm-block0" / "block.safetensors"

ATOL = 1e-6
RTOL = 1e-5  # of sum |w||x|: fp32 sums of a few thousand products stay far below, a wrong element far above


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x W^T + bias in float64."""
    y = x.astype(np.float64) @ weight.astype(np.float64).T
    return np.asarray(y if bias is None else y + bias.astype(np.float64))


def bound(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """The largest error allowed for each element of linear()."""
    magnitude = linear(np.abs(x.astype(np.float64)), np.abs(weight.astype(np.float64)))
    if bias is not None:
        magnitude = magnitude + np.abs(bias.astype(np.float64))
    return np.asarray(ATOL + RTOL * magnitude)


def assert_product(y: Array, x: Array, weight: Array, bias: Array | None = None) -> None:
    """Fails unless y is x W^T + bias up to fp32 accumulation."""
    expected = linear(x, weight, bias)
    assert y.shape == expected.shape
    excess = np.abs(y.astype(np.float64) - expected) - bound(x, weight, bias)
    assert excess.max(initial=-1.0) <= 0, (
        f"off by {excess.max()} more than allowed at {np.unravel_index(excess.argmax(), excess.shape)}"
    )


def sparse_weight(
    rng: np.random.Generator, m: int, k: int, dtype: npt.DTypeLike = np.float16, density: float = 0.5
) -> Array:
    """A random matrix with about `density` of its elements nonzero."""
    weight = rng.standard_normal((m, k)) * (rng.random((m, k)) < density)
    return weight.astype(dtype)
