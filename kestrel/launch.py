"""Launch geometry: which kernel runs an op, with which grid, block and shared memory.

One table for every backend that runs the kernels under ``kernels/``. Nothing here may change a bit: kernels
stride over whatever grid they get, and each output element is computed in the contract's order whoever
computes it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Literal

from kestrel.errors import BackendError
from kestrel.ops import L2HashArgs, Op, WType

Mode = Literal["fast", "bitexact", "l2exact"]
Dim3 = tuple[int, int, int]

ARGMAX_ROWS, ARGMAX_BLOCKS = 8, 64  # as in kernels/head.cu
CLUSTER_CHUNKS = 32  # that clusters merge, at most: a lane to each
CHUNK = 256  # positions of an attention chunk, contract section 7
CODES_BYTES = 8 * (32 + 4) * 16  # of eight heads in a chunk, as in kernels/attention_values.cuh
MERGE_PITCH = 64  # f32[4] of a head that merges, as in kernels/attention_unit.cuh
EXP_TABLE_BYTES = 8 * 64  # of a copy in shared memory
UNIT_HEADS = 8  # query heads that a block of the attention stage takes, at most
ATTENTION_COUNTERS = 4096  # u32 at the start of the attention workspace
SPLIT_ROWS = 8  # passes of more rows let one block walk all chunks of a row: there are blocks enough
LONG_TILES = 256  # of a row whose hash many blocks share, as in kernels/l2_hash.cu
HASH_BYTES = 32  # of a row to a thread
STATIC_SHARED = 1024  # bytes left for what kernels declare themselves
TILE_COLUMNS = 32  # weight rows of a warp's tile
TILE_WARPS = 4
ROW_SPREAD = 32  # elements left out behind every 32 of a row that all multiprocessors read at a time
# Forms of the stages around one matrix: the format of the weights, u loads of a thread in flight for each of
# the r rows of a warp. q4, q8: streams of rows of whole steps of 256 elements (Q4Stream).
NORM_MATMUL_FORMS = ("q4", "any_u2r4", "any_u4r2")
MATMUL_ADD_FORMS = ("q4", "any_u2r4", "any_u4r2")
HEAD_FORMS = ("q4", "q8", "q8_u2r4", "bf16_u2r4", "any_u2r4")
MATRIX_STAGES = (
    *(f"k_norm_matmul_{form}" for form in NORM_MATMUL_FORMS),
    *(f"k_matmul_add_{form}" for form in MATMUL_ADD_FORMS),
    *(f"k_head_{form}" for form in HEAD_FORMS),
)
# Gate, up and SwiGLU: q4local, behind the norm, or any weights.
GATE_UP_STAGES = ("k_norm_gate_up", "k_gate_up_any")
# Attention: heads of up to 128 elements, of exactly so many, and of up to 256.
ATTENTION_STAGES = ("k_attn_stage", "k_attn_stage_128", "k_attn_stage_wide")
# By clusters: heads of up to 128 elements, and of exactly so many.
ATTENTION_CLUSTERS = ("k_attn_cluster", "k_attn_cluster_128")
# Of experts: q4local, or any weights.
EXPERT_STAGES = ("k_moe_gate_up", "k_moe_gate_up_any", "k_moe_down", "k_moe_down_any")


@dataclass(frozen=True)
class Tuning:
    """Parameters of speed alone."""

    sms: int = 132  # multiprocessors to fill
    shared_limit: int = 232448  # bytes of shared memory that a block may take, as on Hopper
    max_cluster: int = 8  # blocks of a cluster, at most, as on Hopper; 1: the GPU has no clusters
    elementwise_threads: int = 256
    norm_threads: int = 256
    qk_norm_heads: int = 4  # heads of a block
    a8_warps: int = 4
    matmul_warps: int = 4  # four weight rows each
    matmul_max_blocks: int = 1 << 16
    tiled_rows: int = 16  # input rows from which quantised matrices go by 16 x 32 tiles
    matmul_row_tile: int = 8  # input rows that share a weight load, at most: 1, 2, 4, 8
    rope_blocks: int = 4  # of one row
    rope_threads: int = 128
    kv_warps: int = 4
    attention_heads: int = 8  # query heads of a block, at most
    attention_slots: int = 64  # blocks that share the chunks and heads of one row and KV head
    attention_threads: int = 256
    attention_blocks: int = 0  # of the attention stage; 0: one on every multiprocessor
    attention_ahead: int = 1  # 0: blocks with many chunks have room for V of one alone
    attention_turns: int = (
        3  # chunks of a block, above which a multiprocessor has two blocks, if a launch merges
    )
    attention_cluster: int = 8  # blocks that make a few chunks of a few heads together: 2, 4, 8; or 1: none
    cluster_heads: int = 4  # query heads of such a cluster, at most: 1, 2, 4, 8
    cluster_chunks: int = 8  # of 256 positions, that clusters merge, at most 32
    merge_chunks: int = 12  # of 256 positions; where there are more, they are merged in a launch of their own
    merge_threads: int = 256  # of such a launch, at most 256: as many chunks go by at a time
    router_threads: int = 128
    argmax_threads: int = 256
    argmax_blocks: int = 64  # of one row, at most
    stage_warps: int = 8  # of the stages that begin with a norm
    stage_blocks: int = 1  # of the stages around one matrix, on a multiprocessor
    apart: int = 1  # 0: the GPU may place several blocks of a stage on one multiprocessor
    stage_bytes: int = 1 << 16  # weights of a multiprocessor above which the any forms take twice the blocks
    streams: int = 16  # warps of a block that take rows of q4local matrices, at most 16
    ring_bytes: int = 96 << 10  # of a block for such rows on their way
    head_ring_bytes: int = 56 << 10  # the same of the head
    head_blocks: int = 2  # of the head, on a multiprocessor
    router_rows: int = 2  # of a block, at most 4; more where there are more rows than multiprocessors
    gate_up_warps: int = 8
    gate_up_blocks: int = 2  # on a multiprocessor
    expert_blocks: int = 1  # of the choice, gate and up of experts, on a multiprocessor
    expert_warps: int = 12  # of such a block, at most 16
    down_warps: int = 8
    down_cluster: int = 2  # blocks that share the experts of their rows, at most: 1, 2, 4, 8
    down_rows: int = 32  # of an expert's matrix, to a block, at most
    hash_threads: int = 256  # of a block, at most 256
    hash_long_bytes: int = 1 << 15  # of a row that many blocks share, if it is the only one of its tap
    shared_carveout: int = 100  # percent of L1 to be shared memory; -1: as each kernel needs
    programmatic: int = 1  # 0: a kernel begins when the one before it has ended
    hash_beside: int = 2  # launches that hashes should have to run beside


# Kernels that call wait_for_previous before they touch what another kernel writes (kernels/port.cuh): on GPUs
# that can, they are launched while the kernel before them still runs. Their ``_fast`` forms are meant, too.
PROGRAMMATIC = frozenset(
    {
        "k_embed",
        "k_norm_a8",
        *(name for name in MATRIX_STAGES if not name.startswith("k_head")),  # they want L1, not shared memory
        *ATTENTION_STAGES,
        *ATTENTION_CLUSTERS,
        "k_attn_merge",
        "k_norm_router",
        *GATE_UP_STAGES,
        *EXPERT_STAGES,
        "k_matmul",
        "k_argmax",
        "k_l2_hash_many",
        "k_l2_hash_long",
        "k_feedback",
    }
)

# Of these, the ones that let the next kernel begin before they wait. Any number of them may follow each other
# and run at a time, so what may follow them reads, ahead of its own wait, nothing that a kernel of this step
# wrote.
STARTS_NEXT_FIRST = frozenset(
    {
        "k_norm_a8",
        *(name for name in MATRIX_STAGES if name.startswith("k_norm_")),
        "k_matmul_add_q4",
        *ATTENTION_STAGES,
        *ATTENTION_CLUSTERS,
        "k_attn_merge",
        "k_norm_router",
        "k_norm_gate_up",
        "k_moe_down",
    }
)
# The ones that read ahead of their wait what the kernel two before them wrote: the router's logits.
READS_TWO_BEFORE = frozenset({"k_moe_down", "k_moe_down_any"})
# And what was written before the step, whose first launch waits for everything: the position and the cache.
READS_BEFORE_STEP = frozenset({*ATTENTION_STAGES, *ATTENTION_CLUSTERS, "k_attn_merge"})


@dataclass(frozen=True)
class Launch:
    """One kernel launch; ``args`` is the kernel's single parameter, by value."""

    kernel: str
    grid: Dim3
    block: Dim3
    shared: int  # bytes of dynamic shared memory
    args: ctypes.Structure
    cluster: int = 1  # blocks along x that run at the same time and reach each other's shared memory
    table: bytes = b""  # what ``args.table`` points at, where there is one: the backend keeps a copy


