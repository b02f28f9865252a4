"""Runs an op in every form: each ISA level of this CPU with 1, 2 and 3 threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel import _native
from tests.support.bits import assert_bits_equal
from tests.support.run_op import run_op

FORMS = [(isa, threads) for isa in _native.isa_available() for threads in (1, 2, 3)]
# Rows of one forward pass that other engines computed differently from one row at a time.
ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 33, 128, 255, 256, 257, 1024)

SPECIAL = np.array(
    [
        *[0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x00400000],
        *[0x3F800000, 0xBF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000],
    ],
    np.uint32,
).view(np.float32)


def check_forms(name: str, outputs: dict[str, npt.NDArray[Any]], **values: Any) -> None:
    """Run op ``name`` in every form and compare with ``outputs``, the expected contents of its output arrays.

    An output that is also in ``values`` holds the op's input (in place); otherwise it starts as 0xa5 bytes.
    NaNs are compared as NaNs: their payload is the hardware's, and hashes canonicalise it.
    """
    for isa, threads in FORMS:
        actual = {}
        for key, expected in outputs.items():
            if key in values:
                actual[key] = values[key].copy()
            else:
                actual[key] = np.empty_like(expected)
                actual[key].view(np.uint8).reshape(-1)[:] = 0xA5
        run_op(name, threads=threads, isa=isa, **{**values, **actual})
        for key, expected in outputs.items():
            assert_bits_equal(actual[key], expected, f"{name}.{key} ({isa}, {threads} threads)", any_nan=True)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(shape: Any, seed: int = 0, scale: float = 1.0) -> npt.NDArray[np.float32]:
    return (rng(seed).standard_normal(shape) * scale).astype(np.float32)


def sprinkle(x: npt.NDArray[np.float32], seed: int = 1, share: float = 0.05) -> npt.NDArray[np.float32]:
    """``x`` with some elements replaced: subnormals, signed zeros, extremes, infinities, NaNs."""
    x = x.copy()
    r = rng(seed)
    at = r.random(x.shape) < share
    x[at] = r.choice(SPECIAL, int(at.sum()))
    return x


def any_floats(shape: Any, seed: int = 0) -> npt.NDArray[np.float32]:
    """Floats of every magnitude: random bit patterns."""
    return rng(seed).integers(0, 2**32, shape, np.uint32).view(np.float32)
