"""Opening whatever a user names as the source of a conversion."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kestrel.checkpoints.hf_folder import open_hf_folder
from kestrel.checkpoints.manifest import MANIFEST_FILE
from kestrel.checkpoints.source_model import Checkpoint, Findings
from kestrel.env import home_folder
from kestrel.errors import ModelError


def open_source(path: Path | str, findings: Findings | None = None) -> Checkpoint:
    """Open and check a Hugging Face folder or a GGUF file. Raises ``ModelError`` that lists every fault.

    A name like ``org/model`` that is no path here is looked up in the local Hugging Face cache.
    ``findings`` receives what could be read, also of a source that is refused.
    """
    source = _from_hub_cache(Path(path))
    where = str(source)
    if source.is_dir():
        if (source / MANIFEST_FILE).exists():
            raise ModelError(where, ["is a kestrel folder already: convert its original source instead"])
        if (source / "config.json").exists():
            return open_hf_folder(source, findings)
        gguf = sorted(source.glob("*.gguf"))
        if gguf:
            raise ModelError(where, [f"has no config.json; to convert a GGUF file, name it: {gguf[0]}"])
        raise ModelError(where, ["is neither a Hugging Face folder (no config.json) nor a GGUF file"])
    try:
        with source.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(where, [f"cannot be read: {error.strerror}"]) from None
    if magic == b"GGUF":
        from kestrel.checkpoints.gguf import open_gguf

        return open_gguf(source, findings)
    if source.name.endswith(".safetensors"):
        raise ModelError(
            where, ["is one file of a checkpoint: name the folder that holds it and config.json"]
        )
    raise ModelError(where, ["is not a GGUF file (wrong magic) and not a folder"])


def _from_hub_cache(path: Path) -> Path:
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        return path
    home = os.environ.get("HF_HOME") or home_folder("HF_HOME") / ".cache" / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    repository = cache / ("models--" + str(path).replace("/", "--"))
    try:
        snapshot = repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
    except OSError:
        raise ModelError(
            str(path),
            [f"is no path here and not in the local cache {cache}: fetch it with `hf download {path}`"],
        ) from None
    return snapshot
