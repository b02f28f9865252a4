"""Stages with shapes, launch parameters and odd values drawn at random: shim against CPU."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("kestrel._simt", reason="the shim is built by `make native`")

from kestrel.launch import CHUNK, Tuning
from tests.kernels import test_attention_cluster, test_attention_stage
from tests.kernels.test_moe_stages import check, moe_config, weights_of

DRAWS = 20  # of each kind
PLACES = (0, 1, 2, 31, 32, 33, 127, 254, 255)  # within a chunk
ODD = (float("nan"), float("inf"), 1e-42, 3e38, -0.0)  # in the place of a scale


def position(draw: random.Random, chunks: int) -> int:
    return (chunks - 1) * CHUNK + draw.choice((*PLACES, draw.randrange(CHUNK)))


def heads(draw: random.Random) -> dict[str, int]:
    kv_heads = draw.choice((1, 2, 3))
    return {"heads": kv_heads * draw.choice((1, 2, 3, 4, 5, 7, 8, 9, 11)), "kv_heads": kv_heads}


@pytest.mark.parametrize("seed", range(DRAWS))
def test_attention_by_clusters(seed: int) -> None:
    draw = random.Random(seed)
    at = position(draw, draw.randint(2, 32 if seed % 3 == 0 else 10))
    ways = {"cluster_chunks": 32, "merge_chunks": 32}
    test_attention_cluster.compare(
        at,
        draw.choice(("any", "rising")),
        seed=seed + 1,
        spoil=(draw.choice(("ks", "vs")), draw.randint(0, at), draw.choice(ODD)) if seed % 5 == 0 else None,
        tunings=tuple(
            {"attention_cluster": size, "cluster_heads": draw.choice((1, 2, 4, 8)), **ways}
            for size in (2, 4, 8)
        ),
        family=draw.choice(("qwen3", "llama")),
        head_dim=draw.choice(range(16, 129, 16)),
        **heads(draw),
    )


@pytest.mark.parametrize("seed", range(DRAWS))
def test_attention_by_stages(seed: int) -> None:
    draw = random.Random(seed)
    at = position(draw, draw.randint(1, 40 if seed % 3 == 0 else 8))
    test_attention_stage.compare(
        at,
        draw.choice(("any", "rising")),
        blocks=draw.choice((1, 2, 3, 5, 7, 11, 16, 29, 64, 132, 300)),
        seed=seed + 1,
        spoil=(draw.randint(0, at), draw.choice(ODD)) if seed % 5 == 0 else None,
        repeat=2,
        merge_chunks=draw.choice((0, 1 << 20)),
        family=draw.choice(("qwen3", "llama")),
        head_dim=draw.choice(range(16, 257, 16)),
        **heads(draw),
    )


@pytest.mark.parametrize("seed", range(DRAWS))
def test_experts(seed: int) -> None:
    draw = random.Random(seed)
    chosen = draw.choice((*range(1, 11), 12))
    config = moe_config(
        hidden=draw.choice((96, 160, 224, 256, 512, 768, 1280)),
        heads=2,
        kv_heads=1,
        experts=max(chosen, draw.choice((9, 16, 130))),
        top_k=chosen,
        moe_ffn=draw.choice((64, 128, 192, 320, 832)),
    )
    tuning = Tuning(
        down_cluster=draw.choice((1, 2, 4, 8)),
        down_rows=draw.choice((4, 8, 12, 20, 32, 64)),
        down_warps=draw.choice((1, 2, 3, 5, 8)),
        expert_warps=draw.choice((1, 2, 3, 12, 16)),
        sms=draw.choice((1, 2, 5, 132)),
    )
    more = draw.choice((0, 1, 9))  # blocks than are planned
    check(
        config,
        weights_of(config),
        tokens=1,
        tuning=tuning,
        seed=seed,
        grid=(lambda launch: launch.grid[0] + more) if more else None,
        kernels=("k_moe_down",),
        gates=seed % 4 != 3,
    )
