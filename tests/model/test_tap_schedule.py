"""Delayed taps give the hashes of taps in place, and delaying one too far would show."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from kestrel.config import Family
from kestrel.cpu import CpuBackend
from kestrel.model import Model
from kestrel.ops import OPS, Op, WType
from kestrel.tap_schedule import WRITES, delay_taps
from tests.support.models import random_weights, tiny_config


def hashes(model: Model, rows: int, level: str, ops: Sequence[Op]) -> npt.NDArray[np.uint64]:
    step = model.step(rows, rows, level)  # type: ignore[arg-type]
    ids = np.arange(1, rows + 1, dtype=np.int32)
    model.load_rows(ids, np.arange(3, 3 + rows, dtype=np.int32))
    model.backend.compile(ops).run()
    return model.hashes(step, rows)


def make_model(family: Family) -> Model:
    config = tiny_config(family, layers=3)
    return Model(config, random_weights(config, WType.q4local), CpuBackend(1), slots=16, max_rows=8)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("level", ["standard", "extended"])
def test_same_hashes(family: Family, rows: int, level: str) -> None:
    model = make_model(family)
    ops = model.step(rows, rows, level).ops  # type: ignore[arg-type]
    delayed = delay_taps(ops)
    assert [op for op in delayed if op.name != "l2_hash"] == [op for op in ops if op.name != "l2_hash"]
    assert {id(op) for op in delayed} == {id(op) for op in ops}
    assert np.array_equal(hashes(model, rows, level, delayed), hashes(model, rows, level, ops))


def groups(ops: Sequence[Op]) -> int:
    """Runs of neighbouring taps: the launches they take."""
    return sum(op.name == "l2_hash" and (i == 0 or ops[i - 1].name != "l2_hash") for i, op in enumerate(ops))


def test_far_fewer_launches() -> None:
    model = make_model("qwen3_moe")
    ops = model.step(1, 1, "standard").ops
    assert groups(ops) >= 7 * 3
    assert groups(delay_taps(ops)) <= 3 * 3 + 1


@pytest.mark.parametrize("writer", ["qk_norm", "rope", "add"])
def test_a_forgotten_write_is_seen(writer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen3")
    ops = model.step(1, 1, "standard").ops
    expected = hashes(model, 1, "standard", ops)
    monkeypatch.setitem(WRITES, writer, lambda a: [])
    assert not np.array_equal(hashes(model, 1, "standard", delay_taps(ops)), expected)


def test_every_op_is_listed() -> None:
    assert set(WRITES) == set(OPS) - {"l2_hash"}
