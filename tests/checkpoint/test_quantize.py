"""The quantisers against scalar forms written from docs/formats.md, and what every scale choice must hold."""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kestrel.checkpoints.quantize import (
    Q4_SCALES,
    Q4Scale,
    RangeError,
    dequantize,
    dequantize_rows,
    quantize,
    quantize_rows,
    to_bf16,
    to_q4local,
    to_q8local,
)
from kestrel.ops import WType
from tests.checkpoint.files import assert_equal_bits

FINITE = st.floats(-1000, 1000, width=32) | st.floats(-(2.0**-13), 2.0**-13, width=32)


def f32(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]


def half_bits(x: float) -> int:
    """Rounded to nearest even; a zero is +0."""
    return int(np.float16(x).view(np.uint16)) if np.float16(x) != 0 else 0


def half(bits: int) -> float:
    return float(np.uint16(bits).view(np.float16))


def code_of(weight: float, scale: float, low: int, high: int) -> int:
    """Round half to even of weight * (1/scale), each operation in f32."""
    if scale == 0:
        return 0
    return min(high, max(low, round(f32(weight * f32(1 / scale)))))


def q8_group(weights: list[float]) -> tuple[list[int], int]:
    bits = half_bits(f32(max(map(abs, weights)) / 127))
    return [code_of(w, half(bits), -127, 127) for w in weights], bits


def q4_group(weights: list[float]) -> tuple[list[int], int]:
    extreme = max(weights, key=abs)  # the first of equals
    bits = half_bits(f32(extreme / -8))
    codes = [code_of(w, half(bits), -8, 7) + 8 for w in weights]
    return [codes[j] | codes[j + 16] << 4 for j in range(16)], bits


def random_rows(seed: int = 0, rows: int = 12, k: int = 96) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, k)) * rng.choice([1e-7, 0.02, 3.0], (rows, 1))).astype(np.float32)


def test_q8local_equals_the_scalar_form() -> None:
    x = random_rows()
    codes, scales = to_q8local(x)
    for row, (row_codes, row_scales) in zip(x, zip(codes, scales, strict=True), strict=True):
        for g in range(3):
            expected = q8_group(row[32 * g : 32 * g + 32].tolist())
            assert (row_codes[g].tolist(), int(row_scales[g])) == expected


def test_q4local_plain_equals_the_scalar_form() -> None:
    x = random_rows()
    codes, scales = to_q4local(x, "plain")
    for row, (row_codes, row_scales) in zip(x, zip(codes, scales, strict=True), strict=True):
        for g in range(3):
            expected = q4_group(row[32 * g : 32 * g + 32].tolist())
            assert (row_codes[g].tolist(), int(row_scales[g])) == expected


def test_plain_maps_the_largest_magnitude_to_minus_8() -> None:
    x = np.linspace(-0.5, 1.0, 32, dtype=np.float32)[None]
    codes, scales = to_q4local(x, "plain")
    assert half(int(scales[0, 0])) == -0.125
    assert codes[0, 0, 15] >> 4 == 0  # element 31: code 0 is -8
    assert dequantize_rows(WType.q4local, codes, scales)[0, 0, 31] == 1.0


def exact_error(weights: np.ndarray, values: np.ndarray, weighted: bool) -> Fraction:
    total = Fraction(0)
    for w, v in zip(weights.tolist(), values.tolist(), strict=True):
        total += (Fraction(w) - Fraction(v)) ** 2 * (abs(Fraction(w)) if weighted else 1)
    return total


@pytest.mark.parametrize("scale", ["search", "weighted"])
def test_search_never_has_the_larger_error(scale: Q4Scale) -> None:
    x = random_rows(1, 40)
    errors = {}
    for how in ("plain", scale):
        values = dequantize_rows(WType.q4local, *to_q4local(x, how))  # type: ignore[arg-type]
        errors[how] = [
            exact_error(w, v, scale == "weighted")
            for w, v in zip(x.reshape(-1, 32), values.reshape(-1, 32), strict=True)
        ]
    # The search compares f32 sums, so a group may lose by their rounding.
    assert all(s <= p * Fraction(100001, 100000) for s, p in zip(errors[scale], errors["plain"], strict=True))
    assert sum(errors[scale]) < sum(errors["plain"]) * Fraction(98, 100)


@settings(max_examples=60, deadline=None)
@given(x=hnp.arrays(np.float32, (2, 64), elements=FINITE), scale=st.sampled_from(Q4_SCALES))
def test_q4local_error_is_bounded(x: np.ndarray, scale: Q4Scale) -> None:
    """Every value is within one step of its weight, or clipped: 7 steps of 0.85 amax/8 are 0.744 amax."""
    codes, scales = to_q4local(x, scale)
    values = dequantize_rows(WType.q4local, codes, scales).reshape(x.shape)
    step = np.abs(scales.view(np.float16).astype(np.float64)).repeat(32, axis=1)
    amax = np.abs(x.reshape(2, 2, 32)).max(-1).astype(np.float64).repeat(32, axis=1)
    subnormal = 8 * 2.0**-25  # 8 steps of a scale that f16 rounds by half its smallest number
    bound = np.maximum(1.001 * step, 0.26 * amax) + subnormal
    assert (np.abs(values - x.astype(np.float64)) <= bound).all()


