"""Folders that transformers itself wrote: its config.json, its names, its layout on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kestrel.convert import convert
from kestrel.ops import WType
from kestrel.rope import attention_factor, inv_freq
from kestrel.weights import load_model_folder
from tests.checkpoint.files import assert_equal_bits, faults_of, values_of

transformers = pytest.importorskip("transformers", reason="writes folders with transformers: not installed")
torch = pytest.importorskip("torch", reason="writes folders with transformers: needs torch")

COMMON: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 32,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-llama3": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "qwen3": ("Qwen3", {}),
    "qwen3-yarn": ("Qwen3", {"rope_parameters": YARN}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    ),
}


def build(name: str) -> Any:
    prefix, changes = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**{**COMMON, **changes})
    torch.manual_seed(0)
    return getattr(transformers, f"{prefix}ForCausalLM")(config)


@pytest.mark.parametrize("shard", ["10GB", "60KB"])
@pytest.mark.parametrize("name", MODELS)
def test_saved_model(tmp_path: Path, name: str, shard: str) -> None:
    model = build(name)
    rotary = model.model.rotary_emb
    frequencies, factor = rotary.inv_freq.numpy().copy(), rotary.attention_scaling
    model = model.to(torch.bfloat16)
    model.save_pretrained(tmp_path / "hf", max_shard_size=shard)
    convert(tmp_path / "hf", tmp_path / "k", wtype=WType.bf16)
    config, _ = load_model_folder(tmp_path / "k")
    values = values_of(tmp_path / "k")
    state = {key: tensor.float().numpy() for key, tensor in model.state_dict().items()}
    assert config.eos_token_ids == (2, 3)
    assert config.tie_word_embeddings == model.config.tie_word_embeddings
    assert_equal_bits(values["embed"], state["model.embed_tokens.weight"])
    if not config.tie_word_embeddings:
        assert_equal_bits(values["head"], state["lm_head.weight"])
    for layer in range(3):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        for leaf in "qkvo":
            assert_equal_bits(values[ours + leaf], state[f"{theirs}self_attn.{leaf}_proj.weight"])
        if config.is_moe_layer(layer):
            fused = state[theirs + "mlp.experts.gate_up_proj"]
            gate_up = np.concatenate([values[f"{ours}experts.gate"], values[f"{ours}experts.up"]], axis=1)
            assert_equal_bits(gate_up, fused)
            assert_equal_bits(values[f"{ours}experts.down"], state[theirs + "mlp.experts.down_proj"])
            assert_equal_bits(values[f"{ours}router"], state[theirs + "mlp.gate.weight"])
        else:
            for leaf in ("gate", "up", "down"):
                assert_equal_bits(values[ours + leaf], state[f"{theirs}mlp.{leaf}_proj.weight"])
    np.testing.assert_allclose(inv_freq(config), frequencies, rtol=2e-6)
    assert attention_factor(config) == pytest.approx(factor, rel=1e-12)
    if config.moe is not None:
        assert config.moe.norm_topk_prob == model.config.norm_topk_prob
        mixed = name.endswith("mixed")
        assert config.moe.dense_layers == ((1,) if mixed else ())


def test_bias_of_a_saved_model_is_refused_by_name(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(**COMMON, attention_bias=True)
    transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    found = faults_of(convert, tmp_path / "hf", tmp_path / "k")
    assert any("attention_bias = True" in fault for fault in found)


def test_pickled_model_is_refused(tmp_path: Path) -> None:
    model = build("llama")
    model.config.save_pretrained(tmp_path / "hf")
    model.config.architectures = ["LlamaForCausalLM"]
    torch.save(model.state_dict(), tmp_path / "hf" / "pytorch_model.bin")
    found = faults_of(convert, tmp_path / "hf", tmp_path / "k")
    assert any("pickled PyTorch checkpoint" in fault for fault in found)
    torch.save(model.state_dict(), tmp_path / "hf" / "model.safetensors")
    found = faults_of(convert, tmp_path / "hf", tmp_path / "k")
    assert any("pickled PyTorch checkpoint" in fault for fault in found)
