"""Moves taps to where they can be hashed together.

A tap has to be hashed before anything overwrites the buffer it reads, and no sooner. The first op that would
overwrite one waits for all taps pending by then, so that one launch hashes them: three launches a layer
instead of one for each tap. No other op moves, and no kernel changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kestrel.ops import Op

Span = tuple[int, int]  # addresses, end exclusive


def _f32(address: int, count: int) -> Span:
    return address, address + 4 * count


def _heads(a: Any) -> Span:
    return _f32(a.x, (a.M - 1) * a.ld + a.heads * a.hd)


def _sum_n(a: Any) -> int:
    return sum(a.w[i].n for i in range(a.n_w))


# What each op writes, as far as a tap can read it. Slots of the KV cache are known on the device alone: its
# buffers count as one unit at their first byte, where the taps of the cache begin.
WRITES: dict[str, Callable[[Any], list[Span]]] = {
    "embed": lambda a: [_f32(a.x, a.M * a.w.k)],
    "rms_norm": lambda a: [_f32(a.out, a.M * a.d)],
    "quantize_a8": lambda a: [
        (a.q, a.q + a.M * a.K),
        _f32(a.d, a.M * a.K // 32),
        _f32(a.gsum, a.M * a.K // 32),
    ],
    "matmul": lambda a: [_f32(a.y, a.M * _sum_n(a))],
    "qk_norm": lambda a: [_heads(a)],
    "rope": lambda a: [_heads(a)],
    "kv_append": lambda a: [(p, p + 1) for p in (a.kq, a.ks, a.vq, a.vs)],
    "attention": lambda a: [_f32(a.out, a.M * a.nh * a.hd)],
    "add": lambda a: [_f32(a.x, a.n)],
    "swiglu": lambda a: [_f32(a.h, a.R * a.F)],
    "router_topk": lambda a: [_f32(a.ids, a.M * a.T), _f32(a.weights, a.M * a.T)],
    "moe_matmul": lambda a: [_f32(a.y, a.M * a.T * _sum_n(a))],
    "moe_combine": lambda a: [_f32(a.out, a.M * a.H)],
    "argmax": lambda a: [_f32(a.ids, a.M)],
}


def _reads(a: Any) -> Span:
    if a.row0:  # a row of the KV cache
        return a.x, a.x + 1
    return a.x, a.x + (a.M - 1) * a.stride + a.bytes


def delay_taps(ops: Sequence[Op]) -> list[Op]:
    """``ops`` with every ``l2_hash`` as late as its buffer allows; the results are the same."""
    ordered: list[Op] = []
    pending: list[Op] = []
    for op in ops:
        if op.name == "l2_hash":
            pending.append(op)
            continue
        written = WRITES[op.name](op.args)
        reads = [_reads(tap.args) for tap in pending]
        if any(begin < r_end and r_begin < end for begin, end in written for r_begin, r_end in reads):
            ordered += pending
            pending = []
        ordered.append(op)
    return ordered + pending
