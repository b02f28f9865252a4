"""The shape of a model, and what a checkpoint's ``config.json`` says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["llama", "qwen3", "qwen3_moe"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding, contract section 5; ``kestrel.rope`` turns it into frequencies."""

    theta: float = 10000.0
    type: Literal["default", "linear", "yarn", "llama3"] = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    # yarn
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True)
class MoeConfig:
    num_experts: int
    top_k: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool
    dense_layers: tuple[int, ...] = ()  # layers that keep a dense FFN


@dataclass(frozen=True)
class ModelConfig:
    """A frozen description; every backend and tool works from this alone."""

    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of the dense FFN
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qk_norm: bool
    moe: MoeConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.moe.dense_layers
