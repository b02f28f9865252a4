"""Argument structs of the stages: mirrors of ``kernels/stage_args.h``."""

from __future__ import annotations

import ctypes
from typing import Any

from kestrel.ops import (
    AddArgs,
    ArgmaxArgs,
    AttentionArgs,
    KvAppendArgs,
    MatmulArgs,
    MoeCombineArgs,
    MoeMatmulArgs,
    QkNormArgs,
    QuantizeA8Args,
    RmsNormArgs,
    RopeArgs,
    RouterTopkArgs,
    SwigluArgs,
)


def _struct(name: str, *fields: tuple[str, Any]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


StreamArgs = _struct(
    "StreamArgs",
    ("streams", ctypes.c_int32),
    ("pieces", ctypes.c_int32),
    ("steps", ctypes.c_int32),
    ("reserved", ctypes.c_int32),
)
NormA8Args = _struct("NormA8Args", ("norm", RmsNormArgs), ("a8", QuantizeA8Args))
NormMatmulArgs = _struct(
    "NormMatmulArgs",
    ("norm", RmsNormArgs),
    ("a8", QuantizeA8Args),
    ("mm", MatmulArgs),
    ("stream", StreamArgs),
)
NormGateUpArgs = _struct(
    "NormGateUpArgs",
    ("norm", RmsNormArgs),
    ("a8", QuantizeA8Args),
    ("mm", MatmulArgs),
    ("swiglu", SwigluArgs),
    ("h_a8", QuantizeA8Args),
    ("stream", StreamArgs),
)
MatmulAddArgs = _struct(
    "MatmulAddArgs",
    ("mm", MatmulArgs),
    ("add", AddArgs),
    ("stream", StreamArgs),
    ("staged", ctypes.c_int32),
    ("reserved", ctypes.c_int32),
)
HeadArgs = _struct(
    "HeadArgs",
    ("norm", RmsNormArgs),
    ("a8", QuantizeA8Args),
    ("mm", MatmulArgs),
    ("argmax", ArgmaxArgs),
    ("stream", StreamArgs),
    ("has_a8", ctypes.c_int32),
    ("reserved", ctypes.c_int32),
)
AttentionStageArgs = _struct(
    "AttentionStageArgs",
    ("q_norm", QkNormArgs),
    ("k_norm", QkNormArgs),
    ("rope", RopeArgs),
    ("kv", KvAppendArgs),
    ("attn", AttentionArgs),
    ("a8", QuantizeA8Args),
    ("normed", ctypes.c_uint64),
    ("roped", ctypes.c_uint64),
    ("has_norm", ctypes.c_int32),
    ("has_a8", ctypes.c_int32),
    ("merges", ctypes.c_int32),
    ("ahead", ctypes.c_int32),
)
AttentionClusterArgs = _struct(
    "AttentionClusterArgs",
    ("stage", AttentionStageArgs),
    ("heads", ctypes.c_int32),
    ("behind", ctypes.c_int32),
)
NormRouterArgs = _struct(
    "NormRouterArgs",
    ("norm", RmsNormArgs),
    ("a8", QuantizeA8Args),
    ("mm", MatmulArgs),
    ("rows", ctypes.c_int32),
    ("reserved", ctypes.c_int32),
)
GateUpArgs = _struct(
    "GateUpArgs",
    ("mm", MoeMatmulArgs),
    ("swiglu", SwigluArgs),
    ("a8", QuantizeA8Args),
    ("topk", RouterTopkArgs),
)
MoeDownArgs = _struct(
    "MoeDownArgs",
    ("mm", MoeMatmulArgs),
    ("combine", MoeCombineArgs),
    ("add", AddArgs),
    ("topk", RouterTopkArgs),
    ("rows", ctypes.c_int32),
    ("spread", ctypes.c_int32),
)
