"""Stages around one matrix product: ``kernels/stages.cu`` and, at the end of a step, ``kernels/head.cu``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    normed_row_bytes,
    q4_rows_bytes,
)
from kestrel.ops import Op, WType
from kestrel.stages.args import HeadArgs, MatmulAddArgs, NormA8Args, NormMatmulArgs
from kestrel.stages.stage import Stage, ceil, names, rows_of, written

HEAD_BLOCKS = 1024  # as in kernels/head.cu


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
    if kinds == {WType.q4local}:
        return "any" if any(mm.w[i].k % 256 for i in range(mm.n_w)) else "q4"
    if len(kinds) > 1:
        return "any"
    return "q8" if kinds == {WType.q8local} else "bf16"


def loads_and_rows(form: str) -> tuple[int, int]:
    """Loads of a thread for a row, and rows of a warp."""
    return int(form[-3]), int(form[-1])


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


def _form(mm: Any, forms: Sequence[str], warps: int, t: Tuning, row: Callable[[str], int]) -> tuple[str, int]:
    """The form, and its dynamic shared memory: ``row`` is that of the input, by what the form is for."""
    for weights in dict.fromkeys((weights_of(mm), "any")):
        form = form_of(mm, forms, warps, weights)
        shared = row(form)
        if form.startswith("q4_"):
            shared += q4_rows_bytes(t.stage_warps, mm.w[0].k, *loads_and_rows(form))
        if _fits(shared, t):
            break
    return form, shared


def _normed(d: int, form: str) -> int:
    return normed_row_bytes(d) if form.startswith("q4_") else norm_shared_bytes(d)


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
            most = _most_blocks(mm, t)
            warps = most * t.stage_warps
            form, shared = _form(mm, NORM_MATMUL_FORMS, warps, t, lambda form: _normed(norm.d, form))
            args = NormMatmulArgs(norm, a8, mm)
            grid = (min(units(mm, loads_and_rows(form)[1]), most), 1, 1)
            launch = Launch(f"k_norm_matmul_{form}", grid, (threads, 1, 1), shared, args)
            return Stage(ops[:3], [launch], written(ops[:3]))
    launch = Launch("k_norm_a8", (norm.M, 1, 1), (threads, 1, 1), shared, NormA8Args(norm, a8))
    return Stage(ops[:2], [launch], written(ops[:2]))


def matmul_add(ops: Sequence[Op], t: Tuning) -> Stage | None:
    """matmul and the residual behind it."""
    if not names(ops, "matmul", "add"):
        return None
    mm, add = ops[0].args, ops[1].args
    if mm.M != 1 or add.y != mm.y or add.n != rows_of(mm) or any(mm.w[i].k % 32 for i in range(mm.n_w)):
        return None
    most = _most_blocks(mm, t)
    k = mm.w[0].k
    any_row = (copied_row_bytes(k) if mm.xq else 0) + (4 * k if _reads_bf16(mm) else 0)
    form, shared = _form(
        mm,
        MATMUL_ADD_FORMS,
        most * t.stage_warps,
        t,
        lambda form: copied_row_bytes(k) if form.startswith("q4_") else any_row,
    )
    staged = _fits(shared, t)
    args = MatmulAddArgs(mm, add, int(staged))
    block = (32 * t.stage_warps, 1, 1)
    grid = (min(units(mm, loads_and_rows(form)[1]), most), 1, 1)
    launch = Launch(f"k_matmul_add_{form}", grid, block, shared if staged else 0, args)
    return Stage(ops[:2], [launch], written(ops[:2]))


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
    form, shared = _form(mm, HEAD_FORMS, 1, t, lambda form: _normed(norm.d, form))
    grid = (min(units(mm, loads_and_rows(form)[1]), t.sms * t.head_blocks, HEAD_BLOCKS), 1, 1)
    launch = Launch(f"k_head_{form}", grid, (32 * t.stage_warps, 1, 1), shared, args)
    return Stage(ops[:count], [launch], written(ops[:count]))
