"""The three launches of an FFN of experts, and the dense gate/up stage: choices, formats, geometry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("kestrel._simt", reason="the shim is built by `make native`")

from kestrel.config import ModelConfig
from kestrel.launch import STATIC_SHARED, Launch, Mode, Tuning, launches, plan
from kestrel.ops import OPS, Op, WType
from kestrel.simt import SimtBackend, run_launch
from kestrel.stages import moe
from kestrel.weights import Weights
from tests.kernels.harness import Case
from tests.support.forward import make_model
from tests.support.models import random_weights, tiny_config

MOE_STAGES = ("k_norm_router", "k_moe_gate_up", "k_moe_down")
Grid = Callable[[Launch], int]


def tap_hashes(model: Any, tokens: int, run: Callable[[Any], None]) -> dict[str, int]:
    """The hash of every tap of ``tokens`` passes of one row."""
    step = model.step(1, 1, "extended")
    found = {}
    for position in range(tokens):
        model.load_rows(np.array([position + 1], np.int32), np.array([position], np.int32))
        run(step)
        for tap, row in zip(step.taps, model.hashes(step, 1), strict=True):
            found[tap.key(position)] = int(row[0])
    return found


def launched(
    step: Any,
    tuning: Tuning,
    grid: Grid | None = None,
    seed: int = 0,
    gates: bool = True,
    mode: Mode = "l2exact",
) -> None:
    whole = plan(step.ops, mode, replace(tuning, apart=0))  # no more memory than kernels need
    if grid is not None:
        whole.main[:] = [
            replace(launch, grid=(blocks_of(launch, grid), 1, 1)) if is_ffn(launch.kernel) else launch
            for launch in whole.main
        ]
    for launch in whole.in_line(late=seed % 2 == 1):
        run_launch(launch, seed, gates=gates)


def blocks_of(launch: Launch, grid: Grid) -> int:
    """The down stage needs a block for each of its rows' parts, in whole clusters."""
    if "moe_down" not in launch.kernel:
        return grid(launch)
    return -(-max(grid(launch), launch.grid[0]) // launch.cluster) * launch.cluster


def is_ffn(kernel: str) -> bool:
    return "gate_up" in kernel or "moe_down" in kernel or kernel == "k_norm_router"


def check(
    config: ModelConfig,
    weights: Weights,
    *,
    tokens: int = 2,
    tuning: Tuning | None = None,
    grid: Grid | None = None,
    seed: int = 0,
    kernels: tuple[str, ...] = (),
    gates: bool = True,
) -> dict[str, int]:
    """Every tap as on the CPU; ``kernels`` must be among the launches."""
    tuning = tuning or Tuning()
    if not gates:
        tuning = replace(tuning, max_cluster=1)
    cpu = make_model(config, weights, slots=8, max_rows=1)
    expected = tap_hashes(cpu, tokens, lambda step: step.program.run())
    model = make_model(config, weights, backend=SimtBackend(tuning=tuning), slots=8, max_rows=1)
    names = {launch.kernel for launch in plan(model.step(1, 1, "extended").ops, "l2exact", tuning).main}
    assert set(kernels) <= names, names
    actual = tap_hashes(model, tokens, lambda step: launched(step, tuning, grid, seed, gates))
    different = [key for key, value in expected.items() if actual[key] != value]
    assert not different, f"{len(different)} of {len(expected)} keys differ, first {different[0]}"
    return expected


def moe_config(**shape: Any) -> ModelConfig:
    return tiny_config("qwen3_moe", **{"layers": 1, "vocab": 64, "hidden": 256, **shape})


def expert_stages(config: ModelConfig, wtype: WType = WType.q4local) -> tuple[str, ...]:
    """The launches of the FFN of experts."""
    assert config.moe is not None
    down = wtype == WType.q4local and config.moe.intermediate_size % 64 == 0
    return (
        "k_norm_router",
        "k_moe_gate_up" if down and config.hidden_size % 256 == 0 else "k_moe_gate_up_any",
        "k_moe_down" if down else "k_moe_down_any",
    )


def weights_of(config: ModelConfig, wtype: WType = WType.q4local) -> Weights:
    return random_weights(config, wtype, WType.q8local)


# -- the choice --------------------------------------------------------------------------------------------


def ties(rng: np.random.Generator, bits: Any) -> None:
    bits[:] = bits[rng.integers(0, 3, len(bits))]  # three different rows


def zeros(rng: np.random.Generator, bits: Any) -> None:
    # +0 and -0 rows: a chain of fma from +0 gives +0 for both, beside rows that are not zero.
    odd = rng.random(len(bits)) < 0.7
    bits[odd] = np.where(rng.random(bits[odd].shape) < 0.5, 0, 0x8000).astype(np.uint16)


def non_finite(rng: np.random.Generator, bits: Any) -> None:
    for value in (0x7F80, 0xFF80, 0x7FC0):  # +inf, -inf, NaN
        bits[rng.integers(len(bits)), rng.integers(bits.shape[1])] = value


def infinity(sign: int) -> Callable[[np.random.Generator, Any], None]:
    """One infinite weight: its expert comes first, or, with the other sign, is never chosen."""

    def change(rng: np.random.Generator, bits: Any) -> None:
        bits[len(bits) // 2, 7] = 0x7F80 | sign << 15

    return change


@pytest.mark.parametrize("change", [ties, zeros, non_finite, infinity(0), infinity(1)])
@pytest.mark.parametrize(("experts", "chosen"), [(5, 5), (20, 3), (34, 33), (128, 8), (130, 9)])
@pytest.mark.parametrize("norm", [True, False])
def test_choices_of_the_joined_stages(change: Any, experts: int, chosen: int, norm: bool) -> None:
    config = moe_config(experts=experts, top_k=chosen, moe_ffn=64, norm_topk_prob=norm)
    weights = weights_of(config)
    router: Any = weights["layers.0.router"]
    bits = router.codes.copy()
    change(np.random.default_rng(experts), bits)
    weights["layers.0.router"] = replace(router, codes=bits)
    check(config, weights, kernels=MOE_STAGES)


@pytest.mark.parametrize("threads", [32, 128, 256])
@pytest.mark.parametrize(
    ("experts", "chosen"),
    [(1, 1), (4, 4), (9, 2), (31, 31), (33, 8), (96, 8), (128, 128), (256, 8), (515, 20)],
)
def test_choice_of_any_number(experts: int, chosen: int, threads: int) -> None:
    rng = np.random.default_rng(experts)
    logits = np.stack(
        [
            rng.standard_normal(experts),
            rng.integers(-1, 2, experts),  # ties
            rng.choice([0.0, -0.0, -1e-45, 1e-45], experts),
            np.where(rng.random(experts) < 0.3, rng.choice([np.nan, np.inf, -np.inf], experts), 1.0),
            np.full(experts, -np.inf),
            np.full(experts, np.nan),
            np.arange(experts),
            -np.arange(experts),
        ]
    ).astype(np.float32)
    logits[5].view(np.uint32)[::2] = 0xFFC12345  # NaNs with a sign and a payload are no less equal
    rows = len(logits)
    arrays = {
        "logits": logits,
        "ids": np.full((rows, chosen), -9, np.int32),
        "weights": np.full((rows, chosen), -9, np.float32),
    }
    case = Case("router_topk", arrays, M=rows, E=experts, T=chosen, norm_topk_prob=experts % 2)
    case.check(Tuning(router_threads=threads), seed=experts)


# -- shapes and formats ------------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-like": {"hidden": 512, "experts": 32, "top_k": 8, "moe_ffn": 192},
    "one of one": {"experts": 1, "top_k": 1, "moe_ffn": 64},
    "one group": {"experts": 1, "top_k": 1, "moe_ffn": 32},
    "all chosen": {"experts": 6, "top_k": 6, "moe_ffn": 64},
    "odd groups": {"hidden": 160, "experts": 7, "top_k": 3, "moe_ffn": 224},
    "more chosen than warps": {"experts": 12, "top_k": 11, "moe_ffn": 128},
    "long h": {"hidden": 96, "experts": 3, "top_k": 2, "moe_ffn": 1056},
    "long x": {"hidden": 2144, "heads": 2, "kv_heads": 1, "experts": 3, "top_k": 2, "moe_ffn": 32},
    "a whole piece": {"hidden": 2048, "heads": 2, "kv_heads": 1, "experts": 5, "top_k": 3, "moe_ffn": 64},
    "two sets of groups": {
        "hidden": 4096,
        "heads": 2,
        "kv_heads": 1,
        "experts": 2,
        "top_k": 2,
        "moe_ffn": 64,
    },
    "a step more": {"hidden": 2304, "heads": 2, "kv_heads": 1, "experts": 2, "top_k": 1, "moe_ffn": 64},
    "a set that is not full": {
        "hidden": 1792,
        "heads": 2,
        "kv_heads": 1,
        "experts": 2,
        "top_k": 2,
        "moe_ffn": 64,
    },
}


@pytest.mark.parametrize("wtype", [WType.q4local, WType.q8local])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, wtype: WType) -> None:
    config = moe_config(**SHAPES[name])
    check(config, weights_of(config, wtype), kernels=expert_stages(config, wtype))


