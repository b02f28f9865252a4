"""Stages of the FFN, dense or of experts: ``kernels/moe_stages.cu``."""

from __future__ import annotations

from collections.abc import Sequence

from kestrel.launch import STATIC_SHARED, Launch, Tuning, norm_shared_bytes, router_shared_bytes
from kestrel.ops import MoeMatmulArgs, Op, WType
from kestrel.stages.args import GateUpArgs, MoeDownArgs, NormRouterArgs
from kestrel.stages.stage import Stage, ceil, names, outputs, written


def router(ops: Sequence[Op], t: Tuning, counter: int) -> Stage | None:
    if not counter or not names(ops, "rms_norm", "matmul", "router_topk", "quantize_a8"):
        return None
    norm, mm, topk, a8 = (op.args for op in ops[:4])
    weight = mm.w[0]
    fits = mm.n_w == 1 and weight.wtype == WType.bf16 and mm.x == norm.out and topk.logits == mm.y
    if norm.M != 1 or not fits or a8.x != norm.out or a8.M != 1 or norm.d % 32:
        return None
    shared = max(norm_shared_bytes(norm.d) + 4 * 2 * (weight.k + 8), router_shared_bytes(topk.E, topk.T))
    if shared > t.shared_limit - STATIC_SHARED:
        return None
    args = NormRouterArgs(norm, a8, mm, topk, counter)
    grid = (ceil(weight.n, 4), 1, 1)
    launch = Launch("k_norm_router", grid, (32 * t.stage_warps, 1, 1), shared, args)
    return Stage(ops[:4], [launch], written(ops[:4]))


def gate_up(ops: Sequence[Op], t: Tuning) -> Stage | None:
    dense = names(ops, "matmul", "swiglu", "quantize_a8")
    if not dense and not names(ops, "moe_matmul", "swiglu", "quantize_a8"):
        return None
    mm, swiglu, a8 = (op.args for op in ops[:3])
    slots = 1 if dense else mm.T
    width = swiglu.F
    fits = mm.M == 1 and mm.n_w == 2 and mm.w[0].n == width and mm.w[1].n == width and mm.w[0].k % 32 == 0
    fits = fits and swiglu.gu == mm.y and slots == swiglu.R and a8.x == swiglu.h
    if not fits or slots != a8.M or width != a8.K or width % 32:
        return None
    if a8.q == mm.xq:  # other blocks still read it
        return None
    if dense:
        moe = MoeMatmulArgs(ids=0, x=mm.x, xq=mm.xq, xd=mm.xd, gsum=mm.gsum, y=mm.y, n_w=2, M=1, T=1, E=1)
        moe.w[0], moe.w[1] = mm.w[0], mm.w[1]
    else:
        moe = mm
    suffix = "u2" if mm.w[0].k <= 2048 else "u4"
    launch = Launch(
        f"k_gate_up_{suffix}",
        (width // 32, slots, 1),
        (32 * t.gate_up_warps, 1, 1),
        0,
        GateUpArgs(moe, swiglu, a8),
    )
    return Stage(ops[:3], [launch], written(ops[1:3]), hidden=outputs(ops[0]))


def moe_down(ops: Sequence[Op], t: Tuning) -> Stage | None:
    if not names(ops, "moe_matmul", "moe_combine", "add"):
        return None
    mm, combine, add = (op.args for op in ops[:3])
    fits = mm.M == 1 and mm.n_w == 1 and mm.per_slot == 1 and mm.w[0].k % 32 == 0 and combine.y == mm.y
    if not fits or add.y != combine.out or add.n != combine.H:
        return None
    blocks = ceil(mm.w[0].n, t.row_warps)
    shared = 4 * t.row_warps * mm.T
    args = MoeDownArgs(mm, combine, add)
    launch = Launch("k_moe_down", (blocks, 1, 1), (32 * t.row_warps, 1, 1), shared, args)
    return Stage(ops[:3], [launch], written(ops[1:3]), hidden=outputs(ops[0]))
