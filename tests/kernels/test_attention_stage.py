"""The attention stage against the CPU reference: one step, filled cache, any cut of the work."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("kestrel._simt", reason="the shim is built by `make native`")

from kestrel.launch import CHUNK, PROGRAMMATIC, STARTS_NEXT_FIRST, Tuning, plan
from kestrel.ops import WType
from kestrel.simt import SimtBackend
from tests.support.forward import make_model, run_rows
from tests.support.models import random_weights, tiny_config

Cache = dict[str, npt.NDArray[Any]]
BASE = 3  # cache slot of position 0


def cache_of(rng: np.random.Generator, slots: int, heads: int, head_dim: int, order: str) -> Cache:
    """Random rows; ``rising``: each K row is longer than the last, so that the maximum often moves."""
    scale = 0.02 * np.exp(rng.standard_normal((slots, heads)))
    if order == "rising":
        scale = np.linspace(0.001, 0.05, slots)[:, None] * np.ones((1, heads))
    return {
        "kq": rng.integers(-127, 128, (slots, heads, head_dim)).astype(np.int8),
        "ks": scale.astype(np.float32),
        "vq": rng.integers(-127, 128, (slots, heads, head_dim)).astype(np.int8),
        "vs": (rng.random((slots, heads)) * 0.03).astype(np.float32),
    }


def compare(
    position: int, cache_order: str = "any", blocks: int = 264, seed: int = 0, spoil: Any = None, **shape: Any
) -> None:
    """``spoil``: position and K scale of it."""
    config = tiny_config(**{"family": "qwen3", "layers": 1, "hidden": 64, "ffn": 64, "vocab": 64, **shape})
    rng = np.random.default_rng(position + seed)
    slots = BASE + position + 1
    cache = cache_of(rng, slots, config.num_kv_heads, config.head_dim, cache_order)
    if spoil is not None:
        cache["ks"][BASE + spoil[0]] = spoil[1]
    keys = []
    tuning = Tuning(attention_blocks=blocks, merge_threads=32 + 32 * (seed % 4))
    for backend in (None, SimtBackend(tuning=tuning, seed=seed)):
        model = make_model(config, backend=backend, slots=slots, max_rows=1)
        for name, array in cache.items():
            model.backend.write(getattr(model.kv.layers[0], name), array)
        keys.append(run_rows(model, [5], [position], [BASE], taps="extended").keys)
        if backend is not None:
            names = [launch.kernel for launch in plan(model.step(1, 1, "extended").ops).main]
            wide = "_wide" if config.head_dim > 128 else ""
            assert {f"k_attn_stage{wide}", "k_attn_merge"} <= set(names)
    assert keys[1] == keys[0]


@pytest.mark.parametrize("position", [0, 1, 7, 31, 32, 254, 255, 256, 257, 511, 512, 1023, 1024])
@pytest.mark.parametrize("order", ["any", "rising"])
def test_positions(position: int, order: str) -> None:
    compare(position, order, heads=8, kv_heads=2, head_dim=32)


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 8, 16, 17, 40])
@pytest.mark.parametrize("heads", [(8, 1), (6, 2), (2, 2), (12, 1), (20, 2)])
def test_cuts(blocks: int, heads: tuple[int, int]) -> None:
    """One to eight heads a unit, more units than blocks, more than eight heads to a KV head."""
    compare(700, blocks=blocks, seed=blocks, heads=heads[0], kv_heads=heads[1], head_dim=16)


@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("shape", [(1, 6, 2, 96), (2, 9, 3, 96), (1, 10, 2, 64)])
def test_one_chunk_and_fewer_blocks_than_units(shape: tuple[int, int, int, int], seed: int) -> None:
    """A block's next unit waits until every warp has stored its part of the one before."""
    blocks, heads, kv_heads, head_dim = shape
    compare(200, blocks=blocks, seed=seed, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


@pytest.mark.parametrize("heads_of_a_unit", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("last", [255, 192, 100, 31, 3])
def test_heads_of_a_unit(heads_of_a_unit: int, head_dim: int, last: int) -> None:
    """Whole and ragged chunks of every cut, with maxima that often move."""
    blocks = 3 * 8 // heads_of_a_unit
    compare(2 * CHUNK + last, "rising", blocks=blocks, seed=last, heads=8, kv_heads=1, head_dim=head_dim)


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 96, 112, 128, 144, 192, 256])
@pytest.mark.parametrize("blocks", [3, 64])
def test_head_sizes(head_dim: int, blocks: int) -> None:
    compare(300, blocks=blocks, seed=head_dim, heads=4, kv_heads=1, head_dim=head_dim)


def test_without_norm() -> None:
    compare(300, family="llama", heads=4, kv_heads=2, head_dim=64)


def test_more_chunks_than_a_merge_round_takes() -> None:
    compare(33 * CHUNK + 5, blocks=7, heads=2, kv_heads=1, head_dim=16)
    compare(65 * CHUNK, blocks=9, seed=1, heads=2, kv_heads=1, head_dim=16)


@pytest.mark.parametrize("place", [0, 40, 199])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [200, 300])  # one chunk; two, whose merge hides what one made
def test_scores_that_are_not_finite(position: int, place: int, value: float) -> None:
    for blocks in (16, 8, 4, 2):  # one to eight heads a unit
        compare(position, spoil=(place, value), blocks=blocks, heads=8, kv_heads=1, head_dim=32)


@pytest.mark.parametrize("wtype", list(WType))
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama"])
@pytest.mark.parametrize("taps", ["off", "extended"])
def test_what_follows_a_kernel_that_starts_the_next_one_first(family: str, wtype: WType, taps: Any) -> None:
    """It may begin while the kernel two before it runs, so it must not read ahead what that one writes."""
    config = tiny_config(family)
    model = make_model(config, random_weights(config, wtype), backend=SimtBackend(), slots=8, max_rows=1)
    names = [launch.kernel for launch in plan(model.step(1, 1, taps).ops).main]
    following = {after for before, after in itertools.pairwise(names) if before in STARTS_NEXT_FIRST}
    assert following
    for name in following & PROGRAMMATIC:
        assert name.startswith("k_matmul"), name  # of weights alone
