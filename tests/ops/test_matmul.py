"""matmul: every form, row count and shape against contract section 3 restated in numpy, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kestrel.ops import WType
from kestrel.weights import QuantTensor
from tests.ops.matmul_reference import Form, Input, all_forms, empty_y, expected, product, random_input, sums
from tests.support.bits import assert_bits_equal
from tests.support.models import random_tensor
from tests.support.run_op import run_op

ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 128, 255, 256, 257)
GROUPS = (1, 2, 7, 8, 9, 11, 13, 18, 24, 64)
FORMS = all_forms()


def run(weights: Sequence[QuantTensor], data: Input, form: Form) -> Any:
    y = empty_y((len(data.x), sum(w.n for w in weights)))
    with form.chosen():
        run_op(
            "matmul", form.threads, form.isa, w=list(weights), n_w=len(weights), M=len(y), y=y, **data.arrays
        )
    return y


def check(weights: Sequence[QuantTensor], data: Input, what: str = "") -> None:
    want = expected(weights, data)
    for form in FORMS:
        assert_bits_equal(run(weights, data, form), want, f"{what} {form}", any_nan=True)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("wtype", list(WType))
def test_every_form_shape_and_row_count(wtype: WType, groups: int) -> None:
    """Each row's bits are those of the row alone, so one restatement of 257 rows serves all row counts."""
    rng = np.random.default_rng(groups)
    w = random_tensor(rng, wtype, 21, 32 * groups)
    data = random_input(rng, max(ROWS), 32 * groups)
    want = product(w, data)
    for form in FORMS:
        for M in ROWS:
            y = run([w], data.take(slice(M)), form)
            assert_bits_equal(y, want[:M], f"M={M} {form}")


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 67, 131, 257])
@pytest.mark.parametrize("wtype", list(WType))
def test_output_rows(wtype: WType, n: int) -> None:
    rng = np.random.default_rng(n)
    w = random_tensor(rng, wtype, n, 352)
    data = random_input(rng, 13, 352)
    want = product(w, data)
    for form in FORMS:
        for M in (1, 2, 4, 5, 6, 13):
            assert_bits_equal(run([w], data.take(slice(M)), form), want[:M], f"M={M} {form}")


