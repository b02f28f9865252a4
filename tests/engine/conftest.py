from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kestrel.llm import LLM
from tests.support.folders import converted_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted_model(tmp_path_factory.mktemp("models"), "qwen3_moe", max_position=512)


@pytest.fixture
def llm(model_folder: Path) -> Iterator[LLM]:
    with LLM(model_folder, threads=1, ctx_size=128) as llm:
        yield llm
