"""From float weights to the formats of contract section 1, and back.

Every function takes blocks of rows: rows are independent, and blocks bound the memory. Only correctly rounded
operations in a stated order are used, so the same weights give the same bytes on every machine.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kestrel.ops import WType
from kestrel.weights import GROUP, QuantTensor

F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]
Codes = npt.NDArray[Any]
Scales = npt.NDArray[np.uint16]

# How a q4local scale is chosen: "plain" maps the value of largest magnitude to -8; the other two try factors
# around that scale and take the one of least squared error, in "weighted" times the magnitude of the weight.
Q4Scale = Literal["plain", "search", "weighted"]
Q4_SCALES: tuple[Q4Scale, ...] = get_args(Q4Scale)
DEFAULT_Q4_SCALE: Q4Scale = "weighted"  # by its effect on logits: docs/formats.md

F16_MAX = 65504.0
_FACTORS = [np.float32(1 + 0.03 * step) for step in (-5, -4, -3, -2, -1, 1, 2, 3, 4, 5)]
_CHUNK = 2048  # groups searched at a time: the working set stays in cache


class RangeError(ValueError):
    """A weight that is not finite, or too large for the format."""


def quantize(x: F32, wtype: WType, q4_scale: Q4Scale = DEFAULT_Q4_SCALE) -> QuantTensor:
    """A matrix f32[N, K] or stack f32[E, N, K] as a tensor of the model. Raises ``RangeError``."""
    codes, scale = quantize_rows(np.ascontiguousarray(x.reshape(-1, x.shape[-1])), wtype, q4_scale)
    lead = x.shape[:-1]
    codes = codes.reshape(*lead, *codes.shape[1:])
    scale = None if scale is None else scale.reshape(*lead, *scale.shape[1:])
    return QuantTensor(wtype, codes, scale, x.shape[0] if x.ndim == 3 else None, x.shape[-2], x.shape[-1])


def quantize_rows(x: F32, wtype: WType, q4_scale: Q4Scale = DEFAULT_Q4_SCALE) -> tuple[Codes, Scales | None]:
    """Codes and scales of f32[R, K]. Raises ``RangeError`` for a weight that the format cannot hold."""
    if wtype == WType.bf16:
        return to_bf16(x), None
    return to_q8local(x) if wtype == WType.q8local else to_q4local(x, q4_scale)


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


def check_finite(x: F32) -> None:
    """Raise ``RangeError`` when ``x`` holds a NaN or an infinity."""
    bad = np.count_nonzero(~np.isfinite(x))
    if bad:
        raise RangeError(f"{bad} weight{'s are' if bad > 1 else ' is'} NaN or infinite")


def to_bf16(x: F32) -> npt.NDArray[np.uint16]:
    """bf16 bits, rounded to nearest even, of f32[..., K]."""
    check_finite(x)
    with np.errstate(over="ignore"):
        bits = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    if np.any((bits & 0x7FFF) == 0x7F80):
        raise RangeError("a weight is too large for bf16")
    return bits


def to_q8local(x: F32) -> tuple[Codes, Scales]:
    """i8[R, G, 32] and f16 bits u16[R, G] of f32[R, K]: a group's largest magnitude maps to 127."""
    groups = _groups(x)
    scale = _f16(np.abs(groups).max(axis=-1) / np.float32(127))
    codes = np.rint(groups * _inverse(scale)[..., None])
    return np.clip(codes, -127, 127).astype(np.int8), scale.view(np.uint16)


def to_q4local(x: F32, q4_scale: Q4Scale = DEFAULT_Q4_SCALE) -> tuple[Codes, Scales]:
    """u8[R, G, 16] and f16 bits u16[R, G] of f32[R, K]."""
    groups = _groups(x)
    plain = _extreme(groups) / np.float32(-8)
    scale = _f16(plain)
    if q4_scale != "plain":
        flat, base, best = groups.reshape(-1, GROUP), plain.reshape(-1), scale.reshape(-1)
        for begin in range(0, len(flat), _CHUNK):
            part = slice(begin, begin + _CHUNK)
            best[part] = _searched(flat[part], base[part], best[part], q4_scale == "weighted")
    codes = np.clip(np.rint(groups * _inverse(scale)[..., None]), -8, 7).astype(np.int8)
    unsigned = (codes + np.int8(8)).view(np.uint8)
    # Byte j holds element j (low nibble) and element j + 16 (high).
    return unsigned[..., :16] | (unsigned[..., 16:] << np.uint8(4)), scale.view(np.uint16)


def _searched(groups: F32, plain: F32, scale: F16, weighted: bool) -> F16:
    """The scale of least squared error of each of [M, 32] groups; ``scale`` wins ties, then low factors."""
    columns = np.ascontiguousarray(groups.T)  # [32, M]: a scale per column makes every loop below a long one
    importance = np.abs(columns) if weighted else None
    values = np.empty_like(columns)
    best = scale.copy()
    least = _squared_error(columns, scale, importance, values)
    for factor in _FACTORS:
        tried = _f16(np.clip(plain * factor, -F16_MAX, F16_MAX))
        error = _squared_error(columns, tried, importance, values)
        better = error < least
        np.copyto(least, error, where=better)
        np.copyto(best, tried, where=better)
    return best


def _squared_error(columns: F32, scale: F16, importance: F32 | None, values: F32) -> F32:
    """f32[M]: sum over each column of (importance *) (weight - value)^2; ``values`` is scratch."""
    np.multiply(columns, _inverse(scale), out=values)
    np.rint(values, out=values)
    np.clip(values, -8, 7, out=values)
    values *= scale.astype(np.float32)
    values -= columns
    values *= values
    if importance is not None:
        values *= importance
    # Halves added pairwise: an order of our own, where that of np.sum may depend on the machine.
    for half in (16, 8, 4, 2, 1):
        values = np.add(values[:half], values[half : 2 * half], out=values[:half])
    error: F32 = values[0].copy()
    return error


def _groups(x: F32) -> F32:
    check_finite(x)
    return x.reshape(x.shape[0], x.shape[1] // GROUP, GROUP)


def _extreme(groups: F32) -> F32:
    """The value of largest magnitude of each group, with its sign; the first of equals."""
    index = np.abs(groups).argmax(axis=-1)
    return np.take_along_axis(groups, index[..., None], axis=-1)[..., 0]


def _f16(scale: F32) -> F16:
    """Rounded to nearest even; a zero is +0."""
    if np.abs(scale).max(initial=0) > F16_MAX:
        raise RangeError("a weight is too large for an f16 scale")
    return scale.astype(np.float16) + np.float16(0)


def _inverse(scale: F16) -> F32:
    """1/scale, and 0 where the scale is 0: such a group's weights are below what f16 can scale."""
    wide = scale.astype(np.float32)
    return np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide != 0)