@settings(max_examples=60, deadline=None)
@given(x=hnp.arrays(np.float32, (2, 64), elements=FINITE))
def test_q8local_error_is_half_a_step(x: np.ndarray) -> None:
    codes, scales = to_q8local(x)
    values = dequantize_rows(WType.q8local, codes, scales).reshape(x.shape)
    step = scales.view(np.float16).astype(np.float64).repeat(32, axis=1)
    # A scale rounded down clips the largest weight by at most 127 half ulps of f16.
    slack = np.maximum(step * 127 * 2.0**-11, 127 * 2.0**-25)
    assert (np.abs(values - x.astype(np.float64)) <= 0.5001 * step + slack).all()


@pytest.mark.parametrize("scale", Q4_SCALES)
def test_group_of_zeros_is_plus_zero(scale: Q4Scale) -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, 40] = -0.0
    codes, scales = to_q4local(x, scale)
    assert scales.tolist() == [[0, 0]]
    assert (codes == 0x88).all()
    codes, scales = to_q8local(x)
    assert (scales.tolist(), codes.any()) == ([[0, 0]], False)


@pytest.mark.parametrize("scale", Q4_SCALES)
def test_weights_below_the_smallest_f16_scale_become_zero(scale: Q4Scale) -> None:
    x = np.full((1, 32), 1e-9, np.float32)
    for wtype in (WType.q4local, WType.q8local):
        codes, scales = quantize_rows(x, wtype, scale)
        assert (dequantize_rows(wtype, codes, scales) == 0).all()


@pytest.mark.parametrize("wtype", list(WType))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weight_that_is_not_finite(wtype: WType, bad: float) -> None:
    x = np.ones((2, 32), np.float32)
    x[1, 5] = bad
    with pytest.raises(RangeError, match="1 weight is NaN or infinite"):
        quantize_rows(x, wtype)


@pytest.mark.parametrize(
    ("wtype", "value"), [(WType.bf16, 3.4e38), (WType.q4local, 8 * 65520.0), (WType.q8local, 127 * 65520.0)]
)
def test_weight_too_large_for_the_format(wtype: WType, value: float) -> None:
    x = np.full((1, 32), value, np.float32)
    with pytest.raises(RangeError, match="too large"):
        quantize_rows(x, wtype)
    quantize_rows(x * np.float32(0.9), wtype)


def test_bf16_rounds_to_nearest_even() -> None:
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x80000001, 0x00010000, 0x80000000]
    x = np.array([bits], np.uint32).view(np.float32)
    assert to_bf16(x).tolist() == [[0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x8000, 0x0001, 0x8000]]


@pytest.mark.parametrize("scale", Q4_SCALES)
@pytest.mark.parametrize("wtype", list(WType))
def test_rows_do_not_depend_on_their_neighbours(wtype: WType, scale: Q4Scale) -> None:
    x = random_rows(2, rows=200, k=1024)  # 6,400 groups: more than the search takes at a time
    codes, scales = quantize_rows(x, wtype, scale)
    for begin, end in ((0, 1), (63, 129), (199, 200)):
        part, part_scales = quantize_rows(x[begin:end].copy(), wtype, scale)
        assert_equal_bits(part, codes[begin:end])
        if scales is not None:
            assert part_scales is not None
            assert_equal_bits(part_scales, scales[begin:end])


@pytest.mark.parametrize("wtype", list(WType))
def test_stack_equals_its_matrices(wtype: WType) -> None:
    x = random_rows(3, rows=6).reshape(2, 3, 96)
    stack = quantize(x, wtype)
    assert (stack.experts, stack.n, stack.k) == (2, 3, 96)
    assert dequantize(stack).shape == x.shape
    for e in range(2):
        assert_equal_bits(dequantize(stack)[e], dequantize(quantize(x[e], wtype)))


@pytest.mark.parametrize("wtype", [WType.q4local, WType.q8local])
def test_quantising_twice_changes_nothing(wtype: WType) -> None:
    """Values that a format can hold are kept: the plain scale of quantised weights is their scale."""
    once = quantize(random_rows(4) * np.float32(4), wtype, "plain")
    twice = quantize(dequantize(once), wtype, "plain")
    kept = np.abs(dequantize(once)).reshape(-1, 32).max(-1) > 1e-4
    difference = np.abs(dequantize(twice) - dequantize(once)).reshape(-1, 32)[kept]
    assert difference.max() <= 1e-2 * np.abs(dequantize(once)).max()
