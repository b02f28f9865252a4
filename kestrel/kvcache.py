"""The KV cache: int8 codes and one f32 scale per position and head, contract section 6."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kestrel.backend import Backend, Buffer
from kestrel.config import ModelConfig


@dataclass(frozen=True)
class LayerKV:
    kq: Buffer  # i8[S, nkv, hd]
    ks: Buffer  # f32[S, nkv]
    vq: Buffer  # i8[S, nkv, hd]
    vs: Buffer  # f32[S, nkv]


class KVCache:
    """``slots`` positions for each layer. A sequence owns a run of slots that starts at its ``base``."""

    def __init__(self, backend: Backend, config: ModelConfig, slots: int) -> None:
        self.slots = slots
        codes = (slots, config.num_kv_heads, config.head_dim)
        scales = (slots, config.num_kv_heads)
        self.layers = [
            LayerKV(
                kq=backend.zeros(codes, np.int8),
                ks=backend.zeros(scales, np.float32),
                vq=backend.zeros(codes, np.int8),
                vs=backend.zeros(scales, np.float32),
            )
            for _ in range(config.num_layers)
        ]

    @staticmethod
    def bytes_per_slot(config: ModelConfig) -> int:
        return 2 * config.num_layers * config.num_kv_heads * (config.head_dim + 4)
