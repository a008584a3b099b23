"""What results are compared with: products in float64, and the error that fp32 accumulation may leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

ATOL = 1e-6
RTOL = 1e-5  # of sum |w||x|: fp32 sums of a few thousand products stay far below, a wrong element far above


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x W^T + bias in float64."""
    y = x.astype(np.float64) @ weight.astype(np.float64).T
    return np.asarray(y if bias is None else y + bias.astype(np.float64))


def magnitude(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """sum |w||x| + |bias|: what the error of each element of linear() is measured in."""
    return linear(abs(x.astype(np.float64)), abs(weight.astype(np.float64)), None if bias is None else abs(bias))


def bound(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """The largest error allowed for each element of linear()."""
    return np.asarray(ATOL + RTOL * magnitude(x, weight, bias))