@pytest.mark.parametrize("wtype", list(WType))
@pytest.mark.parametrize("hidden", [96, 512, 2048, 2560])
def test_dense(wtype: WType, hidden: int) -> None:
    config = tiny_config("qwen3", layers=1, vocab=64, hidden=hidden, heads=2, kv_heads=1, ffn=160)
    joined = wtype == WType.q4local and hidden % 256 == 0
    stages = () if wtype == WType.bf16 else ("k_norm_gate_up",) if joined else ("k_norm_a8", "k_gate_up_any")
    check(config, weights_of(config, wtype), kernels=stages)


# -- geometry ----------------------------------------------------------------------------------------------

GRIDS: dict[str, Grid] = {
    "one": lambda launch: 1,
    "three": lambda launch: 3,
    "more than there is work": lambda launch: launch.grid[0] + 5,
}


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("wtype", [WType.q4local, WType.q8local])
def test_any_grid(grid: str, seed: int, wtype: WType) -> None:
    for hidden in (224, 512):
        config = moe_config(hidden=hidden, experts=13, top_k=6, moe_ffn=192)
        check(config, weights_of(config, wtype), grid=GRIDS[grid], seed=seed)
        config = tiny_config("qwen3", layers=1, vocab=64, hidden=hidden, ffn=416)
        check(config, weights_of(config, wtype), grid=GRIDS[grid], seed=seed)


