"""Stages of the FFN, dense or of experts: ``kernels/moe_stages.cu``, ``kernels/moe_experts.cu``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kestrel.launch import STATIC_SHARED, Launch, Tuning, norm_terms, router_shared_bytes
from kestrel.ops import MoeMatmulArgs, Op, WType
from kestrel.stages.args import GateUpArgs, MoeDownArgs, NormRouterArgs
from kestrel.stages.stage import Range, Stage, ceil, names, outputs, written

QUADS = 8  # of a unit of the any forms of gate and up: four rows of each matrix
EXPERT_WARPS = 16  # of a block of k_moe_gate_up, at most
EXPERT_SPREAD = 32  # of h between k_moe_gate_up and k_moe_down, as in kernels/moe_experts.cu
ROUTER_ROWS = 4  # of a block, at most; as in kernels/moe_stages.cu


def _round_up(a: int, b: int) -> int:
    return ceil(a, b) * b


def _q4local(mm: Any) -> bool:
    return all(mm.w[i].wtype == WType.q4local for i in range(mm.n_w))


def _router_shared_bytes(d: int, rows: int) -> int:
    """Dynamic shared memory of ``k_norm_router`` (``RouterShared``)."""
    return 4 * (norm_terms(d) + _round_up(d, 256)) + 512 * (rows * ceil(d, 256) + 1)


def _norm_router(ops: Sequence[Op], t: Tuning) -> Launch | None:
    """rms_norm, router, a8."""
    norm, mm, a8 = (op.args for op in ops)
    weight = mm.w[0]
    fits = mm.n_w == 1 and weight.wtype == WType.bf16 and mm.x == norm.out
    if norm.M != 1 or not fits or a8.x != norm.out or a8.M != 1 or norm.d != a8.K or norm.d % 32:
        return None
    rows = min(max(ceil(weight.n, t.sms), t.router_rows), ROUTER_ROWS)
    shared = _router_shared_bytes(norm.d, rows)
    if shared > t.shared_limit - STATIC_SHARED:
        return None
    args = NormRouterArgs(norm, a8, mm, rows=rows)
    grid = (ceil(weight.n, rows), 1, 1)
    return Launch("k_norm_router", grid, (32 * t.stage_warps, 1, 1), shared, args)


def _gate_up(
    moe: Any, swiglu: Any, a8: Any, t: Tuning, topk: Any = None, with_a8: bool = True
) -> Launch | None:
    """The two matrices, SwiGLU, and a8 where it is wanted; with ``topk`` the choice of experts first."""
    experts, width, k = topk is not None, swiglu.F, moe.w[0].k
    slots = moe.T if experts else 1
    fits = moe.M == 1 and moe.n_w == 2 and moe.w[0].n == width and moe.w[1].n == width
    fits = fits and k % 32 == 0 and swiglu.gu == moe.y and slots == swiglu.R and not moe.per_slot
    fits = fits and a8.x == swiglu.h and slots == a8.M and width == a8.K and width % 32 == 0
    if not fits or a8.q == moe.xq:  # other blocks still read it
        return None
    if experts and not with_a8 and (launch := _expert_gate_up(moe, swiglu, a8, topk, t)):
        return launch
    units = slots * (width // 32) + experts  # one stores the choice
    warps = min(t.gate_up_warps, QUADS)
    shared = 4 * 64 + (router_shared_bytes(topk.E, topk.T) if experts else 0)
    if shared > t.shared_limit - STATIC_SHARED:
        return None
    args = GateUpArgs(moe, swiglu, a8)
    if experts:
        args.topk = topk
    name = f"k_{'moe_' if experts else ''}gate_up_any"
    return Launch(name, (min(units, t.sms * t.gate_up_blocks), 1, 1), (32 * warps, 1, 1), shared, args)


def _expert_gate_up(moe: Any, swiglu: Any, a8: Any, topk: Any, t: Tuning) -> Launch | None:
    """The choice of experts, gate, up and SwiGLU by rings of bulk copies, for q4local."""
    k, width = moe.w[0].k, swiglu.F
    copied = [moe.xq, moe.xd, moe.gsum, swiglu.gu, *(moe.w[i].scale for i in range(moe.n_w))]
    if not _q4local(moe) or k % 256 or any(address % 16 for address in copied):
        return None
    groups, quads = int(k) // 32, int(moe.T) * (int(width) // 4)
    blocks = min(quads, t.sms * t.expert_blocks)
    each = ceil(quads, blocks)

    def shared(warps: int) -> int:
        own = 40 * groups + 16 * warps + router_shared_bytes(topk.E, topk.T)
        return own + warps * 144 * groups  # RING_HALVES

    limit = t.shared_limit - STATIC_SHARED
    turns = ceil(each, min(t.expert_warps, EXPERT_WARPS))
    while turns < each and shared(ceil(each, turns)) > limit:
        turns += 1
    warps = ceil(each, turns)
    if shared(warps) > limit:
        return None
    args = GateUpArgs(moe, swiglu, a8, topk)
    return Launch("k_moe_gate_up", (blocks, 1, 1), (32 * warps, 1, 1), shared(warps), args)


def _down_shared_bytes(topk: Any, mm: Any, rows: int, cluster: int) -> int:
    """Dynamic shared memory of ``k_moe_down`` (``DownShared``)."""
    groups, chosen = int(mm.w[0].k) // 32, int(mm.T)
    share = chosen // cluster
    ranks, inputs = _round_up(chosen, 8), _round_up(share * groups, 4)
    own = 8 * _round_up(1 + share, 2) + 4 * ranks * (1 + rows) + 8 * inputs + 32 * share * groups
    return own + 18 * chosen * rows * groups + router_shared_bytes(topk.E, chosen)


def _down_rows(n: int, cluster: int, t: Tuning) -> int:
    """Rows to a block of a down stage: as few as fill the multiprocessors with whole clusters."""
    blocks = max(t.sms // cluster, 1) * cluster
    return max(4, min(_round_up(ceil(n, blocks), 4), t.down_rows // 4 * 4, 32 * t.down_warps))


def _down_any_shared_bytes(topk: Any, mm: Any, rows: int) -> int:
    """Dynamic shared memory of ``k_moe_down_any`` (``DownAnyShared``)."""
    chosen = int(mm.T)
    return router_shared_bytes(topk.E, chosen) + 4 * (_round_up(chosen, 4) + chosen * rows)


def _down(ops: Sequence[Op], topk: Any, h: int, t: Tuning) -> Launch | None:
    """The experts' down matrices, their combination, the residual; k_moe_down makes the a8 of ``h``."""
    mm, combine, add = (op.args for op in ops)
    fits = mm.M == 1 and mm.n_w == 1 and mm.per_slot == 1 and mm.w[0].k % 32 == 0 and combine.y == mm.y
    if not fits or mm.w[0].wtype == WType.bf16 or add.y != combine.out or add.n != combine.H:
        return None
    n, block = mm.w[0].n, (32 * t.down_warps, 1, 1)
    limit = t.shared_limit - STATIC_SHARED
    copied = (h, mm.w[0].scale)
    if _q4local(mm) and n % 4 == 0 and mm.w[0].k % 64 == 0 and not any(address % 16 for address in copied):
        cluster = min(t.down_cluster, t.max_cluster)
        while mm.T % cluster:
            cluster //= 2
        rows = _down_rows(n, cluster, t)
        while rows > 4 and _down_shared_bytes(topk, mm, rows, cluster) > limit:
            rows -= 4
        shared = _down_shared_bytes(topk, mm, rows, cluster)
        if shared <= limit:
            args = MoeDownArgs(mm, combine, add, topk, rows=rows)
            args.mm.x = h
            grid = (cluster * ceil(n, cluster * rows), 1, 1)
            return Launch("k_moe_down", grid, block, shared, args, cluster)
    rows = _down_rows(n, 1, t)
    shared = _down_any_shared_bytes(topk, mm, rows)
    if shared > limit:
        return None
    args = MoeDownArgs(mm, combine, add, topk, rows=rows)
    return Launch("k_moe_down_any", (ceil(n, rows), 1, 1), block, shared, args)


