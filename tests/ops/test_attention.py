"""attention: every form against the rule of contract section 7, restated in numpy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ops import reference
from tests.ops.forms import FORMS, ROWS, check_forms, normal, rng
from tests.support.bits import assert_bits_equal
from tests.support.run_op import empty, run_op


def make_case(
    *, nh: int, nkv: int, hd: int, positions: list[int], slots: int, pad: int = 0, seed: int = 0
) -> dict[str, Any]:
    """Rows at the given positions, each with its own base; ``pad`` floats lie between the rows of q."""
    M, ld = len(positions), nh * hd + pad
    r = rng(seed)
    pos = np.array(positions, np.int32)
    base = np.array([r.integers(0, slots - p) for p in positions], np.int32)
    return {
        "q": normal((M, ld), seed + 1),
        "kq": r.integers(-127, 128, (slots, nkv, hd), np.int8),
        "ks": np.abs(normal((slots, nkv), seed + 2, 0.03)),
        "vq": r.integers(-127, 128, (slots, nkv, hd), np.int8),
        "vs": np.abs(normal((slots, nkv), seed + 3, 0.02)),
        "pos": pos,
        "base": base,
        "work": None,
        "copies": None,
        "M": M,
        "nh": nh,
        "nkv": nkv,
        "hd": hd,
        "ld": ld,
        "qscale": float(np.float32(1 / np.sqrt(np.float64(hd)))),
    }


def expected_of(case: dict[str, Any]) -> Any:
    q = np.ascontiguousarray(case["q"][:, : case["nh"] * case["hd"]]).reshape(
        case["M"], case["nh"], case["hd"]
    )
    with np.errstate(all="ignore"):
        return reference.attention(q, *(case[key] for key in ("kq", "ks", "vq", "vs", "pos", "base")))


def run(case: dict[str, Any], isa: str, threads: int) -> Any:
    out = empty((case["M"], case["nh"], case["hd"]), np.float32)
    run_op("attention", threads=threads, isa=isa, out=out, **case)
    return out


@pytest.mark.parametrize("hd", [32, 48, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize(("nh", "nkv"), [(1, 1), (5, 1), (6, 2)])
def test_head_dims(hd: int, nh: int, nkv: int) -> None:
    case = make_case(nh=nh, nkv=nkv, hd=hd, positions=[0, 13, 40], slots=64, pad=8)
    check_forms("attention", {"out": expected_of(case)}, **case)


@pytest.mark.parametrize(("nh", "nkv"), [(3, 3), (4, 2), (9, 3), (4, 1), (7, 1), (8, 1), (16, 1)])
def test_head_ratios(nh: int, nkv: int) -> None:
    case = make_case(nh=nh, nkv=nkv, hd=32, positions=[70, 5], slots=80)
    check_forms("attention", {"out": expected_of(case)}, **case)


@pytest.mark.parametrize("position", [0, 1, 6, 7, 8, 15, 16, 17, 254, 255, 256, 257, 510, 511, 512, 700])
def test_positions(position: int) -> None:
    """Around the vector widths and the chunk boundaries; one row, so that threads share its chunks."""
    case = make_case(nh=2, nkv=1, hd=32, positions=[position], slots=position + 3, seed=position)
    check_forms("attention", {"out": expected_of(case)}, **case)


def test_rising_and_falling_scores() -> None:
    """The largest score is the last or the first of each chunk."""
    case = make_case(nh=2, nkv=1, hd=64, positions=[300, 300], slots=301)
    case["base"][:] = 0
    case["kq"][:] = np.sign(case["q"][0, :64]).astype(np.int8) * 100
    case["ks"][:, 0] = np.linspace(0.001, 0.02, 301, dtype=np.float32)
    check_forms("attention", {"out": expected_of(case)}, **case)
    case["ks"] = np.ascontiguousarray(case["ks"][::-1])
    check_forms("attention", {"out": expected_of(case)}, **case)


@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30, 1e-42, 0.0])
def test_special_values(where: str, bad: float) -> None:
    case = make_case(nh=3, nkv=1, hd=32, positions=[270, 20], slots=300)
    if where == "query":
        case["q"][0, 40] = bad
    else:
        case["ks" if where == "key" else "vs"][case["base"][0] + np.array([0, 9, 100, 260]), 0] = bad
    check_forms("attention", {"out": expected_of(case)}, **case)


def test_zero_query_and_keys() -> None:
    case = make_case(nh=2, nkv=2, hd=64, positions=[33], slots=40)
    case["q"][:] = -0.0
    case["kq"][:, 1] = 0
    check_forms("attention", {"out": expected_of(case)}, **case)


def flat_case(vs: Any, *, hd: int = 32) -> dict[str, Any]:
    """All scores are 0, so that every p is 1, and the weights of V are the given scales."""
    vs = np.asarray(vs, np.float32)
    case = make_case(nh=2, nkv=1, hd=hd, positions=[len(vs) - 1], slots=len(vs))
    case["q"][:] = 0
    case["vs"] = vs[:, None].copy()
    return case


def test_all_scores_are_minus_infinity() -> None:
    case = make_case(nh=2, nkv=1, hd=32, positions=[40], slots=41)
    case["q"][:] = 1
    case["kq"][:] = -5
    case["ks"][:] = np.inf
    expected = expected_of(case)
    assert np.isnan(expected).all()
    check_forms("attention", {"out": expected}, **case)


def test_one_chunk_of_minus_infinity() -> None:
    """Its state has m = -inf and NaN for l: the merge makes NaN of everything."""
    case = make_case(nh=2, nkv=1, hd=32, positions=[300], slots=301)
    case["q"][:] = 1
    case["kq"][256:] = -5
    case["ks"][256:] = np.inf
    check_forms("attention", {"out": expected_of(case)}, **case)


def test_zero_values() -> None:
    case = make_case(nh=2, nkv=1, hd=48, positions=[300], slots=301)
    for zero in ("vq", "vs"):
        changed = {**case, zero: np.zeros_like(case[zero])}
        expected = expected_of(changed)
        assert (expected == 0).all()
        check_forms("attention", {"out": expected}, **changed)


@pytest.mark.parametrize("steps", [-1, 0, 1])
@pytest.mark.parametrize("largest", [2.0**-100, 2.0**-99, 2.0**-126, 1.0, 2.0, 2.0**127])
def test_scale_of_codes_changes_at_a_power_of_two(largest: float, steps: int) -> None:
    """The largest weight at a border of the scale, the one of all zeros among them, and its neighbours."""
    top = np.uint32(int(np.float32(largest).view(np.uint32)) + steps).view(np.float32)
    case = flat_case([top * np.float32(0.3), top, top * np.float32(0.7)])
    expected = expected_of(case)
    assert (expected == 0).all() == (top < 2.0**-100)
    check_forms("attention", {"out": expected}, **case)


@pytest.mark.parametrize("quarters", range(-6, 1))
def test_largest_code_is_clamped(quarters: int) -> None:
    """Weights of 32766.5 to almost 32768 units: what rounds to 32768 is 32767; -32768 stays."""
    top = min(np.float32((32768 + quarters / 4) / 32768), np.nextafter(np.float32(1), np.float32(0)))
    for sign in (1, -1):
        case = flat_case(sign * np.array([top, 0.25, top], np.float32))
        codes, unit = reference.value_codes(np.ascontiguousarray(case["vs"][:, 0]))
        assert codes.max() <= 32767
        assert unit == np.float32(2.0**-15)
        check_forms("attention", {"out": expected_of(case)}, **case)


def test_codes_round_ties_to_even() -> None:
    ties = (np.arange(2**14, 2**14 + 300) + 0.5) / 2.0**14  # of units, and no more than twice the smallest
    case = flat_case(np.concatenate([ties, ties[::-1] / 8, -ties / 4]))
    case["vq"][:] = 1
    check_forms("attention", {"out": expected_of(case)}, **case)


@pytest.mark.parametrize("hd", [32, 80, 256])
@pytest.mark.parametrize("sign", [1, -1])
def test_largest_sums(hd: int, sign: int) -> None:
    """256 largest codes times +-127: 30 bits, whose conversion rounds."""
    top = np.nextafter(np.float32(2), np.float32(0))
    case = flat_case(np.full(512, sign * top, np.float32), hd=hd)
    case["vq"][:] = np.where(np.arange(hd) % 2, 127, -127)
    case["vq"][::9, :, 5] = 126
    expected = expected_of(case)
    assert np.abs(expected).max() > 250
    check_forms("attention", {"out": expected}, **case)


def test_exponentials_are_summed_in_32_lanes() -> None:
    """One large term and many small ones, which are lost or kept by the order of the sum alone."""
    case = make_case(nh=1, nkv=1, hd=32, positions=[255], slots=256)
    case["q"][:] = 1
    case["kq"][:] = 1
    case["vq"][:] = 127
    # The first score is the largest by 17.4: the other exponentials are a quarter of its last place.
    case["ks"][:] = 0
    case["ks"][0] = 17.4 / (32 * case["qscale"])
    check_forms("attention", {"out": expected_of(case)}, **case)


@pytest.mark.parametrize("M", ROWS)
def test_rows_equal_one_row(M: int) -> None:
    """A prompt of M rows: the first, middle and last row have the bits of that row alone."""
    case = make_case(nh=3, nkv=1, hd=32, positions=list(range(M)), slots=M + 1, pad=4)
    case["base"][:] = 1
    reference_rows = {}
    for m in {0, M // 2, M - 1}:
        row = {
            **case,
            "M": 1,
            "q": case["q"][m : m + 1],
            "pos": case["pos"][m : m + 1],
            "base": case["base"][:1],
        }
        reference_rows[m] = run(row, "scalar", 1)[0]
    for isa, threads in FORMS:
        if isa == "scalar" and M > 257:
            continue
        out = run(case, isa, threads)
        for m, expected in reference_rows.items():
            assert_bits_equal(out[m], expected, f"row {m} of {M} ({isa}, {threads} threads)")


@pytest.mark.parametrize("position", [1023, 1024, 5000])
def test_long_context(position: int) -> None:
    """Long pasts, where threads share chunks: all forms equal the scalar form."""
    case = make_case(nh=4, nkv=2, hd=64, positions=[position], slots=position + 1)
    expected = run(case, "scalar", 1)
    for isa, threads in FORMS:
        assert_bits_equal(run(case, isa, threads), expected, f"{isa}, {threads} threads")


@pytest.mark.parametrize("ks", [1e-7, 1e-4])
def test_chunks_of_equal_weight(ks: float) -> None:
    """Sensitive to every rounding of the merge: nearly flat scores, so that all chunks count."""
    case = make_case(nh=6, nkv=2, hd=32, positions=[800], slots=801)
    case["ks"][:] *= np.float32(ks)
    check_forms("attention", {"out": expected_of(case)}, **case)


def test_chunks_merge_left_to_right() -> None:
    """Sensitive to the order of the merge: four chunks with very different maxima."""
    case = make_case(nh=1, nkv=1, hd=32, positions=[1023], slots=1024)
    case["ks"][:, 0] *= np.repeat(np.array([1, 8, 0.1, 3], np.float32), 256)
    check_forms("attention", {"out": expected_of(case)}, **case)


def test_nothing_outside_the_arrays_is_read() -> None:
    """Also where the last positions do not fill what is taken at a time; in its own process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.guarded_attention"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"status {done.returncode} (-11: a read outside)\n{done.stdout}{done.stderr}"
