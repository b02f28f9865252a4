"""Synthetic weights in a file, mapped from it as a real model's are (``kestrel.benchmark.synthetic``)."""

from __future__ import annotations

from pathlib import Path

from kestrel.benchmark.shapes import SHAPES
from kestrel.benchmark.synthetic import host_weights, pending_weights
from kestrel.config import ModelConfig
from kestrel.ops import WType
from kestrel.weights import Weights

__all__ = ["SHAPES", "synthetic_weights"]


def synthetic_weights(
    config: ModelConfig, file: Path, *, wtype: WType, head_wtype: WType, seed: int = 0
) -> Weights:
    """Seeded weights of ``config``'s shape, written to ``file`` and mapped from it."""
    return host_weights(pending_weights(config, wtype, head_wtype, seed), file)
