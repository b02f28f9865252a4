"""Where the blocks of a launch lie: one on each multiprocessor, where there is one for each.

A launch that begins while the one before it runs finds the multiprocessors unequally full, and the GPU
places two or three of its blocks on an empty one and none on others. The whole launch then takes as long as
those do: up to twice its time. So a stage asks for so much shared memory that a second block of it does not
fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kestrel.launch import STATIC_SHARED, Launch, Tuning

RESERVED = 1024  # bytes that a multiprocessor keeps of each block, on top of what the block asks for

# Stages of about one block to a multiprocessor, all of the same weight.
ALONE = frozenset({"k_norm_matmul_q4", "k_matmul_add_q4", "k_norm_gate_up", "k_moe_gate_up", "k_moe_down"})


def _alone(shared: int, before: int, t: Tuning) -> int:
    """Bytes for a block of ``shared``, of which two do not fit where a block of ``before`` bytes lies.

    More than half of the memory, so that two do not fit anywhere, if a block of the launch before fits, too.
    """
    whole = t.shared_limit + RESERVED
    room = whole - (before + RESERVED) - RESERVED
    half = whole // 2 - RESERVED + 1
    wanted = half if half <= room else (room + RESERVED) // 2 - RESERVED + 1
    return max(shared, min(wanted, t.shared_limit - STATIC_SHARED))


def keep_apart(found: Sequence[Launch], t: Tuning) -> list[Launch]:
    """The launches of a step, those of ``ALONE`` with the shared memory that keeps their blocks apart."""
    placed: list[Launch] = []
    before = 0
    for launch in found:
        if launch.kernel.removesuffix("_fast") in ALONE and launch.grid[0] <= t.sms:
            launch = replace(launch, shared=_alone(launch.shared, before, t))
        before = launch.shared
        placed.append(launch)
    return placed
