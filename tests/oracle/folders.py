"""Arguments of write_hf_model for every way a checkpoint may say the same or another thing."""

from __future__ import annotations

from typing import Any

from kestrel.config import Family

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FOLDERS: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": ("llama", {"shards": 3}),
    "llama-tied": ("llama", {"tie": True}),
    "llama-absent-head-dim": ("llama", {"omit": ("head_dim",), "head_dim": 24}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-style4": ("qwen3", {"tie": True, "config_style": 4, "theta": 1e6}),
    "qwen3-eps": ("qwen3", {"rms_norm_eps": 0.01}),
    "moe": ("qwen3_moe", {"shards": 2}),
    "moe-no-norm": ("qwen3_moe", {"norm_topk_prob": False}),
    "moe-norm-absent": ("qwen3_moe", {"omit": ("norm_topk_prob",)}),
    "moe-stacked": ("qwen3_moe", {"experts_layout": "stacked"}),
    "moe-style4": ("qwen3_moe", {"config_style": 4}),
    "moe-sparse-step": ("qwen3_moe", {"layers": 4, "dense_layers": (0, 2), "decoder_sparse_step": 2}),
    "yarn": ("qwen3", {"rope": _YARN, "max_position": 128}),
    "yarn-style4-type": (
        "qwen3",
        {
            "rope": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            "max_position": 128,
            "config_style": 4,
        },
    ),
    "yarn-attention-factor": ("llama", {"rope": {**_YARN, "attention_factor": 1.5}, "max_position": 128}),
    "yarn-mscale": ("llama", {"rope": {**_YARN, "mscale": 2.0, "mscale_all_dim": 0.5}, "max_position": 128}),
    "yarn-betas-untruncated": (
        "qwen3",
        {"rope": {**_YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}, "max_position": 128},
    ),
    "linear": ("llama", {"rope": {"rope_type": "linear", "factor": 2.5}}),
    "llama3": ("llama", {"rope": _LLAMA3, "theta": 500000.0}),
}
