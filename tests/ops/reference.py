"""The contract's ops restated in numpy, from docs/numerics.md: slow, in float32, in the stated order."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel import ucrt
from kestrel.ops import WType
from tests.support.f32 import F32, fma, hsum8, hsum32

I8 = npt.NDArray[np.int8]
I32 = npt.NDArray[np.int32]
ONE = np.float32(1)


def exp(x: Any) -> Any:
    return ucrt.expf(np.atleast_1d(np.asarray(x, np.float32))).reshape(np.shape(x))


def embed(wtype: WType, codes: Any, scale: Any, ids: I32) -> F32:
    codes = codes[ids]
    if wtype == WType.bf16:
        return (codes.astype(np.uint32) << 16).view(np.float32)
    s = scale[ids].view(np.float16).astype(np.float32)[..., None]
    if wtype == WType.q4local:
        codes = np.concatenate([codes & 15, codes >> 4], axis=-1).astype(np.int32) - 8
    return (s * codes.astype(np.float32)).reshape(len(ids), -1)


def _sum_in_lanes(terms: F32) -> F32:
    """terms: f32[..., n]; term j belongs to lane j mod 32."""
    lanes = np.zeros((*terms.shape[:-1], 32), np.float32)
    for j in range(terms.shape[-1]):
        lanes[..., j % 32] += terms[..., j]
    return hsum32(lanes)  # type: ignore[no-any-return]


def _inverse_rms(ss: F32, d: int, eps: float) -> F32:
    return ONE / np.sqrt(ss / np.float32(d) + np.float32(eps))


def rms_norm(x: F32, w: F32, eps: float) -> F32:
    M, d = x.shape
    squares = x * x
    blocks = hsum8(squares[:, : d // 8 * 8].reshape(M, -1, 8))
    ss = _sum_in_lanes(np.concatenate([blocks, squares[:, d // 8 * 8 :]], axis=1))
    return (x * _inverse_rms(ss, d, eps)[:, None]) * w


def qk_norm(x: F32, w: F32, eps: float) -> F32:
    """x: f32[..., hd]."""
    return (x * _inverse_rms(_sum_in_lanes(x * x), x.shape[-1], eps)[..., None]) * w


def quantise(x: F32) -> tuple[I8, F32]:
    """x: f32[..., n] -> codes i8[..., n], scale f32[...]; the rule of a8 groups and KV rows."""
    bits = x.view(np.uint32) & 0x7FFFFFFF
    top = bits.max(axis=-1)
    amax = top.view(np.float32)
    usable = (top < 0x7F800000) & (amax >= np.float32(2.0**-100))
    safe = np.where(usable, amax, ONE)
    d = np.where(usable, safe / np.float32(127), np.float32(0))
    d = np.where(top == 0x7F800000, np.float32(np.inf), d)
    d = np.where(top > 0x7F800000, np.float32(np.nan), d)
    scaled = np.where(usable[..., None], x * (np.float32(127) / safe)[..., None], np.float32(0))
    return np.clip(np.rint(scaled), -127, 127).astype(np.int8), d.astype(np.float32)


def rope(x: F32, pos: I32, inv_freq: F32, factor: float) -> F32:
    """x: f32[M, heads, hd]."""
    angle = pos.astype(np.float32)[:, None] * inv_freq
    c = (ucrt.cosf(angle) * np.float32(factor))[:, None]
    s = (ucrt.sinf(angle) * np.float32(factor))[:, None]
    x0, x1 = np.split(x, 2, axis=-1)
    return np.concatenate([x0 * c - x1 * s, x1 * c + x0 * s], axis=-1)


def value_codes(w: F32) -> tuple[npt.NDArray[np.int64], np.float32]:
    """w: f32[n], the weights of V in a chunk -> their integer codes, and what one unit of them stands for."""
    none = np.zeros(len(w), np.int64)
    a = int((w.view(np.uint32) & 0x7FFFFFFF).max())
    if a > 0x7F800000:
        return none, np.float32(np.nan)
    if a == 0x7F800000:
        return none, np.float32(np.inf)
    if a < 0x0D800000:
        return none, np.float32(0)
    unit = 2.0 ** ((a >> 23) - 141)
    # In f64 the quotient by a power of two is exact, and so is the rounded integer.
    return np.minimum(np.rint(w.astype(np.float64) / unit), 32767).astype(np.int64), np.float32(unit)


def _chunk(q8: I8, qs: np.float32, k8: I8, ks: F32, v8: I8, vs: F32) -> tuple[Any, Any, Any]:
    dots = k8.astype(np.int64) @ q8.astype(np.int64)
    s = dots.astype(np.float32) * (qs * ks)
    m = np.float32(-np.inf)
    for x in s:
        m = x if x > m else m
    p = exp(s - m)
    lanes = np.zeros(32, np.float32)
    for t in range(len(p)):
        lanes[t % 32] += p[t]
    codes, unit = value_codes(p * vs)
    sums = codes @ v8.astype(np.int64)
    assert np.abs(sums).max() < 2**31
    return m, hsum32(lanes), sums.astype(np.float32) * unit


def attention(q: F32, k8: I8, ks: F32, v8: I8, vs: F32, pos: I32, base: I32) -> F32:
    """q: f32[M, nh, hd]; k8, v8: i8[S, nkv, hd]; ks, vs: f32[S, nkv]."""
    M, heads, hd = q.shape
    q8, qd = quantise(q)
    qs = qd * np.float32(1 / np.sqrt(np.float64(hd)))
    out = np.empty_like(q)
    for row in range(M):
        for head in range(heads):
            kv = head // (heads // k8.shape[1])
            state = None
            for begin in range(0, pos[row] + 1, 256):
                slots = slice(base[row] + begin, base[row] + min(begin + 256, pos[row] + 1))
                part = _chunk(
                    q8[row, head], qs[row, head], k8[slots, kv], ks[slots, kv], v8[slots, kv], vs[slots, kv]
                )
                if state is None:
                    state = part
                    continue
                m = part[0] if part[0] > state[0] else state[0]
                a, b = exp(state[0] - m), exp(part[0] - m)
                state = m, fma(part[1], b, state[1] * a), fma(part[2], b, state[2] * a)
            assert state is not None
            out[row, head] = state[2] / state[1]
    return out


def swiglu(gu: F32) -> F32:
    """gu: f32[R, 2, F]."""
    g, u = gu[:, 0], gu[:, 1]
    return (g / (ONE + exp(-g))) * u


def router_topk(logits: F32, k: int, norm_topk_prob: bool) -> tuple[I32, F32]:
    ids = np.empty((len(logits), k), np.int32)
    weights = np.empty((len(logits), k), np.float32)
    for row, r in enumerate(logits):
        order = sorted(range(len(r)), key=lambda i: (not np.isnan(r[i]), 0 if np.isnan(r[i]) else -r[i], i))
        ids[row] = order[:k]
        p = exp(r[ids[row]] - r[ids[row, 0]])
        if norm_topk_prob:
            total = p[0]
            for i in range(1, k):
                total = total + p[i]
        else:
            lanes = np.zeros(8, np.float32)
            every = exp(r - r[ids[row, 0]])
            for i in range(len(r)):
                lanes[i % 8] += every[i]
            total = hsum8(lanes)
        weights[row] = p / total if np.isfinite(r).all() else np.float32(np.nan)
    return ids, weights


def moe_combine(y: F32, weights: F32) -> F32:
    """y: f32[M, T, H]; weights: f32[M, T]."""
    acc = np.zeros((y.shape[0], y.shape[2]), np.float32)
    for t in range(y.shape[1]):
        acc = fma(weights[:, t, None], y[:, t], acc)
    return acc


def argmax(logits: F32) -> I32:
    best = np.argmax(np.where(np.isfinite(logits), logits, -np.inf), axis=1)
    return np.where(np.isfinite(logits).all(axis=1), best, -1).astype(np.int32)


def fnv1a(data: bytes) -> int:
    h = 1469598103934665603
    for byte in data:
        h = (h ^ byte) * 1099511628211 % 2**64
    return h
