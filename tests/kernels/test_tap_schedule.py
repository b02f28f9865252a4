"""When hashes run: behind a step of one row, whose values stay; beside others, where the earliest and the
latest moment give the same values and none beyond does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("kestrel._simt", reason="the shim is built by `make native`")

from kestrel.launch import Plan, Tuning, plan, taps_of
from kestrel.model import Model
from kestrel.simt import SimtBackend, run_launch
from kestrel.stages import planner, stage
from kestrel.step import StepBuilder
from kestrel.tap_schedule import TapGroup, TimedTap, group_taps
from kestrel.taps import dump_bytes
from tests.support.forward import make_model
from tests.support.models import tiny_config

FAMILIES = ["llama", "qwen3", "qwen3_moe"]


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


def load(model: Model, rows: int) -> None:
    model.load_rows(np.arange(1, rows + 1, dtype=np.int32), np.arange(3, 3 + rows, dtype=np.int32))


def hashes(model: Any, rows: int, level: str, *, late: bool) -> Any:
    step = model.step(rows, rows, level)
    load(model, rows)
    for launch in plan(step.ops, tuning=Tuning(apart=0)).in_line(late=late):
        run_launch(launch)
    return model.hashes(step, rows)


def shim_model(family: str) -> Model:
    return make_model(tiny_config(family), backend=SimtBackend(), slots=16)


def expected_hashes(family: str, rows: int, level: Any) -> Any:
    """Those of the CPU."""
    model = make_model(tiny_config(family), slots=16)
    step = model.step(rows, rows, level)
    load(model, rows)
    step.program.run()
    return model.hashes(step, rows)


def split(found: Plan) -> tuple[list[Any], list[Any]]:
    """Main launches: those of the step, those that hash."""
    hashing = [launch.kernel.startswith("k_l2_hash") for launch in found.main]
    first = hashing.index(True) if True in hashing else len(hashing)
    assert all(hashing[first:])
    return found.main[:first], found.main[first:]


# -- one row -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("level", ["standard", "extended"])
def test_a_step_of_one_row_is_hashed_behind_its_end(family: str, level: Any) -> None:
    """Every tap once, nothing beside the step, and the step's own launches are those without a dump."""
    model = shim_model(family)
    step = model.step(1, 1, level)
    found = plan(step.ops)
    launches, hashing = split(found)
    assert found.side == []
    assert sorted(tap.out for launch in hashing for tap in taps_of(launch)) == sorted(
        op.args.out for op in step.ops if op.name == "l2_hash"
    )
    plain = plan(model.step(1, 1).ops).main
    same = [(launch.kernel, launch.grid, launch.block, launch.shared) for launch in launches]
    assert same == [(launch.kernel, launch.grid, launch.block, launch.shared) for launch in plain]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("level", ["standard", "extended"])
def test_values_stay_until_the_end(family: str, level: Any) -> None:
    """Each value as it was when the op behind it was about to run, op by op and in stages."""
    expected = expected_hashes(family, 1, level)
    assert np.array_equal(hashes(shim_model(family), 1, level, late=True), expected)
    model = make_model(tiny_config(family), slots=16)
    step = model.step(1, 1, level)
    load(model, 1)
    step.program.run()
    in_place = {"qraw", "kraw", "qnorm", "knorm"}  # q and k of an op are the next one's place
    for number, tap in enumerate(step.taps):
        if tap.field not in in_place:
            index = tap.op_index + 1 + sum(t.op_index == tap.op_index for t in step.taps[:number])
            assert step.ops[index].name == "l2_hash"
            step.program.run(index, index + 1)
            assert model.hashes(step, 1)[number] == expected[number], tap.key(3)


def shared_between_layers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """All layers keep the value ``name`` in one buffer."""
    real = StepBuilder._kept
    monkeypatch.setattr(
        StepBuilder,
        "_kept",
        lambda self, kept, layer, *rest, **more: real(
            self, kept, 0 if kept == name else layer, *rest, **more
        ),
    )


@pytest.mark.parametrize(
    "name", ["nrm", "qkv", "copies", "attn", "ores", "x", "nrm2", "ffn", "rlogits", "rids"]
)
def test_what_is_overwritten_after_all_is_hashed_in_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = expected_hashes("qwen3_moe", 1, "extended")
    shared_between_layers(monkeypatch, name)
    model = shim_model("qwen3_moe")
    side = plan(model.step(1, 1, "extended").ops).side
    assert side
    for late in (False, True):
        assert np.array_equal(hashes(model, 1, "extended", late=late), expected)
    # A planner that does not see it hashes what the next layer left.
    monkeypatch.setattr(planner, "overlap", lambda a, others: False)
    assert not np.array_equal(hashes(model, 1, "extended", late=False), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_memory_of_a_dump_is_counted(family: str) -> None:
    model = shim_model(family)
    model.step(1, 1, "extended")
    kept = [buffer for name, buffer in model._buffers.items() if "." in name or name == "hash"]
    sizes = [int(np.prod(buffer.shape)) * buffer.dtype.itemsize for buffer in kept]
    assert sum(sizes) == dump_bytes(model.config, model.max_rows)


# -- several rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_early_and_late_are_equal(family: str) -> None:
    early, late = (hashes(shim_model(family), 2, "extended", late=late) for late in (False, True))
    assert np.array_equal(early, late)
    assert np.array_equal(early, expected_hashes(family, 2, "extended"))


@pytest.mark.parametrize("forgotten", ["add", "rope"])
def test_a_forgotten_write_is_seen(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shim_model("qwen3")
    expected = hashes(model, 2, "standard", late=False)
    real = stage.outputs
    for module in (stage, planner):
        monkeypatch.setattr(module, "outputs", lambda op: [] if op.name == forgotten else real(op))
    assert not np.array_equal(hashes(model, 2, "standard", late=True), expected)
