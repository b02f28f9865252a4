"""Canonical weights: what the model reads, whatever file they came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel.ops import WType


@dataclass(frozen=True)
class QuantTensor:
    """A matrix ``[N, K]``, or a stack ``[E, N, K]``, in one of the formats of contract section 1.

    ``codes`` is u16[..., N, K] (bf16 bits), u8[..., N, G, 16] (q4local) or i8[..., N, G, 32] (q8local); ``scale`` is
    u16[..., N, G] (f16 bits), ``None`` for bf16. Arrays of a loaded model are views of the mapped file.
    """

    wtype: WType
    codes: npt.NDArray[Any]
    scale: npt.NDArray[np.uint16] | None
    experts: int | None  # E of a stack
    n: int
    k: int

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + (self.scale.nbytes if self.scale is not None else 0)


# Names of a model's tensors. Norm weights are f32 arrays, the rest QuantTensors.
#   embed  norm  head (absent when tied)
#   layers.{i}.attn_norm  q  k  v  q_norm  k_norm  o  ffn_norm
#   layers.{i}.gate  up  down                    dense FFN
#   layers.{i}.router  experts.gate  experts.up  experts.down      MoE FFN (stacks)
Weights = dict[str, "QuantTensor | npt.NDArray[np.float32]"]
