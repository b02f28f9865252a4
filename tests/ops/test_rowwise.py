"""embed, norms, a8, RoPE, KV rows, add, SwiGLU, expert combination: every form against the contract."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kestrel.ops import WType
from kestrel.weights import QuantTensor
from tests.ops import reference
from tests.ops.forms import ROWS, SPECIAL, any_floats, check_forms, normal, rng, sprinkle
from tests.support.bits import assert_bits_equal
from tests.support.run_op import run_op


def make_weight(wtype: WType, n: int, k: int, seed: int = 0) -> QuantTensor:
    r, groups = rng(seed), k // 32
    if wtype == WType.bf16:
        codes = r.integers(0, 2**16, (n, k), np.uint16)
        codes[0, :4] = [0x0001, 0x8001, 0x8000, 0x7F80]
        return QuantTensor(wtype, codes, None, None, n, k)
    scale = r.integers(0, 2**16, (n, groups), np.uint16)
    shape, dtype = ((n, groups, 16), np.uint8) if wtype == WType.q4local else ((n, groups, 32), np.int8)
    codes = r.integers(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, shape, dtype)
    return QuantTensor(wtype, codes, scale, None, n, k)


@pytest.mark.parametrize("wtype", list(WType))
@pytest.mark.parametrize("k", [32, 352, 576])
@pytest.mark.parametrize("M", [1, 40])
def test_embed(wtype: WType, k: int, M: int) -> None:
    """Random bits everywhere: scales of every magnitude, subnormal halves, infinities and NaNs included."""
    w = make_weight(wtype, 50, k)
    ids = rng(2).integers(0, 50, M).astype(np.int32)
    ids[0] = 0
    with np.errstate(invalid="ignore"):
        expected = reference.embed(wtype, w.codes, w.scale, ids)
    check_forms("embed", {"x": expected}, w=w, ids=ids, M=M)


@pytest.mark.parametrize("d", [1, 7, 8, 31, 64, 255, 257, 360, 576, 1001, 2048, 2560, 5120])
@pytest.mark.parametrize("M", [1, 3, 70])
def test_rms_norm(d: int, M: int) -> None:
    x, w = normal((M, d)), normal(d, 1)
    check_forms("rms_norm", {"out": reference.rms_norm(x, w, 1e-6)}, x=x, w=w, M=M, d=d, eps=1e-6)


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("scale", [1e-42, 1e-20, 1e18])
def test_rms_norm_extremes(eps: float, scale: float) -> None:
    x, w = normal((9, 72), scale=scale), sprinkle(normal(72, 1))
    x[1] = 0
    x[2] = sprinkle(x[2], share=0.5)
    x[3] = SPECIAL[[2, 3, 4, 5] * 18]
    with np.errstate(all="ignore"):
        expected = reference.rms_norm(x, w, eps)
    check_forms("rms_norm", {"out": expected}, x=x, w=w, M=9, d=72, eps=eps)


@pytest.mark.parametrize("hd", [32, 48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("M", "heads"), [(1, 1), (1, 9), (5, 7), (40, 14)])
def test_qk_norm(hd: int, M: int, heads: int) -> None:
    """The heads lie inside wider rows, whose other elements stay as they are."""
    ld = heads * hd + 24
    x, w = normal((M, ld)), normal(hd, 1)
    expected = x.copy()
    expected[:, : heads * hd] = reference.qk_norm(x[:, : heads * hd].reshape(M, heads, hd), w, 1e-6).reshape(
        M, -1
    )
    check_forms("qk_norm", {"x": expected}, x=x, w=w, M=M, heads=heads, hd=hd, ld=ld, eps=1e-6)


@pytest.mark.parametrize("K", [32, 11 * 32, 13 * 32, 18 * 32, 2048])
@pytest.mark.parametrize("M", [1, 2, 33])
@pytest.mark.parametrize("kind", ["normal", "special", "any bits"])
def test_quantize_a8(K: int, M: int, kind: str) -> None:
    x = {"normal": normal, "special": lambda s: sprinkle(normal(s), share=0.01), "any bits": any_floats}[
        kind
    ]((M, K))
    groups = x.reshape(M, -1, 32)
    if kind == "special":
        groups[0, 0] = -0.0
        groups[-1, -1] = np.float32(2.0**-100)  # the smallest amax that has codes
        groups[-1, -1, 1:] = np.nextafter(np.float32(2.0**-100), np.float32(0))
    with np.errstate(all="ignore"):
        q, d = reference.quantise(groups)
    gsum = q.astype(np.int32).sum(axis=-1, dtype=np.int32)
    check_forms("quantize_a8", {"q": q.reshape(M, K), "d": d, "gsum": gsum}, x=x, M=M, K=K)


def test_a8_codes_on_rounding_boundaries() -> None:
    """Half-way between two codes x * (127 / amax) and x / d round apart: the contract multiplies."""
    r = rng(11)
    M = 400
    amax = r.uniform(0.5, 2, (M, 1)).astype(np.float32)
    half = (r.integers(-126, 126, (M, 32)) + np.float32(0.5)).astype(np.float32)
    x = (half * (amax / np.float32(127))).astype(np.float32)
    x = np.nextafter(x, np.where(r.random(x.shape) < 0.5, np.float32(9), x))
    x[:, :1] = amax
    q, d = reference.quantise(x)
    divided = np.clip(np.rint(x / d[:, None]), -127, 127).astype(np.int8)
    assert (divided != q).any(), "these inputs do not tell the two rules apart"
    gsum = q.astype(np.int32).sum(axis=-1, dtype=np.int32)
    check_forms("quantize_a8", {"q": q, "d": d, "gsum": gsum}, x=x, M=M, K=32)


def test_a8_scale_is_canonical() -> None:
    """A NaN of any payload gives exactly 0x7fc00000, an infinity +inf, and all codes are 0."""
    x = np.zeros((4, 32), np.uint32)
    x[0, 3], x[1, 4], x[2, 5], x[2, 6], x[3, 31] = 0xFFFFFFFF, 0xFF800000, 0x7F800000, 0x7F800001, 0x0D800000
    d, q, gsum = np.empty(4, np.float32), np.empty((4, 32), np.int8), np.empty(4, np.int32)
    run_op("quantize_a8", x=x, q=q, d=d, gsum=gsum, M=4, K=32)
    assert d.view(np.uint32)[:3].tolist() == [0x7FC00000, 0x7F800000, 0x7FC00000]
    assert not q[:3].any()
    assert not gsum[:3].any()
    assert q[3].tolist() == [0] * 31 + [127]


@pytest.mark.parametrize("hd", [32, 64, 80, 128, 256])
@pytest.mark.parametrize(("M", "heads"), [(1, 3), (6, 11), (40, 9)])
@pytest.mark.parametrize("factor", [1.0, 1.2079441])
def test_rope(hd: int, M: int, heads: int, factor: float) -> None:
    ld = heads * hd + 16
    x = sprinkle(normal((M, ld)), share=0.01)
    pos = rng(3).integers(0, 40000, M).astype(np.int32)
    pos[0] = 0
    inv_freq = (10000.0 ** (-np.arange(0, hd, 2) / hd)).astype(np.float32)
    expected = x.copy()
    with np.errstate(all="ignore"):
        rotated = reference.rope(x[:, : heads * hd].reshape(M, heads, hd), pos, inv_freq, factor)
    expected[:, : heads * hd] = rotated.reshape(M, -1)
    values = {"pos": pos, "inv_freq": inv_freq, "M": M, "heads": heads, "hd": hd, "ld": ld, "factor": factor}
    check_forms("rope", {"x": expected}, x=x, **values)


@pytest.mark.parametrize(("nkv", "hd"), [(1, 32), (3, 64), (2, 80), (5, 128), (1, 256)])
@pytest.mark.parametrize("M", [1, 7, 60])
def test_kv_append(nkv: int, hd: int, M: int) -> None:
    """Rows go to slot base + pos, no other slot changes; zeros, outliers, subnormals, NaN and inf rows."""
    ld, slots = 2 * nkv * hd + 8, 80
    rows = normal((M, ld))
    rows[0, :hd] = 0
    rows[-1, nkv * hd] = 1e30
    if M > 3:
        rows[1, :hd] = SPECIAL[[2, 3, 4, 5]].repeat(hd // 4)
        rows[2, 5], rows[3, nkv * hd + 6] = np.nan, -np.inf
    slot = rng(4).permutation(slots)[:M].astype(np.int32)
    base = np.minimum(slot, 3).astype(np.int32)
    k, v = rows, np.ascontiguousarray(rows[:, nkv * hd :])
    v = np.concatenate([v, np.zeros((M, nkv * hd), np.float32)], axis=1)  # rows ld apart as well
    before = {"kq": rng(5).integers(-127, 128, (slots, nkv, hd), np.int8), "ks": normal((slots, nkv), 6)}
    before |= {"vq": before["kq"][::-1].copy(), "vs": before["ks"][::-1].copy()}
    expected: dict[str, Any] = {key: array.copy() for key, array in before.items()}
    for part, source in (("k", k), ("v", v)):
        codes, scale = reference.quantise(np.ascontiguousarray(source[:, : nkv * hd]).reshape(M, nkv, hd))
        expected[part + "q"][slot], expected[part + "s"][slot] = codes, scale
    values = {"k": k, "v": v, "pos": slot - base, "base": base, "M": M, "nkv": nkv, "hd": hd, "ld": ld}
    check_forms("kv_append", expected, **values, **before)


@pytest.mark.parametrize("n", [1, 5, 1024, 70001])
def test_add(n: int) -> None:
    x, y = sprinkle(normal(n)), sprinkle(normal(n, 7), 8)
    with np.errstate(all="ignore"):
        expected = x + y
    check_forms("add", {"out": expected}, x=x, y=y, n=n)
    for place in (x, y):  # in place
        before = place.copy()
        run_op("add", x=x, y=y, out=place, n=n)
        assert_bits_equal(place, expected, "add in place", any_nan=True)
        place[:] = before


@pytest.mark.parametrize(("R", "F"), [(1, 1), (1, 31), (3, 77), (9, 768), (64, 200)])
@pytest.mark.parametrize("kind", ["normal", "wide", "any bits"])
def test_swiglu(R: int, F: int, kind: str) -> None:
    if kind == "any bits":
        gu = any_floats((R, 2, F))
    else:
        gu = sprinkle(normal((R, 2, F), scale=60.0 if kind == "wide" else 2.0))
    with np.errstate(all="ignore"):
        expected = reference.swiglu(gu)
    check_forms("swiglu", {"h": expected}, gu=gu, R=R, F=F)


@pytest.mark.parametrize(("M", "T", "H"), [(1, 1, 5), (1, 8, 2048), (3, 4, 77), (70, 3, 384)])
@pytest.mark.parametrize("special", [False, True])
def test_moe_combine(M: int, T: int, H: int, special: bool) -> None:
    y, weights = normal((M, T, H)), np.abs(normal((M, T), 9))
    if special:
        y = sprinkle(y)
    with np.errstate(all="ignore"):
        expected = reference.moe_combine(y, weights)
    check_forms("moe_combine", {"out": expected}, y=y, weights=weights, M=M, T=T, H=H)


@pytest.mark.parametrize("M", ROWS)
def test_rows_equal_one_row(M: int) -> None:
    """Row m of M rows has the bits of that row alone, wherever it stands."""
    d = 18 * 32
    x, w = normal((M, d)), normal(d, 1)
    many, one = np.empty((M, d), np.float32), np.empty((1, d), np.float32)
    q, qd, gsum = np.empty((M, d), np.int8), np.empty((M, 18), np.float32), np.empty((M, 18), np.int32)
    q1, qd1, gsum1 = np.empty((1, d), np.int8), np.empty((1, 18), np.float32), np.empty((1, 18), np.int32)
    run_op("rms_norm", threads=2, x=x, w=w, out=many, M=M, d=d, eps=1e-6)
    run_op("quantize_a8", threads=2, x=many, q=q, d=qd, gsum=gsum, M=M, K=d)
    for m in {0, M // 2, M - 1}:
        run_op("rms_norm", x=x[m : m + 1], w=w, out=one, M=1, d=d, eps=1e-6)
        run_op("quantize_a8", x=one, q=q1, d=qd1, gsum=gsum1, M=1, K=d)
        for got, want in ((many, one), (q, q1), (qd, qd1), (gsum, gsum1)):
            assert_bits_equal(got[m : m + 1], want, f"row {m} of {M}")
