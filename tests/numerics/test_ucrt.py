"""expf, cosf and sinf of kernels/ucrt.cuh: every input, every form, and what the algorithm promises."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import mpmath
import numpy as np
import numpy.typing as npt
import pytest

from kestrel import _native, ucrt
from tests.support.bits import assert_bits_equal

VECTOR_FORMS = [isa for isa in _native.isa_available() if isa != "scalar"]
FORMS = ["scalar", "joined", *(["scalar_fma", "joined_fma", *VECTOR_FORMS] if VECTOR_FORMS else [])]
HEADER = Path(__file__).parents[2] / "kernels" / "ucrt.cuh"
FUNCTIONS = {"expf": ucrt.expf, "cosf": ucrt.cosf, "sinf": ucrt.sinf}

# From here on the vector forms of cosf and sinf hand over to the scalar source.
VECTOR_LIMIT = {"expf": 0xFFFFFFFF, "cosf": 0x4B800456, "sinf": 0x4B800456}


def f32(*bits: int) -> npt.NDArray[np.float32]:
    return np.array(bits, np.uint32).view(np.float32)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_input(function: str) -> None:
    """All 2**32 inputs: no crash, the NaN rule, expf never falls, the vector form equals the scalar one."""
    vector = VECTOR_FORMS[0] if VECTOR_FORMS else "scalar"
    scalar = "scalar_fma" if VECTOR_FORMS else "scalar"
    threads = _native.default_threads()
    sweep = _native.ucrt_sweep(function, scalar, vector, b_below=VECTOR_LIMIT[function], threads=threads)
    assert sweep["inputs"] >= 2**32
    assert sweep["different"] == 0, f"first at 0x{sweep['first']:08x}"
    assert sweep["nan_faults"] == 0
    assert sweep["order_faults"] == 0 or function != "expf"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("function", ["cosf", "sinf"])
def test_every_input_of_both_functions_by_one_text(function: str) -> None:
    forms = ("scalar_fma", "joined_fma") if VECTOR_FORMS else ("scalar", "joined")
    sweep = _native.ucrt_sweep(function, *forms, threads=_native.default_threads())
    assert sweep["different"] == 0, f"first at 0x{sweep['first']:08x}"


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_forms_agree(function: str, form: str) -> None:
    """Every 389th input of the whole range: each form against the scalar one with fma as a library call."""
    sweep = _native.ucrt_sweep(function, "scalar", form, step=389, threads=_native.default_threads())
    assert sweep["inputs"] > 2**32 / 389
    assert sweep["different"] == 0, f"first at 0x{sweep['first']:08x}"
    assert sweep["nan_faults"] == 0


@pytest.mark.parametrize("form", FORMS)
def test_every_position_of_a_vector(form: str) -> None:
    """Special inputs next to ordinary ones, at every lane and in tails of every length."""
    special = f32(0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345)
    special = np.concatenate(
        [special, np.array([88.72284, -103.97, -104.1, 89, 1e30, -3e9, 2e7, 1e-3], np.float32)]
    )
    for n in range(1, 40):
        for value in special:
            for at in {0, n // 2, n - 1}:
                x = np.linspace(-3, 3, n, dtype=np.float32)
                x[at] = value
                for name, call in FUNCTIONS.items():
                    function = getattr(_native, f"{name}_ucrt")
                    assert_bits_equal(
                        function(x, form), function(x, "scalar"), f"{name} {form} n={n} at={at}"
                    )
                    assert_bits_equal(call(x), function(x, "scalar"), name)


def test_special_values() -> None:
    nan = 0x7FC00000
    x = f32(0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7F800001, 0x00000000, 0x80000000, 0x00000001)
    assert ucrt.expf(x).view(np.uint32).tolist() == [0x7F800000, 0, nan, nan, nan, *[0x3F800000] * 3]
    assert ucrt.cosf(x).view(np.uint32).tolist() == [nan] * 5 + [0x3F800000] * 3
    assert ucrt.sinf(x).view(np.uint32).tolist() == [nan] * 5 + [0x00000000, 0x80000000, 0x00000001]


def test_expf_limits() -> None:
    """Subnormal results are gradual down to -103.97; the cut-offs lie where the contract says."""
    x = np.array(
        [88.7228394, np.nextafter(np.float32(88.7228394), np.float32(0)), -87.5, -103.9, -104], np.float32
    )
    y = ucrt.expf(x)
    assert y[0] == np.inf
    assert y[1].view(np.uint32) == 0x7F7FFF84
    assert 0 < y[2] < 2**-126
    assert y[3].view(np.uint32) == 1
    assert y[4].view(np.uint32) == 0


def test_counts_against_correct_rounding() -> None:
    """The published experiment: of 400,002 samples of [-100, 0] 28 differ from (float)exp((double)x)."""
    counts = []
    for seed in range(8):
        x = np.random.default_rng(seed).uniform(-100, 0, 400_002).astype(np.float32)
        counts.append(int(np.count_nonzero(ucrt.expf(x) != np.exp(x.astype(np.float64)).astype(np.float32))))
    assert 15 <= np.mean(counts) <= 41, counts
    assert max(counts) <= 60


@pytest.mark.parametrize(
    ("function", "low", "high"),
    [
        *[("cosf", 1e-6, 4), ("cosf", 4, 1e5), ("cosf", 1e5, 3.3e9), ("cosf", 3.4e9, 3.4e38)],
        *[("sinf", 1e-6, 4), ("sinf", 4, 1e5), ("sinf", 1e5, 1.6e7), ("sinf", 1.7e7, 3.4e38)],
    ],
)
def test_accuracy(function: str, low: float, high: float) -> None:
    """Against mpmath on magnitudes spread over the range, both signs.

    The sine polynomial stops at r**9: r**11/11! at pi/4 is 0.03 ULP, on top of the final rounding's half.
    """
    r = np.random.default_rng(1)
    x = np.exp(r.uniform(np.log(low), np.log(high), 1500)) * r.choice([-1, 1], 1500)
    x = x[np.abs(x) < np.finfo(np.float32).max].astype(np.float32)
    y = FUNCTIONS[function](x)
    with mpmath.workprec(300):
        true = [getattr(mpmath, function[:3])(mpmath.mpf(float(v))) for v in x]
        error = [float(abs(mpmath.mpf(float(a)) - t)) for a, t in zip(y, true, strict=True)]
    ulp = np.spacing(np.abs(np.array([float(t) for t in true])).astype(np.float32))
    assert np.max(np.array(error) / ulp) < 0.535


def test_the_worst_reductions() -> None:
    """Floats very close to a multiple of pi/2, small and huge: the remainder must keep its digits."""
    x = np.array([16367173 * 2.0**72, 12345678.0, 710, 5.7080083e37, 6381956970095103 * 2.0**60], np.float32)
    for function, reference in ((ucrt.cosf, mpmath.cos), (ucrt.sinf, mpmath.sin)):
        for value, result in zip(x, function(x), strict=True):
            with mpmath.workprec(300):
                true = reference(mpmath.mpf(float(value)))
            assert abs(float(result) - float(true)) <= 0.535 * np.spacing(np.float32(abs(true)))


def test_table_is_correctly_rounded() -> None:
    """The 64 doubles 2**(j/64) of the header, recomputed."""
    text = HEADER.read_text().partition("EXPF_UCRT_TABLE[64] = {")[2].partition("}")[0]
    table = [int(word, 16) for word in re.findall(r"0x([0-9a-f]{16})ull", text)]
    with mpmath.workprec(200):
        expected = [float(mpmath.mpf(2) ** (mpmath.mpf(j) / 64)) for j in range(64)]
    assert table == [struct.unpack("<Q", struct.pack("<d", value))[0] for value in expected]


def test_two_over_pi_words() -> None:
    text = HEADER.read_text().partition("TWO_OVER_PI[9] = {")[2].partition("}")[0]
    words = [int(word, 16) for word in re.findall(r"0x([0-9a-f]{8})u", text)]
    with mpmath.workprec(600):
        fraction = int(mpmath.floor(2 / mpmath.pi * mpmath.mpf(2) ** 256))
    assert words == [0, *((fraction >> 32 * (7 - i)) & 0xFFFFFFFF for i in range(8))]


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="float64"):
        ucrt.expf(np.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no form"):
        _native.expf_ucrt(np.zeros(3, np.float32), "sse9")
    assert ucrt.expf(np.zeros((2, 0, 3), np.float32)).shape == (2, 0, 3)
    assert ucrt.cosf(np.zeros((4, 4), np.float32)[::2, ::2]).shape == (2, 2)
