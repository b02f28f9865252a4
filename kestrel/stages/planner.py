"""Cuts the ops of a step into stages and places its taps beside them or behind the last one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kestrel.launch import (
    Launch,
    Mode,
    Plan,
    SideLaunch,
    Tuning,
    hash_last,
    in_mode,
    launches,
    merge_hashes,
)
from kestrel.ops import Op
from kestrel.stages.attention import attention
from kestrel.stages.matmul import head, matmul_add, norm, norm_gate_up
from kestrel.stages.moe import gate_up, moe_ffn
from kestrel.stages.placement import keep_apart
from kestrel.stages.stage import Stage, outputs, overlap, source, written
from kestrel.tap_schedule import TimedTap, group_taps


def _stages(ops: Sequence[Op], t: Tuning, taps: Sequence[Sequence[Any]], position: int) -> list[Stage]:
    """Cut ``ops`` into stages; ``taps[i]`` are the hashes between op i and the next."""
    found: list[Stage] = []
    i = 0
    while i < len(ops):
        rest = ops[i:]
        stage = (
            attention(rest, t, position)
            or moe_ffn(rest, t)
            or head(rest, t)
            or norm_gate_up(rest, t)
            or norm(rest, t)
            or gate_up(rest, t)
            or matmul_add(rest, t)
        )
        if stage is None or not _taps_fit(stage, taps[i : i + len(stage.ops)]):
            stage = Stage(ops[i : i + 1], launches(ops[i], "l2exact", t), outputs(ops[i]))
        found.append(stage)
        i += len(stage.ops)
    return found


def _taps_fit(stage: Stage, taps: Sequence[Sequence[Any]]) -> bool:
    """Whether every tap within the stage can read its value after the whole stage."""
    for i, after in enumerate(taps):
        for tap in after:
            if stage.moved(i, tap.x) is not None:
                continue
            if overlap(source(tap), written(stage.ops[i + 1 :])) or overlap(source(tap), stage.hidden):
                return False
    return True


def plan_stages(ops: Sequence[Op], mode: Mode, t: Tuning, position: int) -> Plan:
    """The launches of a whole step; every mode joins the same ops."""
    core = [op for op in ops if op.name != "l2_hash"]
    taps: list[list[Any]] = [[] for _ in range(len(core) + 1)]  # by the ops before them
    at = 0
    for op in ops:
        if op.name != "l2_hash":
            at += 1
        else:
            taps[at].append(op.args)
    stages = _stages(core, t, taps[1:], position)
    main: list[Launch] = []
    done: list[TimedTap] = []
    pending = [TimedTap(tap, 0, 0) for tap in taps[0]]
    at = 1
    for stage in stages:
        kept: list[TimedTap] = []
        for waiting in pending:
            if overlap(source(waiting.args), stage.written):
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
    if t.apart:
        main = keep_apart(main, t)
    side = [
        SideLaunch(merge_hashes(group.taps, t), group.after, group.before)
        for group in group_taps(done, t.hash_beside)
    ]
    return Plan([*main, *hash_last([tap.args for tap in pending], t)], side)
