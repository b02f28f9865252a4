"""What a stage is, and what the functions that build one share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kestrel.launch import Launch
from kestrel.ops import Op, spread_width

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


def ceil(a: int, b: int) -> int:
    return -(-a // b)


# -- what an op writes --------------------------------------------------------------------------------------


def outputs(op: Op) -> list[Range]:
    """The memory that ``op`` writes; of the KV cache, which is written by slot, only its first byte."""
    a: Any = op.args
    match op.name:
        case "embed":
            found = [(a.x, 4 * a.M * spread_width(a.w.k, a.spread))]
        case "rms_norm":
            found = [(a.out, 4 * a.M * a.d)]
        case "quantize_a8":
            found = [(a.q, a.M * a.K), (a.d, a.M * a.K // 8), (a.gsum, a.M * a.K // 8)]
        case "matmul":
            found = [(a.y, 4 * a.M * rows_of(a))]
        case "qk_norm" | "rope":
            found = [(a.x, 4 * ((a.M - 1) * a.ld + a.heads * a.hd))]
        case "kv_append":
            found = [(a.kq, 1), (a.ks, 1), (a.vq, 1), (a.vs, 1)]
        case "attention":
            found = [(a.out, 4 * a.M * a.nh * a.hd)]
        case "add":
            found = [(a.out, 4 * spread_width(a.n, a.spread))]
        case "swiglu":
            found = [(a.h, 4 * a.R * a.F)]
        case "router_topk":
            found = [(a.ids, 4 * a.M * a.T), (a.weights, 4 * a.M * a.T)]
        case "moe_matmul":
            found = [(a.y, 4 * a.M * a.T * rows_of(a))]
        case "moe_combine":
            found = [(a.out, 4 * a.M * a.H)]
        case "argmax":
            found = [(a.ids, 4 * a.M)]
        case _:
            raise KeyError(op.name)
    return [(start, start + nbytes) for start, nbytes in found]


def written(ops: Sequence[Op]) -> list[Range]:
    return [r for op in ops for r in outputs(op)]


def rows_of(a: Any) -> int:
    return sum(int(a.w[i].n) for i in range(a.n_w))


def source(tap: Any) -> Range:
    """The memory that a hash reads; of the KV cache only its first byte, as ``outputs`` names it."""
    if tap.row0:
        return tap.x, tap.x + 1
    return tap.x, tap.x + (tap.M - 1) * tap.stride + tap.bytes


def overlap(a: Range, others: Sequence[Range]) -> bool:
    return any(a[0] < end and start < a[1] for start, end in others)


def names(ops: Sequence[Op], *names: str) -> bool:
    return len(ops) >= len(names) and all(op.name == name for op, name in zip(ops, names, strict=False))
