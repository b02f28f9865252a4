"""Blocks of a stage on multiprocessors: how many fit where the launch before lies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("kestrel._simt", reason="the shim is built by `make native`")

from kestrel.benchmark.shapes import SHAPES
from kestrel.benchmark.synthetic import pending_weights
from kestrel.launch import STATIC_SHARED, Launch, Tuning, plan
from kestrel.model import Model
from kestrel.ops import EmbedArgs, WType
from kestrel.stages.placement import ALONE, RESERVED, keep_apart
from tests.support.unmade import Unmade

LIMITS = (232448, 166912, 101376)  # of Hopper, A100, Ada


def launch(kernel: str, shared: int, blocks: int = 132) -> Launch:
    return Launch(kernel, (blocks, 1, 1), (256, 1, 1), shared, EmbedArgs())


def fit(limit: int, *blocks: int) -> bool:
    """Whether blocks of so many bytes lie on one multiprocessor together."""
    return sum(shared + RESERVED for shared in blocks) <= limit + RESERVED


def but_for_memory(planned: Launch) -> tuple[object, ...]:
    return planned.kernel, planned.grid, planned.block, bytes(planned.args)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("kernel", sorted(ALONE))
def test_two_blocks_do_not_fit_beside_one_of_the_launch_before(limit: int, kernel: str) -> None:
    rng = np.random.default_rng(limit)
    most = limit - STATIC_SHARED
    for before, own in rng.integers(0, most + 1, (500, 2)).tolist():
        _, placed = keep_apart([launch("k_other", before), launch(kernel, own)], Tuning(shared_limit=limit))
        assert own <= placed.shared <= most
        if placed.shared < most:
            assert not fit(limit, before, placed.shared, placed.shared)
        if fit(limit, before, own):
            assert fit(limit, before, placed.shared), "what could begin early still can"
        if placed.shared > own and fit(limit, before, limit // 2 + 1):
            assert not fit(limit, placed.shared, placed.shared), "nowhere, where there is room for that"


def test_other_launches_stay_as_they_are() -> None:
    found = [
        launch("k_attn_stage", 1000),
        launch("k_norm_matmul_q4", 2000, blocks=133),
        launch("k_norm_matmul_q4_fast", 2000),
    ]
    placed = keep_apart(found, Tuning())
    assert [p.shared for p in placed[:2]] == [1000, 2000]
    assert placed[2].shared > 100_000
    assert list(map(but_for_memory, placed)) == list(map(but_for_memory, found))


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-4b", "qwen3-8b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("position", [0, 1 << 15])
def test_blocks_of_a_layer(name: str, position: int) -> None:
    """Where every multiprocessor has a block of the launch before, one of the next fits, and not two."""
    config = replace(SHAPES[name], num_layers=2)
    model = Model(
        config, pending_weights(config, WType.q4local, WType.q8local), Unmade(), slots=64, max_rows=1
    )
    ops = model.step(1, 1).ops
    limit = Tuning().shared_limit
    found = plan(ops, "l2exact", Tuning(), position).main
    loose = plan(ops, "l2exact", Tuning(apart=0), position).main
    assert list(map(but_for_memory, found)) == list(map(but_for_memory, loose))
    stages = [i for i, f in enumerate(found) if f.kernel in ALONE]
    assert len(stages) == 4 * config.num_layers
    for i in stages:
        before, own = found[i - 1].shared, found[i].shared
        assert fit(limit, before, own), (found[i - 1].kernel, found[i].kernel)
        assert not fit(limit, before, own, own), (found[i - 1].kernel, found[i].kernel)