class L2HashManyArgs(ctypes.Structure):
    """Of ``k_l2_hash_many``: several taps in one launch."""

    _fields_ = [("table", ctypes.c_uint64)]  # L2HashArgs[gridDim.y]


class L2HashLongArgs(ctypes.Structure):
    """Of ``k_l2_hash_long``: one row by many blocks, in three launches."""

    _fields_ = [("tap", L2HashArgs), ("phase", ctypes.c_int32), ("reserved", ctypes.c_int32)]


@dataclass(frozen=True)
class SideLaunch:
    """Runs beside main launches ``after`` to ``before - 1``; main launch ``before`` waits for it."""

    launch: Launch
    after: int
    before: int


@dataclass(frozen=True)
class Plan:
    """The launches of a step: ``main`` in order, ``side`` in order of their start beside them."""

    main: list[Launch]
    side: list[SideLaunch]

    def in_line(self, *, late: bool = False) -> list[Launch]:
        """One order for one queue: each side launch as early as it may start, or as late."""
        found: list[Launch] = []
        for position in range(len(self.main) + 1):
            found += [s.launch for s in self.side if position == (s.before if late else s.after)]
            found += self.main[position : position + 1]
        return found


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, b: int) -> int:
    return _ceil(a, b) * b


def attention_work_bytes(rows: int, heads: int, head_dim: int, context: int) -> int:
    """Bytes of ``AttentionArgs.work`` for passes of at most ``rows`` rows over ``context`` positions.

    The memory must be zero before the first launch; every launch leaves its counters zero.
    """
    states = min(rows, SPLIT_ROWS) * heads * _ceil(context, CHUNK)
    rows_for_taps = 4 * heads * head_dim  # q and k of one row, after the norm and after RoPE
    return 4 * (ATTENTION_COUNTERS + rows_for_taps + states * (head_dim + 4))


