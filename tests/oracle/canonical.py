"""The oracle's view of a model in kestrel's canonical form: an adapter, the only place here that knows it."""

from __future__ import annotations

from typing import Any

import numpy as np

from kestrel.config import ModelConfig
from kestrel.weights import QuantTensor, Weights
from tests.oracle.model import Oracle
from tests.oracle.reference import F64, dequantise

_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{part: f"self_attn.{part}_proj" for part in "qkvo"},
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    **{part: f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    "router": "mlp.gate",
}
_TOP = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def oracle_of(config: ModelConfig, weights: Weights, **options: bool) -> Oracle:
    """An oracle with the dequantised weights; ``options`` as of ``Oracle``. RoPE without scaling only."""
    if config.rope.type != "default":
        raise NotImplementedError("write a Hugging Face folder for scaled RoPE")
    tensors: dict[str, F64] = {}
    for name, tensor in weights.items():
        values = (
            dequantise(tensor.codes, tensor.scale)
            if isinstance(tensor, QuantTensor)
            else tensor.astype(np.float64)
        )
        if name in _TOP:
            tensors[_TOP[name] + ".weight"] = values
            continue
        _, layer, part = name.split(".", 2)
        prefix = f"model.layers.{layer}."
        if part.startswith("experts."):
            for expert, matrix in enumerate(values):
                tensors[f"{prefix}mlp.experts.{expert}.{part[8:]}_proj.weight"] = matrix
        else:
            tensors[f"{prefix}{_NAMES[part]}.weight"] = values
    return Oracle(_config(config), tensors, **options)


def _config(c: ModelConfig) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": c.family,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_size": c.hidden_size,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope.theta,
        "max_position_embeddings": c.max_position,
        "tie_word_embeddings": c.tie_word_embeddings,
    }
    if c.moe is not None:
        config["num_experts_per_tok"] = c.moe.top_k
        config["norm_topk_prob"] = c.moe.norm_topk_prob
    return config
