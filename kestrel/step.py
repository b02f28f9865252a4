"""One step of a model, written as a list of ops in data-flow order."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kestrel.backend import Buffer, Program
from kestrel.ops import OPS, Op, Weight, WType, spread_width
from kestrel.rope import attention_factor
from kestrel.taps import Tap, TapLevel, most_taps, tap_name
from kestrel.weights import QuantTensor

if TYPE_CHECKING:
    from kestrel.model import Model


@dataclass(frozen=True)
class BoundWeight:
    tensor: QuantTensor
    codes: Buffer
    scale: Buffer | None

    @property
    def struct(self) -> ctypes.Structure:
        scale = self.scale.ptr if self.scale is not None else 0
        return Weight(self.codes.ptr, scale, int(self.tensor.wtype), self.tensor.n, self.tensor.k, 0)


@dataclass(frozen=True)
class Step:
    """A compiled forward pass over ``rows`` rows with logits for the last ``logit_rows``."""

    ops: list[Op]
    taps: list[Tap]
    program: Program


class StepBuilder:
    """Emits the ops of one step in data-flow order."""

    def __init__(self, model: Model, rows: int, logit_rows: int, taps: TapLevel) -> None:
        self.model = model
        self.config = model.config
        self.M = rows
        self.L = logit_rows
        self.tap_level = taps
        self.ops: list[Op] = []
        self.taps: list[Tap] = []
        self._a8_turn = 0
        # What a dump reads lies in a row: then each layer has x for itself, too.
        self._spread = model.backend.row_spread if rows == 1 and taps == "off" else 0

    def build(self) -> None:
        c = self.config
        x = self._x()
        ids = self.model.buffer("ids", 1, np.int32)
        self._emit(
            "embed",
            "embed",
            w=self.model._matrix("embed").struct,
            ids=ids,
            x=x,
            M=self.M,
            spread=self._spread,
        )
        for layer in range(c.num_layers):
            x = self._attention(layer, x)
            x = self._ffn(layer, x)
        if self.L:
            self._output(x)

    # -- blocks --------------------------------------------------------------------------------------------

    def _attention(self, layer: int, x: Buffer) -> Buffer:
        """Returns x with what the block adds."""
        c, m = self.config, self.model
        name = f"layers.{layer}."
        ld = c.q_size + 2 * c.kv_size
        k_at, v_at = 4 * c.q_size, 4 * (c.q_size + c.kv_size)
        pos, base = m.buffer("pos", 1, np.int32), m.buffer("base", 1, np.int32)
        kv = m.kv.layers[layer]

        nrm = self._kept("nrm", layer, c.hidden_size)
        self._norm(f"l{layer}.attn_norm", x, m._vector(name + "attn_norm"), nrm)
        self._tap("nrm", layer, nrm, c.hidden_size)
        qkv = self._kept("qkv", layer, ld)
        self._matmul(f"l{layer}.qkv", [name + "q", name + "k", name + "v"], nrm, qkv)
        self._tap("qraw", layer, qkv, c.q_size, width=ld, extended=True)
        self._tap("kraw", layer, qkv, c.kv_size, offset=k_at, width=ld)
        self._tap("vraw", layer, qkv, c.kv_size, offset=v_at, width=ld, extended=True)
        if c.qk_norm:
            norm = {"M": self.M, "hd": c.head_dim, "ld": ld, "eps": c.rms_norm_eps}
            q_norm, k_norm = m._vector(name + "q_norm"), m._vector(name + "k_norm")
            self._emit("qk_norm", f"l{layer}.q_norm", x=qkv, w=q_norm, heads=c.num_heads, **norm)
            self._emit("qk_norm", f"l{layer}.k_norm", x=(qkv, k_at), w=k_norm, heads=c.num_kv_heads, **norm)
            self._tap("qnorm", layer, qkv, c.q_size, width=ld, extended=True)
            self._tap("knorm", layer, qkv, c.kv_size, offset=k_at, width=ld)
        self._emit(
            "rope",
            f"l{layer}.rope",
            x=qkv,
            pos=pos,
            inv_freq=m._inv_freq,
            M=self.M,
            heads=c.num_heads + c.num_kv_heads,
            hd=c.head_dim,
            ld=ld,
            factor=attention_factor(c),
        )
        self._tap("krope", layer, qkv, c.kv_size, offset=k_at, width=ld, extended=True)
        cache: dict[str, Any] = {"kq": kv.kq, "ks": kv.ks, "vq": kv.vq, "vs": kv.vs, "pos": pos, "base": base}
        cache |= {"M": self.M, "nkv": c.num_kv_heads, "hd": c.head_dim, "ld": ld}
        self._emit("kv_append", f"l{layer}.kv_append", k=(qkv, k_at), v=(qkv, v_at), **cache)
        self._tap("k", layer, kv.kq, c.kv_size, by_slot=True)
        self._tap("ks", layer, kv.ks, c.num_kv_heads, by_slot=True)
        self._tap("v", layer, kv.vq, c.kv_size, by_slot=True)
        self._tap("vs", layer, kv.vs, c.num_kv_heads, by_slot=True)
        self._tap("qrope", layer, qkv, c.q_size, width=ld)
        attn = self._kept("attn", layer, c.q_size)
        work, copies = self._attention_work(), None
        if work is not None and self._keeps():
            copies = self._kept("copies", layer, 2 * (c.q_size + c.kv_size))
        self._emit(
            "attention",
            f"l{layer}.attention",
            q=qkv,
            out=attn,
            work=work,
            copies=copies,
            nh=c.num_heads,
            **cache,
            qscale=1.0 / math.sqrt(float(c.head_dim)),
        )
        self._tap("attn", layer, attn, c.q_size)
        out = self._f32("out", c.hidden_size)
        self._matmul(f"l{layer}.o", [name + "o"], attn, out)
        x = self._add(f"l{layer}.attn_residual", x, out, self._x("ores", layer))
        self._tap("ores", layer, x, c.hidden_size)
        return x

    def _ffn(self, layer: int, x: Buffer) -> Buffer:
        """Returns x with what the block adds."""
        c = self.config
        nrm = self._kept("nrm2", layer, c.hidden_size, usual="nrm", extended=True)
        self._norm(f"l{layer}.ffn_norm", x, self.model._vector(f"layers.{layer}.ffn_norm"), nrm)
        self._tap("nrm2", layer, nrm, c.hidden_size, extended=True)
        out = self._kept("ffn", layer, c.hidden_size, usual="out", extended=True)
        if c.is_moe_layer(layer):
            self._moe(layer, nrm, out)
        else:
            name = f"layers.{layer}."
            gu, h = self._f32("gu", 2 * c.intermediate_size), self._f32("h", c.intermediate_size)
            self._matmul(f"l{layer}.gate_up", [name + "gate", name + "up"], nrm, gu)
            self._emit("swiglu", f"l{layer}.swiglu", gu=gu, h=h, R=self.M, F=c.intermediate_size)
            self._matmul(f"l{layer}.down", [name + "down"], h, out)
        self._tap("ffn", layer, out, c.hidden_size, extended=True)
        x = self._add(f"l{layer}.ffn_residual", x, out, self._x("x", layer))
        self._tap("x", layer, x, c.hidden_size)
        return x

    def _moe(self, layer: int, nrm: Buffer, out: Buffer) -> None:
        c = self.config
        assert c.moe is not None
        E, T, F = c.moe.num_experts, c.moe.top_k, c.moe.intermediate_size
        name = f"layers.{layer}."
        rlogits = self._kept("rlogits", layer, E, extended=True)
        rids = self._kept("rids", layer, T, np.int32, extended=True)
        rweights = self._kept("rweights", layer, T, extended=True)
        self._matmul(f"l{layer}.router", [name + "router"], nrm, rlogits)
        self._tap("rlogits", layer, rlogits, E, extended=True)
        self._emit(
            "router_topk",
            f"l{layer}.router_topk",
            logits=rlogits,
            ids=rids,
            weights=rweights,
            M=self.M,
            E=E,
            T=T,
            norm_topk_prob=int(c.moe.norm_topk_prob),
        )
        self._tap("rids", layer, rids, T, extended=True)
        self._tap("rweights", layer, rweights, T, extended=True)
        gu, h = self._f32("moe_gu", T * 2 * F), self._f32("moe_h", T * F)
        y = self._f32("moe_y", T * c.hidden_size)
        gate_up = [name + "experts.gate", name + "experts.up"]
        self._moe_matmul(f"l{layer}.experts.gate_up", gate_up, nrm, rids, gu, per_slot=False)
        self._emit("swiglu", f"l{layer}.swiglu", gu=gu, h=h, R=self.M * T, F=F)
        self._moe_matmul(f"l{layer}.experts.down", [name + "experts.down"], h, rids, y, per_slot=True)
        self._emit(
            "moe_combine", f"l{layer}.combine", y=y, weights=rweights, out=out, M=self.M, T=T, H=c.hidden_size
        )

    def _output(self, x: Buffer) -> None:
        c, m = self.config, self.model
        last = self.M - self.L
        fnorm = m.buffer("fnorm", c.hidden_size, np.float32, m.max_logit_rows)
        logits = m.buffer("logits", c.vocab_size, np.float32, m.max_logit_rows)
        self._emit(
            "rms_norm",
            "norm",
            x=(x, 4 * c.hidden_size * last),
            spread=self._spread,
            w=m._vector("norm"),
            out=fnorm,
            M=self.L,
            d=c.hidden_size,
            eps=c.rms_norm_eps,
        )
        self._tap("fnorm", None, fnorm, c.hidden_size, rows_from=last)
        head = "embed" if c.tie_word_embeddings else "head"
        self._matmul("head", [head], fnorm, logits, rows=self.L)
        self._tap("logits", None, logits, c.vocab_size, rows_from=last)
        self._emit(
            "argmax",
            "argmax",
            logits=logits,
            ids=m.buffer("next", 1, np.int32, m.max_logit_rows),
            M=self.L,
            V=c.vocab_size,
        )

    # -- single ops ----------------------------------------------------------------------------------------

    def _x(self, tap: str = "x", layer: int = 0) -> Buffer:
        """The residual stream, behind what ``tap`` names."""
        width = self.config.hidden_size
        if self._spread:
            return self.model.buffer("x_spread", spread_width(width, self._spread), np.float32, 1)
        return self._kept(tap, layer, width, usual="x")

    def _f32(self, name: str, width: int) -> Buffer:
        return self.model.buffer(name, width, np.float32)

    def _keeps(self, extended: bool = False) -> bool:
        """Whether values stay until the end of the step, so that their hashes need not hurry."""
        return self.M == 1 and self.tap_level in (("extended",) if extended else ("standard", "extended"))

    def _kept(
        self,
        name: str,
        layer: int,
        width: int,
        dtype: npt.DTypeLike = np.float32,
        *,
        usual: str | None = None,
        extended: bool = False,
    ) -> Buffer:
        """A buffer for a value with a tap: the layer's own, or the activation ``usual`` of all layers."""
        if self._keeps(extended):
            return self.model.buffer(f"{name}.{layer}", width, dtype, 1)
        return self.model.buffer(usual or name, width, dtype)

    def _attention_work(self) -> Buffer | None:
        c, m = self.config, self.model
        size = m.backend.attention_work_bytes(m.max_rows, c.num_heads, c.head_dim, m.kv.slots)
        if size and "attention_work" not in m._buffers:
            m._buffers["attention_work"] = m.backend.zeros((size,), np.uint8)  # its counters start at zero
        return m._buffers.get("attention_work")

    def _norm(self, label: str, x: Buffer, weight: Buffer, out: Buffer) -> None:
        c = self.config
        shape = {"M": self.M, "d": c.hidden_size, "eps": c.rms_norm_eps, "spread": self._spread}
        self._emit("rms_norm", label, x=x, w=weight, out=out, **shape)

    def _a8(self, label: str, x: Buffer, k: int, rows: int) -> Mapping[str, Any]:
        """The a8 form of ``x``.

        Two sets of buffers, each for the widest input, take turns: a kernel that joins ops may write one
        while it reads the other.
        """
        m, widest = self.model, self._widest_input()
        turn, self._a8_turn = self._a8_turn, 1 - self._a8_turn
        q = m.buffer(f"a8_q{turn}", 1, np.int8, self._a8_rows() * widest)
        d = m.buffer(f"a8_d{turn}", 1, np.float32, self._a8_rows() * widest // 32)
        gsum = m.buffer(f"a8_gsum{turn}", 1, np.int32, self._a8_rows() * widest // 32)
        self._emit("quantize_a8", f"{label}.a8", x=x, q=q, d=d, gsum=gsum, M=rows, K=k)
        return {"xq": q, "xd": d, "gsum": gsum}

    def _widest_input(self) -> int:
        c = self.config
        widths = [c.hidden_size, c.q_size, c.intermediate_size]
        if c.moe is not None:
            widths.append(c.moe.top_k * c.moe.intermediate_size)
        return -(-max(widths) // 32) * 32

    def _a8_rows(self) -> int:
        return max(self.model.max_rows, self.model.max_logit_rows)

    def _matmul(self, label: str, names: list[str], x: Buffer, y: Buffer, rows: int | None = None) -> None:
        rows = self.M if rows is None else rows
        bound = [self.model._matrix(name) for name in names]
        inputs: dict[str, Any] = {"x": x}
        if any(b.tensor.wtype != WType.bf16 for b in bound):
            inputs.update(self._a8(label, x, bound[0].tensor.k, rows))
        parts = [b.struct for b in bound]
        self._emit("matmul", label, w=parts, y=y, n_w=len(parts), M=rows, **inputs)

    def _moe_matmul(
        self, label: str, names: list[str], x: Buffer, ids: Buffer, y: Buffer, *, per_slot: bool
    ) -> None:
        moe = self.config.moe
        assert moe is not None
        bound = [self.model._matrix(name) for name in names]
        inputs: dict[str, Any] = {"x": x}
        if any(b.tensor.wtype != WType.bf16 for b in bound):
            rows = self.M * moe.top_k if per_slot else self.M
            inputs.update(self._a8(label, x, bound[0].tensor.k, rows))
        self._emit(
            "moe_matmul",
            label,
            w=[b.struct for b in bound],
            ids=ids,
            y=y,
            n_w=len(bound),
            M=self.M,
            T=moe.top_k,
            E=moe.num_experts,
            per_slot=int(per_slot),
            **inputs,
        )

    def _add(self, label: str, x: Buffer, y: Buffer, out: Buffer) -> Buffer:
        n = self.M * self.config.hidden_size
        self._emit("add", label, x=x, y=y, out=out, n=n, spread=self._spread)
        return out

    def _tap(
        self,
        field: str,
        layer: int | None,
        buffer: Buffer,
        count: int,
        *,
        offset: int = 0,
        width: int | None = None,
        by_slot: bool = False,
        rows_from: int = 0,
        extended: bool = False,
    ) -> None:
        """Hash ``count`` elements of each row; ``width`` elements from row to row (default: ``count``)."""
        if self.tap_level == "off" or (extended and self.tap_level != "extended"):
            return
        itemsize = buffer.dtype.itemsize
        stride = itemsize * (count if width is None else width)
        index = len(self.taps)
        tap = Tap(
            field=field,
            layer=layer,
            op_index=len(self.ops) - 1,
            buffer=buffer,
            offset=offset,
            stride=stride,
            nbytes=itemsize * count,
            dtype=buffer.dtype,
            by_slot=by_slot,
            rows_from=rows_from,
        )
        self.taps.append(tap)
        m = self.model
        out = m.buffer("hash", m.max_rows, np.uint64, most_taps(self.config))
        args: dict[str, Any] = {}
        if by_slot:
            args = {"row0": m.buffer("base", 1, np.int32), "row1": m.buffer("pos", 1, np.int32)}
        self._emit(
            "l2_hash",
            "tap." + tap_name(layer, field),
            x=(buffer, offset),
            out=(out, 8 * (index * self.M + rows_from)),
            stride=stride,
            M=self.M - rows_from,
            bytes=tap.nbytes,
            is_f32=int(buffer.dtype == np.float32),
            **args,
        )

    def _emit(self, name: str, label: str, **values: Any) -> None:
        spec = OPS[name]
        args = spec.args()
        known = {field[0] for field in spec.args._fields_}
        for key, value in values.items():
            if key not in known:  # ctypes would take any attribute silently
                raise TypeError(f"op {name} has no argument {key!r}")
            if isinstance(value, list):
                array = getattr(args, key)
                for i, item in enumerate(value):
                    array[i] = item
            elif isinstance(value, tuple):
                setattr(args, key, value[0].ptr + value[1])
            elif hasattr(value, "ptr"):
                setattr(args, key, value.ptr)
            elif value is not None:
                setattr(args, key, value)
        self.ops.append(Op(spec, args, label))
