"""Synthetic contents: the same bytes whoever makes them, and activations in a sane range."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from bench.gpu.synthetic import host_rates
from kestrel.benchmark import synthetic
from kestrel.benchmark.shapes import SHAPES, parameters, shape, weight_bytes_per_token
from kestrel.benchmark.synthetic import (
    Pending,
    Recipe,
    fill,
    host_weights,
    kv_recipes,
    pending_weights,
    tokens,
    words,
)
from kestrel.config import ModelConfig
from kestrel.cpu import CpuBackend
from kestrel.engine import Engine
from kestrel.errors import KestrelError, UsageError
from kestrel.ops import WType
from kestrel.weights import QuantTensor, Weights

TABLES: dict[str, npt.NDArray[np.generic]] = {
    "u8": np.arange(256, dtype=np.uint8),
    "i8": np.arange(-128, 128).astype(np.int8),
    "u16": (np.arange(256) * 257).astype(np.uint16),
    "f32": np.linspace(-1, 1, 256).astype(np.float32),
}


def test_words_are_those_of_the_written_rule() -> None:
    """The rule in Python integers, without numpy's arithmetic."""
    mask = (1 << 64) - 1
    for index in (0, 1, 12345, 1 << 40):
        z = (0x1234567890ABCDEF + (index + 1) * 0xD1342543DE82EF95) & mask
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
        assert int(words(0x1234567890ABCDEF, index, 1)[0]) == z ^ z >> 31


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("threads", [1, 3])
def test_any_part_equals_the_whole(table: str, threads: int) -> None:
    recipe = Recipe.named(3, "part", TABLES[table])
    whole = np.empty(2_500_000, TABLES[table].dtype)
    fill(whole, recipe, threads=threads)
    for first, count in ((0, 1), (1, 7), (5, 100), (524_285, 11), (2_499_999, 1), (7, 2_000_000)):
        part = np.empty(count, whole.dtype)
        fill(part, recipe, first, threads=threads)
        np.testing.assert_array_equal(part.view(np.uint8), whole[first : first + count].view(np.uint8))
    assert len(set(whole.tobytes())) > 100


def test_streams_have_names_and_seeds_of_their_own() -> None:
    table = TABLES["u8"]
    seeds = {Recipe.named(s, n, table).seed for s in range(3) for n in ("a", "b", "a.codes")}
    assert len(seeds) == 9


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 64), (3, 2), (5, 100), (16, 999)])
def test_the_device_kernel_makes_the_same_bytes(
    device_fill: ctypes.CDLL, table: str, first: int, count: int
) -> None:
    recipe = Recipe.named(1, "device", TABLES[table])
    expected = np.empty(count, TABLES[table].dtype)
    fill(expected, recipe, first)
    guard = 16
    made = np.full(count + 2 * guard, 77, TABLES[table].dtype)
    size = made.dtype.itemsize
    device_fill[f"k_fill_{size}"](
        ctypes.c_void_p(made.ctypes.data + guard * size),
        ctypes.c_longlong(count),
        ctypes.c_longlong(first),
        ctypes.c_ulonglong(recipe.seed),
        ctypes.c_void_p(recipe.table.ctypes.data),
    )
    np.testing.assert_array_equal(made[guard:-guard].view(np.uint8), expected.view(np.uint8))
    assert set(made[:guard].tolist()) == set(made[-guard:].tolist()) == {77}


def test_the_device_kernel_compiles_for_every_gpu() -> None:
    pytest.importorskip("cuda.bindings", reason="NVRTC comes with cuda-bindings")
    from kestrel.benchmark.cuda import fill_sources
    from kestrel.cuda.compile import ARCHITECTURES, compile_source, kernels_in

    sources = fill_sources()
    text = sources.units["synthetic.cu"]
    for architecture in (ARCHITECTURES[0], ARCHITECTURES[-1]):
        cubin = compile_source("synthetic.cu", text, sources.headers, architecture).cubin
        assert kernels_in(cubin) == ["k_fill_1", "k_fill_2", "k_fill_4"]


