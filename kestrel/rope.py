"""Rotary frequencies of a model, contract section 5.

The powers and logarithms are taken in decimal arithmetic with far more digits than a double holds and rounded
once, so the frequencies are the same on every machine whatever its C library; the scaling rules are then
plain f64 ``+ - * /`` and the result is rounded to f32 once.
"""

from __future__ import annotations

import decimal
import math
from decimal import Decimal
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kestrel.config import ModelConfig, RopeConfig

_DIGITS = decimal.Context(prec=60, rounding=decimal.ROUND_HALF_EVEN, Emin=-9999, Emax=9999)


def inv_freq(config: ModelConfig) -> npt.NDArray[np.float32]:
    """f32[hd/2]: radians per position of each half-split pair, scaling included. Read-only."""
    return _inv_freq(config.rope, config.head_dim, config.max_position)


def attention_factor(config: ModelConfig) -> float:
    """The factor on cos and sin: 1 unless the model has yarn scaling."""
    rope = config.rope
    if rope.type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    # Zero counts as absent for both, as in transformers.
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


@lru_cache(maxsize=64)
def _inv_freq(rope: RopeConfig, head_dim: int, max_position: int) -> npt.NDArray[np.float32]:
    plain = [_power(rope.theta, -2 * i, head_dim) for i in range(head_dim // 2)]
    if rope.type == "default":
        scaled = plain
    elif rope.type == "linear":
        scaled = [f / rope.factor for f in plain]
    elif rope.type == "yarn":
        scaled = _yarn(rope, plain, head_dim, rope.original_max_position or max_position)
    else:
        scaled = _llama3(rope, plain, rope.original_max_position or max_position)
    result = np.array(scaled, np.float64).astype(np.float32)
    result.flags.writeable = False
    return result


def _power(base: float, numerator: int, denominator: int) -> float:
    """base ** (numerator / denominator), correctly rounded."""
    exponent = _DIGITS.divide(Decimal(numerator), Decimal(denominator))
    return float(_DIGITS.power(Decimal(base), exponent))


def _log(x: float) -> float:
    """Natural logarithm, correctly rounded."""
    return float(_DIGITS.ln(Decimal(x)))


def _mscale(scale: float, mscale: float) -> float:
    return 1.0 if scale <= 1.0 else 0.1 * mscale * _log(scale) + 1.0


def _yarn(rope: RopeConfig, plain: list[float], head_dim: int, original: int) -> list[float]:
    """Pairs below ``low`` kept, pairs above ``high`` interpolated, a linear ramp over the index between."""

    def pair_of(rotations: float) -> float:
        """The (fractional) pair that turns ``rotations`` times over the original context."""
        return head_dim * _log(original / (rotations * 2 * math.pi)) / (2 * _log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp's width may not be zero
    scaled = []
    for i, frequency in enumerate(plain):
        kept = 1.0 - min(max((i - low) / (high - low), 0.0), 1.0)
        scaled.append(frequency / rope.factor * (1.0 - kept) + frequency * kept)
    return scaled


def _llama3(rope: RopeConfig, plain: list[float], original: int) -> list[float]:
    """Long wavelengths divided by the factor, short ones untouched, a blend between."""
    longest, shortest = original / rope.low_freq_factor, original / rope.high_freq_factor
    scaled = []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        if wavelength > longest:
            frequency = frequency / rope.factor
        elif wavelength >= shortest:
            blend = (original / wavelength - rope.low_freq_factor) / (
                rope.high_freq_factor - rope.low_freq_factor
            )
            frequency = (1.0 - blend) * frequency / rope.factor + blend * frequency
        scaled.append(frequency)
    return scaled
