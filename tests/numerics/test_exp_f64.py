"""exp_f64, the exponential of sampling: accurate, and free of the machine's math library."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from kestrel import _native
from tests.support.bits import assert_bits_equal


@pytest.mark.parametrize(("low", "high"), [(-1, 1), (-40, 5), (-708, 709), (-745.1, -708)])
def test_accuracy(low: float, high: float) -> None:
    x = np.random.default_rng(0).uniform(low, high, 3000)
    y = _native.exp_f64(x)
    with mpmath.workprec(200):
        true = [mpmath.exp(mpmath.mpf(float(v))) for v in x]
        ulp = [mpmath.mpf(float(np.spacing(v))) for v in y]
        worst = max(abs(mpmath.mpf(float(a)) - t) / u for a, t, u in zip(y, true, ulp, strict=True))
    assert worst < 1.0


def test_special_values() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 709.79, 709.78, -745.14, -745.13, 1e300, -1e300])
    y = _native.exp_f64(x)
    assert y.view(np.uint64)[0] == 0x7FF8000000000000
    assert y[[1, 2, 3, 4, 5, 7, 9, 10]].tolist() == [np.inf, 0, 1, 1, np.inf, 0, np.inf, 0]
    assert np.isfinite(y[6])
    assert y[8] == 5e-324


def test_bits_are_fixed() -> None:
    """The algorithm may not change unnoticed: sampled tokens hang on these bits."""
    x = np.array([-0.1, -1.0, -3.7, -20.25, -87.3, -700.1, 0.3, 5.5])
    expected = [
        *["0x1.cf46d99d52b3bp-1", "0x1.78b56362cef38p-2", "0x1.9511fc6871044p-6", "0x1.b93de1e27ca3bp-30"],
        *[
            "0x1.09874c0b9cacbp-126",
            "0x1.f52f93df4dfcep-1011",
            "0x1.599058c8c1a95p+0",
            "0x1.e96244f21bbf7p+7",
        ],
    ]
    assert_bits_equal(_native.exp_f64(x), np.array([float.fromhex(text) for text in expected]))
    assert_bits_equal(_native.exp_f64(x), _native.exp_f64(x.reshape(2, 4)).reshape(8))


def test_wrong_dtype() -> None:
    with pytest.raises(TypeError):
        _native.exp_f64(np.zeros(3, np.float32))
