"""attention: every form against the position-by-position loop of contract section 7, restated in numpy."""

from __future__ import annotations

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


@pytest.mark.parametrize("position", [0, 1, 6, 7, 8, 15, 16, 17, 254, 255, 256, 257, 511, 512, 700])
def test_positions(position: int) -> None:
    """Around the vector widths and the chunk boundaries; one row, so that threads share its chunks."""
    case = make_case(nh=2, nkv=1, hd=32, positions=[position], slots=position + 3, seed=position)
    check_forms("attention", {"out": expected_of(case)}, **case)


def test_rising_and_falling_scores() -> None:
    """The running maximum moves at every position, or only at the first."""
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
