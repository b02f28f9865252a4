"""The op registry: the only meeting point of the model and the backends.

An op is a name of the numerics contract, an argument struct (``kernels/op_args.h`` has the same layout in C)
and the bytes it has to move. The model emits a list of ops; a backend runs them by name.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

SPREAD_LINE = 32  # elements of a row that lie side by side where it is spread: KESTREL_SPREAD_AT


def spread_width(width: int, spread: int) -> int:
    """Elements that a spread row of ``width`` takes."""
    return width + -(-width // SPREAD_LINE) * spread


Pointer = ctypes.c_uint64
Int = ctypes.c_int32
Float = ctypes.c_float


class WType(IntEnum):
    """Weight formats, contract section 1."""

    bf16 = 0
    q4local = 1
    q8local = 2

    def bytes_per_row(self, k: int) -> int:
        """Bytes of one row of ``k`` weights, scales included."""
        groups = k // 32
        return {WType.bf16: 2 * k, WType.q4local: 18 * groups, WType.q8local: 34 * groups}[self]


class Weight(ctypes.Structure):
    """One matrix, or a stack of equal matrices (experts)."""

    _fields_ = [
        ("codes", Pointer),
        ("scale", Pointer),
        ("wtype", Int),
        ("n", Int),
        ("k", Int),
        ("reserved", Int),
    ]


def _struct(name: str, *fields: tuple[str, Any]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


def _pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, Pointer) for name in names]


def _ints(*names: str) -> list[tuple[str, Any]]:
    return [(name, Int) for name in names]


EmbedArgs = _struct("EmbedArgs", ("w", Weight), *_pointers("ids", "x"), *_ints("M", "spread"))
RmsNormArgs = _struct(
    "RmsNormArgs", *_pointers("x", "w", "out"), *_ints("M", "d"), ("eps", Float), *_ints("spread")
)
QuantizeA8Args = _struct("QuantizeA8Args", *_pointers("x", "q", "d", "gsum"), *_ints("M", "K"))
MatmulArgs = _struct(
    "MatmulArgs",
    ("w", Weight * 3),
    *_pointers("x", "xq", "xd", "gsum", "y"),
    *_ints("n_w", "M"),
)
QkNormArgs = _struct(
    "QkNormArgs",
    *_pointers("x", "w"),
    *_ints("M", "heads", "hd", "ld"),
    ("eps", Float),
    *_ints("reserved"),
)
RopeArgs = _struct(
    "RopeArgs",
    *_pointers("x", "pos", "inv_freq"),
    *_ints("M", "heads", "hd", "ld"),
    ("factor", Float),
    *_ints("reserved"),
)
KvAppendArgs = _struct(
    "KvAppendArgs",
    *_pointers("k", "v", "kq", "ks", "vq", "vs", "pos", "base"),
    *_ints("M", "nkv", "hd", "ld"),
)
AttentionArgs = _struct(
    "AttentionArgs",
    *_pointers("q", "kq", "ks", "vq", "vs", "pos", "base", "out", "work", "copies"),
    *_ints("M", "nh", "nkv", "hd", "ld"),
    ("qscale", Float),
)
AddArgs = _struct("AddArgs", *_pointers("x", "y", "out"), ("n", ctypes.c_int64), *_ints("spread", "reserved"))
SwigluArgs = _struct("SwigluArgs", *_pointers("gu", "h"), *_ints("R", "F"))
RouterTopkArgs = _struct(
    "RouterTopkArgs",
    *_pointers("logits", "ids", "weights"),
    *_ints("M", "E", "T", "norm_topk_prob"),
)
MoeMatmulArgs = _struct(
    "MoeMatmulArgs",
    ("w", Weight * 2),
    *_pointers("ids", "x", "xq", "xd", "gsum", "y"),
    *_ints("n_w", "M", "T", "E", "per_slot", "reserved"),
)
MoeCombineArgs = _struct(
    "MoeCombineArgs", *_pointers("y", "weights", "out"), *_ints("M", "T", "H", "reserved")
)
ArgmaxArgs = _struct("ArgmaxArgs", *_pointers("logits", "ids"), *_ints("M", "V"))
L2HashArgs = _struct(
    "L2HashArgs",
    *_pointers("x", "row0", "row1", "out"),
    ("stride", ctypes.c_int64),
    *_ints("M", "bytes", "is_f32", "reserved"),
)


def _weight_bytes(w: Any) -> int:
    return int(w.n) * WType(w.wtype).bytes_per_row(int(w.k))


def _a8_bytes(rows: int, k: int) -> int:
    return rows * (k + 8 * (k // 32))


def _matmul_bytes(a: Any) -> int:
    parts = [a.w[i] for i in range(a.n_w)]
    k = parts[0].k
    reads_f32 = any(w.wtype == WType.bf16 for w in parts)
    reads_a8 = any(w.wtype != WType.bf16 for w in parts)
    x = (4 * a.M * k if reads_f32 else 0) + (_a8_bytes(a.M, k) if reads_a8 else 0)
    return int(sum(map(_weight_bytes, parts)) + x + 4 * a.M * sum(w.n for w in parts))


def _moe_matmul_bytes(a: Any) -> int:
    """Each chosen expert counted once per row that chose it: the bytes of M = 1, an upper bound for M > 1."""
    parts = [a.w[i] for i in range(a.n_w)]
    k = parts[0].k
    rows = a.M * a.T if a.per_slot else a.M
    x = 4 * rows * k if parts[0].wtype == WType.bf16 else _a8_bytes(rows, k)
    out = 4 * a.M * a.T * sum(w.n for w in parts)
    return int(a.M * a.T * sum(map(_weight_bytes, parts)) + x + out)


@dataclass(frozen=True)
class OpSpec:
    """What a backend and a test need to know of an op."""

    name: str
    section: str  # of docs/numerics.md
    kernel: str  # exact device kernel under kernels/
    args: type[ctypes.Structure]
    bytes_moved: Callable[[Any], int]  # args -> bytes read and written, KV rows of attention excluded


OPS: dict[str, OpSpec] = {
    spec.name: spec
    for spec in [
        OpSpec("embed", "9", "k_embed", EmbedArgs, lambda a: a.M * 8 * a.w.k),
        OpSpec("rms_norm", "4", "k_rms_norm_cpu", RmsNormArgs, lambda a: 8 * a.M * a.d + 4 * a.d),
        OpSpec(
            "quantize_a8",
            "2",
            "k_quantize_a8",
            QuantizeA8Args,
            lambda a: 4 * a.M * a.K + _a8_bytes(a.M, a.K),
        ),
        OpSpec("matmul", "3", "k_matmul", MatmulArgs, _matmul_bytes),
        OpSpec("qk_norm", "4", "k_qk_norm_cpu", QkNormArgs, lambda a: 8 * a.M * a.heads * a.hd),
        OpSpec("rope", "5", "k_rope", RopeArgs, lambda a: 8 * a.M * a.heads * a.hd),
        OpSpec("kv_append", "6", "k_kv_append", KvAppendArgs, lambda a: 2 * a.M * a.nkv * (5 * a.hd + 4)),
        OpSpec(
            "attention",
            "7",
            "k_attn_decode_online",
            AttentionArgs,
            lambda a: 8 * a.M * a.nh * a.hd,
        ),
        OpSpec("add", "9", "k_add", AddArgs, lambda a: 12 * a.n),
        OpSpec("swiglu", "9", "k_swiglu", SwigluArgs, lambda a: 12 * a.R * a.F),
        OpSpec(
            "router_topk",
            "8",
            "k_router_topk",
            RouterTopkArgs,
            lambda a: 4 * a.M * (a.E + 2 * a.T),
        ),
        OpSpec("moe_matmul", "3", "k_moe_matmul", MoeMatmulArgs, _moe_matmul_bytes),
        OpSpec(
            "moe_combine",
            "9",
            "k_moe_combine",
            MoeCombineArgs,
            lambda a: 4 * a.M * (a.T * (a.H + 1) + a.H),
        ),
        OpSpec("argmax", "10", "k_argmax", ArgmaxArgs, lambda a: 4 * a.M * a.V),
        OpSpec("l2_hash", "12", "k_l2_hash", L2HashArgs, lambda a: a.M * a.bytes),
    ]
}


@dataclass(frozen=True)
class Op:
    """One op of a forward pass, its buffers bound."""

    spec: OpSpec
    args: ctypes.Structure
    label: str  # "l12.qkv": layer and role, for messages and profiles

    @property
    def name(self) -> str:
        return self.spec.name
