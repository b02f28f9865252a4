"""``kestrel.json``: what a kestrel folder holds and what it was made from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kestrel.config import ModelConfig
from kestrel.errors import ModelError

MANIFEST_FILE = "kestrel.json"
WEIGHTS_FILE = "model.safetensors"
FORMAT = "kestrel-model"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class FileRecord:
    """A file by content."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class TensorRecord:
    """A canonical tensor: where it came from, and the hash of each stored array."""

    wtype: str  # "q4local", "q8local", "bf16" or "f32"
    shape: tuple[int, ...]
    source: str  # stored type in the source: "BF16", "Q4_0"
    exact: bool  # True when the source's values were kept without rounding
    sha256: dict[str, str]  # array name in the weights file -> hash of its bytes


@dataclass(frozen=True)
class Manifest:
    config: ModelConfig
    source_format: str  # "hugging-face" or "gguf"
    wtype: str
    head_wtype: str
    q4_scale: str
    sources: tuple[FileRecord, ...]
    tensors: dict[str, TensorRecord]
    files: tuple[FileRecord, ...] = field(default=())  # tokenizer and templates beside the weights

    @property
    def fingerprint(self) -> str:
        """16 hex digits that name these weights in this shape: equal for equal models, wherever they lie."""
        hashes = {name: tensor.sha256 for name, tensor in self.tensors.items()}
        content = {"config": self.config.to_json_values(), "tensors": hashes}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The text of ``kestrel.json``: the same for the same input, wherever and whenever it is made."""
        values = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        return json.dumps(values, indent=1, ensure_ascii=False) + "\n"


def read_manifest(folder: Path | str) -> Manifest:
    """The manifest of a kestrel folder. Raises ``ModelError`` listing every fault in it."""
    path = Path(folder) / MANIFEST_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(str(path), [f"cannot be read: {error.strerror}"]) from None
    except (ValueError, RecursionError) as error:
        raise ModelError(str(path), [f"is not JSON: {error}"]) from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ModelError(str(path), ["is not the manifest of a kestrel model"])
    if raw.get("format_version") != FORMAT_VERSION:
        raise ModelError(
            str(path),
            [
                f"has format version {raw.get('format_version')!r}; this kestrel reads version "
                f"{FORMAT_VERSION}: convert the source again"
            ],
        )
    faults: list[str] = []
    config, config_faults = ModelConfig.from_json(raw.get("config"))
    faults += config_faults
    known = {"format", "format_version", *Manifest.__dataclass_fields__}
    faults += [f"unknown key {key!r}" for key in raw if key not in known]
    texts = {}
    for key in ("source_format", "wtype", "head_wtype", "q4_scale"):
        texts[key] = raw.get(key, "")
        if not isinstance(raw.get(key), str):
            faults.append(f"{key} must be a string, not {raw.get(key)!r}")
    sources, files = _files(raw, "sources", faults), _files(raw, "files", faults)
    tensors = _tensors(raw.get("tensors"), faults)
    if faults or config is None:
        raise ModelError(str(path), faults)
    return Manifest(config=config, **texts, sources=sources, tensors=tensors, files=files)


def _files(raw: dict[str, Any], key: str, faults: list[str]) -> tuple[FileRecord, ...]:
    kinds = {"name": str, "bytes": int, "sha256": str}
    records = raw.get(key)
    if not isinstance(records, list) or not all(_has_types(record, kinds) for record in records):
        faults.append(f"{key} must be a list of {{name, bytes, sha256}}")
        return ()
    return tuple(FileRecord(**record) for record in records)


def _tensors(raw: object, faults: list[str]) -> dict[str, TensorRecord]:
    kinds = {"wtype": str, "shape": list, "source": str, "exact": bool, "sha256": dict}
    if not isinstance(raw, dict):
        faults.append("tensors must be an object")
        return {}
    tensors = {}
    for name, record in raw.items():
        if not _has_types(record, kinds) or not all(type(v) is int for v in record["shape"]):
            faults.append(f"tensors.{name} must be {{wtype, shape, source, exact, sha256}}")
        else:
            tensors[name] = TensorRecord(**{**record, "shape": tuple(record["shape"])})
    return tensors


def _has_types(record: object, kinds: dict[str, type]) -> bool:
    return (
        isinstance(record, dict)
        and set(record) == set(kinds)
        and all(type(record[key]) is kind for key, kind in kinds.items())
    )
