"""Each op of the reference against float64, with tolerances counted from its roundings.

Inputs are float32 and, where an op reads codes, the codes the op itself reads: only roundings remain. An op
with n roundings on the way to a result is off by about n * 2^-24 times the sum of the magnitudes it adds.
Each check runs again with a wrong result, and most against an oracle with a planted mistake: they must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kestrel.ops import OPS, WType
from tests.oracle import reference as ref
from tests.oracle.native import a8, run_op
from tests.oracle.reference import F64, U
from tests.support.models import random_tensor

F32 = np.float32


def assert_close(actual: npt.NDArray[Any], expected: F64, bound: npt.ArrayLike) -> None:
    """|actual - expected| <= bound everywhere, and not everything is zero."""
    assert actual.shape == expected.shape
    assert np.isfinite(expected).all()
    assert np.abs(expected).max() > 0
    error = np.abs(actual.astype(np.float64) - expected)
    worst = int(np.argmax(error - bound))
    limit = float(np.broadcast_to(bound, error.shape).flat[worst])
    assert (error <= bound).all(), f"element {worst}: off by {error.flat[worst]:.3g}, bound {limit:.3g}"


def normal(rng: np.random.Generator, *shape: int) -> npt.NDArray[np.float32]:
    return rng.standard_normal(shape).astype(F32)


# -- the checks ------------------------------------------------------------------------------------


def check_embed() -> None:
    rng = np.random.default_rng(0)
    for wtype in WType:
        table = random_tensor(rng, wtype, 50, 352)
        ids = np.array([[0], [49], [17], [17]], np.int32)
        out = run_op("embed", w=table, ids=ids, x=np.zeros((4, 352), F32), M=4)
        expected = ref.dequantise(table.codes, table.scale)[ids[:, 0]]
        assert_close(out["x"], expected, U * np.abs(expected))


def check_rms_norm() -> None:
    rng = np.random.default_rng(1)
    for d, eps in ((96, 1e-6), (352, 1e-5), (419, 0.3)):
        x, w = normal(rng, 5, d) * F32(3), normal(rng, d)
        x[3] *= F32(1e-3)  # a row in which eps matters
        out = run_op("rms_norm", x=x, w=w, out=np.zeros_like(x), M=5, d=d, eps=eps)
        expected = ref.rms_norm(x.astype(np.float64), w.astype(np.float64), float(F32(eps)))
        roundings = (d / 8 + d % 8 + 6) / 2 + 4
        assert_close(out["out"], expected, roundings * U * np.abs(expected))


def check_qk_norm() -> None:
    rng = np.random.default_rng(2)
    for heads, hd in ((5, 32), (3, 80), (7, 96), (2, 256)):
        ld = heads * hd + 48
        x, w = normal(rng, 4, ld), normal(rng, hd)
        out = run_op("qk_norm", x=x, w=w, M=4, heads=heads, hd=hd, ld=ld, eps=1e-6)["x"]
        head_rows = x[:, : heads * hd].reshape(4, heads, hd).astype(np.float64)
        expected = ref.rms_norm(head_rows, w.astype(np.float64), float(F32(1e-6)))
        bound = ((hd + 3) / 2 + 4) * U * np.abs(expected)
        assert_close(out[:, : heads * hd].reshape(4, heads, hd), expected, bound)
        np.testing.assert_array_equal(out[:, heads * hd :], x[:, heads * hd :])


def check_quantize_a8() -> None:
    rng = np.random.default_rng(3)
    x = normal(rng, 6, 352) * np.exp(normal(rng, 6, 1) * 5)
    x[1, 32:64] = 0
    form = a8(x)
    groups = form["xq"].reshape(6, 11, 32).astype(np.int64)
    np.testing.assert_array_equal(form["gsum"], groups.sum(axis=-1))
    d = form["xd"].astype(np.float64)[..., None]
    amax = np.abs(x.reshape(6, 11, 32)).max(axis=-1, keepdims=True).astype(np.float64)
    assert_close(d, amax / 127, U * amax / 127)
    # The nearest code is half a step away at most; 127 steps carry the rounding of d and of the product.
    assert_close(groups * d, x.reshape(6, 11, 32).astype(np.float64), d * (0.5 + 127 * 4 * U))
    assert np.abs(groups).max(axis=-1)[d[..., 0] > 0].min() == 127


def check_matmul() -> None:
    rng = np.random.default_rng(4)
    for K in (64, 352, 416, 576):
        x = normal(rng, 3, K)
        form = a8(x)
        for wtype in (WType.q4local, WType.q8local, WType.bf16):
            parts = [random_tensor(rng, wtype, n, K, std=K**-0.5) for n in (13, 8, 5)]
            out = run_op("matmul", w=parts, x=x, **form, y=np.zeros((3, 26), F32), M=3)["y"]
            w = np.concatenate([ref.dequantise(part.codes, part.scale) for part in parts])
            expected, bound = _product(wtype, w, x, form)
            assert_close(out, expected, bound)


def _product(
    wtype: WType, w: F64, x: npt.NDArray[np.float32], form: dict[str, npt.NDArray[Any]]
) -> tuple[F64, F64]:
    """Rows of x times w [N, K], and the bound: K/8 or K/256 fmas a lane, the tree, the scale."""
    K = x.shape[1]
    if wtype == WType.bf16:
        read = x.astype(np.float64)
        return read @ w.T, (K / 8 + 4) * U * (np.abs(read) @ np.abs(w).T)
    codes = form["xq"].reshape(*form["xd"].shape, 32).astype(np.float64)
    read = (codes * form["xd"].astype(np.float64)[..., None]).reshape(x.shape)
    groups = np.einsum("mgj,ngj->mng", read.reshape(*form["xd"].shape, 32), w.reshape(len(w), -1, 32))
    return read @ w.T, (K / 256 + 6) * U * np.abs(groups).sum(axis=-1)


def check_moe_matmul() -> None:
    rng = np.random.default_rng(5)
    M, T, E, K = 3, 2, 5, 416
    ids = np.array([[4, 0], [2, 1], [0, 4]], np.int32)
    for wtype in (WType.q4local, WType.q8local, WType.bf16):
        parts = [random_tensor(rng, wtype, 9, K, std=K**-0.5, experts=E) for _ in range(2)]
        for per_slot in (0, 1):
            x = normal(rng, M * T if per_slot else M, K)
            form = a8(x)
            y = np.zeros((M, T, 18), F32)
            out = run_op("moe_matmul", w=parts, ids=ids, x=x, **form, y=y, M=M, T=T, E=E, per_slot=per_slot)[
                "y"
            ]
            for m in range(M):
                for t in range(T):
                    row = m * T + t if per_slot else m
                    chosen = [ref.dequantise(p.codes, p.scale)[ids[m, t]] for p in parts]
                    one = {key: value[row : row + 1] for key, value in form.items()}
                    expected, bound = _product(wtype, np.concatenate(chosen), x[row : row + 1], one)
                    assert_close(out[m, t][None], expected, bound)


def check_rope() -> None:
    rng = np.random.default_rng(6)
    for hd, factor in ((32, 1.0), (80, 1.0), (128, 1.3), (256, 1.0)):
        heads, ld = 3, 3 * hd + 32
        x = normal(rng, 6, ld)
        pos = np.array([0, 1, 2, 63, 1000, 40000], np.int32)[:, None]
        freq = ref.rope_frequencies(hd, 1e4)[0].astype(F32)
        out = run_op("rope", x=x, pos=pos, inv_freq=freq, M=6, heads=heads, hd=hd, ld=ld, factor=factor)["x"]
        head_rows = x[:, : heads * hd].reshape(6, heads, hd).astype(np.float64)
        f = float(F32(factor))
        positions = pos[:, 0].astype(np.float64)
        expected = ref.rope(head_rows, positions, freq.astype(np.float64), f)
        # The rounding of the angle turns both elements of a pair; five roundings follow.
        angle = np.tile(positions[:, None] * freq.astype(np.float64), 2)[:, None, :]
        length = np.hypot(head_rows, np.roll(head_rows, hd // 2, axis=-1))
        bound = f * (angle + 8) * U * length
        assert_close(out[:, : heads * hd].reshape(6, heads, hd), expected, bound)
        np.testing.assert_array_equal(out[:, heads * hd :], x[:, heads * hd :])


def check_kv_append() -> None:
    rng = np.random.default_rng(7)
    M, nkv, hd, S = 4, 3, 80, 12
    ld = nkv * hd
    k, v = normal(rng, M, ld) * F32(20), normal(rng, M, ld)
    out = run_op(
        "kv_append",
        k=k,
        v=v,
        kq=np.full((S, nkv, hd), 99, np.int8),
        ks=np.full((S, nkv), 7, F32),
        vq=np.full((S, nkv, hd), 99, np.int8),
        vs=np.full((S, nkv), 7, F32),
        pos=np.array([[3], [0], [4], [1]], np.int32),
        base=np.array([[0], [6], [0], [6]], np.int32),
        M=M,
        nkv=nkv,
        hd=hd,
        ld=ld,
    )
    slots = [3, 6, 4, 7]
    for codes, scales, rows in ((out["kq"], out["ks"], k), (out["vq"], out["vs"], v)):
        expected = rows.reshape(M, nkv, hd).astype(np.float64)
        d = scales[slots].astype(np.float64)[..., None]
        assert_close(codes[slots] * d, expected, d * (0.5 + 127 * 4 * U))
        others = [s for s in range(S) if s not in slots]
        assert (codes[others] == 99).all()
        assert (scales[others] == 7).all()


def check_attention() -> None:
    rng = np.random.default_rng(8)
    for nh, nkv, hd, last in ((5, 1, 64, 40), (6, 3, 32, 300), (4, 4, 96, 600), (16, 1, 256, 20)):
        S, M = last + 9, 4
        positions = [0, 1, last - 1, last]
        q = normal(rng, M, nh * hd) * F32(1.5)
        kq, vq = (rng.integers(-127, 128, (S, nkv, hd)).astype(np.int8) for _ in range(2))
        ks = rng.uniform(0.5, 1.5, (S, nkv)).astype(F32) / F32(127)
        vs = rng.uniform(0.5, 1.5, (S, nkv)).astype(F32) / F32(127)
        base = 5  # slots below and above belong to others: they hold what would be seen at once
        for scale in (ks, vs):
            scale[:base] = scale[base + last + 1 :] = 100
        out = run_op(
            "attention",
            q=q,
            kq=kq,
            ks=ks,
            vq=vq,
            vs=vs,
            pos=np.array(positions, np.int32)[:, None],
            base=np.full((M, 1), base, np.int32),
            out=np.zeros((M, nh * hd), F32),
            M=M,
            nh=nh,
            nkv=nkv,
            hd=hd,
            ld=nh * hd,
            qscale=1 / np.sqrt(hd),
        )["out"].reshape(M, nh, hd)
        codes, scale = ref.quantise_rows(q.reshape(M, nh, hd))
        read = codes * scale[..., None]
        k = kq[base:].astype(np.float64) * ks[base:].astype(np.float64)[..., None]
        v = vq[base:].astype(np.float64) * vs[base:].astype(np.float64)[..., None]
        for m, position in enumerate(positions):
            seen = slice(0, position + 1)
            expected = ref.attention(read[m : m + 1], k[seen], v[seen])
            magnitude = ref.attention(read[m : m + 1], k[seen], np.abs(v[seen]))
            score = np.abs(read[m]).sum(axis=-1).max() * np.abs(k[seen]).max() / np.sqrt(hd)
            # Exponentials of rounded scores, a dozen roundings around a chunk's sums, the merge of three.
            roundings = (20 * (1 + score / 4) + 60) * U * magnitude
            codes = _weight_codes(read[m], k[seen], v[seen], vs[base:][seen].astype(np.float64))
            assert_close(out[m : m + 1], expected, roundings + codes)


def _weight_codes(q: F64, k: F64, v: F64, vs: F64) -> F64:
    """What the integer codes of the weights can make of one row, f64[nh, hd].

    The largest weight of a chunk has a code of at least 2^14, and the others are rounded to the same unit:
    each is off by half a unit, at most 2^-15 of the largest. A code that is clamped is off by less than a
    unit, but then the largest is at least 32767.5 of them, which comes to 2^-15 * (1 + 2^-15).
    """
    bound = np.zeros(q.shape)
    for head, row in enumerate(q):
        kv = head // (len(q) // k.shape[1])
        scores = k[:, kv] @ row / np.sqrt(len(row))
        p = np.exp(scores - scores.max())
        weights = p / p.sum() * vs[:, kv]
        codes = np.abs(v[:, kv]) / vs[:, kv, None]
        for begin in range(0, len(k), 256):
            chunk = slice(begin, begin + 256)
            bound[head] += weights[chunk].max() * codes[chunk].sum(axis=0)
    return bound * 2.0**-15 * (1 + 2.0**-15)


def check_router_topk() -> None:
    rng = np.random.default_rng(9)
    for E, T in ((128, 8), (7, 7), (16, 1), (60, 4)):
        logits = normal(rng, 9, E) * F32(2)
        logits[1, E // 2] = logits[1, 1] = logits[1].max()  # exact ties
        logits[2] = 0
        logits[2, ::2] = -0.0
        for norm in (0, 1):
            ids, weights = np.zeros((9, T), np.int32), np.zeros((9, T), F32)
            out = run_op(
                "router_topk",
                logits=logits,
                ids=ids,
                weights=weights,
                M=9,
                E=E,
                T=T,
                norm_topk_prob=norm,
            )
            expected_ids, expected = ref.route(logits.astype(np.float64), T, bool(norm))
            np.testing.assert_array_equal(out["ids"], expected_ids)
            spread = np.ptp(logits)
            assert_close(out["weights"], expected, (spread + T + E / 8 + 8) * U * expected + 1e-300)


def check_swiglu() -> None:
    rng = np.random.default_rng(10)
    gu = normal(rng, 5, 2, 97) * F32(6)
    h = run_op("swiglu", gu=gu, h=np.zeros((5, 97), F32), R=5, F=97)["h"]
    expected = ref.swiglu(gu[:, 0].astype(np.float64), gu[:, 1].astype(np.float64))
    assert_close(h, expected, 6 * U * np.abs(expected))


def check_moe_combine() -> None:
    rng = np.random.default_rng(11)
    y, weights = normal(rng, 4, 6, 96), rng.uniform(0, 1, (4, 6)).astype(F32)
    out = run_op("moe_combine", y=y, weights=weights, out=np.zeros((4, 96), F32), M=4, T=6, H=96)["out"]
    terms = weights.astype(np.float64)[..., None] * y
    assert_close(out, terms.sum(axis=1), 6 * U * np.abs(terms).sum(axis=1))


def check_add() -> None:
    rng = np.random.default_rng(12)
    x, y = normal(rng, 1000), normal(rng, 1000)
    expected = x.astype(np.float64) + y
    assert_close(
        run_op("add", x=x, y=y, out=np.zeros(1000, F32), n=1000)["out"], expected, U * np.abs(expected)
    )


def check_argmax() -> None:
    rng = np.random.default_rng(13)
    logits = normal(rng, 6, 331)
    logits[1, [200, 40, 330]] = 9
    logits[2, 0] = logits[3, 330] = 9
    logits[4] = -1
    ids = run_op("argmax", logits=logits, ids=np.zeros((6, 1), np.int32), M=6, V=331)["ids"]
    # numpy's argmax is the first of the largest.
    np.testing.assert_array_equal(ids[:, 0], np.argmax(logits, axis=1))


def check_l2_hash() -> None:
    rng = np.random.default_rng(14)
    for nbytes in (1, 3, 64, 1000):
        x = rng.integers(0, 256, (5, nbytes + 7), dtype=np.uint8)
        out = run_op(
            "l2_hash",
            x=x,
            out=np.zeros(5, np.uint64),
            stride=nbytes + 7,
            M=5,
            bytes=nbytes,
            is_f32=0,
        )["out"]
        assert [int(h) for h in out] == [ref.fnv1a64(row[:nbytes].tobytes()) for row in x]
    x = normal(rng, 2, 9)
    x.view(np.uint32)[0, 4] = 0xFFC00001  # a NaN of another payload
    canonical = x.copy()
    canonical.view(np.uint32)[0, 4] = 0x7FC00000
    out = run_op("l2_hash", x=x, out=np.zeros(2, np.uint64), stride=36, M=2, bytes=36, is_f32=1)["out"]
    assert [int(h) for h in out] == [ref.fnv1a64(row.tobytes()) for row in canonical]


CHECKS: dict[str, Callable[[], None]] = {
    name: globals()[f"check_{name}"]
    for name in OPS  # KeyError here: an op without a check
}


@pytest.mark.parametrize("op", CHECKS)
def test_op_means_what_it_should(op: str) -> None:
    CHECKS[op]()


OUTPUTS = {
    "embed": "x",
    "rms_norm": "out",
    "quantize_a8": "q",
    "matmul": "y",
    "qk_norm": "x",
    "rope": "x",
    "kv_append": "ks",
    "attention": "out",
    "add": "out",
    "swiglu": "h",
    "router_topk": "weights",
    "moe_matmul": "y",
    "moe_combine": "out",
    "argmax": "ids",
    "l2_hash": "out",
}


@pytest.mark.parametrize("op", CHECKS)
def test_check_notices_one_wrong_element(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = run_op

    def wrong(name: str, **values: Any) -> dict[str, npt.NDArray[Any]]:
        result = right(name, **values)
        if name == op:
            array = result[OUTPUTS[op]].reshape(-1)
            at = np.argmax(np.abs(array)) if array.dtype == F32 else 0
            array[at] = array[at] * F32(1 + 1e-4) if array.dtype == F32 else array[at] + 1
        return result

    monkeypatch.setattr("tests.oracle.test_ops.run_op", wrong)
    monkeypatch.setattr("tests.oracle.native.run_op", wrong)
    with pytest.raises(AssertionError):
        CHECKS[op]()


# -- planted mistakes ------------------------------------------------------------------------------


def _interleaved_rope(x: F64, positions: F64, frequencies: F64, factor: float = 1.0) -> F64:
    turn = factor * np.exp(1j * positions[:, None] * frequencies[None, :])[:, None, :]
    rotated = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
    return np.stack([rotated.real, rotated.imag], axis=-1).reshape(x.shape)


def _adjacent_nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    pairs = np.stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 32).astype(np.int64) - 8


def _unscaled_attention(q: F64, k: F64, v: F64) -> F64:
    return _attention(q * np.sqrt(q.shape[-1]), k, v)


def _sees_all_but_itself(q: F64, k: F64, v: F64) -> F64:
    return _attention(q, k[: max(1, len(k) - 1)], v[: max(1, len(k) - 1)])


def _always_normalised(logits: F64, top_k: int, norm_topk_prob: bool) -> Any:
    return _route(logits, top_k, True)


def _last_of_equals(logits: F64, top_k: int, norm_topk_prob: bool) -> Any:
    ids, weights = _route(logits[:, ::-1], top_k, norm_topk_prob)
    return logits.shape[1] - 1 - ids, weights


def _fnv1(data: bytes) -> int:
    h = 1469598103934665603
    for byte in data:
        h = ((h * 1099511628211) & 0xFFFF_FFFF_FFFF_FFFF) ^ byte
    return h


_attention, _route, _rms_norm = ref.attention, ref.route, ref.rms_norm

MISTAKES: dict[str, tuple[str, str, Any]] = {
    "interleaved RoPE pairs": ("rope", "rope", _interleaved_rope),
    "RoPE turning backwards": ("rope", "rope", lambda x, p, f, a=1.0: ref_rope(x, -p, f, a)),
    "KV head by remainder": ("attention", "kv_head_of", lambda head, heads, kv_heads: head % kv_heads),
    "scores not divided by sqrt(hd)": ("attention", "attention", _unscaled_attention),
    "a token that does not see itself": ("attention", "attention", _sees_all_but_itself),
    "nibbles side by side": ("matmul", "q4local_codes", _adjacent_nibbles),
    "nibbles side by side in experts": ("moe_matmul", "q4local_codes", _adjacent_nibbles),
    "no offset of 8": (
        "embed",
        "q4local_codes",
        lambda p: np.concatenate([p & 15, p >> 4], -1).astype(np.int64),
    ),
    "norm_topk_prob ignored": ("router_topk", "route", _always_normalised),
    "ties to the last expert": ("router_topk", "route", _last_of_equals),
    "norm without eps": ("rms_norm", "rms_norm", lambda x, w, eps: _rms_norm(x, w, 0.0)),
    "norm weight plus one": ("qk_norm", "rms_norm", lambda x, w, eps: _rms_norm(x, 1 + w, eps)),
    "gate and up swapped": ("swiglu", "swiglu", lambda gate, up: ref.silu(up) * gate),
    "GELU for SiLU": ("swiglu", "silu", lambda x: x / (1 + np.exp(-1.702 * x))),
    "FNV-1 for FNV-1a": ("l2_hash", "fnv1a64", _fnv1),
}
ref_rope = ref.rope


@pytest.mark.parametrize("mistake", MISTAKES)
def test_oracle_notices(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, name, wrong = MISTAKES[mistake]
    monkeypatch.setattr(ref, name, wrong)
    with pytest.raises(AssertionError):
        CHECKS[op]()