MOE_OPS = (
    *("rms_norm", "matmul", "router_topk", "quantize_a8", "moe_matmul", "swiglu"),
    *("quantize_a8", "moe_matmul", "moe_combine", "add"),
)


def moe_ffn(ops: Sequence[Op], t: Tuning) -> Stage | None:
    """The whole FFN of experts, in three launches in a row. The second one stores the choice, and lets the
    last one begin behind its own wait: so that one may read the router's logits ahead of its wait.
    """
    if not names(ops, *MOE_OPS):
        return None
    ops = ops[: len(MOE_OPS)]
    router, topk, a8, up, swiglu, h_a8, down, combine = (op.args for op in ops[1:9])
    chosen = topk.M == 1 and topk.logits == router.y and topk.E == router.w[0].n == up.E == down.E
    chosen = chosen and topk.ids == up.ids == down.ids and topk.weights == combine.weights
    chosen = chosen and topk.T == up.T == down.T == combine.T
    if not chosen or up.xq != a8.q or down.xq != h_a8.q:
        return None
    last = _down(ops[7:], topk, swiglu.h, t)
    with_a8 = last is None or last.kernel != "k_moe_down"
    launches = [
        _norm_router([ops[0], ops[1], ops[3]], t),
        _gate_up(up, swiglu, h_a8, t, topk, with_a8),
        last,
    ]
    found = [launch for launch in launches if launch is not None]
    if len(found) < len(launches):
        return None
    unseen: tuple[int, ...] = (4, 7)
    more: list[Range] = []
    if found[1].kernel == "k_moe_gate_up":  # h goes spread to k_moe_down, whose own its a8 is
        unseen = (4, 5, 6, 7)
        more = outputs(ops[4])  # its place is that of gate and up
        gate_up_args: Any = found[1].args
        down_args: Any = found[2].args
        gate_up_args.swiglu.h = down_args.mm.x = swiglu.gu
        down_args.spread = EXPERT_SPREAD
    seen = [op for i, op in enumerate(ops) if i not in unseen]
    return Stage(ops, found, [*written(seen), *more], hidden=written([ops[i] for i in unseen]))


def gate_up(ops: Sequence[Op], t: Tuning) -> Stage | None:
    """Gate, up, SwiGLU and a8 of a dense FFN whose norm is not joined (``matmul.norm_gate_up``)."""
    if not names(ops, "matmul", "swiglu", "quantize_a8"):
        return None
    mm, swiglu, a8 = (op.args for op in ops[:3])
    if mm.n_w != 2:
        return None
    moe = MoeMatmulArgs(ids=0, x=mm.x, xq=mm.xq, xd=mm.xd, gsum=mm.gsum, y=mm.y, n_w=2, M=mm.M, T=1, E=1)
    moe.w[0], moe.w[1] = mm.w[0], mm.w[1]
    launch = _gate_up(moe, swiglu, a8, t)
    if launch is None:
        return None
    return Stage(ops[:3], [launch], written(ops[1:3]), hidden=outputs(ops[0]))
