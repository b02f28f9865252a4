"""Attention by clusters against the CPU reference: one step, filled cache, every cut of the work; and which
way attention goes at which position.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("kestrel._simt", reason="the shim is built by `make native`")

from kestrel import simt
from kestrel.config import ModelConfig
from kestrel.engine import Engine
from kestrel.launch import CHUNK, CLUSTER_CHUNKS, Launch, MergeBy, Tuning, merge_by, plan
from kestrel.model import Model
from kestrel.ops import WType
from kestrel.simt import SimtBackend
from tests.kernels.test_attention_stage import BASE, Cache, cache_of
from tests.support.dumps import difference, generate
from tests.support.forward import Run, make_model, run_rows
from tests.support.models import random_weights, tiny_config

DEFAULT = Tuning().cluster_chunks


def attention_of(model: Model, tuning: Tuning, position: int, mode: Any = "l2exact") -> list[Launch]:
    found = plan(model.step(1, 1, "extended").ops, mode, tuning, position).main
    return [launch for launch in found if launch.kernel.startswith("k_attn")]


def fill(model: Model, cache: Cache) -> None:
    for name, array in cache.items():
        for layer in model.kv.layers:
            model.backend.write(getattr(layer, name), array)


def step_of(
    config: ModelConfig, cache: Cache, position: int, backend: SimtBackend | None = None
) -> tuple[Run, list[bytes]]:
    """A step's values, and the cache behind it."""
    model = make_model(config, backend=backend, slots=BASE + position + 1, max_rows=1)
    fill(model, cache)
    if backend is not None:
        size = "_128" if config.head_dim == 128 else ""
        fast = "_fast" if backend.mode == "fast" else ""
        (launch,) = attention_of(model, backend.tuning, position, backend.mode)
        assert launch.kernel == f"k_attn_cluster{size}{fast}"
        assert launch.cluster == backend.tuning.attention_cluster
    run = run_rows(model, [5], [position], [BASE], taps="extended")
    return run, [model.backend.read(getattr(model.kv.layers[0], name)).tobytes() for name in cache]


def compare(
    position: int,
    order: str = "any",
    seed: int = 0,
    spoil: tuple[str, Any, float] | None = None,
    tunings: tuple[dict[str, int], ...] = ({},),
    **shape: Any,
) -> None:
    """``spoil``: scale of the cache, positions and value of it."""
    config = tiny_config(**{"family": "qwen3", "layers": 1, "hidden": 64, "ffn": 64, "vocab": 64, **shape})
    rng = np.random.default_rng(position + seed)
    cache = cache_of(rng, BASE + position + 1, config.num_kv_heads, config.head_dim, order)
    if spoil is not None:
        name, place, value = spoil
        cache[name][BASE:][place] = value
    expected = step_of(config, cache, position)
    for tuning in tunings:
        actual = step_of(config, cache, position, SimtBackend(tuning=Tuning(**tuning), seed=seed))
        assert actual[0].keys == expected[0].keys, tuning
        assert actual[1] == expected[1], tuning


CUTS = tuple(
    {"attention_cluster": size, "cluster_heads": heads} for size in (2, 4, 8) for heads in (1, 2, 4, 8)
)


@pytest.mark.parametrize("position", [256, 257, 511, 512, 1023, 1024, DEFAULT * CHUNK - 1])
@pytest.mark.parametrize("order", ["any", "rising"])
def test_positions(position: int, order: str) -> None:
    compare(position, order, heads=8, kv_heads=2, head_dim=32, seed=order == "rising")


@pytest.mark.parametrize("per_kv", [1, 2, 3, 4, 8, 10])
@pytest.mark.parametrize("position", [300, 1100, 1800])
def test_cuts(position: int, per_kv: int) -> None:
    """Two, five, eight chunks: more than a cluster has blocks, and fewer; whole and ragged head groups."""
    tunings = CUTS if position == 300 else CUTS[per_kv % 3 :: 3]
    compare(position, "rising", seed=per_kv, tunings=tunings, heads=2 * per_kv, kv_heads=2, head_dim=16)


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 96, 112, 128])
@pytest.mark.parametrize("per_kv", [1, 3, 4])
def test_head_sizes(head_dim: int, per_kv: int) -> None:
    tunings = CUTS if per_kv == 3 else ({}, {"attention_cluster": 2})
    compare(790, "rising", seed=head_dim, tunings=tunings, heads=per_kv, kv_heads=1, head_dim=head_dim)


