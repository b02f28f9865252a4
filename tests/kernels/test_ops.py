"""Every kernel through the shim against the CPU reference, bit for bit: awkward shapes and special values."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

pytest.importorskip("kestrel._simt", reason="the shim is built by `make native`")

from kestrel.launch import CHUNK, Tuning, attention_work_bytes
from kestrel.ops import WType
from tests.kernels.harness import Case, quantised, tensor, values


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


WTYPES = list(WType)


def f32(*shape: int) -> Any:
    """An output: bytes that nobody may take for a result."""
    return np.full(shape, -12345.0, np.float32)


# -- embed, norms, a8, elementwise -----------------------------------------------------------------


@pytest.mark.parametrize("wtype", WTYPES)
@pytest.mark.parametrize(("vocab", "k", "rows"), [(5, 32, 1), (40, 352, 7), (9, 1120, 3)])
def test_embed(rng: np.random.Generator, wtype: WType, vocab: int, k: int, rows: int) -> None:
    ids = rng.integers(0, vocab, rows).astype(np.int32)
    ids[-1] = vocab - 1
    Case("embed", {"ids": ids, "x": f32(rows, k)}, [tensor(rng, wtype, vocab, k)], M=rows).check()


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("d", [1, 7, 8, 31, 64, 416, 1001, 2048, 5120])
def test_rms_norm(rng: np.random.Generator, d: int, rows: int) -> None:
    arrays = {"x": values(rng, rows, d, special=0.02), "w": values(rng, d), "out": f32(rows, d)}
    Case("rms_norm", arrays, M=rows, d=d, eps=1e-6).check(seed=d)


def test_norms_of_flat_rows(rng: np.random.Generator) -> None:
    # Terms of one size in many rows: here a sum in another order shows.
    x = rng.standard_normal((150, 1024)).astype(np.float32)
    w = np.ones(1024, np.float32)
    Case("rms_norm", {"x": x, "w": w, "out": f32(150, 1024)}, M=150, d=1024, eps=1e-6).check()
    x = rng.standard_normal((10, 30 * 128)).astype(np.float32)
    numbers = {"M": 10, "heads": 30, "hd": 128, "ld": 30 * 128, "eps": 1e-6}
    Case("qk_norm", {"x": x, "w": w[:128].copy()}, **numbers).check()


def test_rms_norm_of_special_rows(rng: np.random.Generator) -> None:
    x = values(rng, 6, 96)
    x[0] = 0
    x[1] = 1e-45
    x[2, 5] = np.nan
    x[3, 95] = np.inf
    x[4] = 3e38  # the sum of squares overflows
    x[5] = -0.0
    for eps in (0.0, 1e-6):
        Case("rms_norm", {"x": x, "w": values(rng, 96), "out": f32(6, 96)}, M=6, d=96, eps=eps).check()


@pytest.mark.parametrize("hd", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (3, 5), (2, 40)])
def test_qk_norm(rng: np.random.Generator, hd: int, rows: int, heads: int) -> None:
    ld = heads * hd + 64
    arrays = {"x": values(rng, rows, ld, special=0.05), "w": values(rng, hd)}
    Case("qk_norm", arrays, M=rows, heads=heads, hd=hd, ld=ld, eps=1e-6).check(seed=hd)


@pytest.mark.parametrize(("rows", "k"), [(1, 32), (1, 352), (7, 96), (5, 2048), (33, 576)])
def test_quantize_a8(rng: np.random.Generator, rows: int, k: int) -> None:
    x = values(rng, rows, k, special=0.1)
    # Whole groups of one kind: zero, subnormal, just under and at the limit, halves that round to even, huge.
    groups = x.reshape(-1, 32)
    kinds = [0.0, -0.0, 1e-40, 7.8e-31, 2.0**-100, 3.4e38]
    for i, kind in enumerate(kinds[: len(groups)]):
        groups[i] = np.where(rng.random(32) < 0.5, np.float32(kind), np.float32(0.0))
    if len(groups) > 10:
        groups[8] = np.arange(32) - 15.5
        groups[8, 0] = 127
        groups[9] = rng.integers(-254, 255, 32) / 2
        groups[9, 3] = -127
    arrays = {
        "x": x,
        "q": np.full((rows, k), 99, np.int8),
        "d": f32(rows, k // 32),
        "gsum": np.full((rows, k // 32), 9999, np.int32),
    }
    Case("quantize_a8", arrays, M=rows, K=k).check()
    x[:] = values(rng, rows, k, non_finite=0.05)
    Case("quantize_a8", arrays, M=rows, K=k).check()


@pytest.mark.parametrize("n", [1, 255, 256, 257, 5000])
def test_add(rng: np.random.Generator, n: int) -> None:
    x, y = (values(rng, n, special=0.1, non_finite=0.02) for _ in range(2))
    Case("add", {"x": x, "y": y, "out": f32(n)}, n=n).check()


@pytest.mark.parametrize(("rows", "width"), [(1, 32), (3, 257), (8, 768)])
def test_swiglu(rng: np.random.Generator, rows: int, width: int) -> None:
    gu = values(rng, rows, 2, width, special=0.1, non_finite=0.02)
    Case("swiglu", {"gu": gu, "h": f32(rows, width)}, R=rows, F=width).check()


# -- RoPE and the KV cache -------------------------------------------------------------------------


@pytest.mark.parametrize("hd", [32, 80, 128, 256])
@pytest.mark.parametrize("factor", [1.0, 1.1386294])
def test_rope(rng: np.random.Generator, hd: int, factor: float) -> None:
    rows, heads = 5, 7
    ld = heads * hd + 32
    arrays = {
        "x": values(rng, rows, ld, special=0.05),
        "pos": np.array([0, 1, 255, 4095, 131071], np.int32),
        "inv_freq": (10000.0 ** (-np.arange(hd // 2) / (hd // 2))).astype(np.float32),
    }
    Case("rope", arrays, M=rows, heads=heads, hd=hd, ld=ld, factor=factor).check(seed=3)


@pytest.mark.parametrize("hd", [32, 80, 96, 256])
def test_kv_append(rng: np.random.Generator, hd: int) -> None:
    rows, nkv, slots = 4, 3, 40
    ld = 2 * nkv * hd + 16
    k, v = values(rng, rows, ld, special=0.05), values(rng, rows, ld)
    k[0, :hd] = 0
    k[0, hd : 2 * hd] = 1e-42
    v[1, 5] = np.nan
    v[2, 0] = np.inf
    v[3, hd : 2 * hd] = -3e38
    arrays = {
        "k": k,
        "v": v,
        "kq": np.full((slots, nkv, hd), 77, np.int8),
        "ks": f32(slots, nkv),
        "vq": np.full((slots, nkv, hd), 77, np.int8),
        "vs": f32(slots, nkv),
        "pos": np.array([3, 0, 7, 39], np.int32),
        "base": np.array([0, 20, 21, 0], np.int32),
    }
    Case("kv_append", arrays, M=rows, nkv=nkv, hd=hd, ld=ld).check()


# -- matrices --------------------------------------------------------------------------------------


def matmul_case(
    rng: np.random.Generator, kinds: list[WType], sizes: list[int], k: int, rows: int, **special: float
) -> Case:
    arrays: dict[str, Any] = {"x": values(rng, rows, k, **special), "y": f32(rows, sum(sizes))}
    if any(kind != WType.bf16 for kind in kinds):
        arrays.update(quantised(rng, rows, k))
    weights = [tensor(rng, kind, n, k) for kind, n in zip(kinds, sizes, strict=True)]
    return Case("matmul", arrays, weights, M=rows)


@pytest.mark.parametrize("wtype", WTYPES)
@pytest.mark.parametrize("k", [32, 64, 256, 352, 416, 576, 1120, 2048])
def test_matmul_lengths(rng: np.random.Generator, wtype: WType, k: int) -> None:
    matmul_case(rng, [wtype], [37], k, 1).check(seed=k)


@pytest.mark.parametrize("k", [1, 7, 31, 32, 33, 40, 63, 100])
def test_matmul_of_bf16_with_any_length(rng: np.random.Generator, k: int) -> None:
    matmul_case(rng, [WType.bf16], [5], k, 3).check()


@pytest.mark.parametrize("wtype", WTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 9, 16, 17, 33])
def test_matmul_rows(rng: np.random.Generator, wtype: WType, rows: int) -> None:
    matmul_case(rng, [wtype], [19], 352, rows).check(seed=rows)


@pytest.mark.parametrize("rows", [1, 4])
def test_matmul_of_several_matrices(rng: np.random.Generator, rows: int) -> None:
    for kinds in (
        [WType.q4local] * 3,
        [WType.q4local, WType.bf16, WType.q8local],
        [WType.bf16, WType.q8local],
    ):
        matmul_case(rng, kinds, [17, 3, 10][: len(kinds)], 288, rows).check()


def test_matmul_keeps_special_values(rng: np.random.Generator) -> None:
    # Infinite and NaN scales, and groups whose scale is zero: a lane without groups stays +0.
    for wtype in (WType.q4local, WType.q8local):
        case = matmul_case(rng, [wtype], [24], 96, 2)
        xd = case.arrays["xd"]
        xd[0, 0], xd[1, 1] = np.inf, np.nan
        weight = case.weights[0]
        scale = weight.scale.copy()
        scale[3, 2], scale[4, 0], scale[5] = 0x7C00, 0x7E00, 0x0001
        scale[6] = 0x8000
        case.weights[0] = type(weight)(weight.wtype, weight.codes, scale, None, weight.n, weight.k)
        case.check()
    matmul_case(rng, [WType.bf16], [24], 96, 2, special=0.3, non_finite=0.01).check()


# -- mixture of experts ----------------------------------------------------------------------------


@pytest.mark.parametrize("wtype", WTYPES)
@pytest.mark.parametrize(("rows", "chosen", "per_slot"), [(1, 8, 0), (1, 1, 1), (3, 2, 1), (5, 4, 0)])
def test_moe_matmul(rng: np.random.Generator, wtype: WType, rows: int, chosen: int, per_slot: int) -> None:
    experts, k = 9, 96
    inputs = rows * chosen if per_slot else rows
    sizes = [33] if per_slot else [21, 21]
    arrays = {
        "ids": np.stack([rng.permutation(experts)[:chosen] for _ in range(rows)]).astype(np.int32),
        "x": values(rng, inputs, k),
        "y": f32(rows, chosen, sum(sizes)),
        **quantised(rng, inputs, k),
    }
    weights = [tensor(rng, wtype, n, k, experts) for n in sizes]
    numbers = {"M": rows, "T": chosen, "E": experts, "per_slot": per_slot}
    Case("moe_matmul", arrays, weights, **numbers).check(seed=rows)


@pytest.mark.parametrize("norm", [0, 1])
@pytest.mark.parametrize(("experts", "chosen"), [(1, 1), (5, 3), (16, 16), (128, 8), (130, 1), (300, 12)])
def test_router_topk(rng: np.random.Generator, experts: int, chosen: int, norm: int) -> None:
    rows = 9
    logits = values(rng, rows, experts)
    logits[1] = 0.5  # all equal
    logits[2] = rng.integers(-1, 2, experts)  # many ties
    logits[3] = np.where(rng.random(experts) < 0.5, 0.0, -0.0)
    logits[4] = values(rng, experts, non_finite=0.3)
    logits[5] = np.nan
    logits[6] = -np.inf
    logits[7] = values(rng, experts) * 200  # most exponentials vanish
    arrays = {
        "logits": logits,
        "ids": np.full((rows, chosen), -9, np.int32),
        "weights": f32(rows, chosen),
    }
    numbers = {"M": rows, "E": experts, "T": chosen, "norm_topk_prob": norm}
    Case("router_topk", arrays, **numbers).check(seed=experts)


@pytest.mark.parametrize(("rows", "chosen", "width"), [(1, 8, 2048), (4, 1, 33), (3, 5, 260)])
def test_moe_combine(rng: np.random.Generator, rows: int, chosen: int, width: int) -> None:
    arrays = {
        "y": values(rng, rows, chosen, width, special=0.05),
        "weights": rng.random((rows, chosen)).astype(np.float32),
        "out": f32(rows, width),
    }
    Case("moe_combine", arrays, M=rows, T=chosen, H=width).check()


@pytest.mark.parametrize("wtype", [WType.q4local, WType.q8local])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33, 50])
def test_tiles(rng: np.random.Generator, wtype: WType, rows: int) -> None:
    tuning = Tuning(tiled_rows=1)
    case = matmul_case(rng, [wtype, WType.q8local, wtype], [70, 32, 3], 416, rows)
    assert case.launches(tuning)[0].kernel == "k_matmul_tiled"
    case.check(tuning, seed=rows)


@pytest.mark.parametrize("wtype", [WType.q4local, WType.q8local])
@pytest.mark.parametrize(
    ("rows", "chosen", "experts"), [(1, 1, 1), (40, 3, 5), (33, 2, 2), (16, 8, 40), (70, 1, 3)]
)
@pytest.mark.parametrize("per_slot", [0, 1])
def test_tiles_of_experts(
    rng: np.random.Generator, wtype: WType, rows: int, chosen: int, experts: int, per_slot: int
) -> None:
    k, sizes = 96, [40] if per_slot else [33, 33]
    inputs = rows * chosen if per_slot else rows
    arrays = {
        "ids": np.stack([rng.permutation(experts)[:chosen] for _ in range(rows)]).astype(np.int32),
        "x": values(rng, inputs, k),
        "y": f32(rows, chosen, sum(sizes)),
        **quantised(rng, inputs, k),
    }
    weights = [tensor(rng, wtype, n, k, experts) for n in sizes]
    numbers = {"M": rows, "T": chosen, "E": experts, "per_slot": per_slot}
    tuning = Tuning(tiled_rows=1)
    case = Case("moe_matmul", arrays, weights, **numbers)
    assert case.launches(tuning)[0].kernel == "k_moe_matmul_tiled"
    case.check(tuning, seed=rows)


# -- attention -------------------------------------------------------------------------------------


def attention_case(
    rng: np.random.Generator,
    positions: list[int],
    heads: int,
    kv_heads: int,
    hd: int,
    *,
    base: list[int] | None = None,
    scale: float = 0.03,
) -> Case:
    rows = len(positions)
    base = base or [0] * rows
    slots = max(b + p for b, p in zip(base, positions, strict=True)) + 3
    ld = heads * hd + 32
    q = values(rng, rows, ld)
    ks, vs = (rng.random((slots, kv_heads)).astype(np.float32) * np.float32(scale) for _ in range(2))
    arrays = {
        "q": q,
        "kq": rng.integers(-127, 128, (slots, kv_heads, hd)).astype(np.int8),
        "ks": ks,
        "vq": rng.integers(-127, 128, (slots, kv_heads, hd)).astype(np.int8),
        "vs": vs,
        "pos": np.array(positions, np.int32),
        "base": np.array(base, np.int32),
        "out": f32(rows, heads * hd),
        "work": np.zeros(attention_work_bytes(rows, heads, hd, max(positions) + 1), np.uint8),
    }
    # What lies beyond a row's own positions must not be read as a value.
    last = max(b + p for b, p in zip(base, positions, strict=True))
    ks[last + 1 :] = np.nan
    vs[last + 1 :] = np.nan
    numbers = {"M": rows, "nh": heads, "nkv": kv_heads, "hd": hd, "ld": ld}
    return Case("attention", arrays, qscale=np.float32(1 / np.sqrt(float(hd))), **numbers)


@pytest.mark.parametrize("position", [0, 1, 31, 32, 254, 255, 256, 257, 511, 512, 1023, 1024, 1025])
def test_attention_positions(rng: np.random.Generator, position: int) -> None:
    case = attention_case(rng, [position], 4, 2, 64)
    expected = case.on_cpu()
    for slots in (1, 2, 3, 16):
        case.check(Tuning(attention_slots=slots), seed=slots, expected=expected)


@pytest.mark.parametrize("hd", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("ratio", [1, 2, 5, 8, 16])
def test_attention_shapes(rng: np.random.Generator, hd: int, ratio: int) -> None:
    case = attention_case(rng, [300], ratio, 1, hd)
    expected = case.on_cpu()
    for heads in (1, 3, 16 if hd < 256 else 8):
        case.check(Tuning(attention_heads=heads), seed=heads, expected=expected)


def test_attention_rows(rng: np.random.Generator) -> None:
    # Rows of several sequences, of any length, in any order; nine rows walk their chunks in one block.
    case = attention_case(rng, [5, 700, 0, 255, 256, 511], 4, 2, 32, base=[0, 10, 720, 720, 300, 9])
    case.check(seed=1)
    case = attention_case(rng, [0, 3, 256, 260, 520, 1, 2, 600, 255], 3, 1, 32)
    case.check(seed=2)


def test_attention_of_special_values(rng: np.random.Generator) -> None:
    kinds = ("zero", "nan", "inf", "rising", "falling", "equal", "huge", "zero query", "nan query")
    of_values = {
        "zero values": 0.0,
        "tiny values": 2.0**-101,
        "largest code": np.nextafter(np.float32(1), np.float32(0)),
    }
    for kind in (*kinds, "nan value", "inf value", *of_values):
        case = attention_case(rng, [530], 2, 1, 32)
        ks, kq, q, vs = (case.arrays[name] for name in ("ks", "kq", "q", "vs"))
        t = np.arange(len(ks))
        if kind == "zero":
            ks[:] = 0
        elif kind in ("nan", "inf"):
            ks[[0, 100, 255, 256, 300]] = np.nan if kind == "nan" else np.inf
        elif kind in ("rising", "falling"):  # the maximum moves at every step, or never after the first
            kq[:] = np.sign(q[0, :32]).astype(np.int8) * 50
            ks[:, 0] = (t if kind == "rising" else t[::-1]) * 1e-3
        elif kind == "equal":
            kq[:] = 3
            ks[:] = 0.01
        elif kind == "huge":
            ks[:] = 1e30
        elif kind in ("nan value", "inf value"):
            vs[[3, 300]] = np.nan if kind == "nan value" else np.inf
        elif kind in of_values:
            vs[:] = of_values[kind]
        else:
            q[:] = 0 if kind == "zero query" else np.nan
        expected = case.on_cpu()
        for slots in (1, 8):
            case.check(Tuning(attention_slots=slots), seed=slots, expected=expected)


def test_attention_leaves_its_counters_zero(rng: np.random.Generator) -> None:
    case = attention_case(rng, [700, 300], 4, 2, 32)
    work = case.on_kernels(Tuning(attention_slots=4))["work"]
    assert not work[: 4 * 4096].any()
    assert work.any(), "this case must use the workspace"


def test_attention_over_more_chunks_than_a_merge_takes_at_once(rng: np.random.Generator) -> None:
    case = attention_case(rng, [CHUNK * CHUNK + 700], 1, 1, 32)
    case.check(Tuning(attention_slots=3))


# -- head and hash ---------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 31, 33, 1024, 5000])
def test_argmax(rng: np.random.Generator, vocab: int) -> None:
    logits = values(rng, 8, vocab)
    logits[1] = 2.5
    logits[2] = np.where(rng.random(vocab) < 0.5, 0.0, -0.0)
    logits[3, -1] = logits[3].max()
    logits[4, vocab // 2] = np.nan
    logits[5, 0] = np.inf
    logits[6, -1] = -np.inf
    logits[7] = -np.abs(logits[7])
    Case("argmax", {"logits": logits, "ids": np.full(8, -9, np.int32)}, M=8, V=vocab).check(seed=vocab)


@pytest.mark.parametrize(
    "nbytes", [1, 2, 3, 4, 5, 8, 64, 100, 255, 256, 257, 1023, 4096, 8190, 40004, 300000]
)
def test_l2_hash_of_bytes(rng: np.random.Generator, nbytes: int) -> None:
    for stride in (nbytes, nbytes + 3):  # rows at any alignment
        x = rng.integers(-128, 128, 4 * stride + 1).astype(np.int8)
        x[: nbytes // 2] = 0
        case = Case("l2_hash", {"x": x, "out": np.zeros(4, np.uint64)}, M=4, stride=stride, bytes=nbytes)
        expected = case.on_cpu()
        case.check(expected=expected, seed=nbytes)
        case.check(Tuning(hash_threads=64), expected=expected)


@pytest.mark.parametrize("count", [1, 2, 31, 64, 512, 2048, 4096, 20001])
def test_l2_hash_of_floats(rng: np.random.Generator, count: int) -> None:
    x = values(rng, 3, count, special=0.1, non_finite=0.05)
    x.view(np.uint32)[0, 0] = 0xFFC12345  # a NaN of another sign and payload
    x.view(np.uint32)[1, -1] = 0x7F800001
    arrays = {"x": x, "out": np.zeros(3, np.uint64)}
    Case("l2_hash", arrays, M=3, stride=4 * count, bytes=4 * count, is_f32=1).check()


def test_l2_hash_of_kv_slots(rng: np.random.Generator) -> None:
    arrays = {
        "x": rng.integers(-128, 128, (30, 48)).astype(np.int8),
        "row0": np.array([0, 10, 20], np.int32),
        "row1": np.array([4, 0, 9], np.int32),
        "out": np.zeros(3, np.uint64),
    }
    Case("l2_hash", arrays, M=3, stride=48, bytes=48).check()
