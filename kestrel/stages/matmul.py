"""Stages around one matrix product: ``kernels/stages.cu``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kestrel.launch import STATIC_SHARED, Launch, Tuning, norm_shared_bytes
from kestrel.ops import Op
from kestrel.stages.args import MatmulAddArgs, NormA8Args, NormMatmulArgs
from kestrel.stages.stage import Stage, ceil, names, rows_of, written


def shape_of(groups: int) -> tuple[str, int]:
    """Suffix of the kernel for rows of ``groups`` groups, and the rows a warp takes."""
    return ("u2r4", 4) if groups <= 64 else ("u4r2", 2)


def units(mm: Any, rows: int) -> int:
    return sum(ceil(mm.w[i].n, rows) for i in range(mm.n_w))


def norm(ops: Sequence[Op], t: Tuning) -> Stage | None:
    """rms_norm and a8, with the matmul behind them when its blocks are few enough to norm each for itself."""
    if not names(ops, "rms_norm", "quantize_a8"):
        return None
    norm: Any = ops[0].args
    a8: Any = ops[1].args
    if a8.x != norm.out or a8.M != norm.M or norm.d != a8.K:
        return None
    threads = 32 * t.stage_warps
    shared = norm_shared_bytes(norm.d)
    if shared > t.shared_limit - STATIC_SHARED:
        return None
    if norm.M == 1 and names(ops, "rms_norm", "quantize_a8", "matmul"):
        mm: Any = ops[2].args
        suffix, rows = shape_of(norm.d // 32)
        blocks = ceil(units(mm, rows), t.stage_warps)
        if mm.xq == a8.q and mm.M == 1 and blocks <= t.stage_max_blocks:
            args = NormMatmulArgs(norm, a8, mm)
            launch = Launch(f"k_norm_matmul_{suffix}", (blocks, 1, 1), (threads, 1, 1), shared, args)
            return Stage(ops[:3], [launch], written(ops[:3]))
    launch = Launch("k_norm_a8", (norm.M, 1, 1), (threads, 1, 1), shared, NormA8Args(norm, a8))
    return Stage(ops[:2], [launch], written(ops[:2]))


def matmul_add(ops: Sequence[Op], t: Tuning) -> Stage | None:
    if not names(ops, "matmul", "add"):
        return None
    mm, add = ops[0].args, ops[1].args
    if mm.M != 1 or add.y != mm.y or add.n != rows_of(mm) or any(mm.w[i].k % 32 for i in range(mm.n_w)):
        return None
    suffix, rows = shape_of(mm.w[0].k // 32)
    blocks = ceil(units(mm, rows), t.row_warps)
    args = MatmulAddArgs(mm, add)
    launch = Launch(f"k_matmul_add_{suffix}", (blocks, 1, 1), (32 * t.row_warps, 1, 1), 0, args)
    return Stage(ops[:2], [launch], written(ops[:2]))
