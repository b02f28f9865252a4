"""kestrel: language models on an NVIDIA GPU, bit-identical to their CPU reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kestrel.errors import (
        BackendError,
        ContextOverflowError,
        KestrelError,
        ModelError,
        NonFiniteError,
        UsageError,
    )
    from kestrel.llm import LLM, GenerationResult, Stream, StreamChunk
    from kestrel.sampling import SamplingParams

__all__ = [
    "LLM",
    "BackendError",
    "ContextOverflowError",
    "GenerationResult",
    "KestrelError",
    "ModelError",
    "NonFiniteError",
    "SamplingParams",
    "Stream",
    "StreamChunk",
    "UsageError",
    "__version__",
]

# Loaded at first use, so that `import kestrel` and `kestrel --version` are quick.
_HOMES = {
    "LLM": "llm",
    "GenerationResult": "llm",
    "Stream": "llm",
    "StreamChunk": "llm",
    "SamplingParams": "sampling",
    "BackendError": "errors",
    "ContextOverflowError": "errors",
    "KestrelError": "errors",
    "ModelError": "errors",
    "NonFiniteError": "errors",
    "UsageError": "errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kestrel' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"kestrel.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