@pytest.mark.parametrize("wtype", list(WType))
@pytest.mark.parametrize("M", [2, 3, 9, 17, 128, 257])
def test_row_of_interest_first_middle_last(wtype: WType, M: int) -> None:
    """The same row among any others gives the bits of that row alone."""
    rng = np.random.default_rng(M)
    w = random_tensor(rng, wtype, 33, 576)
    data = random_input(rng, M, 576)
    interest = random_input(rng, 1, 576)
    for form in FORMS:
        alone = run([w], interest, form)
        for place in (0, M // 2, M - 1):
            mixed = Input(*(a.copy() for a in data.arrays.values()))
            for ours, theirs in zip(mixed.arrays.values(), interest.arrays.values(), strict=True):
                ours[place] = theirs[0]
            assert_bits_equal(run([w], mixed, form)[place], alone[0], f"row {place} of {M}, {form}")


@pytest.mark.parametrize("k", [1, 3, 7, 8, 9, 31, 32, 33, 63, 64, 100, 1023, 2048])
def test_bf16_of_any_length(k: int) -> None:
    rng = np.random.default_rng(k)
    for M in (1, 2, 3, 4, 5, 9):
        check([random_tensor(rng, WType.bf16, 19, k)], random_input(rng, M, k), f"M={M}")


@pytest.mark.parametrize(
    "wtypes",
    [
        (WType.q4local, WType.q8local, WType.bf16),
        (WType.bf16, WType.q4local, WType.q4local),
        (WType.q8local, WType.bf16),
        (WType.q4local, WType.q4local, WType.q4local),
    ],
)
@pytest.mark.parametrize("M", [1, 3, 6, 40])
def test_several_matrices_over_one_input(wtypes: Sequence[WType], M: int) -> None:
    rng = np.random.default_rng(M)
    weights = [random_tensor(rng, t, n, 288) for t, n in zip(wtypes, (65, 7, 130), strict=False)]
    check(weights, random_input(rng, M, 288), f"M={M}")


def test_inputs_that_no_matrix_reads_may_be_null() -> None:
    rng = np.random.default_rng(0)
    data = random_input(rng, 6, 288)
    unread: dict[WType, dict[str, None]] = {
        WType.q4local: {"x": None},
        WType.q8local: {"x": None},
        WType.bf16: {"xq": None, "xd": None, "gsum": None},
    }
    for wtype, missing in unread.items():
        w = random_tensor(rng, wtype, 9, 288)
        for form in FORMS:
            y = empty_y((6, 9))
            with form.chosen():
                run_op("matmul", form.threads, form.isa, w=[w], n_w=1, M=6, y=y, **{**data.arrays, **missing})
            assert_bits_equal(y, product(w, data), str(form))


@pytest.mark.parametrize("M", [1, 4, 5, 12])
@pytest.mark.parametrize("code", [0, 8, 15])
@pytest.mark.parametrize("q", [-127, 0, 127])
def test_extreme_q4_codes(M: int, code: int, q: int) -> None:
    """Sums of bytes come nearest to the limits of 16 bits where every code is extreme."""
    w = random_tensor(np.random.default_rng(1), WType.q4local, 17, 32 * 19)
    w = replace(w, codes=np.full_like(w.codes, code << 4 | code))
    check([w], _constant_input(M, w.k, q))


@pytest.mark.parametrize("M", [1, 4, 5, 12])
@pytest.mark.parametrize("code", [-128, -127, 127])
@pytest.mark.parametrize("q", [-127, 0, 127])
def test_extreme_q8_codes(M: int, code: int, q: int) -> None:
    """-128 occurs in imported Q8_0 files."""
    w = random_tensor(np.random.default_rng(1), WType.q8local, 17, 32 * 19)
    w = replace(w, codes=np.full_like(w.codes, code))
    check([w], _constant_input(M, w.k, q))


def _constant_input(M: int, k: int, q: int) -> Input:
    data = random_input(np.random.default_rng(2), M, k)
    xq = np.full_like(data.xq, q)
    return replace(data, xq=xq, gsum=sums(xq))


# f16: subnormals, zeros of both signs, the largest, infinities, quiet and signalling NaN.
SCALES = np.array(
    [0x0001, 0x83FF, 0x0400, 0x0000, 0x8000, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0x7D01, 0xFE55], np.uint16
)
SCALES_D = np.array([0.0, 2.0**-149, 2.0**-126, 3e38, np.inf, np.nan], np.float32)


@pytest.mark.parametrize("groups", [1, 5, 8, 13, 24])
@pytest.mark.parametrize("wtype", [WType.q4local, WType.q8local])
def test_special_scales(wtype: WType, groups: int) -> None:
    """One special scale at a time, first, middle and last, and all of them at random."""
    rng = np.random.default_rng(groups)
    n = 3 * len(SCALES) + 8
    w = random_tensor(rng, wtype, n, 32 * groups)
    assert w.scale is not None
    scale = w.scale.copy()
    for i, special in enumerate(SCALES):
        for j, place in enumerate((0, groups // 2, groups - 1)):
            scale[3 * i + j, place] = special
    scale[-8:] = rng.choice(SCALES, (8, groups))
    w = replace(w, scale=scale)
    for M in (1, 3, 10):
        data = random_input(rng, M, 32 * groups)
        check([w], data, f"M={M}")
        at = rng.random(data.xd.shape) < 0.3
        data.xd[at] = rng.choice(SCALES_D, int(at.sum()))
        check([w], data, f"special d, M={M}")


@pytest.mark.parametrize("k", [4, 12, 32, 77])
def test_special_bf16(k: int) -> None:
    rng = np.random.default_rng(k)
    w = random_tensor(rng, WType.bf16, 40, k)
    codes = w.codes.copy()
    special = np.array([0x0001, 0x8001, 0x007F, 0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81], np.uint16)
    at = rng.random(codes.shape) < 0.1
    codes[at] = rng.choice(special, int(at.sum()))
    codes[:6] = rng.choice(special[:5], (6, k))
    x_special = np.array([0x00000001, 0x807FFFFF, 0x80000000, 0x7F7FFFFF, 0xFF800000], np.uint32).view(
        np.float32
    )
    for M in (1, 3, 10):
        data = random_input(rng, M, k)
        at = rng.random(data.x.shape) < 0.1
        data.x[at] = rng.choice(x_special, int(at.sum()))
        check([replace(w, codes=codes)], data, f"M={M}")


@pytest.mark.parametrize("M", [1, 3, 10])
def test_lanes_without_an_element_stay_untouched(M: int) -> None:
    """Products that underflow to -0 leave -0 in a lane; adding a product of padding would make it +0."""
    k = 44
    codes = np.full((9, k), 0x8001, np.uint16)  # the negative bf16 nearest to zero
    w = QuantTensor(WType.bf16, codes, None, None, 9, k)
    data = replace(random_input(np.random.default_rng(0), M, k), x=np.full((M, k), 2.0**-149, np.float32))
    assert (product(w, data).view(np.uint32) == 0x80000000).all()
    check([w], data)
    short = replace(w, codes=codes[:, :28].copy(), k=28)  # lanes 28..31 have no element and stay +0
    few = replace(data, x=data.x[:, :28].copy())
    assert (product(short, few).view(np.uint32) == 0).all()
    check([short], few)


@pytest.mark.parametrize("offset", [1, 2, 7])
@pytest.mark.parametrize("wtype", list(WType))
def test_weights_at_any_address(wtype: WType, offset: int) -> None:
    """A mapped file promises no alignment."""
    rng = np.random.default_rng(offset)
    w = random_tensor(rng, wtype, 37, 352)

    def moved(array: Any) -> Any:
        raw = np.empty(array.nbytes + 64, np.uint8)
        start = -raw.ctypes.data % 64 + offset
        raw[start : start + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
        return raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)

    shifted = replace(w, codes=moved(w.codes), scale=None if w.scale is None else moved(w.scale))
    for M in (1, 3, 11):
        data = random_input(rng, M, 352)
        want = product(w, data)
        for form in FORMS:
            assert_bits_equal(run([shifted], data, form), want, f"M={M} {form}")


def test_large_products_agree_with_scalar() -> None:
    """Sizes of real models, where tasks are cut differently: every form against the scalar one."""
    rng = np.random.default_rng(3)
    for wtype, n, k, M in (
        (WType.q4local, 1536, 1024, 1),
        (WType.q8local, 1000, 2560, 2),
        (WType.bf16, 128, 2048, 9),
    ):
        w = random_tensor(rng, wtype, n, k)
        data = random_input(rng, M, k)
        want = run([w], data, Form("scalar", 1, False))
        for form in FORMS:
            assert_bits_equal(run([w], data, form), want, f"{wtype.name} {form}")


@pytest.mark.parametrize("wtype", list(WType))
def test_nothing_outside_the_arrays_is_touched(wtype: WType) -> None:
    """Inputs end before a page that may not be read, outputs lie among known bytes; in its own process."""
    script = Path(__file__).with_name("guarded_matmul.py")
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.guarded_matmul", wtype.name],
        cwd=script.parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"status {done.returncode} (-11: a read outside)\n{done.stdout}{done.stderr}"


def test_the_restatement_notices_wrong_rules() -> None:
    """The comparison must be able to fail: another order of groups, a wrong sum of codes."""
    rng = np.random.default_rng(5)
    w = random_tensor(rng, WType.q4local, 64, 32 * 13)
    data = random_input(rng, 4, w.k)
    want = product(w, data)
    order = np.roll(np.arange(13), 1)
    assert w.scale is not None
    turned = replace(w, codes=w.codes[:, order].copy(), scale=w.scale[:, order].copy())
    xq = data.xq.reshape(4, 13, 32)[:, order].reshape(4, -1)
    turned_data = replace(data, xq=xq, xd=data.xd[:, order].copy(), gsum=data.gsum[:, order].copy())
    with pytest.raises(AssertionError, match="differ"):
        assert_bits_equal(product(turned, turned_data), want)
    off_by_one = replace(data, gsum=data.gsum + 1)
    for form in FORMS:
        with pytest.raises(AssertionError, match="differ"):
            assert_bits_equal(run([w], off_by_one, form), want)
