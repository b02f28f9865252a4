"""Stages around one matrix product: ``kernels/stages.cu`` and, at the end of a step, ``kernels/head.cu``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kestrel.launch import (
    HEAD_FORMS,
    MATMUL_ADD_FORMS,
    NORM_MATMUL_FORMS,
    STATIC_SHARED,
    Launch,
    Tuning,
    copied_row_bytes,
    norm_shared_bytes,
    norm_terms,
    split_row_bytes,
    stream_bytes,
    stream_piece_bytes,
)
from kestrel.ops import Op, WType
from kestrel.stages.args import (
    HeadArgs,
    MatmulAddArgs,
    NormA8Args,
    NormGateUpArgs,
    NormMatmulArgs,
    StreamArgs,
)
from kestrel.stages.stage import Stage, ceil, names, outputs, rows_of, written

HEAD_BLOCKS = 1024  # as in kernels/head.cu
NORM_MATMUL_ROWS, MATMUL_ADD_ROWS, HEAD_ROWS = 4, 2, 4  # of a stream, as in the kernels
MOST_STREAMS = 16  # warps of a block: kernels that stream have up to 64 registers
PIECE_STEPS = 16  # of a row that does not stay whole, at most
STEPS_AT_ONCE = {4: 2, 2: 8}  # of a row, by the rows of a stream, as in kernels/q4_stream.cuh
GATE_UP_QUADS = 16  # of a unit, as in kernels/gate_up_stage.cu


def units(mm: Any, rows: int) -> int:
    """What the warps of a launch take in turn: runs of ``rows`` rows of one matrix."""
    return sum(ceil(mm.w[i].n, rows) for i in range(mm.n_w))


def _loads(mm: Any) -> int:
    """Loads of a thread for a quantised row that all slots of a warp share."""
    wide = 2 if any(mm.w[i].wtype == WType.q8local for i in range(mm.n_w)) else 1
    return ceil(max(mm.w[i].k for i in range(mm.n_w)), 4 * 256) * wide


def weights_of(mm: Any) -> str:
    """What forms the weights of ``mm`` allow, by name: one format, or any."""
    kinds = {WType(mm.w[i].wtype) for i in range(mm.n_w)}
    if kinds == {WType.q4local}:  # a stream takes whole steps, by copies of 16 bytes
        whole = all(mm.w[i].k % 256 == 0 and mm.w[i].scale % 16 == 0 for i in range(mm.n_w))
        return "q4" if whole else "any"
    if len(kinds) > 1:
        return "any"
    return "q8" if kinds == {WType.q8local} else "bf16"


def loads_and_rows(form: str) -> tuple[int, int]:
    """Loads of a thread for a row, and rows of a warp."""
    return int(form[-3]), int(form[-1])


def stream_of(
    each: int, k: int, rows: int, input_bytes: int, t: Tuning, most: int = MOST_STREAMS, codes: int = 16
) -> tuple[int, Any] | None:
    """Dynamic shared memory and ``StreamArgs`` of a block with ``each`` units of ``rows`` rows.

    None where there is no room. The units go to as few warps as need no more turns than ``most`` would.
    Where ``t.ring_bytes`` hold all weights of a block, or two units a warp, a unit is one piece. Otherwise
    pieces are as long as leaves every warp two of them, of four to sixteen steps.
    """
    room = min(t.ring_bytes, t.shared_limit - STATIC_SHARED - input_bytes - 16)
    steps = k // 256

    def warps(most: int) -> int:
        return ceil(each, ceil(each, max(1, min(most, t.streams))))

    def bytes_of(steps: int) -> int:
        return stream_piece_bytes(rows, steps, codes) + 8  # and its gate

    streams = warps(most)
    turns = ceil(each, streams)
    pieces = min(turns, room // (streams * bytes_of(steps)))
    if pieces < min(turns, 2):
        at_once = STEPS_AT_ONCE[rows]
        longest = PIECE_STEPS
        while longest > max(4, at_once) and 2 * streams * bytes_of(longest) > room:
            longest -= at_once
        streams = min(streams, warps(min(most, room // (2 * bytes_of(longest)))))
        even = ceil(steps, ceil(steps, longest))
        steps = min(steps, ceil(even, at_once) * at_once)
        pieces = max(1, room // (streams * bytes_of(steps)))
    shared = stream_bytes(streams, pieces, stream_piece_bytes(rows, steps, codes)) + input_bytes
    if not _fits(shared, t):
        return None
    return shared, StreamArgs(streams=streams, pieces=pieces, steps=steps)


def streams_of(mm: Any, rows: int, input_bytes: int, t: Tuning) -> tuple[int, int, Any] | None:
    """Blocks, one on each multiprocessor, and ``stream_of`` for the rows of ``mm``."""
    found = units(mm, rows)
    blocks = min(found, t.sms * t.stage_blocks)
    codes = 32 if mm.w[0].wtype == WType.q8local else 16  # bytes of a group
    stream = stream_of(ceil(found, blocks), mm.w[0].k, rows, input_bytes, t, codes=codes)
    return None if stream is None else (blocks, *stream)


def form_of(mm: Any, forms: Sequence[str], warps: int, weights: str) -> str:
    """The form of ``forms`` for ``warps`` warps that is made for ``weights``, or else for any.

    The one that leaves the busiest warp the fewest rows, with half a row on top for each of its turns.
    """
    listed = [form for form in forms if form.startswith(f"{weights}_")]
    if not listed:
        listed = [form for form in forms if form.startswith("any_")]
    # Four rows of bf16 go side by side, whatever their length.
    short = _loads(mm) <= 2 or _reads_bf16(mm)
    listed = [form for form in listed if (loads_and_rows(form)[0] == 2) == short] or listed

    def cost(form: str) -> int:
        rows = loads_and_rows(form)[1]
        return ceil(units(mm, rows), warps) * (2 * rows + 1)

    return min(listed, key=cost)


def _most_blocks(mm: Any, t: Tuning) -> int:
    nbytes = sum(mm.w[i].n * WType(mm.w[i].wtype).bytes_per_row(mm.w[i].k) for i in range(mm.n_w))
    return t.sms * t.stage_blocks * (2 if nbytes > t.sms * t.stage_bytes else 1)


def _fits(shared: int, t: Tuning) -> bool:
    return shared <= t.shared_limit - STATIC_SHARED


def _normed_row_bytes(d: int) -> int:
    """Dynamic shared memory of a block that norms a row for streamed weights (``SplitRow``, its terms)."""
    return split_row_bytes(d) + 4 * norm_terms(d)


def _norm_warps(d: int, streams: int, t: Tuning) -> int:
    """Warps of a block that norms a row and streams; a thread norms eight elements at a time."""
    return max(streams, min(max(ceil(d, 256), t.stage_warps), MOST_STREAMS))


def norm(ops: Sequence[Op], t: Tuning) -> Stage | None:
    """rms_norm and a8, with the matmul behind them unless it opens an FFN, which has a stage of its own."""
    if not names(ops, "rms_norm", "quantize_a8"):
        return None
    norm: Any = ops[0].args
    a8: Any = ops[1].args
    if a8.x != norm.out or a8.M != norm.M or norm.d != a8.K:
        return None
    threads = 32 * t.stage_warps
    shared = norm_shared_bytes(norm.d)
    if not _fits(shared, t):
        return None
    joined = names(ops, "rms_norm", "quantize_a8", "matmul") and not names(ops[2:], "matmul", "swiglu")
    if norm.M == 1 and joined:
        mm: Any = ops[2].args
        if mm.xq == a8.q and mm.M == 1:
            launch = _norm_matmul_q4(norm, a8, mm, t)
            if launch is None:
                most = _most_blocks(mm, t)
                form = form_of(mm, NORM_MATMUL_FORMS, most * t.stage_warps, "any")
                grid = (min(units(mm, loads_and_rows(form)[1]), most), 1, 1)
                args = NormMatmulArgs(norm, a8, mm)
                launch = Launch(f"k_norm_matmul_{form}", grid, (threads, 1, 1), shared, args)
            return Stage(ops[:3], [launch], written(ops[:3]))
    launch = Launch("k_norm_a8", (norm.M, 1, 1), (threads, 1, 1), shared, NormA8Args(norm, a8))
    return Stage(ops[:2], [launch], written(ops[:2]))


def _norm_matmul_q4(norm: Any, a8: Any, mm: Any, t: Tuning) -> Launch | None:
    if weights_of(mm) != "q4":
        return None
    found = streams_of(mm, NORM_MATMUL_ROWS, _normed_row_bytes(norm.d), t)
    if found is None:
        return None
    blocks, shared, stream = found
    warps = _norm_warps(norm.d, stream.streams, t)
    args = NormMatmulArgs(norm, a8, mm, stream)
    return Launch("k_norm_matmul_q4", (blocks, 1, 1), (32 * warps, 1, 1), shared, args)


def norm_gate_up(ops: Sequence[Op], t: Tuning) -> Stage | None:
    """The first half of a dense FFN of q4local weights: norm, a8, gate and up, SwiGLU, a8."""
    if not names(ops, "rms_norm", "quantize_a8", "matmul", "swiglu", "quantize_a8"):
        return None
    norm, a8, mm, swiglu, h_a8 = (op.args for op in ops[:5])
    width = swiglu.F
    fits = norm.M == 1 and mm.M == 1 and mm.n_w == 2 and mm.w[0].n == mm.w[1].n == width and width % 32 == 0
    fits = fits and weights_of(mm) == "q4" and mm.w[0].k == norm.d == a8.K
    fits = fits and a8.x == norm.out and mm.xq == a8.q and swiglu.gu == mm.y and swiglu.R == 1
    fits = fits and h_a8.x == swiglu.h and h_a8.M == 1 and width == h_a8.K and h_a8.q != a8.q
    if not fits:
        return None
    units = width // 32
    blocks = min(units, t.sms * t.stage_blocks)
    each = GATE_UP_QUADS * ceil(units, blocks)
    found = stream_of(each, norm.d, 4, 4 * 128 + _normed_row_bytes(norm.d), t, GATE_UP_QUADS // 2)
    if found is None:
        return None
    shared, stream = found
    warps = _norm_warps(norm.d, stream.streams + 1, t)  # one makes h
    args = NormGateUpArgs(norm, a8, mm, swiglu, h_a8, stream)
    launch = Launch("k_norm_gate_up", (blocks, 1, 1), (32 * warps, 1, 1), shared, args)
    return Stage(ops[:5], [launch], written([*ops[:2], *ops[3:5]]), hidden=outputs(ops[2]))


def _matmul_add_q4(mm: Any, add: Any, t: Tuning) -> Launch | None:
    if weights_of(mm) != "q4":
        return None
    found = streams_of(mm, MATMUL_ADD_ROWS, split_row_bytes(mm.w[0].k), t)
    if found is None:
        return None
    blocks, shared, stream = found
    warps = max(stream.streams, min(t.stage_warps, MOST_STREAMS))
    args = MatmulAddArgs(mm, add, stream, 1)
    return Launch("k_matmul_add_q4", (blocks, 1, 1), (32 * warps, 1, 1), shared, args)


def matmul_add(ops: Sequence[Op], t: Tuning) -> Stage | None:
    """matmul and the residual behind it."""
    if not names(ops, "matmul", "add"):
        return None
    mm, add = ops[0].args, ops[1].args
    if mm.M != 1 or add.y != mm.y or add.n != rows_of(mm) or any(mm.w[i].k % 32 for i in range(mm.n_w)):
        return None
    launch = _matmul_add_q4(mm, add, t) or _matmul_add_any(mm, add, t)
    return Stage(ops[:2], [launch], written(ops[:2]))


def _matmul_add_any(mm: Any, add: Any, t: Tuning) -> Launch:
    most = _most_blocks(mm, t)
    k = mm.w[0].k
    row = (copied_row_bytes(k) if mm.xq else 0) + (4 * k if _reads_bf16(mm) else 0)
    form = form_of(mm, MATMUL_ADD_FORMS, most * t.stage_warps, "any")
    staged = _fits(row, t)
    args = MatmulAddArgs(mm, add, staged=int(staged))
    grid = (min(units(mm, loads_and_rows(form)[1]), most), 1, 1)
    return Launch(f"k_matmul_add_{form}", grid, (32 * t.stage_warps, 1, 1), row if staged else 0, args)


def _reads_bf16(mm: Any) -> bool:
    return any(mm.w[i].wtype == WType.bf16 for i in range(mm.n_w))


def head(ops: Sequence[Op], t: Tuning) -> Stage | None:
    """The end of a step of one row: final norm, a8 where the head is quantised, head matrix, argmax."""
    has_a8 = names(ops, "rms_norm", "quantize_a8", "matmul", "argmax")
    if not has_a8 and not names(ops, "rms_norm", "matmul", "argmax"):
        return None
    count = 4 if has_a8 else 3
    norm: Any = ops[0].args
    mm: Any = ops[count - 2].args
    argmax: Any = ops[count - 1].args
    fits = norm.M == 1 and mm.M == 1 and argmax.M == 1 and mm.n_w == 1 and mm.w[0].k == norm.d
    fits = fits and norm.d % 32 == 0 and argmax.logits == mm.y and mm.w[0].n == argmax.V
    args = HeadArgs(norm=norm, mm=mm, argmax=argmax, has_a8=int(has_a8))
    if has_a8:
        a8: Any = ops[1].args
        args.a8 = a8
        fits = fits and a8.x == norm.out and norm.d == a8.K and mm.xq == a8.q
    if _reads_bf16(mm):
        fits = fits and mm.x == norm.out
    elif not has_a8:
        return None
    if not fits or not _fits(norm_shared_bytes(norm.d), t):
        return None
    launch = _head_stream(args, t)
    if launch is None:
        form = form_of(mm, HEAD_FORMS, 1, weights_of(mm))
        grid = (min(units(mm, loads_and_rows(form)[1]), t.sms * t.head_blocks, HEAD_BLOCKS), 1, 1)
        launch = Launch(f"k_head_{form}", grid, (32 * t.stage_warps, 1, 1), norm_shared_bytes(norm.d), args)
    return Stage(ops[:count], [launch], written(ops[:count]))


def _head_stream(args: Any, t: Tuning) -> Launch | None:
    weights = weights_of(args.mm)
    if weights not in ("q4", "q8") or args.mm.w[0].k % 256 or args.mm.w[0].scale % 16:
        return None
    own = replace(t, ring_bytes=t.head_ring_bytes)
    found = streams_of(args.mm, HEAD_ROWS, _normed_row_bytes(args.norm.d), own)
    if found is None or found[0] > HEAD_BLOCKS:
        return None
    blocks, shared, args.stream = found
    warps = _norm_warps(args.norm.d, args.stream.streams, t)
    return Launch(f"k_head_{weights}", (blocks, 1, 1), (32 * warps, 1, 1), shared, args)
