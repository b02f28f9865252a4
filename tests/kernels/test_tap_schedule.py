"""Hashes beside the step: the earliest and the latest moment give the same values, none beyond does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("kestrel._simt", reason="the shim is built by `make native`")

from kestrel.launch import plan
from kestrel.simt import SimtBackend, run_launch
from kestrel.stages import planner, stage
from kestrel.tap_schedule import TapGroup, TimedTap, group_taps
from tests.support.forward import make_model
from tests.support.models import tiny_config


def timed(ready: int, deadline: int) -> TimedTap:
    return TimedTap((ready, deadline), ready, deadline)


def spans(groups: list[TapGroup]) -> list[tuple[int, int, int]]:
    return [(g.after, g.before, len(g.taps)) for g in groups]


def test_groups_leave_launches_to_run_beside() -> None:
    layer = [timed(1, 3), timed(1, 6), timed(2, 7), timed(2, 7), timed(3, 5), timed(6, 8)]
    assert spans(group_taps(layer, beside=0)) == [(3, 3, 5), (6, 8, 1)]
    assert spans(group_taps(layer, beside=2)) == [(1, 3, 1), (3, 5, 4), (6, 8, 1)]


def test_a_tap_without_time_stands_alone() -> None:
    assert spans(group_taps([timed(4, 4)], beside=2)) == [(4, 4, 1)]
    assert group_taps([], beside=2) == []


@pytest.mark.parametrize("beside", [0, 1, 2, 5])
def test_every_tap_stays_within_its_time(beside: int) -> None:
    rng = np.random.default_rng(beside)
    taps = []
    for _ in range(300):
        ready = int(rng.integers(0, 60))
        taps.append(timed(ready, ready + int(rng.integers(0, 9))))
    groups = group_taps(taps, beside)
    assert sorted(tap for g in groups for tap in g.taps) == sorted(t.args for t in taps)
    for group in groups:
        assert group.after <= group.before
        assert all(ready <= group.after and group.before <= deadline for ready, deadline in group.taps)


def hashes(model: Any, rows: int, level: str, *, late: bool) -> Any:
    step = model.step(rows, rows, level)
    model.load_rows(np.arange(1, rows + 1, dtype=np.int32), np.arange(3, 3 + rows, dtype=np.int32))
    for launch in plan(step.ops).in_line(late=late):
        run_launch(launch)
    return model.hashes(step, rows)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("rows", [1, 2])
def test_early_and_late_are_equal(family: str, rows: int) -> None:
    model = make_model(tiny_config(family), backend=SimtBackend(), slots=16)
    early, late = (hashes(model, rows, "extended", late=late) for late in (False, True))
    assert np.array_equal(early, late)


@pytest.mark.parametrize("forgotten", ["add", "rope"])
def test_a_forgotten_write_is_seen(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tiny_config("qwen3"), backend=SimtBackend(), slots=16)
    expected = hashes(model, 2, "standard", late=False)
    real = stage.outputs
    for module in (stage, planner):
        monkeypatch.setattr(module, "outputs", lambda op: [] if op.name == forgotten else real(op))
    assert not np.array_equal(hashes(model, 2, "standard", late=True), expected)
