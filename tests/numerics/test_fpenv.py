"""The floating-point environment: flush-to-zero from outside is noticed and undone, nothing is contracted."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from kestrel import _native, ucrt
from tests.ops.forms import FORMS, rng
from tests.support.bits import assert_bits_equal
from tests.support.f32 import fma
from tests.support.run_op import run_op

# Linked with -Ofast, whose start-up code switches flush-to-zero on. The rounding mode, which no compiler
# touches but interval arithmetic libraries do, is set by hand.
LIBRARY = """
#include <xmmintrin.h>
float scale(float x) { return x * 0.5f; }
unsigned get_mxcsr(void) { return _mm_getcsr(); }
void set_mxcsr(unsigned value) { _mm_setcsr(value); }
"""

SCRIPT = """
import ctypes, sys
import numpy as np
from kestrel import _native
from tests.support.run_op import run_op

def subnormal_sum(threads):
    n = 100_000  # enough for the threads to share it
    x, y = np.full(n, 3, np.uint32).view(np.float32), np.full(n, 4, np.uint32).view(np.float32)
    run_op("add", threads=threads, x=x, y=y, out=x, n=n)
    return set(x.view(np.uint32).tolist())

def half(x):
    gu = np.array([x, 1, x, 1], np.float32).reshape(1, 2, 2)
    h = np.empty((1, 2), np.float32)
    run_op("swiglu", gu=gu, h=h, R=1, F=2)
    return h.view(np.uint32).tolist()

before = half(2.0**-70), [subnormal_sum(t) for t in (1, 2, 3)], _native.fpenv_state()
assert before[1] == [{7}] * 3 and not before[2]["flush_to_zero"], before
library = ctypes.CDLL(sys.argv[1])
library.get_mxcsr.restype = ctypes.c_uint
if sys.argv[2] != "load":
    library.set_mxcsr(int(sys.argv[2], 16))
state = _native.fpenv_state()
hostile = library.get_mxcsr()
after = half(2.0**-70), [subnormal_sum(t) for t in (1, 2, 3, 4)], _native.fpenv_state()
assert after[0] == before[0] and after[1] == [{7}] * 4, after
assert library.get_mxcsr() & 0xFFC0 == hostile & 0xFFC0, "the caller's setting was not put back"
print(state["flush_to_zero"], state["denormals_are_zero"], state["rounding"])
print(after[2]["hostile_entries"] - before[2]["hostile_entries"])
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no gcc here to build the hostile library")
    folder = tmp_path_factory.mktemp("hostile")
    source, target = folder / "hostile.c", folder / "hostile.so"
    source.write_text(LIBRARY)
    subprocess.run([compiler, "-x", "c", "-Ofast", "-shared", "-fPIC", source, "-o", target], check=True)
    return target


def run_script(library: Path, setting: str) -> list[str]:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(library), setting]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_ofast_library(library: Path) -> None:
    """Loading it flushes subnormals to zero in this process; the ops do not see it, the module notices."""
    ftz, _, rounding, noticed = run_script(library, "load")
    if ftz != "True":
        pytest.skip("this compiler's -Ofast no longer switches flush-to-zero on in shared libraries")
    assert rounding == "nearest"
    assert int(noticed) > 0


@pytest.mark.parametrize(
    ("setting", "state"),
    [
        ("9fc0", ["True", "True", "nearest"]),
        ("9f80", ["True", "False", "nearest"]),
        ("1fc0", ["False", "True", "nearest"]),
        ("3f80", ["False", "False", "down"]),
        ("5f80", ["False", "False", "up"]),
        ("7f80", ["False", "False", "zero"]),
    ],
)
def test_hostile_settings(library: Path, setting: str, state: list[str]) -> None:
    *found, noticed = run_script(library, setting)
    assert found == state
    assert int(noticed) > 0


def test_harmless_state_is_not_reported() -> None:
    before = _native.fpenv_state()
    x = np.ones(4, np.float32)
    run_op("add", x=x, y=x, out=x, n=4)
    assert _native.fpenv_state()["hostile_entries"] == before["hostile_entries"]


A = np.float32(1 + 2.0**-12)  # A * A = 1 + 2^-11 + 2^-24; rounded to f32 1 + 2^-11
C = np.float32(1 + 2.0**-11)


@pytest.mark.parametrize(("isa", "threads"), FORMS)
def test_fused_where_the_contract_says(isa: str, threads: int) -> None:
    """a*b+c with c = -(a*b rounded) is 0 in two steps and 2^-24 when fused; combining experts is fused."""
    n = 67
    y = np.stack([np.full(n, -C, np.float32), np.full(n, A, np.float32)])[None]
    out = np.empty((1, n), np.float32)
    weights = np.array([[1, A]], np.float32)
    run_op("moe_combine", threads, isa, y=y, weights=weights, out=out, M=1, T=2, H=n)
    assert_bits_equal(out, np.full((1, n), 2.0**-24, np.float32), "moe_combine")


@pytest.mark.parametrize(("isa", "threads"), FORMS)
def test_rope_is_not_fused(isa: str, threads: int) -> None:
    """x0*c - x1*s with x0 = x1 and c = s: 0 when both products are rounded first, else a rounding error."""
    hd = 48
    x = np.full((1, hd), A, np.float32)
    eighth = np.full(hd // 2, np.pi / 4, np.float32)
    values = {"pos": np.ones(1, np.int32), "inv_freq": eighth, "M": 1, "heads": 1, "hd": hd, "ld": hd}
    assert_bits_equal(ucrt.cosf(eighth), ucrt.sinf(eighth))
    run_op("rope", threads, isa, x=x, factor=1.0, **values)
    assert_bits_equal(x[0, : hd // 2], np.zeros(hd // 2, np.float32), "rope")


def inverse_rms(ss: np.float32, d: int) -> np.float32:
    return np.float32(1) / np.sqrt(ss / np.float32(d))


@pytest.mark.parametrize(("isa", "threads"), FORMS)
@pytest.mark.parametrize(("name", "second"), [("qk_norm", 1), ("rms_norm", 4)])
def test_sums_of_squares_are_not_fused(name: str, second: int, isa: str, threads: int) -> None:
    """Two elements whose squares meet in one addition, chosen so that fusing it would show in the result."""
    d, r = 32, rng(5)
    ones = np.ones(d, np.float32)
    for a, b in r.uniform(0.5, 2, (1000, 2)).astype(np.float32):
        rounded, fused = inverse_rms(a * a + b * b, d), inverse_rms(fma(b, b, a * a), d)
        also_fused = inverse_rms(fma(a, a, b * b), d)
        if rounded not in (fused, also_fused):
            break
    else:
        pytest.fail("no pair of inputs tells the two apart")
    x = np.zeros((1, d), np.float32)
    x[0, [0, second]] = a, b
    expected = x * rounded
    if name == "qk_norm":
        run_op(name, threads, isa, x=x, w=ones, M=1, heads=1, hd=d, ld=d, eps=0.0)
    else:
        out = np.empty_like(x)
        run_op(name, threads, isa, x=x.copy(), w=ones, out=out, M=1, d=d, eps=0.0)
        x = out
    assert_bits_equal(x, expected, name)