@pytest.mark.parametrize("chunks", [9, 16, 31, 32])
def test_as_many_chunks_as_a_warp_has_lanes(chunks: int) -> None:
    more = {"cluster_chunks": CLUSTER_CHUNKS, "merge_chunks": CLUSTER_CHUNKS}
    tunings = tuple({**more, "attention_cluster": size} for size in (2, 8))
    compare(chunks * CHUNK - 7, "rising", seed=chunks, tunings=tunings, heads=4, kv_heads=1, head_dim=48)


@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("shape", [(8, 2, 32), (6, 2, 80), (4, 1, 128)])
def test_orders_of_blocks_and_threads(shape: tuple[int, int, int], seed: int) -> None:
    tunings = ({}, {"attention_cluster": 2}, {"attention_cluster": 4, "cluster_heads": 1})
    heads, kv_heads, head_dim = shape
    compare(1290, seed=seed, tunings=tunings, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("position", [256, 1024])
def test_without_norm(position: int, head_dim: int) -> None:
    compare(position, family="llama", tunings=CUTS[::3], heads=4, kv_heads=2, head_dim=head_dim)


SOME = ({}, {"attention_cluster": 2, "cluster_heads": 8}, {"attention_cluster": 4, "cluster_heads": 1})


@pytest.mark.parametrize("place", [0, 40, 299, 600, 699])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite(place: int, value: float) -> None:
    """In the first chunk, in one between, in the last: what one made a later merge may hide."""
    compare(700, spoil=("ks", place, value), tunings=SOME, heads=8, kv_heads=1, head_dim=32)


@pytest.mark.parametrize("chunk", [0, 1, 2])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_chunk_without_a_finite_score(chunk: int, value: float) -> None:
    place = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
    compare(700, spoil=("ks", place, value), tunings=SOME, heads=8, kv_heads=1, head_dim=32)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (40, np.nan),
        (299, np.inf),
        (699, -np.inf),
        (slice(None), 0.0),
        (slice(None), 2.0**-101),  # below which all codes are zero
        (slice(None), np.nextafter(np.float32(1), np.float32(0))),  # rounds to a code too many
        (slice(None), 3e38),
    ],
)
def test_scales_of_values(place: Any, value: float) -> None:
    compare(700, spoil=("vs", place, value), tunings=SOME, heads=8, kv_heads=1, head_dim=32)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("position", [256, 700, 1800])
def test_the_fast_form_means_the_same(position: int, head_dim: int) -> None:
    config = tiny_config("qwen3", layers=1, heads=8, kv_heads=2, head_dim=head_dim)
    rng = np.random.default_rng(position)
    cache = cache_of(rng, BASE + position + 1, config.num_kv_heads, config.head_dim, "any")
    exact, _ = step_of(config, cache, position)
    for size in (2, 8):
        fast, _ = step_of(
            config, cache, position, SimtBackend("fast", Tuning(attention_cluster=size), seed=1)
        )
        assert np.abs(fast.logits - exact.logits).max() < 0.1 * exact.logits.std()


# -- the way by position -----------------------------------------------------------------------------------


def test_ways() -> None:
    t = Tuning(cluster_chunks=3, merge_chunks=5)
    ways = [merge_by(chunk * CHUNK + at, t, 4) for chunk in range(7) for at in (0, CHUNK - 1)]
    one, some, few, many = MergeBy.nobody, MergeBy.cluster, MergeBy.last_block, MergeBy.launch
    assert ways == [one] * 2 + [some] * 4 + [few] * 4 + [many] * 4
    for without in (Tuning(max_cluster=1), Tuning(attention_cluster=1), Tuning(cluster_chunks=1)):
        assert [merge_by(at, without, 4) for at in (255, 256, 3071, 3072)] == [one, few, few, many]
    assert merge_by(0, Tuning(merge_chunks=0), 4) == many
    wide = Tuning(cluster_chunks=100, merge_chunks=100)
    assert [merge_by(chunks * CHUNK - 1, wide, 4) for chunks in (32, 33)] == [some, few]
    deep = Tuning(sms=132, attention_turns=3)
    double = MergeBy.launch_double
    for groups, most in ((4, 99), (8, 48), (133, 13)):  # three chunks to each of 33, 16, 1 blocks
        found = [merge_by(chunks * CHUNK - 1, deep, groups) for chunks in (13, most, max(most, 13) + 1)]
        assert found == [double if groups == 133 else many, double if groups == 133 else many, double]


