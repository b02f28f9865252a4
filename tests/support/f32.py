"""float32 arithmetic for references: numpy's own operations, and the fused multiply-add that it lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


def fma(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> Any:
    """``a * b + c`` of float32 values with one rounding, elementwise.

    The product is exact in float64. The sum is rounded to odd there (an inexact result gets an odd last bit),
    after which rounding to float32 is as if from the exact value: float64 has more than twice its digits.
    """
    product = np.multiply(a, b, dtype=np.float64)
    addend = np.asarray(c, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.asarray(product + addend)
        # Knuth's two-sum: the rounding error of the addition, exactly.
        part = total - product
        error = (product - (total - part)) + (addend - part)
        even = (total.view(np.int64) & 1) == 0
        inexact = np.isfinite(total) & (error != 0) & even
        odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        return np.where(inexact, odd, total).astype(np.float32)


def hsum8(a: F32) -> Any:
    """Contract section 0, over the last axis of 8."""
    lo = a[..., :4] + a[..., 4:]
    return (lo[..., 0] + lo[..., 1]) + (lo[..., 2] + lo[..., 3])


def hsum32(a: F32) -> Any:
    """Contract section 0, over the last axis of 32."""
    b = a[..., :16] + a[..., 16:]
    return hsum8(b[..., :8] + b[..., 8:])
