"""Whole models on the device kernels, through the shim, against the CPU reference: every key equal."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("kestrel._simt", reason="the shim is built by `make native`")

from kestrel import _simt
from kestrel.config import ModelConfig
from kestrel.engine import Engine
from kestrel.errors import BackendError
from kestrel.launch import STATIC_SHARED, Tuning, plan
from kestrel.ops import WType
from kestrel.simt import SimtBackend
from tests.support.bits import assert_bits_equal
from tests.support.forward import Run, make_model, run_tokens
from tests.support.models import AWKWARD, tiny_config
from tests.support.tunings import VARIANTS

FAMILIES = ("llama", "qwen3", "qwen3_moe")


def tokens(config: ModelConfig, count: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(count).integers(0, config.vocab_size, count).astype(np.int32)


def assert_runs_equal(actual: Run, expected: Run) -> None:
    different = [key for key in expected.keys if actual.keys.get(key) != expected.keys[key]]
    assert actual.keys.keys() == expected.keys.keys()
    assert not different, f"{len(different)} of {len(expected.keys)} keys differ, first {different[0]}"
    assert_bits_equal(actual.logits, expected.logits, "logits")
    assert_bits_equal(actual.next, expected.next, "greedy choice")


@pytest.mark.parametrize("wtype", list(WType))
@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_and_decode_of_each_family(family: str, wtype: WType) -> None:
    config = tiny_config(family)
    ids = tokens(config, 16)
    expected = run_tokens(make_model(config, wtype=wtype), ids, chunk=16, taps="extended")
    before = _simt.counters()["launches"]
    for chunk, seed in ([9, 4, 1, 1, 1], 0), ([3] * 5 + [1], 11):
        model = make_model(config, wtype=wtype, backend=SimtBackend(seed=seed), slots=32)
        assert_runs_equal(run_tokens(model, ids, chunk=chunk, taps="extended"), expected)
    assert _simt.counters()["launches"] > before


@pytest.mark.parametrize("name", sorted(AWKWARD))
def test_awkward_shapes(name: str) -> None:
    family, shape = AWKWARD[name]
    config = tiny_config(family, **shape)
    ids = tokens(config, 6)
    expected = run_tokens(make_model(config), ids, chunk=6, taps="extended")
    model = make_model(config, backend=SimtBackend(seed=1), slots=16)
    assert_runs_equal(run_tokens(model, ids, chunk=[3, 1, 1, 1], taps="extended"), expected)


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        # 40 and 72 groups: a warp's four slots all have steps, and more than one round of them.
        ("qwen3", {"hidden": 1280, "heads": 2, "kv_heads": 1, "head_dim": 128, "ffn": 1152, "vocab": 64}),
        ("llama", {"hidden": 2304, "heads": 36, "kv_heads": 4, "head_dim": 64, "ffn": 96, "vocab": 64}),
        ("qwen3_moe", {"hidden": 1280, "experts": 12, "top_k": 9, "moe_ffn": 1120, "vocab": 64}),
    ],
)
def test_long_rows(family: str, shape: dict[str, int]) -> None:
    config = tiny_config(family, layers=1, **shape)
    ids = tokens(config, 2)
    expected = run_tokens(make_model(config), ids, chunk=1, taps="extended")
    model = make_model(config, backend=SimtBackend(seed=1), slots=4)
    assert_runs_equal(run_tokens(model, ids, chunk=1, taps="extended"), expected)


def test_router_without_normalisation_and_tied_output() -> None:
    config = tiny_config("qwen3_moe", norm_topk_prob=False, tie=True)
    ids = tokens(config, 5)
    expected = run_tokens(make_model(config), ids, chunk=5, taps="extended")
    model = make_model(config, backend=SimtBackend(), slots=16)
    assert_runs_equal(run_tokens(model, ids, chunk=[4, 1], taps="extended"), expected)


def test_decode_across_attention_chunks() -> None:
    # Positions 250 to 260 and 509 to 515: one, two and three chunks, split over blocks or walked by one.
    config = tiny_config("qwen3", layers=1, hidden=64, ffn=64, vocab=96)
    ids = tokens(config, 515)
    expected = run_tokens(make_model(config, slots=520), ids, chunk=103, taps="standard")
    for slots in (1, 16):
        backend = SimtBackend(tuning=Tuning(attention_slots=slots), seed=slots)
        model = make_model(config, backend=backend, slots=520)
        chunks = [250, *[1] * 10, 245, 4, *[1] * 6]
        assert_runs_equal(run_tokens(model, ids, chunk=chunks, taps="standard"), expected)


@pytest.fixture(scope="module")
def reference() -> tuple[ModelConfig, npt.NDArray[np.int32], Run]:
    config = tiny_config("qwen3_moe", dense_layers=(1,), heads=6, kv_heads=2)
    ids = tokens(config, 262)
    return config, ids, run_tokens(make_model(config), ids, chunk=262 // 2, taps="standard")


def run_tuned(tuning: Tuning, seed: int, reference: tuple[ModelConfig, npt.NDArray[np.int32], Run]) -> None:
    config, ids, expected = reference
    model = make_model(config, backend=SimtBackend(tuning=tuning, seed=seed), slots=270)
    actual = run_tokens(model, ids[:12], chunk=[9, 2, 1], taps="standard")
    for key, value in actual.keys.items():
        assert value == expected.keys[key], key


@pytest.mark.parametrize("field", [f.name for f in fields(Tuning)])
def test_tuning_changes_no_bit(field: str, reference: tuple[ModelConfig, npt.NDArray[np.int32], Run]) -> None:
    for i, value in enumerate(VARIANTS[field]):
        assert value != getattr(Tuning(), field)
        run_tuned(replace(Tuning(), **{field: value}), i, reference)


def test_a_head_size_without_kernels_is_refused_before_anything_is_uploaded() -> None:
    config = tiny_config("qwen3", head_dim=40)
    with pytest.raises(BackendError, match="multiples of 16 up to 256, not 40"):
        Engine(config, {}, SimtBackend())


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_no_launch_takes_more_shared_memory_than_a_block_may(head_dim: int, rows: int) -> None:
    """99 KB is what blocks of sm_86, sm_89 and sm_120 may take: less than the stage needs for heads of 256.
    80 KB are less than 8 such heads of a prompt need."""
    config = tiny_config("qwen3_moe", heads=16, kv_heads=2, head_dim=head_dim)
    ops = make_model(config, slots=270).step(rows, 1, "standard").ops
    small = Tuning(shared_limit=(99 if rows == 1 else 80) * 1024)
    needed = [launch.shared for launch in plan(ops, "l2exact", small).main]
    assert max(needed) <= small.shared_limit - STATIC_SHARED
    if head_dim == 256:
        assert max(launch.shared for launch in plan(ops, "l2exact", Tuning()).main) > small.shared_limit


def test_random_tunings_change_no_bit(reference: tuple[ModelConfig, npt.NDArray[np.int32], Run]) -> None:
    rng = np.random.default_rng(5)
    for seed in range(4):
        choice = {name: int(rng.choice(values)) for name, values in VARIANTS.items()}
        run_tuned(Tuning(**choice), seed, reference)


def test_the_comparison_sees_one_wrong_bit(reference: tuple[ModelConfig, npt.NDArray[np.int32], Run]) -> None:
    config, ids, expected = reference
    model = make_model(config, backend=SimtBackend(), slots=270)
    norm = model._weights["layers.1.q_norm"]
    norm.array.view(np.uint32)[3] ^= 1  # type: ignore[union-attr]
    actual = run_tokens(model, ids[:2], chunk=[1, 1], taps="standard")
    different = [key for key, value in actual.keys.items() if value != expected.keys[key]]
    assert different
    assert different[0] == "t0_l1_qrope"
