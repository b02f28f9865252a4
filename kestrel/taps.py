"""The values of a forward pass that have a key in an L2 dump (contract section 12)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kestrel.backend import Buffer
from kestrel.config import ModelConfig

TapLevel = Literal["off", "standard", "extended"]


@dataclass(frozen=True)
class Tap:
    """A buffer of the forward pass under a name of contract section 12."""

    field: str  # "kraw"
    layer: int | None  # None for fnorm and logits
    op_index: int  # of the op after which the buffer holds the value
    buffer: Buffer
    offset: int  # bytes to the first row
    stride: int  # bytes from row to row
    nbytes: int  # of one row
    dtype: np.dtype[Any]
    by_slot: bool  # row m lies at slot base[m] + pos[m] instead of m
    rows_from: int  # first row that has a value (logits of the last rows only)

    @property
    def name(self) -> str:
        """The key without its position."""
        return tap_name(self.layer, self.field)

    def key(self, position: int) -> str:
        return f"t{position}_{self.name}"


def tap_name(layer: int | None, field: str) -> str:
    return field if layer is None else f"l{layer}_{field}"


def tap_key(position: int, layer: int | None, field: str) -> str:
    return f"t{position}_{tap_name(layer, field)}"


def dump_bytes(config: ModelConfig, rows: int) -> int:
    """Bytes that dumps take beside the activations: hashes, and the layers' own buffers of one row."""
    c = config
    common = 5 * c.hidden_size + (c.q_size + 2 * c.kv_size) + 2 * (c.q_size + c.kv_size) + c.q_size
    router = 0 if c.moe is None else c.moe.num_experts + 2 * c.moe.top_k
    layers = range(c.num_layers)
    kept = 4 * sum(common + (router if c.is_moe_layer(layer) else 0) for layer in layers)
    return kept + 8 * rows * most_taps(c)


def most_taps(config: ModelConfig) -> int:
    """Keys of a position at the extended level, of a model that has every field."""
    return 2 + 20 * config.num_layers
