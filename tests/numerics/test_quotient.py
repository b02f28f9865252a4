"""Quotients by a rounded inverse (kernels/block_norm.cuh, ``quotient``) are what a division rounds to."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


def fma(a: F32, b: F32, c: F32) -> F32:
    """a * b + c, rounded once: by way of a float64 sum that is rounded to odd."""
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)  # exact
    total = product + addend
    back = total - addend
    error = (addend - (total - back)) + (product - back)
    even = (total.view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even, odd, total).astype(np.float32)


def quotient(a: F32, b: F32) -> F32:
    inverse = np.float32(1) / b
    first = a * inverse
    return fma(fma(-b, first, a), inverse, first)


def mantissas(step: int = 1) -> F32:
    """Floats from 1 to 2."""
    return (np.arange(0, 1 << 23, step, dtype=np.uint32) + np.uint32(0x3F800000)).view(np.float32)


def test_fma_rounds_once() -> None:
    # The product is just above or below half a unit of the sum: 2^-24 * (1 +- 2^-23).
    tiny = np.float32(2.0**-24) * np.array([1 + 2.0**-23, 1 - 2.0**-23, 1], np.float32)
    got = fma(tiny, np.ones(3, np.float32), np.ones(3, np.float32))
    assert got.tolist() == [1 + 2.0**-23, 1.0, 1.0]


def test_quotients_of_a8() -> None:
    x, limit = mantissas(), np.float32(127)
    assert np.array_equal(quotient(np.full_like(x, limit), x), limit / x)
    assert np.array_equal(quotient(x, np.full_like(x, limit)), x / limit)


def test_means_of_a_norm() -> None:
    # A power of two in the length changes the exponent alone.
    x = mantissas(241)
    for odd in range(1, 2048, 2):
        length = np.full_like(x, odd)
        assert np.array_equal(quotient(x, length), x / length), odd
