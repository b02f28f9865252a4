"""What the operations mean, in float64 numpy, written from their textbook definitions.

Nothing of kestrel is imported here: two implementations that agree bit for bit may share a mistake, and
this is the third opinion. Every function takes and returns float64 (or integers) unless it says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

# Unit roundoff of float32: one correctly rounded operation is off by at most U relative to its result.
U = 2.0**-24


# -- formats -------------------------------------------------------------------------------------------------


def bf16_to_f64(bits: npt.NDArray[np.uint16]) -> F64:
    """bf16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def f16_to_f64(bits: npt.NDArray[np.uint16]) -> F64:
    return bits.view(np.float16).astype(np.float64)


def q4local_codes(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Signed codes [..., G, 32] of packed [..., G, 16]: byte j holds element j low, element j + 16 high."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int64) - 8


def dequantise(codes: npt.NDArray[Any], scale: npt.NDArray[np.uint16] | None) -> F64:
    """Values [..., N, K] of a stored matrix; its format follows from the codes' type."""
    if scale is None:
        return bf16_to_f64(codes)
    signed = q4local_codes(codes) if codes.dtype == np.uint8 else codes.astype(np.int64)
    values: F64 = signed * f16_to_f64(scale)[..., None]
    return values.reshape(*values.shape[:-2], -1)


def quantise_rows(x: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int64], F64]:
    """Symmetric int8 of each row (last axis), in float32 as the contract rounds it: codes and scales.

    Only for rows of finite values that are not almost zero.
    """
    amax = np.abs(x).max(axis=-1, keepdims=True)
    inverse = np.float32(127) / amax
    codes = np.clip(np.rint(x * inverse), -127, 127).astype(np.int64)
    return codes, (amax / np.float32(127))[..., 0].astype(np.float64)


def int8_step(x: F64) -> F64:
    """The scale [..., 1] of rows (last axis) stored as int8."""
    amax = np.abs(x).max(axis=-1, keepdims=True)
    return np.where(amax > 0, amax, 1.0) / 127


def through_int8(x: F64) -> F64:
    """What is left of rows (last axis) that were stored as int8 with one scale."""
    step = int8_step(x)
    return np.rint(x / step) * step


def through_15_bits(w: F64) -> F64:
    """What is left of non-negative rows (last axis) as 15-bit multiples of a power of two."""
    largest = w.max(axis=-1, keepdims=True)
    step = 2.0 ** (np.floor(np.log2(np.where(largest > 0, largest, 1.0))) - 14)
    return np.minimum(np.rint(w / step), 2**15 - 1) * step


# -- layers --------------------------------------------------------------------------------------------------


def rms_norm(x: F64, w: F64, eps: float) -> F64:
    """Divide each row by its root mean square, then scale elementwise."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * w


def rope_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, Any] | None = None, max_position: int = 0
) -> tuple[F64, float]:
    """Radians per position of each of the head_dim/2 pairs, and the factor on cos and sin.

    ``scaling`` is the dictionary of a config.json. Yarn is NTK-by-parts (Peng et al., 2023); llama3 is the
    rule published with Llama 3.1.
    """
    pair = np.arange(head_dim // 2, dtype=np.float64)
    plain = theta ** (-2 * pair / head_dim)
    scaling = dict(scaling or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return plain, 1.0
    s = float(scaling["factor"])
    if kind == "linear":
        return plain / s, 1.0
    context = float(scaling.get("original_max_position_embeddings") or max_position)
    if kind == "llama3":
        turns = context * plain / (2 * np.pi)  # rotations over the original context
        slow, quick = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        keep = np.clip((turns - slow) / (quick - slow), 0, 1)
        return keep * plain + (1 - keep) * plain / s, 1.0
    if kind == "yarn":

        def pair_with_turns(turns: float) -> float:
            return head_dim * math.log(context / (2 * math.pi * turns)) / (2 * math.log(theta))

        first = pair_with_turns(float(scaling.get("beta_fast") or 32))
        last = pair_with_turns(float(scaling.get("beta_slow") or 1))
        if scaling.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        interpolate = np.clip((pair - first) / max(last - first, 0.001), 0, 1)
        return plain * (1 - interpolate) + plain / s * interpolate, _yarn_factor(scaling, s)
    raise ValueError(f"no such RoPE scaling: {kind}")


def _yarn_factor(scaling: Mapping[str, Any], s: float) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(s) + 1 if s > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)


def rope(x: F64, positions: F64, frequencies: F64, factor: float = 1.0) -> F64:
    """Rotate x [T, heads, hd]: element i of the first half pairs with element i of the second half."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * frequencies[None, :]
    turn = factor * np.exp(1j * angle)[:, None, :]
    rotated = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([rotated.real, rotated.imag], axis=-1)


def kv_head_of(query_head: int, heads: int, kv_heads: int) -> int:
    """Grouped-query attention: consecutive query heads share one KV head."""
    return query_head // (heads // kv_heads)


def attention(q: F64, k: F64, v: F64, v_step: F64 | None = None) -> F64:
    """Causal softmax attention. q [T, nh, hd] at the last T of the S positions of k, v [S, nkv, hd].

    With ``v_step`` [S, nkv, 1], the scales of V, the weights of its codes pass through 15 bits, 256 positions
    at a time.
    """
    T, nh, hd = q.shape
    S, nkv, _ = k.shape
    visible = np.arange(S)[None, :] <= np.arange(S - T, S)[:, None]
    out = np.empty_like(q)
    for head in range(nh):
        shared = kv_head_of(head, nh, nkv)
        scores = q[:, head] @ k[:, shared].T / math.sqrt(hd)
        scores = np.where(visible, scores, -np.inf)
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        total = p.sum(axis=1, keepdims=True)
        for begin in range(0, S, 256):
            if v_step is None:
                break
            part = slice(begin, begin + 256)
            # Each part is relative to its own largest score, which moves its powers of two.
            top = scores[:, part].max(axis=1, keepdims=True)
            shift = np.exp(top - scores.max(axis=1, keepdims=True))
            relative = np.where(shift > 0, p[:, part] / np.where(shift > 0, shift, 1.0), 0.0)
            step = v_step[part, shared, 0]
            p[:, part] = through_15_bits(relative * step) / step * shift
        out[:, head] = p / total @ v[:, shared]
    return out


def silu(x: F64) -> F64:
    return x / (1 + np.exp(-x))


def swiglu(gate: F64, up: F64) -> F64:
    return silu(gate) * up


def route(logits: F64, top_k: int, norm_topk_prob: bool) -> tuple[npt.NDArray[np.int64], F64]:
    """Chosen experts [T, k], best first and the lower index first among equals, and their weights."""
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :top_k]
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    chosen = np.take_along_axis(p, order, axis=-1)
    if norm_topk_prob:
        chosen = chosen / chosen.sum(axis=-1, keepdims=True)
    return order, chosen


def fnv1a64(data: bytes) -> int:
    """FNV-1a with 64 bits, offset and prime as the contract prints them."""
    h = 1469598103934665603
    for byte in data:
        h = ((h ^ byte) * 1099511628211) & 0xFFFF_FFFF_FFFF_FFFF
    return h
