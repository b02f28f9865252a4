"""A Hugging Face checkpoint folder: config, index, shards and tensors, checked against each other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kestrel.checkpoints.hf_config import read_hf_config, token_ids
from kestrel.checkpoints.safetensors_file import (
    FLOAT_DTYPES,
    HeaderError,
    SafetensorsHeader,
    TensorEntry,
    read_header,
    read_rows,
)
from kestrel.checkpoints.source_model import (
    F32,
    Checkpoint,
    Findings,
    Segment,
    SourceTensor,
    StoredTensor,
    read_segments,
)
from kestrel.config import ModelConfig
from kestrel.errors import ModelError
from kestrel.weights import TensorSpec, tensor_specs

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SIDE_FILES = (  # patterns
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "special_tokens_map.json",
)

_LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "router": "mlp.gate.weight",
}
_TOP_NAMES = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
_Q0, _K0 = (f"model.layers.0.self_attn.{which}_proj.weight" for which in "qk")

# Buffers that older transformers versions stored; recomputed from the config.
_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")

_SHOWN_NAMES = 20  # of a long list of tensor names in one message


def open_hf_folder(folder: Path, findings: Findings | None = None) -> Checkpoint:
    """Open and check a checkpoint folder. Raises ``ModelError`` that lists every fault.

    ``findings`` receives what could be read, also of a folder that is refused.
    """
    findings = findings or Findings()
    findings.format = "hugging-face"
    faults: list[str] = []
    headers, tensors = _read_shards(folder, faults)
    findings.stored = [StoredTensor(t.name, t.dtype, t.shape, t.nbytes) for t in tensors.values()]
    raw = read_json_object(folder / "config.json", faults)
    generation: dict[str, Any] = {}
    if (folder / "generation_config.json").exists():
        generation = read_json_object(folder / "generation_config.json", faults) or {}
    config: ModelConfig | None = None
    if raw is not None:
        raw = _with_generation_eos(raw, generation, faults)
        config, found = read_hf_config(raw, q_rows=_rows(tensors, _Q0), kv_rows=_rows(tensors, _K0))
        faults += [f"config.json: {fault}" for fault in found]
    findings.config = config
    files = _OpenFiles()
    try:
        sources: list[SourceTensor] = []
        # Without every shard, each of its tensors would be reported a second time as missing.
        if config is not None and headers is not None:
            sources = _match(config, tensors, headers, files, faults)
        if config is not None and not faults:
            _check_tied_head(config, sources, tensors, headers or {}, files, faults)
        if faults or config is None or headers is None:
            raise ModelError(str(folder), faults)
    except BaseException:
        files.close()
        raise
    side_files = _side_files(folder)
    notes = (
        [] if "tokenizer.json" in side_files else ["no tokenizer.json: the model will take token ids only"]
    )
    weight_files = sorted({header.path for header in headers.values()})
    return Checkpoint(
        str(folder), "hugging-face", config, sources, weight_files, side_files, notes, files.close
    )


def _side_files(folder: Path) -> dict[str, bytes]:
    """Files beside the weights that a kestrel folder keeps, by their path in it."""
    paths = [path for pattern in SIDE_FILES for path in sorted(folder.glob(pattern)) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def read_json_object(path: Path, faults: list[str]) -> dict[str, Any] | None:
    """The object in a JSON file; ``None``, and a fault, where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        faults.append(f"{path.name}: cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:
        faults.append(f"{path.name}: is not JSON: {error}")
    else:
        if isinstance(value, dict):
            return value
        faults.append(f"{path.name}: must hold a JSON object")
    return None


def _with_generation_eos(
    raw: dict[str, Any], generation: dict[str, Any], faults: list[str]
) -> dict[str, Any]:
    """config.json with the end tokens of generation_config.json added to its own."""
    extra = token_ids(generation.get("eos_token_id"))
    if extra is None:
        faults.append(
            "generation_config.json: eos_token_id must be an integer or a list, "
            f"not {generation['eos_token_id']!r}"
        )
    own = token_ids(raw.get("eos_token_id"))
    if not extra or own is None:
        return raw
    return {**raw, "eos_token_id": list(dict.fromkeys([*own, *extra]))}


# -- shards ------------------------------------------------------------------------------------------------


def _read_shards(
    folder: Path, faults: list[str]
) -> tuple[dict[str, SafetensorsHeader] | None, dict[str, TensorEntry]]:
    """Header of each tensor's shard, and each tensor; the first is ``None`` when a shard cannot be used."""
    names, weight_map = _shard_names(folder, faults)
    headers: dict[str, SafetensorsHeader] = {}
    tensors: dict[str, TensorEntry] = {}
    usable = bool(names)
    for name in names:
        if not (folder / name).exists():
            faults.append(f"{name}: shard is missing")
            usable = False
            continue
        try:
            header = read_header(folder / name)
        except HeaderError as error:
            faults += [f"{name}: {fault}" for fault in error.faults]
            usable = False
            continue
        for tensor in header.tensors.values():
            if tensor.name in tensors:
                faults.append(f"{tensor.name}: in both {headers[tensor.name].path.name} and {name}")
                continue
            headers[tensor.name], tensors[tensor.name] = header, tensor
            if weight_map and weight_map.get(tensor.name, name) != name:
                faults.append(f"{tensor.name}: in {name}, but {INDEX_FILE} says {weight_map[tensor.name]}")
            elif weight_map and tensor.name not in weight_map:
                faults.append(f"{tensor.name}: in {name}, but not in {INDEX_FILE}")
        faults += [
            f"{tensor}: {INDEX_FILE} says {name}, which has no such tensor"
            for tensor, shard in weight_map.items()
            if shard == name and tensor not in header.tensors
        ]
    return (headers if usable else None), tensors


def _shard_names(folder: Path, faults: list[str]) -> tuple[list[str], dict[str, str]]:
    single, index = (folder / SINGLE_FILE).exists(), (folder / INDEX_FILE).exists()
    if index:
        raw = read_json_object(folder / INDEX_FILE, faults)
        if raw is None:
            return [], {}
        weight_map = raw.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            faults.append(f"{INDEX_FILE}: has no weight_map")
            return [], {}
        outside = [v for v in weight_map.values() if not isinstance(v, str) or not v or Path(v).name != v]
        if outside:
            faults.append(f"{INDEX_FILE}: {outside[0]!r} is not the name of a file in this folder")
            return [], {}
        names = sorted(set(weight_map.values()))
        if single and SINGLE_FILE not in names:
            faults.append(
                f"holds both {SINGLE_FILE} and {INDEX_FILE}, which does not name it: remove one of them"
            )
        return names, weight_map
    if single:
        return [SINGLE_FILE], {}
    present = {path.name for path in folder.iterdir()}
    if any(re.fullmatch(r"model-\d+-of-\d+\.safetensors", name) for name in present):
        faults.append(f"{INDEX_FILE}: is missing, though shards are there")
    elif any(name.startswith("pytorch_model") or name.endswith((".bin", ".pt", ".pth")) for name in present):
        faults.append(
            "has only a pickled PyTorch checkpoint, which can run code when it is opened and is not read: "
            "save it as safetensors (save_pretrained does)"
        )
    else:
        faults.append(f"has neither {SINGLE_FILE} nor {INDEX_FILE}")
    return [], {}


class _OpenFiles:
    """Shards stay open while their tensors are read."""

    def __init__(self) -> None:
        self._files: dict[Path, BinaryIO] = {}

    def get(self, path: Path) -> BinaryIO:
        if path not in self._files:
            self._files[path] = path.open("rb", buffering=0)
        return self._files[path]

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


# -- tensors -----------------------------------------------------------------------------------------------


def _rows(tensors: dict[str, TensorEntry], name: str) -> int | None:
    entry = tensors.get(name)
    return entry.shape[0] if entry is not None and len(entry.shape) == 2 else None


def _match(
    config: ModelConfig,
    tensors: dict[str, TensorEntry],
    headers: dict[str, SafetensorsHeader],
    files: _OpenFiles,
    faults: list[str],
) -> list[SourceTensor]:
    """Every tensor that the model needs; faults for those missing, misshapen, of a wrong type, or unknown."""
    used: set[str] = set()
    sources = []
    missing: list[str] = []
    for spec in tensor_specs(config):
        parts = _parts(spec, tensors)
        for name, shape, _, _ in parts:
            if name in used:  # the other half of gate_up_proj
                continue
            used.add(name)
            _check_tensor(name, shape, tensors, missing, faults)
        source = _source(spec, parts, tensors, headers, files)
        if source is not None:
            sources.append(source)
    faults += name_list("missing", missing)
    if config.tie_word_embeddings:
        used.add(_TOP_NAMES["head"])  # compared with the embedding later
    elif _TOP_NAMES["head"] in missing:
        faults.append("tie_word_embeddings is false or absent, so lm_head.weight is needed: contradiction")
    unknown = [name for name in tensors if name not in used and not _IGNORED.search(name)]
    faults += name_list("not part of such a model", unknown)
    return sources


_Part = tuple[str, tuple[int, ...], int, int]  # tensor, its expected shape, first row, rows


def _parts(spec: TensorSpec, tensors: dict[str, TensorEntry]) -> list[_Part]:
    """The tensors of the checkpoint, in order, whose rows make up ``spec``."""
    if spec.name in _TOP_NAMES:
        return [(_TOP_NAMES[spec.name], spec.shape, 0, spec.rows)]
    _, layer, leaf = spec.name.split(".", 2)
    prefix = f"model.layers.{layer}."
    if not leaf.startswith("experts."):
        return [(prefix + _LAYER_NAMES[leaf], spec.shape, 0, spec.rows)]
    which = leaf.removeprefix("experts.")
    E, N, K = spec.shape
    prefix += "mlp.experts."
    if f"{prefix}gate_up_proj" in tensors or f"{prefix}down_proj" in tensors:
        # All experts in one tensor, gate above up: what the modules of transformers 5 hold.
        if which == "down":
            return [(prefix + "down_proj", (E, N, K), 0, E * N)]
        first = 0 if which == "gate" else N
        return [(prefix + "gate_up_proj", (E, 2 * N, K), e * 2 * N + first, N) for e in range(E)]
    return [(f"{prefix}{e}.{which}_proj.weight", (N, K), 0, N) for e in range(E)]


def _check_tensor(
    name: str, shape: tuple[int, ...], tensors: dict[str, TensorEntry], missing: list[str], faults: list[str]
) -> None:
    entry = tensors.get(name)
    if entry is None:
        missing.append(name)
        return
    if entry.shape != shape:
        faults.append(f"{name}: shape {list(entry.shape)}, expected {list(shape)}")
    if entry.dtype not in FLOAT_DTYPES:
        faults.append(f"{name}: dtype {entry.dtype}, expected {', '.join(FLOAT_DTYPES)}")


def _source(
    spec: TensorSpec,
    parts: list[_Part],
    tensors: dict[str, TensorEntry],
    headers: dict[str, SafetensorsHeader],
    files: _OpenFiles,
) -> SourceTensor | None:
    segments: list[Segment] = []
    stored: dict[str, None] = {}
    for name, shape, first, rows in parts:
        entry = tensors.get(name)
        if entry is None or entry.shape != shape or entry.dtype not in FLOAT_DTYPES:
            return None
        stored[entry.dtype] = None
        segments.append(_segment(entry, headers[name].path, first, rows, files))
    origin = (
        parts[0][0] if len({name for name, *_ in parts}) == 1 else f"{parts[0][0]} and {len(parts) - 1} more"
    )
    return SourceTensor(spec, origin, "+".join(stored), read_segments(segments))


def _segment(entry: TensorEntry, path: Path, first: int, rows: int, files: _OpenFiles) -> Segment:
    def read(begin: int, end: int) -> F32:
        values = read_rows(files.get(path), entry, first + begin, first + end)
        return values.astype(np.float32)

    return Segment(rows, read)


def _check_tied_head(
    config: ModelConfig,
    sources: list[SourceTensor],
    tensors: dict[str, TensorEntry],
    headers: dict[str, SafetensorsHeader],
    files: _OpenFiles,
    faults: list[str],
) -> None:
    """A tied model may store a head, but only one that equals the embedding."""
    name = _TOP_NAMES["head"]
    entry = tensors.get(name)
    if entry is None or not config.tie_word_embeddings:
        return
    contradiction = f"tie_word_embeddings is true, but {name} differs from the embedding"
    embed = sources[0]
    if entry.shape != embed.spec.shape or entry.dtype not in FLOAT_DTYPES:
        faults.append(f"{contradiction}: {entry.dtype} {list(entry.shape)}")
        return
    head = _segment(entry, headers[name].path, 0, embed.spec.rows, files)
    step = max(1, 2**22 // embed.spec.k)
    for begin in range(0, embed.spec.rows, step):
        end = min(begin + step, embed.spec.rows)
        differing = (embed.read(begin, end).view(np.uint32) != head.read(begin, end).view(np.uint32)).any(
            axis=1
        )
        if differing.any():
            faults.append(f"{contradiction}, first in row {begin + int(differing.argmax())}")
            return


def name_list(what: str, names: Iterable[str]) -> list[str]:
    """One fault for each name, the rest of a long list counted."""
    ordered = list(names)
    faults = [f"{name}: {what}" for name in ordered[:_SHOWN_NAMES]]
    if len(ordered) > _SHOWN_NAMES:
        faults.append(f"and {len(ordered) - _SHOWN_NAMES} more tensors {what}")
    return faults
