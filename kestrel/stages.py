"""Ops of one row joined into stages: fewer launches, the same bits.

The planner looks for the op sequences that ``kernels/stages.cu`` and ``k_attn_stage`` implement and leaves
every other op as it is. Taps do not change what is joined: a stage leaves the bits of its ops wherever a tap
reads them, and a hash runs any time before its source is overwritten, so that many share a launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kestrel.launch import (
    ATTENTION_COUNTERS,
    STATIC_SHARED,
    Launch,
    Mode,
    Plan,
    SideLaunch,
    Tuning,
    attention_geometry,
    attention_shared_bytes,
    in_mode,
    launches,
    merge_hashes,
    norm_shared_bytes,
    router_shared_bytes,
)
from kestrel.ops import (
    AddArgs,
    AttentionArgs,
    KvAppendArgs,
    MatmulArgs,
    MoeCombineArgs,
    MoeMatmulArgs,
    Op,
    QkNormArgs,
    QuantizeA8Args,
    RmsNormArgs,
    RopeArgs,
    RouterTopkArgs,
    SwigluArgs,
    WType,
)
from kestrel.tap_schedule import TimedTap, group_taps


def _struct(name: str, *fields: tuple[str, Any]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


# Mirrors of kernels/stage_args.h.
PREFETCH_RANGES = 6
PrefetchRanges = _struct(
    "PrefetchRanges",
    ("start", ctypes.c_uint64 * PREFETCH_RANGES),
    ("bytes", ctypes.c_int64 * PREFETCH_RANGES),
)
NormA8Args = _struct("NormA8Args", ("norm", RmsNormArgs), ("a8", QuantizeA8Args))
NormMatmulArgs = _struct("NormMatmulArgs", ("norm", RmsNormArgs), ("a8", QuantizeA8Args), ("mm", MatmulArgs))
MatmulAddArgs = _struct("MatmulAddArgs", ("mm", MatmulArgs), ("add", AddArgs))
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
    ("next", PrefetchRanges),
    ("has_norm", ctypes.c_int32),
    ("has_a8", ctypes.c_int32),
)
NormRouterArgs = _struct(
    "NormRouterArgs",
    ("norm", RmsNormArgs),
    ("a8", QuantizeA8Args),
    ("mm", MatmulArgs),
    ("topk", RouterTopkArgs),
    ("counter", ctypes.c_uint64),
    ("next", PrefetchRanges),
)
GateUpArgs = _struct("GateUpArgs", ("mm", MoeMatmulArgs), ("swiglu", SwigluArgs), ("a8", QuantizeA8Args))
MoeDownArgs = _struct("MoeDownArgs", ("mm", MoeMatmulArgs), ("combine", MoeCombineArgs), ("add", AddArgs))

Range = tuple[int, int]  # first byte, byte after the last


@dataclass
class Stage:
    """A run of ops that one or more launches carry out."""

    ops: Sequence[Op]
    launches: list[Launch]
    written: list[Range]
    hidden: list[Range] = field(default_factory=list)  # what its ops would write and the stage does not
    # Where a tap after op i of the stage finds what it reads at this address; None: where it always is.
    moved: Callable[[int, int], int | None] = lambda i, address: None


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


# -- what an op writes --------------------------------------------------------------------------------------


def _outputs(op: Op) -> list[Range]:
    """The memory that ``op`` writes; of the KV cache, which is written by slot, only its first byte."""
    a: Any = op.args
    match op.name:
        case "embed":
            found = [(a.x, 4 * a.M * a.w.k)]
        case "rms_norm":
            found = [(a.out, 4 * a.M * a.d)]
        case "quantize_a8":
            found = [(a.q, a.M * a.K), (a.d, a.M * a.K // 8), (a.gsum, a.M * a.K // 8)]
        case "matmul":
            found = [(a.y, 4 * a.M * _rows(a))]
        case "qk_norm" | "rope":
            found = [(a.x, 4 * ((a.M - 1) * a.ld + a.heads * a.hd))]
        case "kv_append":
            found = [(a.kq, 1), (a.ks, 1), (a.vq, 1), (a.vs, 1)]
        case "attention":
            found = [(a.out, 4 * a.M * a.nh * a.hd)]
        case "add":
            found = [(a.x, 4 * a.n)]
        case "swiglu":
            found = [(a.h, 4 * a.R * a.F)]
        case "router_topk":
            found = [(a.ids, 4 * a.M * a.T), (a.weights, 4 * a.M * a.T)]
        case "moe_matmul":
            found = [(a.y, 4 * a.M * a.T * _rows(a))]
        case "moe_combine":
            found = [(a.out, 4 * a.M * a.H)]
        case "argmax":
            found = [(a.ids, 4 * a.M)]
        case _:
            raise KeyError(op.name)
    return [(start, start + nbytes) for start, nbytes in found]


def _written(ops: Sequence[Op]) -> list[Range]:
    return [r for op in ops for r in _outputs(op)]


def _rows(a: Any) -> int:
    return sum(int(a.w[i].n) for i in range(a.n_w))


def _source(tap: Any) -> Range:
    """The memory that a hash reads; of the KV cache only its first byte, as ``_outputs`` names it."""
    if tap.row0:
        return tap.x, tap.x + 1
    return tap.x, tap.x + (tap.M - 1) * tap.stride + tap.bytes


def _overlap(a: Range, others: Sequence[Range]) -> bool:
    return any(a[0] < end and start < a[1] for start, end in others)


# -- stages -------------------------------------------------------------------------------------------------
#
# Each function looks at the ops from some point on and returns the stage that begins there, or None.


def _names(ops: Sequence[Op], *names: str) -> bool:
    return len(ops) >= len(names) and all(op.name == name for op, name in zip(ops, names, strict=False))


def _shape(groups: int) -> tuple[str, int]:
    """Suffix of the kernel for rows of ``groups`` groups, and the rows a warp takes."""
    return ("u2r4", 4) if groups <= 64 else ("u4r2", 2)


def _units(mm: Any, rows: int) -> int:
    return sum(_ceil(mm.w[i].n, rows) for i in range(mm.n_w))


def _norm(ops: Sequence[Op], t: Tuning) -> Stage | None:
    """rms_norm and a8, with the matmul behind them when its blocks are few enough to norm each for itself."""
    if not _names(ops, "rms_norm", "quantize_a8"):
        return None
    norm: Any = ops[0].args
    a8: Any = ops[1].args
    if a8.x != norm.out or a8.M != norm.M or norm.d != a8.K:
        return None
    threads = 32 * t.stage_warps
    shared = norm_shared_bytes(norm.d)
    if shared > t.shared_limit - STATIC_SHARED:
        return None
    if norm.M == 1 and _names(ops, "rms_norm", "quantize_a8", "matmul"):
        mm: Any = ops[2].args
        suffix, rows = _shape(norm.d // 32)
        blocks = _ceil(_units(mm, rows), t.stage_warps)
        if mm.xq == a8.q and mm.M == 1 and blocks <= t.stage_max_blocks:
            args = NormMatmulArgs(norm, a8, mm)
            launch = Launch(f"k_norm_matmul_{suffix}", (blocks, 1, 1), (threads, 1, 1), shared, args)
            return Stage(ops[:3], [launch], _written(ops[:3]))
    launch = Launch("k_norm_a8", (norm.M, 1, 1), (threads, 1, 1), shared, NormA8Args(norm, a8))
    return Stage(ops[:2], [launch], _written(ops[:2]))


def _router(ops: Sequence[Op], t: Tuning, counter: int) -> Stage | None:
    if not counter or not _names(ops, "rms_norm", "matmul", "router_topk", "quantize_a8"):
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
    grid = (_ceil(weight.n, 4), 1, 1)
    launch = Launch("k_norm_router", grid, (32 * t.stage_warps, 1, 1), shared, args)
    return Stage(ops[:4], [launch], _written(ops[:4]))


def _matmul_add(ops: Sequence[Op], t: Tuning) -> Stage | None:
    if not _names(ops, "matmul", "add"):
        return None
    mm, add = ops[0].args, ops[1].args
    if mm.M != 1 or add.y != mm.y or add.n != _rows(mm) or any(mm.w[i].k % 32 for i in range(mm.n_w)):
        return None
    suffix, rows = _shape(mm.w[0].k // 32)
    blocks = _ceil(_units(mm, rows), t.row_warps)
    args = MatmulAddArgs(mm, add)
    launch = Launch(f"k_matmul_add_{suffix}", (blocks, 1, 1), (32 * t.row_warps, 1, 1), 0, args)
    return Stage(ops[:2], [launch], _written(ops[:2]))


def _gate_up(ops: Sequence[Op], t: Tuning) -> Stage | None:
    dense = _names(ops, "matmul", "swiglu", "quantize_a8")
    if not dense and not _names(ops, "moe_matmul", "swiglu", "quantize_a8"):
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
    return Stage(ops[:3], [launch], _written(ops[1:3]), hidden=_outputs(ops[0]))


def _moe_down(ops: Sequence[Op], t: Tuning) -> Stage | None:
    if not _names(ops, "moe_matmul", "moe_combine", "add"):
        return None
    mm, combine, add = (op.args for op in ops[:3])
    fits = mm.M == 1 and mm.n_w == 1 and mm.per_slot == 1 and mm.w[0].k % 32 == 0 and combine.y == mm.y
    if not fits or add.y != combine.out or add.n != combine.H:
        return None
    blocks = _ceil(mm.w[0].n, t.row_warps)
    shared = 4 * t.row_warps * mm.T
    args = MoeDownArgs(mm, combine, add)
    launch = Launch("k_moe_down", (blocks, 1, 1), (32 * t.row_warps, 1, 1), shared, args)
    return Stage(ops[:3], [launch], _written(ops[1:3]), hidden=_outputs(ops[0]))


def _attention(ops: Sequence[Op], t: Tuning) -> Stage | None:
    norms = 2 if _names(ops, "qk_norm", "qk_norm") else 0
    if not _names(ops[norms:], "rope", "kv_append", "attention"):
        return None
    rope, kv, attn = (op.args for op in ops[norms : norms + 3])
    q, size = rope.x, 4 * attn.nh * attn.hd
    fits = rope.M == 1 and kv.M == 1 and attn.M == 1 and attn.work and attn.q == q and kv.k == q + size
    if not fits or rope.heads != attn.nh + attn.nkv or attn.kq != kv.kq:
        return None
    args = AttentionStageArgs(rope=rope, kv=kv, attn=attn, has_norm=int(norms == 2))
    if norms:
        q_norm, k_norm = ops[0].args, ops[1].args
        if q_norm.x != q or q_norm.heads != attn.nh or k_norm.x != kv.k or k_norm.heads != attn.nkv:
            return None
        args.q_norm, args.k_norm = q_norm, k_norm
    grid, threads, heads = attention_geometry(attn, t)
    count = norms + 3
    if _names(ops[count:], "quantize_a8"):
        a8: Any = ops[count].args
        if a8.x == attn.out and a8.M == 1 and attn.hd % 32 == 0:
            args.a8, args.has_a8 = a8, 1
            count += 1
    args.normed = attn.work + 4 * ATTENTION_COUNTERS
    args.roped = args.normed + 8 * attn.nh * attn.hd
    rows = (q, q + 4 * (attn.nh + attn.nkv) * attn.hd)

    def moved(i: int, address: int) -> int | None:
        if not rows[0] <= address < rows[1]:
            return None
        return int((args.normed if i < norms else args.roped) + address - q)

    shared = attention_shared_bytes(heads, attn.hd, stage=True)
    launch = Launch("k_attn_stage", grid, (threads, 1, 1), shared, args)
    stored = (args.normed, args.roped + 4 * (attn.nh + attn.nkv) * attn.hd)
    # q and k stay as the matmul left them: the stage works on copies.
    return Stage(ops[:count], [launch], [stored, *_written(ops[norms + 1 : count])], moved=moved)


def _stages(ops: Sequence[Op], t: Tuning, taps: Sequence[Sequence[Any]]) -> list[Stage]:
    """Cut ``ops`` into stages; ``taps[i]`` are the hashes between op i and the next."""
    work = next((int(op.args.work) for op in ops if op.name == "attention"), 0)
    counter = work + 4 * (ATTENTION_COUNTERS - 1) if work else 0
    found: list[Stage] = []
    i = 0
    while i < len(ops):
        rest = ops[i:]
        stage = (
            _attention(rest, t)
            or _router(rest, t, counter)
            or _norm(rest, t)
            or _gate_up(rest, t)
            or _moe_down(rest, t)
            or _matmul_add(rest, t)
        )
        if stage is None or not _taps_fit(stage, taps[i : i + len(stage.ops)]):
            stage = Stage(ops[i : i + 1], launches(ops[i], "l2exact", t), _outputs(ops[i]))
        found.append(stage)
        i += len(stage.ops)
    _ask_ahead(found)
    return found


def _ask_ahead(stages: Sequence[Stage]) -> None:
    """Stages that leave the memory idle ask for the weights of the next stage whose matrices are known."""
    for i, stage in enumerate(stages):
        args: Any = stage.launches[0].args
        if not isinstance(args, (AttentionStageArgs, NormRouterArgs)):
            continue
        for later in stages[i + 1 :]:
            following: Any = later.launches[0].args
            if isinstance(following, (MatmulAddArgs, NormMatmulArgs)):
                _set_ranges(args.next, following.mm)
                break


def _set_ranges(ranges: Any, mm: Any) -> None:
    at = 0
    for i in range(mm.n_w):
        weight = mm.w[i]
        scales = 0 if weight.wtype == WType.bf16 else 2 * weight.n * (weight.k // 32)
        codes = weight.n * WType(weight.wtype).bytes_per_row(weight.k) - scales
        for start, nbytes in ((weight.codes, codes), (weight.scale, scales)):
            ranges.start[at], ranges.bytes[at] = start, nbytes
            at += 1


def _taps_fit(stage: Stage, taps: Sequence[Sequence[Any]]) -> bool:
    """Whether every tap within the stage can read its value after the whole stage."""
    for i, after in enumerate(taps):
        for tap in after:
            if stage.moved(i, tap.x) is not None:
                continue
            if _overlap(_source(tap), _written(stage.ops[i + 1 :])) or _overlap(_source(tap), stage.hidden):
                return False
    return True


def plan_stages(ops: Sequence[Op], mode: Mode, t: Tuning) -> Plan:
    """The launches of a whole step; every mode joins the same ops."""
    core = [op for op in ops if op.name != "l2_hash"]
    taps: list[list[Any]] = [[] for _ in range(len(core) + 1)]  # by the ops before them
    at = 0
    for op in ops:
        if op.name != "l2_hash":
            at += 1
        else:
            taps[at].append(op.args)
    stages = _stages(core, t, taps[1:])
    main: list[Launch] = []
    done: list[TimedTap] = []
    pending = [TimedTap(tap, 0, 0) for tap in taps[0]]
    at = 1
    for stage in stages:
        kept: list[TimedTap] = []
        for waiting in pending:
            if _overlap(_source(waiting.args), stage.written):
                done.append(replace(waiting, deadline=len(main)))
            else:
                kept.append(waiting)
        pending = kept
        main += in_mode(stage.launches, mode)
        for i, after in enumerate(taps[at : at + len(stage.ops)]):
            for tap in after:
                address = stage.moved(i, tap.x)
                if address is not None:
                    copy = type(tap).from_buffer_copy(tap)
                    copy.x = address
                    tap = copy
                pending.append(TimedTap(tap, len(main), 0))
        at += len(stage.ops)
    done += [replace(tap, deadline=len(main)) for tap in pending]
    side = [
        SideLaunch(launch, group.after, group.before)
        for group in group_taps(done, t.hash_beside)
        for launch in merge_hashes(group.taps, t)
    ]
    return Plan(main, side)
