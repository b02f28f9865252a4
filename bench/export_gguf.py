"""Writes a kestrel model as a GGUF file with the same weights, bit for bit, for llama.cpp to run.

q4local becomes Q4_0 and q8local Q8_0 (the same numbers, interleaved differently), bf16 stays bf16. The file
has no tokenizer: it is fed with token ids.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from kestrel.checkpoints.gguf import LAYER_NAMES, TOP_NAMES
from kestrel.config import ModelConfig
from kestrel.ops import WType
from kestrel.weights import QuantTensor, Weights

_ARCHITECTURE = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
_TYPE = {
    WType.bf16: gguf.GGMLQuantizationType.BF16,
    WType.q4local: gguf.GGMLQuantizationType.Q4_0,
    WType.q8local: gguf.GGMLQuantizationType.Q8_0,
}
_NAMES = {**TOP_NAMES, **LAYER_NAMES}


def export_gguf(config: ModelConfig, weights: Weights, file: Path) -> None:
    """Raises ValueError for scaled RoPE, whose GGUF form differs from scaling to scaling."""
    if config.rope.type != "default":
        raise ValueError(f"RoPE scaling {config.rope.type!r} is not exported")
    writer = gguf.GGUFWriter(file, _ARCHITECTURE[config.family], use_temp_file=False)
    _write_metadata(writer, config)
    for name, tensor in weights.items():
        target = _gguf_name(name)
        if not isinstance(tensor, QuantTensor):
            writer.add_tensor(target, np.ascontiguousarray(tensor, np.float32))
            continue
        heads = {"q": config.num_heads, "k": config.num_kv_heads}.get(name.rpartition(".")[2])
        interleaved = config.family == "llama" and heads is not None
        order = _interleaved_rope_rows(heads, config.head_dim) if interleaved and heads else None
        writer.add_tensor(target, _blocks(tensor, order), raw_dtype=_TYPE[tensor.wtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_metadata(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    if config.moe is not None:
        if not config.moe.norm_topk_prob:
            raise ValueError("llama.cpp normalises the weights of the chosen experts; this model does not")
        writer.add_expert_count(config.moe.num_experts)
        writer.add_expert_used_count(config.moe.top_k)
        writer.add_expert_feed_forward_length(config.moe.intermediate_size)


def _gguf_name(name: str) -> str:
    if name.startswith("layers."):
        _, layer, rest = name.split(".", 2)
        return f"blk.{layer}.{_NAMES[rest]}.weight"
    return f"{_NAMES[name]}.weight"


def _interleaved_rope_rows(heads: int, head_dim: int) -> npt.NDArray[np.intp]:
    """Row order of a llama model's heads: llama.cpp turns neighbouring rows, kestrel rows hd/2 apart."""
    rows = np.arange(heads * head_dim).reshape(heads, 2, head_dim // 2)
    return rows.transpose(0, 2, 1).reshape(-1)


def _blocks(tensor: QuantTensor, order: npt.NDArray[np.intp] | None) -> npt.NDArray[Any]:
    """u8[..., N, bytes per row]: per group the f16 scale and then the codes."""
    codes = tensor.codes if order is None else tensor.codes[order]
    if tensor.scale is None:
        return np.ascontiguousarray(codes).view(np.uint8)
    scale = tensor.scale if order is None else tensor.scale[order]
    parts = [np.ascontiguousarray(scale)[..., None].view(np.uint8), codes.view(np.uint8)]
    blocks = np.concatenate(parts, axis=-1)
    return blocks.reshape(*blocks.shape[:-2], -1)
