"""Shapes of published models by name, for synthetic weights, and the bytes that decoding reads."""

from __future__ import annotations

from typing import Any

from kestrel.config import ModelConfig, MoeConfig, RopeConfig
from kestrel.errors import UsageError
from kestrel.kvcache import KVCache
from kestrel.weights import QuantTensor, Weights


def _qwen3(**sizes: Any) -> ModelConfig:
    """What all Qwen3 models share."""
    return ModelConfig(
        family="qwen3_moe" if "moe" in sizes else "qwen3",
        vocab_size=151936,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position=40960,
        rope=RopeConfig(theta=1000000.0),
        qk_norm=True,
        **sizes,
    )


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
    "qwen3-0.6b": _qwen3(
        hidden_size=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        intermediate_size=3072,
        tie_word_embeddings=True,
    ),
    "qwen3-4b": _qwen3(
        hidden_size=2560,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        intermediate_size=9728,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": _qwen3(
        hidden_size=4096,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        intermediate_size=12288,
        tie_word_embeddings=False,
    ),
    "qwen3-30b-a3b": _qwen3(
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        intermediate_size=6144,
        tie_word_embeddings=False,
        moe=MoeConfig(num_experts=128, top_k=8, intermediate_size=768, norm_topk_prob=True),
    ),
}


def shape(name: str) -> ModelConfig:
    """The config of a named shape. Raises UsageError that lists the names."""
    if name not in SHAPES:
        raise UsageError(f"unknown shape {name!r}: choose from {', '.join(sorted(SHAPES))}")
    return SHAPES[name]


def weight_bytes_per_token(config: ModelConfig, weights: Weights) -> int:
    """Weight bytes that decoding one token reads: of stacks the chosen experts, no untied embedding."""
    total = 0
    for name, tensor in weights.items():
        if not isinstance(tensor, QuantTensor):
            total += tensor.nbytes
        elif tensor.experts is not None:
            assert config.moe is not None
            total += tensor.nbytes * config.moe.top_k // tensor.experts
        elif name != "embed" or config.tie_word_embeddings:
            total += tensor.nbytes
    return total


def parameters(weights: Weights) -> int:
    """Weights of the whole model, all experts counted."""
    return sum(
        (t.experts or 1) * t.n * t.k if isinstance(t, QuantTensor) else t.size for t in weights.values()
    )


def kv_bytes_per_token(config: ModelConfig, depth: int, count: int) -> float:
    """KV bytes that one of ``count`` tokens decoded from ``depth`` on reads, on average."""
    return KVCache.bytes_per_slot(config) * (depth + (count + 1) / 2)
