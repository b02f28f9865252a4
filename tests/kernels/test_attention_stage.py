"""The attention stage against the CPU reference: one step, filled cache, any cut of the work."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("kestrel._simt", reason="the shim is built by `make native`")

from kestrel.config import ModelConfig
from kestrel.launch import ATTENTION_COUNTERS, CHUNK, READS_TWO_BEFORE, STARTS_NEXT_FIRST, Tuning, plan
from kestrel.ops import WType
from kestrel.simt import SimtBackend
from tests.support.forward import Run, make_model, run_rows
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


def step_of(
    config: ModelConfig, cache: Cache, position: int, backend: SimtBackend | None = None, repeat: int = 1
) -> Run:
    """The last of ``repeat`` equal steps at ``position``; each has to leave the counters zero."""
    model = make_model(config, backend=backend, slots=BASE + position + 1, max_rows=1)
    for name, array in cache.items():
        for layer in model.kv.layers:
            model.backend.write(getattr(layer, name), array)
    if backend is not None:
        ops, tuning = model.step(1, 1, "extended").ops, backend.tuning
        names = [launch.kernel for launch in plan(ops, backend.mode, tuning, position).main]
        assert any(name.startswith("k_attn_merge") for name in names) == (tuning.merge_chunks == 0)
        size = "_wide" if config.head_dim > 128 else "_128" if config.head_dim == 128 else ""
        fast = "_fast" if backend.mode == "fast" else ""
        assert f"k_attn_stage{size}{fast}" in names
    runs = []
    for _ in range(repeat):
        runs.append(run_rows(model, [5], [position], [BASE], taps="extended"))
        assert runs[-1].keys == runs[0].keys
        if backend is not None:
            work = model.backend.read(model._buffers["attention_work"]).ravel()
            assert not work[: 4 * ATTENTION_COUNTERS].any()
    return runs[-1]


def compare(
    position: int,
    cache_order: str = "any",
    blocks: int = 132,
    seed: int = 0,
    spoil: Any = None,
    spoil_values: Any = None,
    repeat: int = 1,
    merge_chunks: int = 1 << 20,
    ahead: int = 1,
    **shape: Any,
) -> None:
    """``spoil``: position and K scale of it, or V scale; ``merge_chunks``: 0 for a launch that merges."""
    config = tiny_config(**{"family": "qwen3", "layers": 1, "hidden": 64, "ffn": 64, "vocab": 64, **shape})
    rng = np.random.default_rng(position + seed)
    cache = cache_of(rng, BASE + position + 1, config.num_kv_heads, config.head_dim, cache_order)
    if spoil is not None:
        cache["ks"][BASE + spoil[0]] = spoil[1]
    if spoil_values is not None:
        cache["vs"][BASE:][spoil_values[0]] = spoil_values[1]
    expected = step_of(config, cache, position)
    tuning = Tuning(
        attention_blocks=blocks,
        merge_threads=32 + 32 * (seed % 4),
        merge_chunks=merge_chunks,
        attention_ahead=ahead,
        attention_cluster=1,
    )
    backend = SimtBackend(tuning=tuning, seed=seed)
    assert step_of(config, cache, position, backend, repeat).keys == expected.keys


@pytest.mark.parametrize("position", [0, 1, 7, 31, 32, 254, 255, 256, 257, 511, 512, 1023, 1024])
@pytest.mark.parametrize("order", ["any", "rising"])
@pytest.mark.parametrize("merge_chunks", [0, 32])
def test_positions(position: int, order: str, merge_chunks: int) -> None:
    compare(position, order, heads=8, kv_heads=2, head_dim=32, merge_chunks=merge_chunks)


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 8, 16, 17, 40])
@pytest.mark.parametrize("heads", [(8, 1), (6, 2), (2, 2), (12, 1), (20, 2)])
def test_cuts(blocks: int, heads: tuple[int, int]) -> None:
    """One to eight heads a unit, more units than blocks, more than eight heads to a KV head."""
    compare(700, blocks=blocks, seed=blocks, heads=heads[0], kv_heads=heads[1], head_dim=16)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
@pytest.mark.parametrize("head_dim", [32, 96, 128, 144])
def test_blocks_with_several_chunks_and_a_launch_that_merges(blocks: int, head_dim: int, ahead: int) -> None:
    """V of a block's next chunk comes while one is computed; the new row is in the last one."""
    for seed, position in enumerate((767, 768, 1100, 1535)):
        shape = {"heads": 4, "kv_heads": 2, "head_dim": head_dim}
        compare(position, blocks=blocks, seed=seed, merge_chunks=0, ahead=ahead, **shape)


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
    for merge_chunks in (0, 32):
        compare(
            300,
            blocks=blocks,
            seed=head_dim,
            heads=4,
            kv_heads=1,
            head_dim=head_dim,
            merge_chunks=merge_chunks,
        )


@pytest.mark.parametrize("head_dim", [16, 48, 128, 144])
@pytest.mark.parametrize("blocks", [1, 64])
def test_places_of_the_new_row(head_dim: int, blocks: int) -> None:
    """Made in the launch, among rows of K that threads hold: in a block's first chunk, and in a later one."""
    for t in range(0, CHUNK, 17):
        compare(CHUNK + t, blocks=blocks, heads=4, kv_heads=1, head_dim=head_dim)


def test_without_norm() -> None:
    compare(300, family="llama", heads=4, kv_heads=2, head_dim=64)


