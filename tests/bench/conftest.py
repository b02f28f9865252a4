from __future__ import annotations

import ctypes
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from kestrel import bench
from kestrel.benchmark.shapes import SHAPES
from kestrel.benchmark.synthetic import host_weights, pending_weights
from kestrel.config import ModelConfig, MoeConfig
from kestrel.ops import WType
from kestrel.weights import Weights
from tests.support.folders import converted_model


@pytest.fixture(autouse=True)
def quick_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own settings change no test; nothing is measured for its own sake."""
    for name in list(os.environ):
        if name.startswith(("KESTREL_", "VLLM_")) and name != "KESTREL_SHARED":
            monkeypatch.delenv(name)
    monkeypatch.setattr(bench, "READ_BYTES", 1 << 22)  # quick, and of no meaning


@pytest.fixture(scope="session")
def small_config() -> ModelConfig:
    """The 30B shape made small in every direction."""
    return replace(
        SHAPES["qwen3-30b-a3b"],
        hidden_size=128,
        num_layers=2,
        vocab_size=500,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_position=1024,
        moe=MoeConfig(num_experts=8, top_k=2, intermediate_size=64, norm_topk_prob=True),
    )


@pytest.fixture(scope="session")
def small_weights(small_config: ModelConfig) -> Weights:
    return host_weights(pending_weights(small_config, WType.q4local, WType.q8local))


@pytest.fixture
def small_shape(small_config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name under which the commands of this process know ``small_config``."""
    monkeypatch.setitem(SHAPES, "small", small_config)
    return "small"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted_model(tmp_path_factory.mktemp("models"), "qwen3_moe", max_position=512)


@pytest.fixture(scope="session")
def device_fill(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The GPU's kernel, compiled for this CPU as one thread of a block of one."""
    pytest.importorskip("cuda.bindings", reason="the device source imports cuda-bindings' module")
    from kestrel.benchmark.cuda import SOURCE

    folder: Path = tmp_path_factory.mktemp("fill")
    prelude = """
struct Dim3 { int x = 1, y = 1, z = 1; };
static Dim3 gridDim, blockDim;
static struct { int x = 0; } blockIdx, threadIdx;
#define __device__
#define __forceinline__ inline
#define __global__
"""
    (folder / "fill.cpp").write_text(prelude + SOURCE)
    command = ["g++", "-O1", "-shared", "-fPIC", "-o", str(folder / "fill.so"), str(folder / "fill.cpp")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "fill.so"))
