"""Kestrel folders: mapped without copies, and every damage one clear error."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kestrel.checkpoints.manifest import read_manifest
from kestrel.config import ModelConfig
from kestrel.convert import convert
from kestrel.ops import WType
from kestrel.weights import QuantTensor, load_model_folder, tensor_specs
from tests.checkpoint.files import (
    assert_equal_bits,
    edit_header,
    edit_json,
    faults_of,
    read_safetensors,
    write_safetensors,
)
from tests.support.models import tiny_config, write_hf_model

SHAPE: dict[str, Any] = {"layers": 2, "experts": 4, "top_k": 2, "moe_ffn": 32}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_hf_model(tmp_path / "hf", "qwen3_moe", **SHAPE)
    convert(tmp_path / "hf", tmp_path / "k")
    return tmp_path / "k"


def arrays_of(tensor: QuantTensor | np.ndarray) -> list[np.ndarray]:
    if isinstance(tensor, QuantTensor):
        return [tensor.codes] if tensor.scale is None else [tensor.codes, tensor.scale]
    return [tensor]


@pytest.mark.parametrize("wtype", list(WType))
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_shapes_and_dtypes(tmp_path: Path, family: Any, wtype: WType) -> None:
    write_hf_model(tmp_path / "hf", family, **SHAPE)
    convert(tmp_path / "hf", tmp_path / "k", wtype=wtype, head_wtype=wtype)
    config, weights = load_model_folder(tmp_path / "k")
    assert config == tiny_config(family, **SHAPE, eos_token_ids=config.eos_token_ids)
    specs = list(tensor_specs(config))
    assert list(weights) == [spec.name for spec in specs]
    for spec in specs:
        tensor = weights[spec.name]
        if spec.role == "norm":
            assert isinstance(tensor, np.ndarray)
            assert (tensor.dtype, tensor.shape) == (np.float32, spec.shape)
            continue
        assert isinstance(tensor, QuantTensor)
        *lead, n, k = spec.shape
        assert (tensor.experts, tensor.n, tensor.k) == (lead[0] if lead else None, n, k)
        expected = WType.bf16 if spec.role == "router" else wtype
        assert tensor.wtype == expected
        shape, dtype = {
            WType.bf16: ((*lead, n, k), np.uint16),
            WType.q4local: ((*lead, n, k // 32, 16), np.uint8),
            WType.q8local: ((*lead, n, k // 32, 32), np.int8),
        }[expected]
        assert (tensor.codes.shape, tensor.codes.dtype) == (shape, dtype)
        if expected == WType.bf16:
            assert tensor.scale is None
        else:
            assert tensor.scale is not None
            assert (tensor.scale.shape, tensor.scale.dtype) == ((*lead, n, k // 32), np.uint16)


def test_arrays_are_read_only_views_of_one_mapping(folder: Path) -> None:
    _, weights = load_model_folder(folder)
    mappings = set()
    for tensor in weights.values():
        for array in arrays_of(tensor):
            assert array.flags.c_contiguous
            assert not array.flags.writeable
            base: Any = array
            while isinstance(base, np.ndarray):
                base = base.base
            owner = base.obj if isinstance(base, memoryview) else base
            assert isinstance(owner, mmap.mmap)
            mappings.add(id(owner))
    assert len(mappings) == 1


def test_q4_codes_in_the_file_are_in_contract_order(folder: Path) -> None:
    """Byte j of a group: element j in the low nibble, j + 16 in the high one; a scale for each group."""
    header, data = read_safetensors(folder / "model.safetensors")
    begin, end = header["layers.0.q.codes"]["data_offsets"]
    _, weights = load_model_folder(folder)
    tensor = weights["layers.0.q"]
    assert isinstance(tensor, QuantTensor)
    assert_equal_bits(np.frombuffer(data[begin:end], np.uint8).reshape(tensor.codes.shape), tensor.codes)


def test_manifest_round_trip(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert manifest.to_json() == (folder / "kestrel.json").read_text()


# -- damage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, "is not the manifest of a kestrel model"),
        (
            {"format_version": 2},
            "has format version 2; this kestrel reads version 1: convert the source again",
        ),
        ({"format_version": ...}, "has format version None"),
        ({"extra": 1}, "unknown key 'extra'"),
        ({"config": ...}, "config must be an object"),
        ({"wtype": 4}, "wtype must be a string"),
        ({"sources": [{"name": 1}]}, "sources must be a list of"),
        ({"tensors": []}, "tensors must be an object"),
        ({"tensors": {"embed": {}}}, "tensors.embed must be"),
    ],
)
def test_damaged_manifest(folder: Path, change: dict[str, Any], words: str) -> None:
    edit_json(folder / "kestrel.json", **change)
    assert any(words in fault for fault in faults_of(load_model_folder, folder))


def test_manifest_that_is_not_json(folder: Path) -> None:
    (folder / "kestrel.json").write_text("{")
    assert "is not JSON" in faults_of(load_model_folder, folder)[0]


def test_manifest_faults_are_listed_together(folder: Path) -> None:
    config = json.loads((folder / "kestrel.json").read_text())["config"]
    edit_json(folder / "kestrel.json", config={**config, "num_layers": "2", "surprise": 1}, wtype=3)
    assert len(faults_of(load_model_folder, folder)) == 3


def edit_tensor(folder: Path, name: str, **changes: Any) -> None:
    tensors = json.loads((folder / "kestrel.json").read_text())["tensors"]
    record = {**tensors[name], **changes}
    edit_json(folder / "kestrel.json", tensors={**tensors, name: record})


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("embed", {"wtype": "q5local"}, "embed: cannot be stored as 'q5local'"),
        ("layers.0.router", {"wtype": "q4local"}, "layers.0.router: cannot be stored as 'q4local'"),
        ("norm", {"wtype": "bf16"}, "norm: cannot be stored as 'bf16'"),
        ("layers.0.q", {"shape": [96, 96]}, "layers.0.q: shape [96, 96] in kestrel.json, not [128, 96]"),
        ("layers.0.q", {"wtype": "q8local"}, "layers.0.q.codes: is U8 [128, 3, 16], not I8 [128, 3, 32]"),
    ],
)
def test_manifest_against_config_and_weights(
    folder: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    edit_tensor(folder, name, **changes)
    assert any(words in fault for fault in faults_of(load_model_folder, folder))


def test_missing_and_unknown_tensors(folder: Path) -> None:
    tensors = json.loads((folder / "kestrel.json").read_text())["tensors"]
    tensors["extra"] = tensors.pop("layers.1.v")
    edit_json(folder / "kestrel.json", tensors=tensors)
    found = faults_of(load_model_folder, folder)
    assert "layers.1.v: missing from kestrel.json" in found
    assert "extra: in kestrel.json, but not part of such a model" in found
    assert "layers.1.v.codes: in model.safetensors, but not part of such a model" in found


def test_config_of_another_shape(folder: Path) -> None:
    config = json.loads((folder / "kestrel.json").read_text())["config"]
    edit_json(folder / "kestrel.json", config={**config, "hidden_size": 64})
    assert len(faults_of(load_model_folder, folder)) > 10


@pytest.mark.parametrize("keep", [0, 5, 500, -1, -10000])
def test_truncated_weights(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert faults_of(load_model_folder, folder)


def test_weights_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "cannot be read: No such file" in faults_of(load_model_folder, folder)[0]


def test_overlapping_offsets(folder: Path) -> None:
    def overlap(header: dict[str, Any]) -> None:
        header["layers.0.k.scale"]["data_offsets"] = header["layers.0.v.scale"]["data_offsets"]

    edit_header(folder / "model.safetensors", overlap)
    assert any("overlaps" in fault for fault in faults_of(load_model_folder, folder))


def test_unaligned_data(folder: Path) -> None:
    header, data = read_safetensors(folder / "model.safetensors")
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)  # an odd start
    write_safetensors(folder / "model.safetensors", text, data)
    assert any("is not aligned" in fault for fault in faults_of(load_model_folder, folder))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: None, "does not exist"),
        (lambda p: p.mkdir(), "has no kestrel.json; `kestrel convert SRC DST` makes one"),
        (
            lambda p: p.write_bytes(b"GGUF\3\0\0\0"),
            "is a GGUF file, not a kestrel folder: convert it first: python -m",
        ),
        (lambda p: p.write_bytes(b"text"), "is a file, not a kestrel folder"),
        (
            lambda p: write_hf_model(p),
            "is a Hugging Face folder, not a kestrel folder: convert it first: python -m",
        ),
        (lambda p: (p.mkdir(), (p / "m.gguf").touch()), "holds m.gguf, not a kestrel model"),
    ],
)
def test_not_a_kestrel_folder(tmp_path: Path, make: Any, words: str) -> None:
    make(tmp_path / "x")
    assert words in faults_of(load_model_folder, tmp_path / "x")[0]


def test_partial_folder_is_refused_though_complete(folder: Path, tmp_path: Path) -> None:
    folder.rename(tmp_path / "k.partial-123")
    assert "interrupted conversion" in faults_of(load_model_folder, tmp_path / "k.partial-123")[0]


def test_tensor_specs_count() -> None:
    """The 30B shape of the performance notes: 3,029 M weights read per token, 30.5 G in all."""
    config = tiny_config(
        "qwen3_moe",
        hidden=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        head_dim=128,
        experts=128,
        top_k=8,
        moe_ffn=768,
        vocab=151936,
    )
    assert isinstance(config, ModelConfig)
    total = sum(spec.rows * spec.k for spec in tensor_specs(config))
    assert total == pytest.approx(30.53e9, rel=1e-3)