@pytest.mark.parametrize("blocks", [1, 2, 7, 200])
@pytest.mark.parametrize("chunks", [1, 2, 5, 9])
@pytest.mark.parametrize("heads", [(8, 1), (6, 2)])
def test_the_last_block_of_a_head_group_merges(heads: tuple[int, int], chunks: int, blocks: int) -> None:
    """Blocks in order and in others, one launch behind the other with the same counters."""
    for seed in range(3):
        compare(
            chunks * CHUNK - 1 - 60 * seed,
            "rising" if seed % 2 else "any",
            blocks=blocks,
            seed=seed,
            repeat=2,
            heads=heads[0],
            kv_heads=heads[1],
            head_dim=32,
        )


@pytest.mark.parametrize("chunks", [4, 5, 6, 8, 9, 10, 12, 13, 14, 16, 17, 18, 32, 33, 34, 61, 65])
def test_groups_of_a_merge(chunks: int) -> None:
    """Chunks go by in groups of four behind the first, their factors in groups of 32."""
    for blocks in (2, 3 * chunks):
        compare(chunks * CHUNK - 9, "rising", blocks=blocks, seed=chunks, heads=2, kv_heads=1, head_dim=16)


@pytest.mark.parametrize("chunks", [60, 61, 121, 188, 380])
@pytest.mark.parametrize("order", ["any", "rising"])
def test_more_chunks_than_a_merge_round_takes(order: str, chunks: int) -> None:
    compare(chunks * CHUNK - 3, order, blocks=7, seed=chunks, heads=2, kv_heads=1, head_dim=16)


def test_more_chunks_than_the_merge_launch_has_threads() -> None:
    compare(33 * CHUNK + 5, blocks=7, heads=2, kv_heads=1, head_dim=16, merge_chunks=0)
    compare(65 * CHUNK, blocks=9, seed=1, heads=2, kv_heads=1, head_dim=16, merge_chunks=0)


def test_more_chunks_and_elements_than_a_merge_takes_at_once() -> None:
    compare(189 * CHUNK, "rising", blocks=3, seed=2, heads=8, kv_heads=1, head_dim=144)


@pytest.mark.parametrize("blocks", [2, 30])
@pytest.mark.parametrize("position", [200, 700, 2400])
def test_the_fast_form_means_the_same(position: int, blocks: int) -> None:
    config = tiny_config("qwen3", layers=1, heads=8, kv_heads=2, head_dim=64)
    rng = np.random.default_rng(position)
    cache = cache_of(rng, BASE + position + 1, config.num_kv_heads, config.head_dim, "any")
    exact = step_of(config, cache, position)
    tuning = Tuning(attention_blocks=blocks, attention_cluster=1)
    fast = step_of(config, cache, position, SimtBackend("fast", tuning, seed=1), repeat=2)
    assert np.abs(fast.logits - exact.logits).max() < 0.1 * exact.logits.std()


@pytest.mark.parametrize("place", [0, 40, 199])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [200, 300])  # one chunk; two, whose merge hides what one made
def test_scores_that_are_not_finite(position: int, place: int, value: float) -> None:
    for blocks in (16, 8, 4, 2):  # one to eight heads a unit
        for merge_chunks in (0, 32):
            compare(
                position,
                spoil=(place, value),
                blocks=blocks,
                heads=8,
                kv_heads=1,
                head_dim=32,
                merge_chunks=merge_chunks,
            )


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (40, np.nan),
        (199, np.inf),
        (slice(None), 0.0),
        (slice(None), 2.0**-101),  # below which all codes are zero
        (slice(None), np.nextafter(np.float32(1), np.float32(0))),  # rounds to a code too many
        (slice(None), 3e38),
    ],
)
@pytest.mark.parametrize("position", [200, 300])
def test_scales_of_values(position: int, place: Any, value: float) -> None:
    for blocks in (16, 8, 4, 2):  # one to eight heads a unit
        compare(position, spoil_values=(place, value), blocks=blocks, heads=8, kv_heads=1, head_dim=32)


@pytest.mark.parametrize("wtype", list(WType))
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama"])
@pytest.mark.parametrize("position", [0, 700, 4000, 1 << 20])
@pytest.mark.parametrize("taps", ["off", "extended"])
def test_what_follows_a_kernel_that_starts_the_next_one_first(
    family: str, wtype: WType, position: int, taps: Any
) -> None:
    """It may begin while the kernel two before it runs, so it must not read ahead what that one writes."""
    whole = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 256, "layers": 3, "moe_ffn": 64}
    shapes: list[dict[str, Any]] = [{}, whole]
    if family == "qwen3_moe":
        shapes += [{**whole, "dense_layers": (0,)}, {**whole, "dense_layers": (1,)}]
    for shape in shapes:
        config = tiny_config(family, **shape)
        weights = random_weights(config, wtype)
        model = make_model(config, weights, backend=SimtBackend(), slots=8, max_rows=1)
        found = plan(model.step(1, 1, taps).ops, "l2exact", Tuning(), position)
        names = [launch.kernel for launch in found.main]
        assert ("k_attn_merge" in names) == (position > 700)
        assert ("k_attn_cluster" in names) == (position == 700)
        stages = [launch for launch in found.main if launch.kernel.startswith("k_attn_stage")]
        blocks = Tuning().sms * (2 if position == 1 << 20 else 1)
        assert {launch.grid for launch in stages} == ({(blocks, 1, 1)} if position != 700 else set())
        following = {after for before, after in itertools.pairwise(names) if before in STARTS_NEXT_FIRST}
        assert following
        assert not following & READS_TWO_BEFORE
        if shape and wtype == WType.q4local:
            assert {"k_norm_matmul_q4", "k_matmul_add_q4"} <= set(names)
            assert family == "qwen3_moe" or "k_norm_gate_up" in names
            assert family != "qwen3_moe" or "k_moe_gate_up" in names
