"""Seeded random models of real shapes, for timing: the right bytes in the right places, no meaning."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kestrel.config import ModelConfig, MoeConfig, RopeConfig
from kestrel.ops import WType
from kestrel.weights import QuantTensor, TensorSpec, Weights, stored_wtype, tensor_specs

SHAPES: dict[str, ModelConfig] = {
    "smollm2-135m": ModelConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        rms_norm_eps=1e-5,
        max_position=8192,
        rope=RopeConfig(theta=100000.0),
        tie_word_embeddings=True,
        qk_norm=False,
    ),
    "qwen3-0.6b": ModelConfig(
        family="qwen3",
        vocab_size=151936,
        hidden_size=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=3072,
        rms_norm_eps=1e-6,
        max_position=40960,
        rope=RopeConfig(theta=1000000.0),
        tie_word_embeddings=True,
        qk_norm=True,
    ),
    "qwen3-4b": ModelConfig(
        family="qwen3",
        vocab_size=151936,
        hidden_size=2560,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=9728,
        rms_norm_eps=1e-6,
        max_position=40960,
        rope=RopeConfig(theta=1000000.0),
        tie_word_embeddings=True,
        qk_norm=True,
    ),
    "qwen3-30b-a3b": ModelConfig(
        family="qwen3_moe",
        vocab_size=151936,
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=6144,
        rms_norm_eps=1e-6,
        max_position=40960,
        rope=RopeConfig(theta=1000000.0),
        tie_word_embeddings=False,
        qk_norm=True,
        moe=MoeConfig(num_experts=128, top_k=8, intermediate_size=768, norm_topk_prob=True),
    ),
}

# A byte of two codes 1..15, both uniform: values -7 .. 7 of mean 0, so that no direction grows.
_CODE_PAIRS = np.array([(1 + a) | (1 + b) << 4 for a in range(15) for b in range(15)], np.uint8)
_Q4_STD = math.sqrt(np.mean(np.arange(-7, 8) ** 2))
_Q8_STD = math.sqrt(np.mean(np.arange(-127, 128) ** 2))


def synthetic_weights(
    config: ModelConfig, file: Path, *, wtype: WType, head_wtype: WType, seed: int = 0
) -> Weights:
    """Random weights of ``config``'s shape, written to ``file`` and mapped from it as a real model's are.

    Every matrix keeps the size of its input (rows of length 1 for inputs near 1), a table gives logits that
    spread by 2: routing and softmax are neither flat nor one-hot.
    """
    rng = np.random.default_rng(seed)
    weights: Weights = {}
    places: list[tuple[str, str, tuple[int, ...], np.dtype[Any], int]] = []
    with file.open("wb") as out:

        def place(name: str, part: str, array: npt.NDArray[Any]) -> None:
            out.write(bytes(-out.tell() % 64))
            places.append((name, part, array.shape, array.dtype, out.tell()))
            array.tofile(out)

        specs = list(tensor_specs(config))
        for spec in specs:
            stored = stored_wtype(spec, wtype, head_wtype)
            if stored is None:
                place(spec.name, "norm", np.ones(spec.shape, np.float32))
                continue
            codes, scale = _random_matrix(rng, spec, stored, 2.0 if spec.role == "table" else 1.0)
            place(spec.name, "codes", codes)
            if scale is not None:
                place(spec.name, "scale", scale)
    mapped = np.memmap(file, np.uint8, "r")
    arrays: dict[tuple[str, str], npt.NDArray[Any]] = {}
    for name, part, shape, dtype, offset in places:
        nbytes = math.prod(shape) * dtype.itemsize
        arrays[name, part] = mapped[offset : offset + nbytes].view(dtype).reshape(shape).view(np.ndarray)
    for spec in specs:
        stored = stored_wtype(spec, wtype, head_wtype)
        if stored is None:
            weights[spec.name] = arrays[spec.name, "norm"]
        else:
            experts = spec.shape[0] if len(spec.shape) == 3 else None
            weights[spec.name] = QuantTensor(
                stored,
                arrays[spec.name, "codes"],
                arrays.get((spec.name, "scale")),
                experts,
                spec.shape[-2],
                spec.k,
            )
    return weights


def _random_matrix(
    rng: np.random.Generator, spec: TensorSpec, wtype: WType, gain: float
) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint16] | None]:
    """Codes and scales (f16 bits) in the layout of contract section 1."""
    *lead, k = spec.shape
    std = gain / math.sqrt(k)
    if wtype == WType.bf16:
        values = rng.standard_normal(spec.shape, np.float32) * np.float32(std)
        return values.astype(ml_dtypes.bfloat16).view(np.uint16), None
    groups = (*lead, k // 32)
    spread = rng.uniform(0.7, 1.3, groups).astype(np.float32)
    if wtype == WType.q4local:
        codes = _CODE_PAIRS[rng.integers(0, len(_CODE_PAIRS), (*groups, 16), np.uint8)]
        return codes, (spread * (std / _Q4_STD)).astype(np.float16).view(np.uint16)
    codes = rng.integers(-127, 128, (*groups, 32), np.int8)
    return codes, (spread * (std / _Q8_STD)).astype(np.float16).view(np.uint16)