@pytest.mark.parametrize(
    "tuning",
    [
        Tuning(expert_warps=3, sms=2),
        Tuning(expert_warps=1, sms=1),
        Tuning(expert_warps=16, sms=1),
        Tuning(down_warps=3, down_rows=20, sms=1),
        Tuning(down_warps=8, down_rows=64, sms=2),
        Tuning(down_warps=1, down_rows=64, sms=1),
        Tuning(router_rows=2, stage_warps=3),
        Tuning(router_rows=3, stage_warps=2),
        Tuning(shared_limit=12_000, sms=1),
        Tuning(shared_limit=24_000, sms=1),
    ],
)
def test_few_multiprocessors_and_little_memory(tuning: Tuning) -> None:
    config = moe_config(hidden=512, experts=13, top_k=5, moe_ffn=192)
    check(config, weights_of(config), tuning=tuning, seed=1, kernels=MOE_STAGES)
    model = make_model(config, weights_of(config), backend=SimtBackend(tuning=tuning), slots=8, max_rows=1)
    found = plan(model.step(1, 1, "off").ops, "l2exact", tuning).main
    assert (
        max(launch.shared for launch in found if is_ffn(launch.kernel)) <= tuning.shared_limit - STATIC_SHARED
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_experts_without_gates(seed: int) -> None:
    """As below sm_90."""
    config = moe_config(hidden=512, experts=13, top_k=5, moe_ffn=192)
    for tuning in (Tuning(sms=2), Tuning(expert_warps=3, down_warps=3, down_rows=20, sms=1)):
        check(config, weights_of(config), tuning=tuning, seed=seed, kernels=MOE_STAGES, gates=False)


# -- clusters of the down stage ----------------------------------------------------------------------------

# Of 160 to a block, at most. In the last cluster of four by 12, 16 are left: two blocks get none.
CLUSTER_ROWS = (20, 12, 32)


def cluster_config(chosen: int, ffn: int = 192) -> ModelConfig:
    return moe_config(hidden=160, heads=2, kv_heads=1, experts=9, top_k=chosen, moe_ffn=ffn)


def planned(config: ModelConfig, weights: Weights, tuning: Tuning) -> list[Launch]:
    model = make_model(config, weights, backend=SimtBackend(tuning=tuning), slots=8, max_rows=1)
    return plan(model.step(1, 1, "off").ops, "l2exact", tuning).main


@pytest.mark.parametrize(
    ("chosen", "wanted", "most", "cluster"),
    [
        *((8, wanted, 8, wanted) for wanted in (1, 2, 4, 8)),
        *((6, wanted, 8, min(wanted, 2)) for wanted in (1, 2, 4, 8)),
        *((5, wanted, 8, 1) for wanted in (1, 2, 8)),
        *((8, 8, most, most) for most in (1, 2, 4)),
        (1, 8, 8, 1),
    ],
)
def test_a_cluster_shares_the_experts_equally(chosen: int, wanted: int, most: int, cluster: int) -> None:
    config = cluster_config(chosen)
    tuning = Tuning(down_cluster=wanted, max_cluster=most, down_rows=12, sms=1)
    whole = planned(config, weights_of(config), tuning)
    (launch,) = (launch for launch in whole if launch.kernel == "k_moe_down")
    assert launch.cluster == cluster
    assert launch.grid == (-(-160 // (12 * cluster)) * cluster, 1, 1)
    assert all(launch.cluster == 1 for launch in whole if launch.kernel != "k_moe_down")


@pytest.mark.parametrize("wanted", [1, 2, 4, 8])
def test_whole_clusters_on_the_multiprocessors(wanted: int) -> None:
    """Where rows suffice for one block to each: so ``placement`` can keep them apart."""
    for hidden in (2048, 2112, 2144, 2560, 4096):
        config = moe_config(hidden=hidden, heads=2, kv_heads=1, experts=8, top_k=8, moe_ffn=64)
        weights = weights_of(config)
        for sms in (132, 108, 78):
            tuning = Tuning(down_cluster=wanted, sms=sms)
            (grid,) = (launch.grid for launch in planned(config, weights, tuning) if "down" in launch.kernel)
            assert grid[0] <= sms or hidden > 32 * (sms // wanted * wanted)


@pytest.mark.parametrize("rows", CLUSTER_ROWS)
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize("chosen", [8, 6, 4, 2, 1])
def test_clusters(chosen: int, cluster: int, rows: int) -> None:
    config = cluster_config(chosen)
    weights = weights_of(config)
    for seed in range(6):
        tuning = Tuning(down_cluster=cluster, down_rows=rows, down_warps=(8, 3, 1)[seed % 3], sms=1)
        check(config, weights, tuning=tuning, tokens=1, seed=seed, kernels=("k_moe_down",))


@pytest.mark.parametrize("chosen", [8, 6])
def test_clusters_of_many_experts_and_long_rows(chosen: int) -> None:
    """More than a warp chooses among, and inputs of several rounds of loads."""
    config = moe_config(hidden=96, heads=2, kv_heads=1, experts=130, top_k=chosen, moe_ffn=832)
    weights = weights_of(config)
    for cluster in (2, 4, 8):
        tuning = Tuning(down_cluster=cluster, down_warps=4, sms=2)
        check(config, weights, tuning=tuning, seed=cluster, kernels=("k_moe_down",))


@pytest.mark.parametrize("seed", [0, 1])
def test_experts_that_a_cluster_would_share_without_gates(seed: int) -> None:
    """As below sm_90: every block takes all experts."""
    config = cluster_config(8)
    check(config, weights_of(config), tuning=Tuning(down_cluster=4, sms=1), seed=seed, gates=False)


@pytest.mark.parametrize("rows", CLUSTER_ROWS)
def test_fast_forms_do_not_depend_on_the_cluster(rows: int) -> None:
    config = cluster_config(8)
    weights = weights_of(config)

    def hashes(cluster: int, seed: int) -> dict[str, int]:
        tuning = Tuning(down_cluster=cluster, down_rows=rows, sms=1)
        model = make_model(config, weights, backend=SimtBackend(tuning=tuning), slots=8, max_rows=1)
        names = {launch.kernel for launch in plan(model.step(1, 1, "extended").ops, "fast", tuning).main}
        assert "k_moe_down_fast" in names
        return tap_hashes(model, 2, lambda step: launched(step, tuning, seed=seed, mode="fast"))

    expected = hashes(1, 0)
    for cluster in (2, 4, 8):
        for seed in (0, 1, 2):
            assert hashes(cluster, seed) == expected, (cluster, seed)


# -- what is joined ----------------------------------------------------------------------------------------


def ffn_ops(config: ModelConfig, rows: int = 1) -> list[Op]:
    model = make_model(config, weights_of(config), backend=SimtBackend(), slots=8, max_rows=4)
    ops = [op for op in model.step(rows, rows, "off").ops if op.name != "l2_hash"]
    first = next(i for i, op in enumerate(ops) if op.name == "router_topk") - 2
    return ops[first : first + len(moe.MOE_OPS)]


def test_ops_that_are_not_joined() -> None:
    config = moe_config()
    ops = ffn_ops(config)
    stage = moe.moe_ffn(ops, Tuning())
    assert stage is not None
    assert [launch.kernel for launch in stage.launches] == list(MOE_STAGES)
    assert moe.moe_ffn(ops[:-1], Tuning()) is None
    assert moe.moe_ffn(ffn_ops(config, rows=2), Tuning()) is None
    assert moe.moe_ffn(ops, Tuning(shared_limit=2000)) is None

    def with_changed(index: int, **values: Any) -> list[Op]:
        changed = list(ops)
        args = type(ops[index].args).from_buffer_copy(ops[index].args)
        for key, value in values.items():
            setattr(args, key, value)
        changed[index] = Op(OPS[ops[index].name], args, ops[index].label)
        return changed

    other = 0x1000
    for index, field in [
        (2, "logits"),
        (2, "ids"),
        (2, "weights"),
        (4, "xq"),
        (5, "gu"),
        (7, "ids"),
        (9, "y"),
    ]:
        assert moe.moe_ffn(with_changed(index, **{field: other}), Tuning()) is None, (index, field)


@pytest.mark.parametrize("wtype", [WType.q4local, WType.q8local])
def test_a_block_stores_the_choice(wtype: WType) -> None:
    """One more than there are units, or one with as few as any: taps and the down stage read it."""
    config = moe_config(experts=13, top_k=5, moe_ffn=128)
    weights = weights_of(config, wtype)
    model = make_model(config, weights, backend=SimtBackend(), slots=8, max_rows=1)
    whole = plan(model.step(1, 1, "off").ops, "l2exact", Tuning()).main
    (launch,) = (launch for launch in whole if "gate_up" in launch.kernel)
    if wtype == WType.q4local:
        assert (launch.kernel, launch.grid) == ("k_moe_gate_up", (Tuning().sms, 1, 1))
    else:
        assert (launch.kernel, launch.grid) == ("k_moe_gate_up_any", (5 * 4 + 1, 1, 1))
    for more in (0, 1, -1):
        keys = check(config, weights, grid=lambda launch, more=more: launch.grid[0] + more)  # type: ignore[misc]
    assert {"t0_l0_rids", "t0_l0_rweights"} <= set(keys)


def test_the_comparison_sees_the_wrong_expert() -> None:
    """A choice that breaks ties upwards would be seen."""
    config = moe_config(experts=8, top_k=2, moe_ffn=32)
    weights = weights_of(config)
    router: Any = weights["layers.0.router"]
    tied = replace(router, codes=np.repeat(router.codes[:1], 8, axis=0))
    before = check(config, {**weights, "layers.0.router": tied})
    gate: Any = weights["layers.0.experts.gate"]
    flipped = replace(gate, codes=gate.codes[::-1].copy(), scale=gate.scale[::-1].copy())
    after = check(config, {**weights, "layers.0.router": tied, "layers.0.experts.gate": flipped})
    assert before["t0_l0_rids"] == after["t0_l0_rids"]
    assert before["t0_l0_ffn"] != after["t0_l0_ffn"]


def test_router_topk_alone_takes_the_memory_it_is_given() -> None:
    case = Case(
        "router_topk",
        {
            "logits": np.zeros((1, 3), np.float32),
            "ids": np.zeros((1, 2), np.int32),
            "weights": np.zeros((1, 2), np.float32),
        },
        M=1,
        E=3,
        T=2,
        norm_topk_prob=1,
    )
    (launch,) = launches(case.bind()[0])
    assert launch.shared == 4 * (8 + 4 + 2 * 4 + 8 + 32)
