"""From float weights to the formats of contract section 1, and back.

Every function takes blocks of rows: rows are independent, and blocks bound the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kestrel.ops import WType
from kestrel.weights import GROUP, QuantTensor

F32 = npt.NDArray[np.float32]
Codes = npt.NDArray[Any]
Scales = npt.NDArray[np.uint16]

F16_MAX = 65504.0


class RangeError(ValueError):
    """A weight that is not finite, or too large for the format."""


def check_finite(x: F32) -> None:
    """Raise ``RangeError`` when ``x`` holds a NaN or an infinity."""
    bad = np.count_nonzero(~np.isfinite(x))
    if bad:
        raise RangeError(f"{bad} weight{'s are' if bad > 1 else ' is'} NaN or infinite")


def to_bf16(x: F32) -> npt.NDArray[np.uint16]:
    """bf16 bits, rounded to nearest even, of f32[..., K]."""
    check_finite(x)
    with np.errstate(over="ignore"):
        rounded = x.astype(ml_dtypes.bfloat16)
    bits = rounded.view(np.uint16)
    if np.any((bits & 0x7FFF) == 0x7F80):
        raise RangeError("weight too large for bf16")
    return bits


def to_q8local(x: F32) -> tuple[Codes, Scales]:
    """i8[R, G, 32] codes and u16[R, G] f16 bits of f32[R, K]: the largest magnitude of a group maps to 127."""
    groups = _groups(x)
    amax = np.abs(groups).max(axis=-1)
    scale = _f16_scale(amax / np.float32(127))
    codes = np.rint(groups * _inverse(scale)[..., None])
    return np.clip(codes, -127, 127).astype(np.int8), scale.view(np.uint16)


def to_q4local_plain(x: F32) -> tuple[Codes, Scales]:
    """u8[R, G, 16] codes and u16[R, G] f16 bits of f32[R, K]: the value of largest magnitude maps to -8."""
    groups = _groups(x)
    scale = _f16_scale(_extreme(groups) / np.float32(-8))
    return _pack4(_codes4(groups, scale)), scale.view(np.uint16)


def to_q4local_search(x: F32) -> tuple[Codes, Scales]:
    """As ``to_q4local_plain``, but the scale is the one of least squared error among 21 around the plain one."""
    groups = _groups(x)
    plain = _extreme(groups) / np.float32(-8)
    best_scale = _f16_scale(plain)
    best_codes = _codes4(groups, best_scale)
    best_error = _error4(groups, best_codes, best_scale)
    for step in range(-10, 11):
        scale = _f16_scale(plain * np.float32(1 + 0.02 * step))
        codes = _codes4(groups, scale)
        error = _error4(groups, codes, scale)
        better = error < best_error
        best_error[better] = error[better]
        best_scale[better] = scale[better]
        best_codes[better] = codes[better]
    return _pack4(best_codes), best_scale.view(np.uint16)


Q4_SCALES: dict[str, Callable[[F32], tuple[Codes, Scales]]] = {
    "plain": to_q4local_plain,
    "search": to_q4local_search,
}
DEFAULT_Q4_SCALE = "plain"


def quantize_rows(x: F32, wtype: WType, q4_scale: str = DEFAULT_Q4_SCALE) -> tuple[Codes, Scales | None]:
    """Codes and scales of f32[R, K]. Raises ``RangeError`` for a weight that the format cannot hold."""
    if wtype == WType.bf16:
        return to_bf16(x), None
    return to_q8local(x) if wtype == WType.q8local else Q4_SCALES[q4_scale](x)


def quantize(x: F32, wtype: WType, q4_scale: str = DEFAULT_Q4_SCALE) -> QuantTensor:
    """A matrix f32[N, K] or stack f32[E, N, K] as a tensor of the model."""
    codes, scale = quantize_rows(np.ascontiguousarray(x.reshape(-1, x.shape[-1])), wtype, q4_scale)
    lead = x.shape[:-1]
    codes = codes.reshape(*lead, *codes.shape[1:])
    scale = None if scale is None else scale.reshape(*lead, *scale.shape[1:])
    return QuantTensor(wtype, codes, scale, x.shape[0] if x.ndim == 3 else None, x.shape[-2], x.shape[-1])


def dequantize(tensor: QuantTensor) -> F32:
    """f32[..., N, K]: the values that the codes stand for, one rounded product each."""
    values = dequantize_rows(tensor.wtype, tensor.codes, tensor.scale)
    return values if tensor.wtype == WType.bf16 else values.reshape(*tensor.codes.shape[:-2], -1)


def dequantize_rows(wtype: WType, codes: Codes, scale: Scales | None) -> F32:
    """f32 values of codes: [..., K] of bf16 bits, else [..., G, 32]."""
    if wtype == WType.bf16:
        return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
    assert scale is not None
    if wtype == WType.q4local:
        codes = np.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1)
        codes = codes.astype(np.int8) - np.int8(8)
    return codes.astype(np.float32) * scale.view(np.float16).astype(np.float32)[..., None]


def _groups(x: F32) -> F32:
    check_finite(x)
    return x.reshape(x.shape[0], x.shape[1] // GROUP, GROUP)


def _extreme(groups: F32) -> F32:
    """The value of largest magnitude of each group, with its sign; the first of equals."""
    index = np.abs(groups).argmax(axis=-1)
    return np.take_along_axis(groups, index[..., None], axis=-1)[..., 0]


def _f16_scale(scale: F32) -> npt.NDArray[np.float16]:
    if np.abs(scale).max(initial=0) > F16_MAX:
        raise RangeError("weight too large for an f16 scale")
    return scale.astype(np.float16) + np.float16(0)  # a group of zeros has scale +0, not -0


def _inverse(scale: npt.NDArray[np.float16]) -> F32:
    """1/scale, and 0 where the scale is 0: such a group's weights are below what f16 can scale."""
    wide = scale.astype(np.float32)
    return np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide != 0)


def _codes4(groups: F32, scale: npt.NDArray[np.float16]) -> npt.NDArray[np.uint8]:
    """Codes 0..15 of weights in units of the stored (rounded) scale, offset 8."""
    codes = np.rint(groups * _inverse(scale)[..., None]) + np.float32(8)
    return np.clip(codes, 0, 15).astype(np.uint8)


def _error4(groups: F32, codes: npt.NDArray[np.uint8], scale: npt.NDArray[np.float16]) -> F32:
    values = (codes.astype(np.float32) - np.float32(8)) * scale.astype(np.float32)[..., None]
    return np.square(groups - values).sum(axis=-1)


def _pack4(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Byte j holds element j (low nibble) and element j + 16 (high)."""
    return codes[..., :16] | (codes[..., 16:] << np.uint8(4))