def norm_shared_bytes(d: int) -> int:
    """Dynamic shared memory of a block that norms a row of ``d`` elements (``NormShared``)."""
    floats = norm_terms(d) + _round_up(d, 4) + 2 * _round_up(d // 32, 4)
    return 4 * floats + _round_up(d, 16)


def norm_terms(d: int) -> int:
    """Floats that the terms of a norm take."""
    return _round_up(d // 8 + d % 8, 4)


def stream_piece_bytes(rows: int, steps: int, codes: int = 16) -> int:
    """Shared memory of a piece of ``rows`` rows by ``steps`` steps of 256 elements (``Q4Stream``)."""
    apart = 64 if codes == 32 else 128 // rows
    return rows * (_round_up(8 * (codes + 2) * steps - apart, 128) + apart)


def stream_bytes(streams: int, pieces: int, piece_bytes: int) -> int:
    """Dynamic shared memory for the weights on their way to a block (``Q4Stream``)."""
    return _round_up(8 * streams * pieces, 16) + streams * pieces * piece_bytes


def split_row_bytes(k: int) -> int:
    """Dynamic shared memory of an a8 row for streamed weights (``SplitRow``)."""
    return k + 8 * (k // 32 + 104)


def copied_row_bytes(k: int) -> int:
    """Dynamic shared memory of a copied a8 row for other forms."""
    return k + 2 * 4 * _round_up(k // 32, 4)


def attention_stage_shared_bytes(head_dim: int) -> int:
    """Dynamic shared memory of a block of the attention stage (``UnitShared``)."""
    heads, warps = 8, CHUNK // 32
    positions = CHUNK + 4  # UNIT_PITCH
    floats = max(positions * heads, (heads + 2) * (_round_up(head_dim, 64) + 4)) + head_dim + 2 * CHUNK
    floats += heads + 4 + 3 * heads + 2 * warps
    values = max(CHUNK * head_dim, heads * 16 * MERGE_PITCH)
    return 4 * floats + CODES_BYTES + EXP_TABLE_BYTES + (heads + 2) * head_dim + values


def attention_merge_shared_bytes(threads: int) -> int:
    """Dynamic shared memory of a block that merges the chunks of 32 elements of a head (``merge_part``)."""
    return 4 * (threads + 8) * (4 + 32) + _round_up(4 * threads // 32, 16)


def attention_shared_bytes(heads: int, head_dim: int) -> int:
    """Dynamic shared memory of an attention block of ``heads`` query heads (``AttentionShared``)."""
    floats = heads * CHUNK + CHUNK + heads * head_dim + _round_up(6 * heads, 4) + 4
    return (heads + CHUNK) * head_dim + _ceil(heads, 8) * CODES_BYTES + EXP_TABLE_BYTES + 4 * floats


def router_shared_bytes(experts: int, chosen: int) -> int:
    """Dynamic shared memory of a block that chooses experts (``ChoiceShared``)."""
    words = _round_up(experts, 8) + _round_up(experts, 4) + 2 * _round_up(chosen, 4)
    return 4 * (words + 8 + 32)


# -- one function per op -----------------------------------------------------------------------------------


def _embed(a: Any, t: Tuning) -> list[Launch]:
    n = t.elementwise_threads
    return [Launch("k_embed", (_ceil(a.w.k, n), a.M, 1), (n, 1, 1), 0, a)]


def _rms_norm(a: Any, t: Tuning) -> list[Launch]:
    return [Launch("k_rms_norm_cpu", (a.M, 1, 1), (t.norm_threads, 1, 1), norm_shared_bytes(a.d), a)]


def _quantize_a8(a: Any, t: Tuning) -> list[Launch]:
    blocks = _ceil(a.M * (a.K // 32), 4 * t.a8_warps)
    return [Launch("k_quantize_a8", (blocks, 1, 1), (32 * t.a8_warps, 1, 1), 0, a)]


def _row_tile(rows: int, t: Tuning) -> int:
    tile = 1
    while tile < rows and tile < t.matmul_row_tile:
        tile *= 2
    return tile


def _tiled(a: Any, t: Tuning) -> bool:
    return t.tiled_rows <= a.M and all(a.w[i].wtype != WType.bf16 for i in range(a.n_w))


def _column_tiles(a: Any) -> int:
    return sum(_ceil(a.w[i].n, TILE_COLUMNS) for i in range(a.n_w))


def _matmul(a: Any, t: Tuning) -> list[Launch]:
    if _tiled(a, t):
        grid = (_ceil(_column_tiles(a), TILE_WARPS), min(_ceil(a.M, 16), 65535), 1)
        return [Launch("k_matmul_tiled", grid, (32 * TILE_WARPS, 1, 1), 0, a)]
    total = sum(a.w[i].n for i in range(a.n_w))
    tile = _row_tile(a.M, t)
    blocks = min(_ceil(total, 4 * t.matmul_warps), t.matmul_max_blocks)
    kernel = "k_matmul" if tile == 1 else f"k_matmul_m{tile}"
    return [Launch(kernel, (blocks, _ceil(a.M, tile), 1), (32 * t.matmul_warps, 1, 1), 0, a)]


def _qk_norm(a: Any, t: Tuning) -> list[Launch]:
    check_head_dim(a.hd)
    heads = t.qk_norm_heads
    blocks = _ceil(a.M * a.heads, heads)
    return [Launch("k_qk_norm_cpu", (blocks, 1, 1), (32, heads, 1), 0, a)]


def _rope(a: Any, t: Tuning) -> list[Launch]:
    return [Launch("k_rope", (min(t.rope_blocks, a.heads), a.M, 1), (t.rope_threads, 1, 1), 4 * a.hd, a)]


def _kv_append(a: Any, t: Tuning) -> list[Launch]:
    blocks = _ceil(2 * a.M * a.nkv, t.kv_warps)
    return [Launch("k_kv_append", (blocks, 1, 1), (32 * t.kv_warps, 1, 1), 0, a)]


def attention_geometry(a: Any, t: Tuning) -> tuple[Dim3, int, int]:
    """Grid, threads and query heads of a block of an attention launch."""
    check_head_dim(a.hd)
    per_kv = a.nh // a.nkv
    most = min(per_kv, t.attention_heads)
    while most > 1 and attention_shared_bytes(most, a.hd) > t.shared_limit - STATIC_SHARED:
        most -= 1
    slices = _ceil(per_kv, most)
    heads = _ceil(per_kv, slices)
    slots = t.attention_slots if a.M <= SPLIT_ROWS and a.work else 1
    if slots > 1 and a.M * a.nh >= ATTENTION_COUNTERS:
        raise BackendError(
            f"attention over {a.M} rows of {a.nh} heads needs {ATTENTION_COUNTERS} counters or more"
        )
    threads = t.attention_threads
    return (slots, a.nkv * slices, a.M), threads, heads


def _attention(a: Any, t: Tuning) -> list[Launch]:
    grid, threads, heads = attention_geometry(a, t)
    shared = attention_shared_bytes(heads, a.hd)
    return [Launch("k_attn_decode_online", grid, (threads, 1, 1), shared, a)]


def check_head_dim(hd: int) -> None:
    """BackendError unless the kernels have a form for heads of ``hd`` elements."""
    if hd % 16 or hd > 256:
        raise BackendError(f"the kernels take head sizes that are multiples of 16 up to 256, not {hd}")


def _add(a: Any, t: Tuning) -> list[Launch]:
    n = t.elementwise_threads
    return [Launch("k_add", (min(_ceil(a.n, n), 1 << 16), 1, 1), (n, 1, 1), 0, a)]


def _swiglu(a: Any, t: Tuning) -> list[Launch]:
    n = t.elementwise_threads
    return [Launch("k_swiglu", (_ceil(a.F, n), min(a.R, 65535), 1), (n, 1, 1), 0, a)]


def _router_topk(a: Any, t: Tuning) -> list[Launch]:
    shared = router_shared_bytes(a.E, a.T)
    return [Launch("k_router_topk", (a.M, 1, 1), (t.router_threads, 1, 1), shared, a)]


def _moe_matmul(a: Any, t: Tuning) -> list[Launch]:
    if _tiled(a, t):
        grid = (_ceil(_column_tiles(a), TILE_WARPS), min(a.E, 65535), 1)
        return [Launch("k_moe_matmul_tiled", grid, (32 * TILE_WARPS, 1, 1), 0, a)]
    total = sum(a.w[i].n for i in range(a.n_w))
    blocks = min(_ceil(total, 4 * t.matmul_warps), t.matmul_max_blocks)
    return [Launch("k_moe_matmul", (blocks, min(a.M * a.T, 65535), 1), (32 * t.matmul_warps, 1, 1), 0, a)]


def _moe_combine(a: Any, t: Tuning) -> list[Launch]:
    n = t.elementwise_threads
    return [Launch("k_moe_combine", (_ceil(a.H, n), min(a.M, 65535), 1), (n, 1, 1), 0, a)]


def _argmax(a: Any, t: Tuning) -> list[Launch]:
    threads = min(t.argmax_threads, _round_up(a.V, 32))
    several = a.M <= ARGMAX_ROWS
    blocks = min(t.argmax_blocks, ARGMAX_BLOCKS, _ceil(a.V, 4 * threads)) if several else 1
    return [Launch("k_argmax", (blocks, min(a.M, 65535), 1), (threads, 1, 1), 0, a)]


def _hash_threads(nbytes: int, t: Tuning) -> int:
    return min(t.hash_threads, max(32, _round_up(_ceil(nbytes, HASH_BYTES), 32)))


def _l2_hash(a: Any, t: Tuning) -> list[Launch]:
    return [Launch("k_l2_hash", (a.M, 1, 1), (_hash_threads(a.bytes, t), 1, 1), 0, a)]


_BUILDERS: dict[str, Callable[[Any, Tuning], list[Launch]]] = {
    "embed": _embed,
    "rms_norm": _rms_norm,
    "quantize_a8": _quantize_a8,
    "matmul": _matmul,
    "qk_norm": _qk_norm,
    "rope": _rope,
    "kv_append": _kv_append,
    "attention": _attention,
    "add": _add,
    "swiglu": _swiglu,
    "router_topk": _router_topk,
    "moe_matmul": _moe_matmul,
    "moe_combine": _moe_combine,
    "argmax": _argmax,
    "l2_hash": _l2_hash,
}

# Kernels with a fast form; it takes the launch of its exact one. What attention reads and does (QK-norm,
# RoPE, the cache, the scores) stays exact in mode bitexact.
_FAST = {
    "k_rms_norm_cpu": "k_rms_norm_fast",
    "k_swiglu": "k_swiglu_fast",
    **{
        name: f"{name}_fast"
        for name in (
            "k_norm_a8",
            *MATRIX_STAGES,
            "k_norm_router",
            *GATE_UP_STAGES,
            *EXPERT_STAGES,
        )
    },
}
_FAST_ATTENTION = {
    "k_qk_norm_cpu": "k_qk_norm_fast",
    "k_rope": "k_rope_fast",
    "k_attn_decode_online": "k_attn_fast",
    **{name: f"{name}_fast" for name in (*ATTENTION_STAGES, *ATTENTION_CLUSTERS, "k_attn_merge")},
}


def in_mode(found: Sequence[Launch], mode: Mode) -> list[Launch]:
    """The launches with the kernels of ``mode``; ``bitexact`` keeps attention exact, the rest is fast."""
    names: dict[str, str] = {"l2exact": {}, "bitexact": _FAST, "fast": {**_FAST, **_FAST_ATTENTION}}[mode]
    return [replace(launch, kernel=names.get(launch.kernel, launch.kernel)) for launch in found]


def launches(op: Op, mode: Mode = "l2exact", tuning: Tuning | None = None) -> list[Launch]:
    """The launches of one op, in order."""
    return in_mode(_BUILDERS[op.name](op.args, tuning or Tuning()), mode)


def merge_hashes(taps: Sequence[Any], tuning: Tuning | None = None) -> Launch:
    """Taps that may be hashed at the same time, in one launch."""
    t = tuning or Tuning()
    args = L2HashManyArgs()
    threads = max(_hash_threads(tap.bytes, t) for tap in taps)
    grid = (max(tap.M for tap in taps), len(taps), 1)
    return Launch("k_l2_hash_many", grid, (threads, 1, 1), 0, args, table=b"".join(map(bytes, taps)))


def hash_last(taps: Sequence[Any], tuning: Tuning | None = None) -> list[Launch]:
    """Hashes at the end of a step, when nothing else is left to run: many blocks share a long row."""
    t = tuning or Tuning()
    long: list[tuple[Any, int]] = []  # with its tiles
    short: list[Any] = []
    for tap in taps:
        tiles = _ceil(tap.bytes, HASH_BYTES * t.hash_threads)
        shared = tap.M == 1 and tap.bytes % 4 == 0 and tap.bytes > t.hash_long_bytes
        if shared and 1 < tiles <= LONG_TILES:
            long.append((tap, tiles))
        else:
            short.append(tap)
    found = [merge_hashes(short, t)] if short else []
    for tap, tiles in long:
        for phase, guesses in enumerate((8, 8, 1)):
            args = L2HashLongArgs(tap, phase)
            found.append(Launch("k_l2_hash_long", (tiles, guesses, 1), (t.hash_threads, 1, 1), 0, args))
    return found


def taps_of(launch: Launch) -> list[Any]:
    """The ``l2_hash`` arguments of a launch that hashes."""
    args: Any = launch.args
    if isinstance(args, L2HashManyArgs):
        return list((L2HashArgs * launch.grid[1]).from_buffer_copy(launch.table))
    return [args.tap] if isinstance(args, L2HashLongArgs) else []


class MergeBy(IntEnum):
    """How attention of one row merges its chunks: each is planned for other positions."""

    nobody = 0  # there is one
    cluster = 1  # only for as many as ``Tuning.cluster_chunks``
    last_block = 2
    launch = 3
    launch_double = 4  # states by two blocks on a multiprocessor


def head_groups(ops: Sequence[Op]) -> int:
    """Runs of up to eight query heads of one KV head in the attention of ``ops``, each a block's; 0: none."""
    attn: Any = next((op.args for op in ops if op.name == "attention"), None)
    return 0 if attn is None else attn.nkv * _ceil(attn.nh // attn.nkv, UNIT_HEADS)


def merge_by(position: int, tuning: Tuning, groups: int) -> MergeBy:
    """The fastest way at ``position``, by ``head_groups``. All but ``cluster`` are right at any position."""
    t, chunks = tuning, position // CHUNK + 1
    if chunks > t.merge_chunks:
        blocks = max(t.sms // max(groups, 1), 1)  # of a group, with one on each multiprocessor
        return MergeBy.launch if chunks <= t.attention_turns * blocks else MergeBy.launch_double
    if min(t.attention_cluster, t.max_cluster) > 1 and 1 < chunks <= min(t.cluster_chunks, CLUSTER_CHUNKS):
        return MergeBy.cluster
    return MergeBy.nobody if chunks == 1 else MergeBy.last_block


def plan(ops: Sequence[Op], mode: Mode = "l2exact", tuning: Tuning | None = None, position: int = 0) -> Plan:
    """The launches of a whole step: ops of one row joined into stages where there is a stage for them
    (``kestrel.stages``), taps beside them (``kestrel.tap_schedule``). ``position``: see ``merge_by``.
    """
    from kestrel.stages import plan_stages  # it builds on this module

    return plan_stages(ops, mode, tuning or Tuning(), position)
