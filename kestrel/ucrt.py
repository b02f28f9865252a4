"""expf, cosf and sinf as the Universal C Runtime computes them (contract section 11), over arrays.

They are the functions of ``kernels/ucrt.cuh``, which the reference and the device kernels share: equal bits
on every machine. This is the UCRT's FMA path; its SSE2-only path and other versions may differ. Beyond the
UCRT's fast range (cosf from 3373259426, sinf from 16779436) the reduction is an exact one of our own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kestrel import _native


def expf(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """e to the power of each element: f32 of any shape in, f32 of the same shape out.

    Above 88.7228394 +inf, below -104 +0, NaN gives the NaN 0x7fc00000. Raises TypeError for another dtype.
    """
    return _native.expf_ucrt(_checked(x))


def cosf(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Cosine of each element (radians): f32 of any shape in, f32 of the same shape out.

    NaN and infinities give the NaN 0x7fc00000. Raises TypeError for another dtype.
    """
    return _native.cosf_ucrt(_checked(x))


def sinf(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Sine of each element (radians): f32 of any shape in, f32 of the same shape out.

    NaN and infinities give the NaN 0x7fc00000. Raises TypeError for another dtype.
    """
    return _native.sinf_ucrt(_checked(x))


def _checked(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    array = np.asarray(x)
    if array.dtype != np.float32:
        raise TypeError(f"expected a float32 array, got {array.dtype}")
    return np.ascontiguousarray(array)
