"""A GGUF file as llama.cpp's converter would write a Hugging Face folder, tensor types to choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from tests.support.models import random_hf_tensors

ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}


def gguf_tensors(family: Any, **shape: Any) -> dict[str, np.ndarray]:
    """The tensors of ``random_hf_tensors`` under GGUF names: experts stacked, Llama's q and k interleaved."""
    stacks: dict[str, list[np.ndarray]] = {}
    tensors = {}
    for name, values in random_hf_tensors(family, **shape).items():
        if name == "model.embed_tokens.weight":
            tensors["token_embd.weight"] = values
        elif name == "model.norm.weight":
            tensors["output_norm.weight"] = values
        elif name == "lm_head.weight":
            tensors["output.weight"] = values
        else:
            _, _, layer, rest = name.removesuffix(".weight").split(".", 3)
            parts = rest.split(".")
            if len(parts) == 4:  # mlp.experts.{e}.gate_proj
                target = f"blk.{layer}.{_LAYER_NAMES[f'mlp.experts.{parts[3]}']}.weight"
                stacks.setdefault(target, []).append(values)
                continue
            if family == "llama" and parts[-1] in ("q_proj", "k_proj"):
                values = interleave(values, shape["head_dim"])
            tensors[f"blk.{layer}.{_LAYER_NAMES[rest]}.weight"] = values
    return {**tensors, **{name: np.stack(stack) for name, stack in stacks.items()}}


def interleave(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Row i of a head's first half goes to row 2i, row i of its second half to row 2i + 1."""
    result = np.empty_like(values)
    for head in range(0, len(values), head_dim):
        result[head : head + head_dim : 2] = values[head : head + head_dim // 2]
        result[head + 1 : head + head_dim : 2] = values[head + head_dim // 2 : head + head_dim]
    return result


def write_gguf_model(
    path: Path,
    family: Any = "qwen3",
    *,
    type_of: Callable[[str], Type] = lambda name: Type.Q4_0,
    metadata: Mapping[str, Any] | None = None,
    edit: Mapping[str, np.ndarray | None] | None = None,
    architecture: str | None = None,
    **shape: Any,
) -> dict[str, np.ndarray]:
    """Write the file; returns the f32 values before they were quantised.

    ``type_of`` gives the type of a matrix by its name (vectors and routers are F32). ``metadata`` sets keys
    below the architecture's prefix (or whole keys that start with "general.", "tokenizer." or "split."); None
    removes one. ``edit`` replaces tensors, and with None removes them.
    """
    arguments: dict[str, Any] = {
        "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96, "vocab": 300,
        "experts": 4, "top_k": 2, "moe_ffn": 32, "dense_layers": (), "tie": False, "seed": 0, **shape,
    }  # fmt: skip
    tensors = gguf_tensors(family, **arguments)
    for name, values in (edit or {}).items():
        if values is None:
            del tensors[name]
        else:
            tensors[name] = values.astype(np.float32)
    arch = architecture or ARCHITECTURES[family]
    a = arguments
    values_of: dict[str, Any] = {
        "block_count": a["layers"],
        "context_length": 4096,
        "embedding_length": a["hidden"],
        "feed_forward_length": a["ffn"],
        "attention.head_count": a["heads"],
        "attention.head_count_kv": a["kv_heads"],
        "attention.key_length": a["head_dim"],
        "attention.value_length": a["head_dim"],
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
    }
    if family == "qwen3_moe":
        values_of |= {
            "expert_count": a["experts"],
            "expert_used_count": a["top_k"],
            "expert_feed_forward_length": a["moe_ffn"],
        }
    values_of |= metadata or {}
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values_of.items():
        full = key if key.startswith(("general.", "tokenizer.", "split.")) else f"{arch}.{key}"
        _add(writer, full, value)
    for name, values in tensors.items():
        kind = Type.F32 if values.ndim == 1 or "gate_inp" in name else type_of(name)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_string(key, value)