@pytest.mark.parametrize("head_dim", [64, 128, 144])
def test_kernels_by_position(head_dim: int) -> None:
    config = tiny_config("qwen3", layers=1, heads=8, kv_heads=2, head_dim=head_dim)
    model = make_model(config, backend=SimtBackend(), slots=8, max_rows=1)
    size = {64: "", 128: "_128", 144: "_wide"}[head_dim]

    def names(position: int, **tuning: int) -> list[str]:
        return [launch.kernel for launch in attention_of(model, Tuning(**tuning), position)]

    stage = [f"k_attn_stage{size}"]
    clusters = [f"k_attn_cluster{size}"] if head_dim <= 128 else stage
    assert names(255) == names(DEFAULT * CHUNK) == stage
    assert names(256) == names(DEFAULT * CHUNK - 1) == clusters
    assert names(1 << 14) == [*stage, "k_attn_merge"]
    assert names(700, max_cluster=1) == names(700, attention_cluster=1) == stage
    assert names(700, shared_limit=30_000 if head_dim < 128 else 60_000)[0].startswith("k_attn_")


def test_a_launch_by_clusters() -> None:
    """Heads of a KV head in groups, a cluster to each, and room for all chunks of all parts."""
    config = tiny_config("qwen3", layers=1, heads=10, kv_heads=2, head_dim=64)
    model = make_model(config, backend=SimtBackend(), slots=8, max_rows=1)
    for size, most, heads, cluster in [(8, 8, 4, 8), (8, 4, 2, 4), (4, 8, 1, 4), (2, 8, 8, 2), (8, 2, 8, 2)]:
        tuning = Tuning(attention_cluster=size, max_cluster=most, cluster_heads=heads)
        (launch,) = attention_of(model, tuning, 700)
        args: Any = launch.args
        assert (launch.cluster, args.heads) == (cluster, heads)
        assert launch.grid == (2 * -(-5 // heads) * cluster, 1, 1)
        assert args.behind % 16 == 0
        parts = -(-heads * 2 // cluster)
        assert launch.shared == args.behind + 4 * 36 * DEFAULT * parts


def steps(model: Model, begin: int, end: int, taps: Any) -> list[bytes]:
    """Greedy steps at positions ``begin`` to ``end - 1``: choices and logits."""
    token, found = 5, []
    for position in range(begin, end):
        run = run_rows(model, [token], [position], [BASE], taps=taps)
        token = int(run.next[0])
        found += [
            run.next.tobytes(),
            run.logits.tobytes(),
            *(f"{k} {v}".encode() for k, v in run.keys.items()),
        ]
    return found


@pytest.mark.parametrize("taps", ["off", "extended"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_steps_over_every_border(family: str, taps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One, two, three and four chunks: each another way, forth and back, by one program."""
    config = tiny_config(family, heads=4, kv_heads=2, head_dim=32)
    weights = random_weights(config, WType.q4local)
    cache = cache_of(np.random.default_rng(3), BASE + 1100, config.num_kv_heads, config.head_dim, "any")
    ran: list[str] = []
    real = simt.run_launch
    monkeypatch.setattr(simt, "run_launch", lambda launch, *a: (ran.append(launch.kernel), real(launch, *a)))
    backends = (None, SimtBackend(tuning=Tuning(cluster_chunks=2, merge_chunks=3), seed=1))
    models = [make_model(config, weights, backend=b, slots=BASE + 1100, max_rows=1) for b in backends]
    for model in models:
        fill(model, cache)
    stage, cluster, merge = "k_attn_stage", "k_attn_cluster", "k_attn_merge"
    for border, before, after in [
        (256, [stage], [cluster]),
        (512, [cluster], [stage]),
        (768, [stage], [stage, merge]),
        (256, [stage], [cluster]),
    ]:
        ran.clear()
        expected, actual = (steps(model, border - 2, border + 2, taps) for model in models)
        assert actual == expected
        seen = [name for name in ran if name.startswith("k_attn")]
        assert seen == 2 * config.num_layers * before + 2 * config.num_layers * after
    for name in cache:
        for one, other in zip(models[0].kv.layers, models[1].kv.layers, strict=True):
            kept = [m.backend.read(getattr(kv, name)) for m, kv in zip(models, (one, other), strict=True)]
            assert kept[0].tobytes() == kept[1].tobytes(), name


@pytest.mark.parametrize("count", [252, 508, 764])
def test_a_text_that_grows_over_a_border(count: int) -> None:
    config = tiny_config("qwen3", layers=1, hidden=64, ffn=64, vocab=96, heads=4, kv_heads=2, head_dim=16)
    weights = random_weights(config, WType.q4local)
    ids = [int(i) for i in np.random.default_rng(count).integers(0, config.vocab_size, count)]
    tuning = Tuning(cluster_chunks=2, merge_chunks=3)
    actual, expected = (
        generate(Engine(config, weights, backend, context=800), ids, 10, "extended")
        for backend in (SimtBackend(tuning=tuning), make_model(config, weights).backend)
    )
    assert actual[0] == expected[0]
    assert difference(actual[1], expected[1]).count == 0
