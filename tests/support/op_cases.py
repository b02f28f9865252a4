"""One op with concrete inputs, and its run on any backend: the same cases compare GPU, shim and reference.

Inputs are drawn from a seed and salted with what breaks careless code: zeros of both signs, subnormals,
groups of equal magnitude, one huge value in a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel.backend import Backend
from kestrel.ops import OPS, Op, Weight, WType
from kestrel.weights import QuantTensor
from tests.support.models import random_tensor

Array = npt.NDArray[Any]
POISON = 0xA5  # every byte of an output before the op runs


@dataclass(frozen=True)
class Case:
    """One op: pointer members get ``inputs`` (host arrays), weights or outputs; the rest are ``scalars``."""

    op: str
    label: str
    inputs: dict[str, Array]
    scalars: dict[str, Any]
    outputs: dict[str, tuple[tuple[int, ...], Any]] = field(default_factory=dict)  # member -> shape, dtype
    in_place: tuple[str, ...] = ()  # inputs that the op writes
    weights: tuple[QuantTensor, ...] = ()
    any_nan: bool = False  # the contract leaves NaN payloads to the hardware here

    def __str__(self) -> str:
        return f"{self.op}[{self.label}]"


def run_case(case: Case, backend: Backend) -> dict[str, Array]:
    """The arrays that the op wrote, by member."""
    spec = OPS[case.op]
    args = spec.args()
    keep: dict[str, Any] = {}
    for name, value in case.scalars.items():
        if not hasattr(args, name):
            raise TypeError(f"{case.op} has no argument {name}")
        setattr(args, name, value)
    for name, array in case.inputs.items():
        keep[name] = backend.upload(array.copy() if name in case.in_place else array)
        setattr(args, name, keep[name].ptr)
    for name, (shape, dtype) in case.outputs.items():
        keep[name] = backend.upload(np.full(shape, 0, dtype).view(np.uint8) + np.uint8(POISON))
        setattr(args, name, keep[name].ptr)
    bound = []
    for tensor in case.weights:
        codes = backend.upload(tensor.codes)
        scale = backend.upload(tensor.scale) if tensor.scale is not None else None
        keep[f"weight{len(bound)}"] = (codes, scale)
        struct = Weight(codes.ptr, scale.ptr if scale else 0, int(tensor.wtype), tensor.n, tensor.k, 0)
        bound.append(struct)
    if case.op == "embed":
        args.w = bound[0]
    else:
        for i, struct in enumerate(bound):
            args.w[i] = struct
    if case.op == "attention":
        a = case.scalars
        slots = case.inputs["kq"].shape[0]
        size = backend.attention_work_bytes(a["M"], a["nh"], a["hd"], slots)
        if size:
            keep["work"] = backend.zeros((size,), np.uint8)
            args.work = keep["work"].ptr
    backend.compile([Op(spec, args, case.label)]).run()
    result = {name: backend.read(keep[name]) for name in case.in_place}
    for name, (shape, dtype) in case.outputs.items():
        result[name] = backend.read(keep[name]).reshape(-1).view(dtype).reshape(shape)
    return result


# -- values --------------------------------------------------------------------------------------------------


def salted(rng: np.random.Generator, shape: Sequence[int], scale: float = 1.0) -> Array:
    """Normal values; one in sixteen rows is all zero, subnormal, of one magnitude, or has one huge value."""
    x = (rng.standard_normal(tuple(shape)) * scale).astype(np.float32)
    rows = x.reshape(-1, x.shape[-1])
    kinds = rng.integers(0, 64, rows.shape[0])
    rows[kinds == 0] = np.where(rng.integers(0, 2, rows[kinds == 0].shape), np.float32(0), np.float32(-0.0))
    rows[kinds == 1] *= np.float32(2.0**-140)
    rows[kinds == 2] = np.sign(rows[kinds == 2]) * np.float32(0.75)
    rows[kinds == 3, rng.integers(0, rows.shape[1])] = np.float32(3e30)
    flat = x.reshape(-1)
    some = rng.integers(0, flat.size, max(1, flat.size // 97))
    flat[some] = rng.choice(
        np.array([0.0, -0.0, 2.0**-149, -(2.0**-149), 2.0**-126, 1.0, -1.0], np.float32), some.size
    )
    return x


def a8(x: Array) -> dict[str, Array]:
    """Codes, scales and code sums of random rows, near enough to what quantize_a8 gives."""
    groups = x.reshape(x.shape[0], -1, 32)
    d = (np.abs(groups).max(axis=2) / np.float32(127)).astype(np.float32)
    safe = np.where((d > 0) & np.isfinite(d), d, 1)
    q = np.clip(np.rint(groups / safe[:, :, None]), -127, 127).astype(np.int8)
    q[d == 0] = 0
    return {"xq": q.reshape(x.shape), "xd": d, "gsum": q.astype(np.int32).sum(axis=2, dtype=np.int32)}


def seed_of(*parts: Any) -> int:
    """The same seed for the same case, in every process."""
    return int.from_bytes(repr(parts).encode()[-8:], "little") % (1 << 32) + sum(map(ord, repr(parts)))


# -- cases of each op ----------------------------------------------------------------------------------------


def embed(vocab: int, hidden: int, M: int, wtype: WType) -> Case:
    rng = np.random.default_rng(seed_of("embed", vocab, hidden, M, wtype))
    ids = rng.integers(0, vocab, M).astype(np.int32)
    ids[-1] = vocab - 1
    return Case(
        "embed",
        f"V={vocab} H={hidden} M={M} {wtype.name}",
        {"ids": ids},
        {"M": M},
        {"x": ((M, hidden), np.float32)},
        weights=(random_tensor(rng, wtype, vocab, hidden),),
    )


def rms_norm(d: int, M: int) -> Case:
    rng = np.random.default_rng(seed_of("rms_norm", d, M))
    return Case(
        "rms_norm",
        f"d={d} M={M}",
        {"x": salted(rng, (M, d)), "w": salted(rng, (d,))},
        {"M": M, "d": d, "eps": 1e-6},
        {"out": ((M, d), np.float32)},
        any_nan=True,
    )


def quantize_a8(K: int, M: int, *, non_finite: bool = False) -> Case:
    rng = np.random.default_rng(seed_of("quantize_a8", K, M, non_finite))
    x = salted(rng, (M, K))
    groups = x.reshape(-1, 32)
    for n in range(0, groups.shape[0], 5):  # boundaries of rounding, and amax just around 2^-100
        groups[n] = np.float32(127.0) * rng.integers(-8, 8, 32).astype(np.float32) / 8
        groups[n, 0] = 127.0
    if groups.shape[0] > 3:
        groups[1] = np.float32(2.0**-100) * np.sign(groups[1] + np.float32(1e-30))
        groups[3] = np.nextafter(np.float32(2.0**-100), np.float32(0))
    if non_finite:
        values = np.array([np.nan, np.inf, -np.inf], np.float32)
        for n in range(0, groups.shape[0], 2):
            groups[n, rng.integers(0, 32)] = values[n // 2 % 3]
        groups[-1, :2] = [np.inf, np.nan]
    shape = (M, K // 32)
    return Case(
        "quantize_a8",
        f"K={K} M={M}{' non-finite' if non_finite else ''}",
        {"x": x},
        {"M": M, "K": K},
        {"q": ((M, K), np.int8), "d": (shape, np.float32), "gsum": (shape, np.int32)},
    )


def matmul(ns: Sequence[int], K: int, M: int, wtypes: Sequence[WType]) -> Case:
    rng = np.random.default_rng(seed_of("matmul", tuple(ns), K, M, tuple(wtypes)))
    x = salted(rng, (M, K))
    x[np.abs(x) > 1e20] = 1e4  # finite sums
    inputs: dict[str, Array] = {"x": x}
    if any(w != WType.bf16 for w in wtypes):
        inputs.update(a8(x))
    return Case(
        "matmul",
        f"N={'+'.join(map(str, ns))} K={K} M={M} {'+'.join(w.name for w in wtypes)}",
        inputs,
        {"n_w": len(ns), "M": M},
        {"y": ((M, sum(ns)), np.float32)},
        weights=tuple(random_tensor(rng, w, n, K) for n, w in zip(ns, wtypes, strict=True)),
    )


def qk_norm(heads: int, hd: int, M: int, pad: int = 0) -> Case:
    rng = np.random.default_rng(seed_of("qk_norm", heads, hd, M, pad))
    ld = heads * hd + pad
    return Case(
        "qk_norm",
        f"heads={heads} hd={hd} M={M} ld={ld}",
        {"x": salted(rng, (M, ld)), "w": salted(rng, (hd,))},
        {"M": M, "heads": heads, "hd": hd, "ld": ld, "eps": 1e-6},
        in_place=("x",),
        any_nan=True,
    )


def rope(heads: int, hd: int, M: int, pad: int = 0, factor: float = 1.0) -> Case:
    rng = np.random.default_rng(seed_of("rope", heads, hd, M, pad, factor))
    ld = heads * hd + pad
    inv_freq = (1.0 / 1e6 ** (np.arange(0, hd, 2) / hd)).astype(np.float32)
    pos = rng.integers(0, 40960, M).astype(np.int32)
    pos[0] = 0
    return Case(
        "rope",
        f"heads={heads} hd={hd} M={M} ld={ld} factor={factor}",
        {"x": salted(rng, (M, ld)), "pos": pos, "inv_freq": inv_freq},
        {"M": M, "heads": heads, "hd": hd, "ld": ld, "factor": factor},
        in_place=("x",),
        any_nan=True,
    )


def kv_append(nkv: int, hd: int, M: int, *, non_finite: bool = False) -> Case:
    rng = np.random.default_rng(seed_of("kv_append", nkv, hd, M, non_finite))
    ld = 2 * nkv * hd + 32
    slots = M + 9
    k, v = salted(rng, (M, ld)), salted(rng, (M, ld))
    if non_finite:
        k[M // 2, 1], v[M // 2, 0], v[0, nkv * hd - 1] = np.nan, np.inf, -np.inf
    order = rng.permutation(slots - 5)[:M].astype(np.int32)  # distinct slots, in any order
    cache = {
        "kq": rng.integers(-127, 128, (slots, nkv, hd)).astype(np.int8),
        "ks": salted(rng, (slots, nkv)),
        "vq": rng.integers(-127, 128, (slots, nkv, hd)).astype(np.int8),
        "vs": salted(rng, (slots, nkv)),
    }
    return Case(
        "kv_append",
        f"nkv={nkv} hd={hd} M={M}{' non-finite' if non_finite else ''}",
        {"k": k, "v": v, **cache, "pos": order, "base": np.full(M, 4, np.int32)},
        {"M": M, "nkv": nkv, "hd": hd, "ld": ld},
        in_place=("kq", "ks", "vq", "vs"),
    )


def attention(
    nh: int, nkv: int, hd: int, positions: Sequence[int], *, base: int = 0, spread: float = 1.0
) -> Case:
    """``positions`` are those of the M query rows; ``spread`` scales the scores (large: one-hot)."""
    rng = np.random.default_rng(seed_of("attention", nh, nkv, hd, tuple(positions), base, spread))
    M, slots = len(positions), max(positions) + 1 + base
    ld = (nh + 2 * nkv) * hd
    ks = np.abs(rng.standard_normal((slots, nkv))).astype(np.float32) * np.float32(spread / 60)
    ks[rng.integers(0, 8, ks.shape) == 0] = 0  # all-zero rows
    return Case(
        "attention",
        f"nh={nh} nkv={nkv} hd={hd} M={M} last={positions[-1]} base={base} spread={spread}",
        {
            "q": salted(rng, (M, ld)),
            "kq": rng.integers(-127, 128, (slots, nkv, hd)).astype(np.int8),
            "ks": ks,
            "vq": rng.integers(-127, 128, (slots, nkv, hd)).astype(np.int8),
            "vs": np.abs(salted(rng, (slots, nkv), 0.02)),  # never negative (contract section 6)
            "pos": np.array(positions, np.int32),
            "base": np.full(M, base, np.int32),
        },
        {
            "M": M,
            "nh": nh,
            "nkv": nkv,
            "hd": hd,
            "ld": ld,
            "qscale": float(np.float32(1 / np.sqrt(float(hd)))),
        },
        {"out": ((M, nh, hd), np.float32)},
        any_nan=True,
    )


def add(n: int) -> Case:
    rng = np.random.default_rng(seed_of("add", n))
    return Case(
        "add",
        f"n={n}",
        {"x": salted(rng, (1, n)), "y": salted(rng, (1, n))},
        {"n": n},
        {"out": ((1, n), np.float32)},
    )


def swiglu(R: int, F: int) -> Case:
    rng = np.random.default_rng(seed_of("swiglu", R, F))
    gu = salted(rng, (R, 2, F), 4.0)
    gu[:, 0, 0] = rng.choice(np.array([-104.5, -88.0, 88.7228394, 89.0, 200.0], np.float32), R)
    return Case(
        "swiglu", f"R={R} F={F}", {"gu": gu}, {"R": R, "F": F}, {"h": ((R, F), np.float32)}, any_nan=True
    )


def router_topk(M: int, E: int, T: int, norm: bool, *, ties: bool = False, non_finite: bool = False) -> Case:
    rng = np.random.default_rng(seed_of("router_topk", M, E, T, norm, ties, non_finite))
    logits = (rng.standard_normal((M, E)) * 2).astype(np.float32)
    if ties:
        logits = np.round(logits).astype(np.float32)  # few values, zeros of both signs
        logits[0] = 1.0
        logits[-1] = np.where(np.arange(E) % 2, np.float32(0.0), np.float32(-0.0))
    if non_finite:
        logits[:, ::3] = np.nan
    return Case(
        "router_topk",
        f"M={M} E={E} T={T} norm={norm}{' ties' if ties else ''}{' non-finite' if non_finite else ''}",
        {"logits": logits},
        {"M": M, "E": E, "T": T, "norm_topk_prob": int(norm)},
        {"ids": ((M, T), np.int32), "weights": ((M, T), np.float32)},
        any_nan=True,
    )


def moe_matmul(
    ns: Sequence[int], K: int, M: int, E: int, T: int, wtype: WType, *, per_slot: bool = False
) -> Case:
    rng = np.random.default_rng(seed_of("moe_matmul", tuple(ns), K, M, E, T, wtype, per_slot))
    rows = M * T if per_slot else M
    x = salted(rng, (rows, K))
    x[np.abs(x) > 1e20] = 1e4
    ids = np.stack([rng.permutation(E)[:T] for _ in range(M)]).astype(np.int32)
    inputs = {"x": x, "ids": ids}
    if wtype != WType.bf16 and K % 32 == 0:
        inputs.update(a8(x))
    return Case(
        "moe_matmul",
        f"N={'+'.join(map(str, ns))} K={K} M={M} E={E} T={T} {wtype.name}{' per slot' if per_slot else ''}",
        inputs,
        {"n_w": len(ns), "M": M, "T": T, "E": E, "per_slot": int(per_slot)},
        {"y": ((M, T, sum(ns)), np.float32)},
        weights=tuple(random_tensor(rng, wtype, n, K, experts=E) for n in ns),
    )


def moe_combine(M: int, T: int, H: int) -> Case:
    rng = np.random.default_rng(seed_of("moe_combine", M, T, H))
    weights = rng.random((M, T)).astype(np.float32)
    return Case(
        "moe_combine",
        f"M={M} T={T} H={H}",
        {"y": salted(rng, (M, T, H)), "weights": weights},
        {"M": M, "T": T, "H": H},
        {"out": ((M, H), np.float32)},
        any_nan=True,
    )


def argmax(M: int, V: int) -> Case:
    """Rows with ties, with NaN and infinities anywhere, and plain ones."""
    rng = np.random.default_rng(seed_of("argmax", M, V))
    logits = salted(rng, (M, V))
    logits[np.abs(logits) > 1e20] = 1e4
    for m in range(M):
        if m % 4 == 1:
            logits[m, rng.integers(0, V, min(V, 3))] = 50.0
        if m % 4 == 2:
            logits[m, rng.integers(0, V)] = [np.nan, np.inf, -np.inf][m // 4 % 3]
        if m % 4 == 3:
            logits[m] = np.where(np.arange(V) % 2, np.float32(0.0), np.float32(-0.0))
    return Case("argmax", f"M={M} V={V}", {"logits": logits}, {"M": M, "V": V}, {"ids": ((M,), np.int32)})


def l2_hash(
    M: int, nbytes: int, *, stride: int | None = None, by_slot: bool = False, is_f32: bool = False
) -> Case:
    rng = np.random.default_rng(seed_of("l2_hash", M, nbytes, stride, by_slot, is_f32))
    stride = nbytes if stride is None else stride
    rows = M + 7 if by_slot else M
    data = np.frombuffer(rng.bytes(rows * stride), np.uint8).copy()
    if is_f32 and stride >= 4:
        floats = data.view(np.uint32)
        floats[:: max(1, floats.size // 13)] = 0x7FA00001
        floats[0] = 0xFFC00000
    inputs: dict[str, Array] = {"x": data}
    if by_slot:
        inputs["row0"] = np.full(M, 3, np.int32)
        inputs["row1"] = rng.permutation(M + 4)[:M].astype(np.int32)
    return Case(
        "l2_hash",
        f"M={M} bytes={nbytes} stride={stride}{' by slot' if by_slot else ''}{' f32' if is_f32 else ''}",
        inputs,
        {"M": M, "bytes": nbytes, "stride": stride, "is_f32": int(is_f32)},
        {"out": ((M,), np.uint64)},
    )


# -- collections ---------------------------------------------------------------------------------------------

# The row counts that broke batched kernels elsewhere, around every power and tile size.
BATCH_ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 33, 128, 255, 256, 257, 1024)
LONG_ROWS = (1, 17, 65, 1024, 1502, 1674, 1777, 2004, 2231, 2992, 3712, 3713, 4087, 4095, 4096)


def small_cases() -> Iterator[Case]:
    """Every op at sizes that take no time: for the GPU tests of pytest and for the shim."""
    q4, q8, bf16 = WType.q4local, WType.q8local, WType.bf16
    for wtype in (q4, q8, bf16):
        yield embed(300, 352, 5, wtype)
        for M in (1, 3, 9, 33):
            yield matmul([64, 32, 33], 352, M, [wtype] * 3)
        yield matmul([7], 4096, 2, [wtype])
        for M in (1, 5):
            yield moe_matmul([96, 96], 352, M, 7, 3, wtype)
            yield moe_matmul([160], 96, M, 5, 5, wtype, per_slot=True)
    yield matmul([64, 32, 8], 576, 2, [q4, q8, bf16])
    yield matmul([24], 80, 3, [bf16])
    for d in (64, 96, 100, 2048):
        yield rms_norm(d, 3)
    for M in (1, 17):
        yield quantize_a8(352, M)
        yield quantize_a8(352, M, non_finite=True)
    for heads, hd in ((1, 32), (5, 80), (9, 96), (4, 128), (2, 256)):
        yield qk_norm(heads, hd, 3, pad=64)
        yield rope(heads, hd, 3, pad=64)
        yield kv_append(heads, hd, 5)
    yield rope(3, 64, 5, factor=1.1386)
    yield kv_append(3, 64, 6, non_finite=True)
    for nh, nkv, hd in (
        (3, 3, 32),
        (4, 2, 64),
        (5, 1, 80),
        (7, 1, 96),
        (8, 1, 128),
        (16, 1, 32),
        (4, 1, 256),
    ):
        yield attention(nh, nkv, hd, [0])
        yield attention(nh, nkv, hd, [254, 255, 256, 257], base=5)
    yield attention(4, 2, 64, [1023, 1024, 1025])
    yield attention(4, 2, 64, [600], spread=50.0)
    for n in (1, 33, 4097):
        yield add(n)
    yield swiglu(3, 96)
    yield swiglu(1, 1000)
    for norm in (True, False):
        for E, T in ((5, 3), (7, 7), (16, 1), (128, 8)):
            yield router_topk(4, E, T, norm)
            yield router_topk(4, E, T, norm, ties=True)
        yield router_topk(4, 16, 4, norm, non_finite=True)
    yield moe_combine(3, 8, 352)
    yield moe_combine(1, 1, 64)
    for V in (3, 300, 8192):
        yield argmax(8, V)
    for nbytes in (1, 3, 4, 31, 255, 256, 257, 1024, 8192):
        yield l2_hash(3, nbytes)
    yield l2_hash(5, 384, stride=1024, is_f32=True)
    yield l2_hash(5, 256, by_slot=True)
    yield l2_hash(2, 16, by_slot=True, is_f32=True)
    yield l2_hash(1, 4 * 8192, is_f32=True)