# -- weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_costs_no_memory_until_it_is_made(name: str) -> None:
    config = shape(name)
    assert config.faults() == []
    weights = pending_weights(config, WType.q4local, WType.q8local)
    assert all(
        isinstance(tensor, Pending) or isinstance(tensor.codes, Pending) for tensor in weights.values()
    )
    counted = {
        "smollm2-135m": 134.5e6,
        "qwen3-0.6b": 596.0e6,
        "qwen3-4b": 4022e6,
        "qwen3-8b": 8191e6,
        "qwen3-30b-a3b": 30532e6,
    }
    assert parameters(weights) == pytest.approx(counted[name], rel=0.001)


def test_decoding_the_30b_shape_reads_what_the_performance_page_counts() -> None:
    """3,029 M weights at 4.5 bits with a q4local head, and 25 MB of bf16 router."""
    config = shape("qwen3-30b-a3b")
    read = weight_bytes_per_token(config, pending_weights(config, WType.q4local, WType.q4local))
    assert read == pytest.approx(1.704e9 + 25.2e6, rel=0.001)


def test_unknown_shape_lists_the_names() -> None:
    with pytest.raises(UsageError, match=r"unknown shape 'qwen9'.*qwen3-0\.6b, qwen3-30b-a3b"):
        shape("qwen9")


def test_files_and_memory_hold_the_same(
    small_config: ModelConfig, small_weights: Weights, tmp_path: Path
) -> None:
    pending = pending_weights(small_config, WType.q4local, WType.q8local)
    mapped = host_weights(pending, tmp_path / "weights", threads=1)
    for name, tensor in small_weights.items():
        other = mapped[name]
        if isinstance(tensor, QuantTensor):
            assert isinstance(other, QuantTensor)
            assert tensor.codes.tobytes() == other.codes.tobytes()
            assert (tensor.scale is None) == (other.scale is None)
            if tensor.scale is not None and other.scale is not None:
                assert tensor.scale.tobytes() == other.scale.tobytes()
        else:
            assert not isinstance(other, QuantTensor)
            assert tensor.tobytes() == other.tobytes()


@pytest.mark.parametrize("wtype", list(WType))
def test_activations_are_sane(small_config: ModelConfig, wtype: WType) -> None:
    weights = host_weights(pending_weights(small_config, wtype, wtype))
    engine = Engine(small_config, weights, CpuBackend(1), context=64)
    logits = engine.logits([int(t) for t in tokens(small_config, 64)])
    assert np.isfinite(logits).all()
    assert 1.5 < logits.std() < 2.5
    model = engine.prompt_model
    x = model.backend.read(model.buffer("x", small_config.hidden_size, np.float32))
    assert 0.5 < np.sqrt(np.mean(x**2)) < 20
    assert len(set(np.argmax(logits, axis=1).tolist())) > 20


def test_routing_uses_most_experts(small_config: ModelConfig, small_weights: Weights) -> None:
    engine = Engine(small_config, small_weights, CpuBackend(1), context=64)
    engine.logits([int(t) for t in tokens(small_config, 64)])
    assert small_config.moe is not None
    model = engine.prompt_model
    chosen = model.backend.read(model.buffer("rids", small_config.moe.top_k, np.int32))
    assert len(set(chosen[:64].reshape(-1).tolist())) >= 6


def test_weights_that_do_not_fit_are_refused(
    small_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic, "_available_bytes", lambda: 1000)
    with pytest.raises(KestrelError, match=r"do not fit: 0\.0 GB of memory are available"):
        host_weights(pending_weights(small_config, WType.q4local, WType.q8local))


def test_kv_rows_are_valid(small_config: ModelConfig) -> None:
    for name, width, recipe in kv_recipes(small_config, 0):
        values = np.empty(1000 * width, recipe.table.dtype)
        fill(values, recipe)
        if name in ("kq", "vq"):
            assert (values.min(), values.max()) == (-127, 127)
        else:
            assert values.dtype == np.float32
            assert 0.004 < values.min() < values.max() < 0.03


def test_the_cpu_beside_a_plain_read() -> None:
    config = shape("smollm2-135m")
    weights = host_weights(pending_weights(config, WType.q4local, WType.q8local))
    backend = CpuBackend(threads=1)
    rates = host_rates(Engine(config, weights, backend, context=16), weights, 50.0)
    assert rates["threads"] == 1
    assert rates["tokens_per_second"] == 20.0
    assert rates["weights_gb_s"] == pytest.approx(weight_bytes_per_token(config, weights) / 0.05 / 1e9)
    assert rates["plain_read_gb_s"] > 0.1
