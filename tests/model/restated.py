"""A whole forward pass in float32 numpy, from docs/numerics.md: the third implementation, slow and short.

It composes the restated ops of ``tests/ops/reference.py`` in the order of section 9 and knows nothing of
``kestrel/step.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel.config import ModelConfig
from kestrel.ops import WType
from kestrel.rope import attention_factor, inv_freq
from kestrel.weights import QuantTensor, Weights
from tests.ops import reference as ops
from tests.support.f32 import F32, fma, hsum8, hsum32
from tests.support.forward import Run


def matmul(w: QuantTensor, x: F32, expert: int | None = None) -> F32:
    """x: f32[M, K] -> f32[M, N], section 3."""
    codes = w.codes if expert is None else w.codes[expert]
    lanes = np.zeros((len(x), w.n, 32 if w.wtype == WType.bf16 else 8), np.float32)
    if w.wtype == WType.bf16:
        values = (codes.astype(np.uint32) << 16).view(np.float32)
        for k in range(w.k):
            lanes[..., k % 32] = fma(values[None, :, k], x[:, k, None], lanes[..., k % 32])
        return np.asarray(hsum32(lanes))
    assert w.scale is not None
    scale = (w.scale if expert is None else w.scale[expert]).view(np.float16).astype(np.float32)
    if w.wtype == WType.q4local:
        codes = np.concatenate([codes & 15, codes >> 4], axis=-1).astype(np.int64) - 8
    q, d = ops.quantise(x.reshape(len(x), -1, 32))
    dots = np.einsum("mgj,ngj->mng", q.astype(np.int64), codes.astype(np.int64))
    for g in range(w.k // 32):
        ws = scale[None, :, g] * d[:, None, g]
        lanes[..., g % 8] = fma(dots[..., g].astype(np.float32), ws, lanes[..., g % 8])
    return np.asarray(hsum8(lanes))


def _hash(row: npt.NDArray[Any]) -> int:
    """Section 12: every NaN is hashed as the canonical one."""
    if row.dtype == np.float32:
        row = np.where(np.isnan(row), np.uint32(0x7FC00000), row.view(np.uint32))
    return ops.fnv1a(row.tobytes())


class Restated:
    """One sequence from an empty cache; all positions at once, since rows are computed alone."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights: dict[str, Any] = dict(weights)
        self.taps: list[tuple[str, npt.NDArray[Any]]] = []

    def forward(self, ids: npt.NDArray[np.int32]) -> Run:
        c, w = self.config, self.weights
        self.taps = []
        x = ops.embed(w["embed"].wtype, w["embed"].codes, w["embed"].scale, ids)
        for layer in range(c.num_layers):
            x = self._attention(layer, x)
            x = self._ffn(layer, x)
        fnorm = self._tap("fnorm", ops.rms_norm(x, w["norm"], c.rms_norm_eps))
        logits = self._tap("logits", matmul(w["embed" if c.tie_word_embeddings else "head"], fnorm))
        keys = {f"t{t}_{name}": _hash(rows[t]) for name, rows in self.taps for t in range(len(ids))}
        return Run(logits, ops.argmax(logits), keys)

    def _tap(self, name: str, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        self.taps.append((name, np.ascontiguousarray(rows)))
        return rows

    def _attention(self, layer: int, x: F32) -> F32:
        c, w, p, t = self.config, self.weights, f"layers.{layer}.", f"l{layer}_"
        M, nh, nkv, hd = len(x), c.num_heads, c.num_kv_heads, c.head_dim
        nrm = self._tap(t + "nrm", ops.rms_norm(x, w[p + "attn_norm"], c.rms_norm_eps))
        q = self._tap(t + "qraw", matmul(w[p + "q"], nrm)).reshape(M, nh, hd)
        k = self._tap(t + "kraw", matmul(w[p + "k"], nrm)).reshape(M, nkv, hd)
        v = self._tap(t + "vraw", matmul(w[p + "v"], nrm)).reshape(M, nkv, hd)
        if c.qk_norm:
            q = self._tap(t + "qnorm", ops.qk_norm(q, w[p + "q_norm"], c.rms_norm_eps))
            k = self._tap(t + "knorm", ops.qk_norm(k, w[p + "k_norm"], c.rms_norm_eps))
        positions = np.arange(M, dtype=np.int32)
        frequencies, factor = inv_freq(c), attention_factor(c)
        k = self._tap(t + "krope", ops.rope(k, positions, frequencies, factor))
        q = ops.rope(q, positions, frequencies, factor)
        k8, ks = ops.quantise(k)
        v8, vs = ops.quantise(v)
        for name, rows in (("k", k8), ("ks", ks), ("v", v8), ("vs", vs), ("qrope", q)):
            self._tap(t + name, rows)
        attn = self._tap(t + "attn", ops.attention(q, k8, ks, v8, vs, positions, np.zeros(M, np.int32)))
        return self._tap(t + "ores", x + matmul(w[p + "o"], attn.reshape(M, nh * hd)))

    def _ffn(self, layer: int, x: F32) -> F32:
        c, w, p, t = self.config, self.weights, f"layers.{layer}.", f"l{layer}_"
        nrm = self._tap(t + "nrm2", ops.rms_norm(x, w[p + "ffn_norm"], c.rms_norm_eps))
        if c.is_moe_layer(layer):
            y = self._experts(p, t, nrm)
        else:
            h = ops.swiglu(np.stack([matmul(w[p + "gate"], nrm), matmul(w[p + "up"], nrm)], axis=1))
            y = matmul(w[p + "down"], h)
        return self._tap(t + "x", x + self._tap(t + "ffn", y))

    def _experts(self, p: str, t: str, nrm: F32) -> F32:
        assert self.config.moe is not None
        w, top_k = self.weights, self.config.moe.top_k
        rlogits = self._tap(t + "rlogits", matmul(w[p + "router"], nrm))
        ids, weights = ops.router_topk(rlogits, top_k, self.config.moe.norm_topk_prob)
        self._tap(t + "rids", ids)
        self._tap(t + "rweights", weights)
        y = np.empty((len(nrm), top_k, self.config.hidden_size), np.float32)
        for m, row in enumerate(nrm):
            for rank, expert in enumerate(ids[m]):
                parts = [matmul(w[f"{p}experts.{part}"], row[None], int(expert)) for part in ("gate", "up")]
                y[m, rank] = matmul(w[p + "experts.down"], ops.swiglu(np.stack(parts, axis=1)), int(expert))[
                    0
                ]
        return ops.moe_combine(y, weights)
