"""Shared by the tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from reference import Array, bound, linear

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCK = REPOSITORY / "tests" / "data" / "minilm-block0" / "block.safetensors"


def assert_product(y: Array, x: Array, weight: Array, bias: Array | None = None) -> None:
    """Fails unless y is x W^T + bias up to fp32 accumulation."""
    expected = linear(x, weight, bias)
    assert y.shape == expected.shape
    excess = np.abs(y.astype(np.float64) - expected) - bound(x, weight, bias)
    worst = excess.max(initial=-1.0)
    assert worst <= 0, f"off by {worst} more than allowed at {np.unravel_index(excess.argmax(), excess.shape)}"


def sparse_weight(
    rng: np.random.Generator, m: int, k: int, dtype: npt.DTypeLike = np.float16, density: float = 0.5
) -> Array:
    """A random matrix with about `density` of its elements nonzero."""
    weight = rng.standard_normal((m, k)) * (rng.random((m, k)) < density)
    return weight.astype(dtype)
