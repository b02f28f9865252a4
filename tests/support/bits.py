"""Comparison of arrays as bits, never with a tolerance."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The elements of ``array`` as unsigned integers of the same width."""
    return np.ascontiguousarray(array).view(_UINT[array.dtype.itemsize]).reshape(array.shape)


def ulp_distance(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Steps between neighbouring floats from ``a`` to ``b``; +0 and -0 are zero steps apart."""

    def ordered(x: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        width = 8 * x.dtype.itemsize
        u = bits(x).astype(np.int64)
        if width == 64:
            return np.where(u < 0, np.int64(-(2**63)) - u, u)
        return np.where(u >> (width - 1) & 1 == 1, (1 << (width - 1)) - u, u)

    return np.abs(ordered(a) - ordered(b))


def _canonical(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if np.issubdtype(array.dtype, np.floating) and np.isnan(array).any():
        array = array.copy()
        array[np.isnan(array)] = np.nan
    return array


def assert_bits_equal(
    actual: npt.ArrayLike, expected: npt.ArrayLike, what: str = "", *, any_nan: bool = False
) -> None:
    """Raise AssertionError naming the first differing element, unless the two arrays have equal bits.

    ``any_nan`` takes any two NaNs as equal: for ops that leave the hardware's NaN payload.
    """
    a, b = np.asarray(actual), np.asarray(expected)
    prefix = f"{what}: " if what else ""
    if a.dtype != b.dtype:
        raise AssertionError(f"{prefix}dtype {a.dtype} against expected {b.dtype}")
    if a.shape != b.shape:
        raise AssertionError(f"{prefix}shape {a.shape} against expected {b.shape}")
    if any_nan:
        a, b = _canonical(a), _canonical(b)
    ua, ub = bits(a), bits(b)
    different = ua != ub
    if not different.any():
        return
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(different)), a.shape))
    digits = 2 * a.dtype.itemsize
    found = f"0x{int(ua[index]):0{digits}x} ({a[index]!r})"
    wanted = f"0x{int(ub[index]):0{digits}x} ({b[index]!r})"
    message = (
        f"{prefix}{int(different.sum())} of {a.size} elements differ, first at {list(index)}: "
        f"{found} against expected {wanted}"
    )
    if np.issubdtype(a.dtype, np.floating):
        distance = ulp_distance(a[index].reshape(1), b[index].reshape(1))[0]
        message += f", {int(distance)} ULP apart"
    raise AssertionError(message)
