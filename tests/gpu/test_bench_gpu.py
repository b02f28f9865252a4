"""Timing on a GPU: contents made on the device, shared weights, and the CPU's output hash."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import kernels, profile_decode
from bench.gpu import notes
from bench.gpu.tune import Variant, whole_steps
from kestrel import bench
from kestrel.benchmark.cuda import BenchBackend, SharedWeights, copy_bandwidth
from kestrel.benchmark.runner import Runner
from kestrel.benchmark.shapes import SHAPES
from kestrel.benchmark.synthetic import Recipe, fill, host_weights, pending_weights
from kestrel.config import ModelConfig, MoeConfig
from kestrel.cpu import CpuBackend
from kestrel.cuda.sources import read_sources
from kestrel.launch import Tuning
from kestrel.ops import WType

KERNELS = Path(__file__).parents[2] / "kernels"


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    """A small model under the name ``small``."""
    moe = MoeConfig(num_experts=16, top_k=4, intermediate_size=96, norm_topk_prob=True)
    config = replace(
        SHAPES["qwen3-30b-a3b"], hidden_size=256, num_layers=3, vocab_size=5000, max_position=4096, moe=moe
    )
    monkeypatch.setitem(SHAPES, "small", config)
    return config


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.float32])
@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 100_000), (3, 2), (77, 4096)])
def test_the_device_makes_the_hosts_bytes(dtype: type, first: int, count: int) -> None:
    recipe = Recipe.named(5, "x", np.arange(256).astype(np.uint8).view(np.int8).astype(dtype))
    expected = np.empty(count, dtype)
    fill(expected, recipe, first)
    backend = BenchBackend(0)
    buffer = backend.zeros((first + count + 8,), dtype)
    backend.fill(buffer, recipe, first, count)
    found = backend.read(buffer)
    assert found[first : first + count].tobytes() == expected.tobytes()
    assert not found[:first].any()
    assert not found[first + count :].any()
    assert backend.read_rows(buffer, first, first + count).tobytes() == expected.tobytes()
    backend.close()


def test_backends_share_weights_and_find_the_cpus_hash(config: ModelConfig) -> None:
    pending = pending_weights(config, WType.q4local, WType.q8local)
    shared = SharedWeights()
    backends = [
        BenchBackend(0, "l2exact", shared=shared),
        BenchBackend(0, "l2exact", False, shared=shared),
    ]
    options = {"context": 400, "chunk": 64, "seed": 0}
    runners = [Runner(config, pending, backend, **options) for backend in backends]
    size = sum(tensor.nbytes for tensor in pending.values())
    assert shared.nbytes == size
    assert backends[1].used_bytes < backends[0].used_bytes
    assert backends[1].device_bytes > size
    reference = Runner(config, host_weights(pending), CpuBackend(), **options)
    for depth in (300, 0, 255):
        hashes, prompts = set(), set()
        for runner in [reference, *runners]:
            for taps in ("off", "standard"):
                _, chosen = runner.generate(10, depth, taps)
                hashes.add(runner.output_hash(chosen, depth, 10))
            _, chosen = runner.prompt(70, depth)
            prompts.add(runner.output_hash(chosen, depth, 70))
        assert len(hashes) == len(prompts) == 1
    for backend in reversed(backends):
        backend.close()


def test_a_copy_has_a_rate() -> None:
    backend = BenchBackend(0)
    assert 1e10 < copy_bandwidth(backend, 1 << 26) < 1e14
    backend.close()


def test_the_command(config: ModelConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpu.json"
    tests = ["--shape", "small", "-p", "40", "-n", "12", "-d", "0,1000", "-r", "2", "-q"]
    modes = ["--cuda", "--mode", "l2exact,bitexact,fast", "--eager", "--dump"]
    assert bench.main([*tests, *modes, "-o", str(file)]) == 0
    records = json.loads(file.read_text())
    assert len(records) == 2 * (3 + 9)
    assert all(r["gpu_info"] and r["nvrtc"] and r["bandwidth_kind"] == "device copy" for r in records)
    assert bench.main([*tests, "--compare", str(file)]) == 0  # the CPU finds the same hashes
    assert "bits differ" not in capsys.readouterr().err


def test_kernels_and_profile(config: ModelConfig, tmp_path: Path) -> None:
    arguments = ["--shape", "small", "-d", "100", "--mode", "l2exact,fast"]
    assert kernels.main([*arguments, "--json", str(tmp_path / "k.json")]) == 0
    assert kernels.main([*arguments, "--ops"]) == 0
    rows = json.loads((tmp_path / "k.json").read_text())["rows"]
    assert {row["mode"] for row in rows} == {"l2exact", "fast"}
    assert all(row["us"] > 0 and row["registers"] > 0 and row["blocks_per_sm"] > 0 for row in rows)
    trace = tmp_path / "trace.json"
    assert profile_decode.main([*arguments, "--trace", str(trace)]) == 0
    assert len(json.loads(trace.read_text())["traceEvents"]) > 10


def test_whole_steps_of_variants_in_turn(config: ModelConfig) -> None:
    wanted = [Variant("defaults", Tuning()), Variant("streams=4", Tuning(streams=4))]
    rows = whole_steps(config, "l2exact", [0, 300], 2, wanted)
    assert [row[0] for row in rows] == ["defaults", "streams=4"]
    assert all(float(cell.split()[0]) > 0 for row in rows for cell in row[1:])


def test_a_variant_with_other_bits_is_refused(config: ModelConfig, tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    shutil.copytree(KERNELS, folder)
    norm = (folder / "block_norm.cuh").read_text()
    changed = norm.replace("(x[c][k] * r) * w[c][k]", "(x[c][k] * r) * w[c][k] + 1e-3f")
    assert changed != norm
    (folder / "block_norm.cuh").write_text(changed)
    wanted = [Variant("defaults", Tuning()), Variant("other", Tuning(), read_sources(folder))]
    with pytest.raises(SystemExit, match="other: other logits than defaults at depth 3"):
        whole_steps(config, "l2exact", [3], 1, wanted)


def test_notes_of_a_step(config: ModelConfig, tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    shutil.copytree(KERNELS, folder)
    stages = (folder / "stages.cu").read_text()
    place = "    stream.finish(in, out);\n"
    (folder / "stages.cu").write_text(stages.replace(place, f"    note(1);\n{place}    note(2);\n"))
    rows = notes.record(folder, replace(config, num_layers=2), 5, "l2exact")
    assert {row[0] for row in rows} == {"k_norm_matmul_q4", "k_matmul_add_q4"}
    assert all(row[1:3] == ["2", "2"] and 0 < int(row[3]) <= int(row[4]) <= int(row[5]) for row in rows)
