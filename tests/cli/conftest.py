from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.folders import converted_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted_model(tmp_path_factory.mktemp("models"), "qwen3_moe", max_position=512)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own settings change no test."""
    import os

    for name in list(os.environ):
        if name.startswith(("KESTREL_", "VLLM_")) and name != "KESTREL_SHARED":
            monkeypatch.delenv(name)
