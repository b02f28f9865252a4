"""Whole small models: GPU dump equal to CPU dump, graph equal to eager, any mixture equal."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from kestrel.cpu import CpuBackend
from kestrel.cuda.device import CudaBackend
from kestrel.engine import Engine
from kestrel.launch import Tuning
from kestrel.ops import WType
from tests.support.dumps import difference, generate
from tests.support.models import AWKWARD, random_weights, tiny_config
from tests.support.tunings import VARIANTS

WTYPES = [WType.q4local, WType.q8local, WType.bf16]


def prompt(length: int, vocab: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(length).integers(0, vocab, length)]


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize("wtype", WTYPES, ids=lambda w: w.name)
def test_awkward_models(name: str, wtype: WType, gpu: CudaBackend, cpu: CpuBackend) -> None:
    family, shape = AWKWARD[name]
    config = tiny_config(family, **shape)
    weights = random_weights(config, wtype)
    ids = prompt(9, config.vocab_size)
    runs = [generate(Engine(config, weights, b, context=32), ids, 6, "extended") for b in (gpu, cpu)]
    assert str(difference(runs[0][1], runs[1][1])).startswith("0 of")
    assert runs[0][0] == runs[1][0]


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_chunk_boundaries(family: str, chunk: int, gpu: CudaBackend, cpu: CpuBackend) -> None:
    config = tiny_config(family)  # type: ignore[arg-type]
    weights = random_weights(config, WType.q4local)
    ids = prompt(250, config.vocab_size)
    expected = generate(Engine(config, weights, cpu, context=300), ids, 12)
    actual = generate(Engine(config, weights, gpu, context=300, chunk=chunk), ids, 12)
    assert str(difference(actual[1], expected[1])).startswith("0 of")
    assert actual[0] == expected[0]


@pytest.mark.parametrize("start", [250, 1018])
def test_graph_equals_eager_across_positions(start: int, gpu: CudaBackend) -> None:
    config = tiny_config("qwen3_moe")
    weights = random_weights(config, WType.q4local)
    ids = prompt(start, config.vocab_size)
    eager_backend = CudaBackend(0, graph=False)
    eager = Engine(config, weights, eager_backend, context=start + 32)
    recorded = Engine(config, weights, gpu, context=start + 32)
    a, b = generate(recorded, ids, 12), generate(eager, ids, 12)
    program = recorded.decode_model.step(1, 1, "standard").program
    assert program.recorded  # type: ignore[attr-defined]
    assert not eager.decode_model.step(1, 1, "standard").program.recorded  # type: ignore[attr-defined]
    assert str(difference(a[1], b[1])).startswith("0 of")
    assert a[0] == b[0]
    # The KV cache made anew, larger: other addresses, the same bits.
    again = Engine(config, weights, gpu, context=start + 300)
    c = generate(again, ids, 12)
    assert str(difference(c[1], b[1])).startswith("0 of")
    eager_backend.close()


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("taps", ["off", "extended"])
def test_a_text_that_comes_to_many_chunks(graph: bool, taps: Any, cpu: CpuBackend) -> None:
    """The plan of the steps changes on the way, in the queue and step by step."""
    config = tiny_config("qwen3_moe")
    weights = random_weights(config, WType.q4local)
    ids = prompt(250, config.vocab_size)
    backend = CudaBackend(0, graph=graph, tuning=Tuning(merge_chunks=1))
    engine = Engine(config, weights, backend, context=300)
    expected = generate(Engine(config, weights, cpu, context=300), ids, 20, taps)
    for _ in range(2):  # the second time both plans are there
        actual = generate(engine, ids, 20, taps)
        assert actual[0] == expected[0]
        if taps != "off":
            assert str(difference(actual[1], expected[1])).startswith("0 of")
    program = engine.decode_model.step(1, 1, taps).program
    few, many = (len(program._plan(position).main) for position in (0, 256))  # type: ignore[attr-defined]
    assert many == few + config.num_layers
    backend.close()


@pytest.mark.parametrize("taps", ["off", "extended"])
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_text_that_comes_to_clusters_and_leaves_them(
    head_dim: int, size: int, taps: Any, gpu: CudaBackend, cpu: CpuBackend
) -> None:
    """One chunk, two by clusters where the GPU has them, three by the last block."""
    if gpu.tuning.max_cluster < size:
        pytest.skip(f"no clusters of {size} blocks")
    config = tiny_config("qwen3_moe", heads=8, kv_heads=2, head_dim=head_dim)
    weights = random_weights(config, WType.q4local)
    backend = CudaBackend(0, tuning=Tuning(attention_cluster=size, cluster_heads=size // 2, cluster_chunks=2))
    for begin in (250, 506):
        ids = prompt(begin, config.vocab_size)
        expected = generate(Engine(config, weights, cpu, context=600), ids, 16, taps)
        engine = Engine(config, weights, backend, context=600)
        for _ in range(2):
            actual = generate(engine, ids, 16, taps)
            assert actual[0] == expected[0]
            if taps != "off":
                assert str(difference(actual[1], expected[1])).startswith("0 of")
    program: Any = engine.decode_model.step(1, 1, taps).program
    kernel = "k_attn_cluster_128" if head_dim == 128 else "k_attn_cluster"
    found = [sum(item.kernel == kernel for item in program._plan(at).main) for at in (255, 256, 511, 512)]
    assert found == [0, config.num_layers, config.num_layers, 0]
    backend.close()


def test_a_step_writes_its_own_slot_alone(gpu: CudaBackend) -> None:
    config = tiny_config("qwen3")
    engine = Engine(config, random_weights(config, WType.q4local), gpu, context=64)
    for layer in engine.prompt_model.kv.layers:
        for name in ("kq", "ks", "vq", "vs"):
            buffer = getattr(layer, name)
            gpu.write(buffer, np.frombuffer(b"\x5a" * buffer.nbytes, buffer.dtype))
    generate(engine, prompt(10, config.vocab_size), 8)
    written = 10 + 7  # the last token was not run
    for layer in engine.prompt_model.kv.layers:
        for name in ("kq", "ks", "vq", "vs"):
            rows = gpu.read(getattr(layer, name)).view(np.uint8).reshape(64, -1)
            assert (rows[written:] == 0x5A).all(), name
            assert (rows[:written] != 0x5A).any(axis=1).all(), name


@pytest.mark.parametrize("placement", ["prompt cpu", "decode cpu"])
def test_mixtures(placement: str, gpu: CudaBackend, cpu: CpuBackend) -> None:
    config = tiny_config("qwen3_moe")
    weights = random_weights(config, WType.q4local)
    ids = prompt(40, config.vocab_size)
    expected = generate(Engine(config, weights, cpu, context=64), ids, 12)
    first, second = (cpu, gpu) if placement == "prompt cpu" else (gpu, cpu)
    mixed = generate(Engine(config, weights, first, second, context=64), ids, 12)
    assert str(difference(mixed[1], expected[1])).startswith("0 of")
    assert mixed[0] == expected[0]


@pytest.mark.parametrize("mode", ["fast", "bitexact"])
def test_other_modes_run_and_stay_close(mode: str, cpu: CpuBackend) -> None:
    config = tiny_config("qwen3_moe")
    weights = random_weights(config, WType.q4local)
    ids = prompt(40, config.vocab_size)
    backend = CudaBackend(0, mode)  # type: ignore[arg-type]
    expected = Engine(config, weights, cpu, context=64).logits(ids)
    actual = Engine(config, weights, backend, context=64).logits(ids)
    assert np.isfinite(actual).all()
    # No promise of bits: only that it is the same model. 4-bit steps of the activations flip here and there.
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    assert 0 < error < 0.1
    backend.close()


def test_scaled_rope_with_attention_factor(gpu: CudaBackend, cpu: CpuBackend) -> None:
    config = tiny_config("qwen3")
    rope = replace(config.rope, type="yarn", factor=4.0, original_max_position=1024)
    config = replace(config, rope=rope)
    weights = random_weights(config, WType.q4local)
    ids = prompt(20, config.vocab_size)
    runs = [generate(Engine(config, weights, b, context=32), ids, 6) for b in (gpu, cpu)]
    assert str(difference(runs[0][1], runs[1][1])).startswith("0 of")


@pytest.fixture(scope="module")
def whole_steps(cpu: CpuBackend) -> tuple[Any, Any, list[int], Any]:
    """A model whose rows take the kernels of the large ones, and what the CPU makes of it."""
    config = tiny_config(
        "qwen3_moe",
        dense_layers=(1,),
        hidden=256,
        heads=8,
        kv_heads=2,
        head_dim=128,
        ffn=512,
        experts=16,
        top_k=4,
        moe_ffn=256,
    )
    weights = random_weights(config, WType.q4local)
    ids = prompt(250, config.vocab_size)
    return config, weights, ids, generate(Engine(config, weights, cpu, context=300), ids, 12)


@pytest.mark.parametrize("field", [f.name for f in fields(Tuning)])
def test_tuning_changes_no_bit(
    field: str, whole_steps: tuple[Any, Any, list[int], Any], gpu: CudaBackend
) -> None:
    config, weights, ids, expected = whole_steps
    for value in VARIANTS[field]:
        backend = CudaBackend(0, tuning=replace(gpu.tuning, **{field: value}))
        actual = generate(Engine(config, weights, backend, context=300), ids, 12)
        backend.close()
        assert str(difference(actual[1], expected[1])).startswith("0 of"), (field, value)
        assert actual[0] == expected[0]


def test_random_tunings_change_no_bit(whole_steps: tuple[Any, Any, list[int], Any], gpu: CudaBackend) -> None:
    config, weights, ids, expected = whole_steps
    rng = np.random.default_rng(5)
    for _ in range(6):
        choice = {name: int(rng.choice(values)) for name, values in VARIANTS.items()}
        choice["shared_limit"] = gpu.tuning.shared_limit
        backend = CudaBackend(0, tuning=Tuning(**choice))
        actual = generate(Engine(config, weights, backend, context=300), ids, 12)
        backend.close()
        assert str(difference(actual[1], expected[1])).startswith("0 of"), choice
