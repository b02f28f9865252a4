"""Hugging Face folders: every layout gives the same weights, and every damage one clear error."""

from __future__ import annotations

import errno
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kestrel.checkpoints.source import open_source
from kestrel.convert import convert
from kestrel.errors import ModelError
from kestrel.ops import WType
from kestrel.weights import load_model_folder, tensor_specs
from tests.checkpoint.files import (
    assert_equal_bits,
    assert_equal_weights,
    edit_header,
    edit_json,
    faults_of,
    read_safetensors,
    values_of,
    write_safetensors,
)
from tests.support.models import random_hf_tensors, tiny_config, write_hf_model
from tests.support.shared import shared_path

SHAPE: dict[str, Any] = {
    "hidden": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "ffn": 96,
    "vocab": 300,
}
EXPERTS: dict[str, Any] = {"experts": 4, "top_k": 2, "moe_ffn": 32}


def hf_values(family: str, **shape: Any) -> dict[str, np.ndarray]:
    """The f32 tensors that write_hf_model stores, by the name transformers gives them."""
    arguments: dict[str, Any] = {**SHAPE, **EXPERTS, "dense_layers": (), "tie": False, "seed": 0, **shape}
    return random_hf_tensors(family, **arguments)


# -- layouts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_every_value_arrives_where_it_belongs(tmp_path: Path, family: Any) -> None:
    """f32 source, bf16 out: each value is its source's, rounded once; nothing swapped, nothing lost."""
    write_hf_model(tmp_path / "hf", family, **SHAPE, **EXPERTS, dtype="bf16")
    convert(tmp_path / "hf", tmp_path / "k", wtype=WType.bf16)
    source = {name: t.astype("bfloat16").astype(np.float32) for name, t in hf_values(family).items()}
    values = values_of(tmp_path / "k")
    assert_equal_bits(values["embed"], source.pop("model.embed_tokens.weight"))
    assert_equal_bits(values["norm"], source.pop("model.norm.weight"))
    assert_equal_bits(values["head"], source.pop("lm_head.weight"))
    leaves = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        **{x: f"self_attn.{x}_proj" for x in "qkvo"},
    }
    if family != "llama":
        leaves |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    for layer in range(2):
        here, there = f"layers.{layer}.", f"model.layers.{layer}."
        for leaf, name in leaves.items():
            assert_equal_bits(values[here + leaf], source.pop(f"{there}{name}.weight"), leaf)
        if family == "qwen3_moe":
            assert_equal_bits(values[here + "router"], source.pop(f"{there}mlp.gate.weight"))
        for part in ("gate", "up", "down"):
            if family == "qwen3_moe":
                stack = [source.pop(f"{there}mlp.experts.{e}.{part}_proj.weight") for e in range(4)]
                assert_equal_bits(values[f"{here}experts.{part}"], np.stack(stack))
            else:
                assert_equal_bits(values[here + part], source.pop(f"{there}mlp.{part}_proj.weight"))
    assert not source


@pytest.mark.parametrize("wtype", list(WType))
@pytest.mark.parametrize(
    "layout",
    [
        {"shards": 3},
        {"config_style": 4},
        {"shards": 2, "config_style": 4, "experts_layout": "stacked"},
        {"experts_layout": "stacked"},
    ],
)
def test_layouts_give_equal_weights(tmp_path: Path, layout: dict[str, Any], wtype: WType) -> None:
    arguments: dict[str, Any] = {**SHAPE, **EXPERTS, "layers": 3, "dense_layers": (1,)}
    write_hf_model(tmp_path / "plain", "qwen3_moe", **arguments)
    write_hf_model(tmp_path / "other", "qwen3_moe", **arguments, **layout)
    convert(tmp_path / "plain", tmp_path / "a", wtype=wtype)
    convert(tmp_path / "other", tmp_path / "b", wtype=wtype)
    (config_a, a), (config_b, b) = load_model_folder(tmp_path / "a"), load_model_folder(tmp_path / "b")
    assert config_a == config_b
    assert config_a.eos_token_ids == (2, 0)  # config.json's, then generation_config.json's
    assert_equal_weights(a, b)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_dtypes(tmp_path: Path, dtype: Any) -> None:
    write_hf_model(tmp_path / "hf", "qwen3", **SHAPE, dtype=dtype)
    result = convert(tmp_path / "hf", tmp_path / "k", wtype=WType.bf16)
    rounded = [note for note in result.notes if note.startswith("rounded from")]
    assert rounded == ([] if dtype == "bf16" else [rounded[0]])
    stored = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}[dtype]
    expected = hf_values("qwen3")["model.layers.1.mlp.up_proj.weight"].astype(stored).astype("bfloat16")
    assert_equal_bits(values_of(tmp_path / "k")["layers.1.up"], expected.astype(np.float32))
    norm = hf_values("qwen3")["model.norm.weight"].astype(stored).astype(np.float32)
    assert_equal_bits(values_of(tmp_path / "k")["norm"], norm)
    record = result.manifest.tensors["layers.1.up"]
    assert (record.source, record.exact) == (dtype.upper(), dtype == "bf16")


def test_f32_that_holds_bf16_values_is_exact(tmp_path: Path) -> None:
    write_hf_model(tmp_path / "hf", "qwen3", **SHAPE, dtype="bf16")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    save_file({k: v.astype(np.float32) for k, v in tensors.items()}, tmp_path / "hf" / "model.safetensors")
    result = convert(tmp_path / "hf", tmp_path / "k", wtype=WType.bf16)
    assert all(record.exact for record in result.manifest.tensors.values())
    assert result.notes == []


def test_head_dim_absent_is_taken_from_the_tensors(tmp_path: Path) -> None:
    for family in ("llama", "qwen3", "qwen3_moe"):
        write_hf_model(tmp_path / family, family, **SHAPE, **EXPERTS, omit=["head_dim"])
        source = open_source(tmp_path / family)
        assert source.config.head_dim == 32
        source.close()


def test_config_equals_the_described_model(tmp_path: Path) -> None:
    for family in ("llama", "qwen3", "qwen3_moe"):
        write_hf_model(tmp_path / family, family, **SHAPE, **EXPERTS)
        source = open_source(tmp_path / family)
        assert source.config == tiny_config(family, **SHAPE, **EXPERTS)
        assert [t.spec for t in source.tensors] == list(tensor_specs(source.config))
        source.close()


def test_shared_model_opens() -> None:
    source = open_source(shared_path("models", "tiny-qwen3-moe"))
    source.close()
    assert source.config.moe is not None
    assert (source.config.moe.num_experts, source.config.head_dim) == (16, 64)


# -- tied output ---------------------------------------------------------------------------------------------


def test_tied_model_has_no_head(tmp_path: Path) -> None:
    write_hf_model(tmp_path / "hf", "llama", **SHAPE, tie=True)
    convert(tmp_path / "hf", tmp_path / "k")
    config, weights = load_model_folder(tmp_path / "k")
    assert config.tie_word_embeddings
    assert "head" not in weights


def test_tied_model_with_an_equal_head(tmp_path: Path) -> None:
    write_hf_model(tmp_path / "hf", "llama", **SHAPE, tie=True, lm_head="copy")
    convert(tmp_path / "hf", tmp_path / "k")
    assert "head" not in load_model_folder(tmp_path / "k")[1]


def test_untied_model_with_an_equal_head_keeps_both(tmp_path: Path) -> None:
    write_hf_model(tmp_path / "hf", "llama", **SHAPE, lm_head="copy")
    convert(tmp_path / "hf", tmp_path / "k", wtype=WType.q8local)
    values = values_of(tmp_path / "k")
    assert_equal_bits(values["head"], values["embed"])


def test_tied_model_with_another_head_is_a_contradiction(tmp_path: Path) -> None:
    write_hf_model(tmp_path / "hf", "llama", **SHAPE, tie=True, lm_head="different")
    (fault,) = faults_of(open_source, tmp_path / "hf")
    assert (
        "tie_word_embeddings is true, but lm_head.weight differs from the embedding, first in row 0" in fault
    )


def test_one_differing_weight_of_the_last_row_is_seen(tmp_path: Path) -> None:
    head = hf_values("llama", tie=True)["model.embed_tokens.weight"].copy()
    head[-1, -1] += 1
    write_hf_model(tmp_path / "hf", "llama", **SHAPE, tie=True, lm_head="copy", edit={"lm_head.weight": head})
    assert "first in row 299" in faults_of(open_source, tmp_path / "hf")[0]


def test_untied_model_without_head_is_a_contradiction(tmp_path: Path) -> None:
    write_hf_model(tmp_path / "hf", "llama", **SHAPE, lm_head="absent")
    found = faults_of(open_source, tmp_path / "hf")
    assert any("lm_head.weight is needed" in fault for fault in found)


# -- damage --------------------------------------------------------------------------------------------------

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return write_hf_model(tmp_path / "hf", "qwen3", **SHAPE)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_hf_model(tmp_path / "sharded", "qwen3", **SHAPE, shards=3)


def weights_file(folder: Path) -> Path:
    return folder / "model.safetensors"


def test_missing_shards_are_all_named_once(sharded: Path) -> None:
    (sharded / "model-00001-of-00003.safetensors").unlink()
    (sharded / "model-00003-of-00003.safetensors").unlink()
    assert faults_of(open_source, sharded) == [
        "model-00001-of-00003.safetensors: shard is missing",
        "model-00003-of-00003.safetensors: shard is missing",
    ]


def test_index_names_a_tensor_that_no_shard_has(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map={**weight_map, "model.extra.weight": "model-00002-of-00003.safetensors"})
    (fault,) = faults_of(open_source, sharded)
    assert fault.startswith("model.extra.weight: model.safetensors.index.json says model-00002-of-00003")


def test_tensor_missing_from_the_index(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    del weight_map[Q]
    edit_json(index, weight_map=weight_map)
    assert any(
        f"{Q}: in " in fault and "not in model.safetensors.index" in fault
        for fault in faults_of(open_source, sharded)
    )


def test_same_name_in_two_shards(sharded: Path) -> None:
    first, second = (sharded / f"model-0000{i}-of-00003.safetensors" for i in (1, 2))
    tensors, moved = load_file(second), load_file(first)
    name = next(iter(moved))
    save_file({**tensors, name: moved[name]}, second)
    found = faults_of(open_source, sharded)
    assert f"{name}: in both {first.name} and {second.name}" in found


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "is not the name of a file in this folder"),
        ('{"weight_map": {"a": 3}}', "is not the name of a file in this folder"),
    ],
)
def test_malformed_index(sharded: Path, content: str, words: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    assert any(words in fault for fault in faults_of(open_source, sharded))


def test_index_missing(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    assert "is missing, though shards are there" in faults_of(open_source, sharded)[0]


def test_single_file_beside_an_index_is_ambiguous(sharded: Path) -> None:
    weights_file(sharded).write_bytes((sharded / "model-00001-of-00003.safetensors").read_bytes())
    assert "remove one of them" in faults_of(open_source, sharded)[0]


def test_wrong_shape(tmp_path: Path) -> None:
    write_hf_model(tmp_path / "hf", "qwen3", **SHAPE, edit={Q: np.zeros((128, 32), np.float32)})
    assert faults_of(open_source, tmp_path / "hf") == [f"{Q}: shape [128, 32], expected [128, 64]"]


def test_transposed_matrix_is_a_wrong_shape(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    write_hf_model(tmp_path / "hf", "qwen3", **SHAPE, edit={name: hf_values("qwen3")[name].T})
    assert faults_of(open_source, tmp_path / "hf") == [f"{name}: shape [96, 64], expected [64, 96]"]


def test_zero_length_tensor(tmp_path: Path) -> None:
    write_hf_model(tmp_path / "hf", "qwen3", **SHAPE, edit={Q: np.zeros((0, 64), np.float32)})
    assert any(f"{Q}: shape [0, 64]" in fault for fault in faults_of(open_source, tmp_path / "hf"))


def test_missing_and_unknown_tensors(tmp_path: Path) -> None:
    bias = "model.layers.0.self_attn.q_proj.bias"
    write_hf_model(tmp_path / "hf", "qwen3", **SHAPE, edit={"model.norm.weight": None, bias: np.zeros(128)})
    assert faults_of(open_source, tmp_path / "hf") == [
        "model.norm.weight: missing",
        f"{bias}: not part of such a model",
    ]


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    write_hf_model(tmp_path / "hf", "llama", **SHAPE, edit={name: np.ones(16)})
    open_source(tmp_path / "hf").close()


def test_half_of_the_experts_stacked(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    write_hf_model(
        tmp_path / "hf", "qwen3_moe", **SHAPE, **EXPERTS, edit={name: np.zeros((4, 64, 64), np.float32)}
    )
    found = faults_of(open_source, tmp_path / "hf")
    assert "model.layers.0.mlp.experts.down_proj: missing" in found
    assert any("experts.0.gate_proj.weight: not part" in fault for fault in found)


def test_long_lists_are_counted(tmp_path: Path) -> None:
    write_hf_model(tmp_path / "hf", "qwen3_moe", **SHAPE, experts=40, top_k=2, moe_ffn=32)
    edit_json(tmp_path / "hf" / "config.json", num_local_experts=80)
    assert "and 220 more tensors missing" in faults_of(open_source, tmp_path / "hf")


@pytest.mark.parametrize("dtype", ["F64", "I8", "F8_E4M3"])
def test_wrong_dtype(hf: Path, dtype: str) -> None:
    header, data = read_safetensors(weights_file(hf))
    begin, end = header[Q]["data_offsets"]
    size = {"F64": 8, "I8": 1, "F8_E4M3": 1}[dtype]
    # The tensor moves to the end, where it may have another length.
    for entry in header.values():
        if "data_offsets" in entry and entry["data_offsets"][0] > begin:
            entry["data_offsets"] = [at - (end - begin) for at in entry["data_offsets"]]
    rest = data[:begin] + data[end:]
    header[Q] = {"dtype": dtype, "shape": [128, 64], "data_offsets": [len(rest), len(rest) + 128 * 64 * size]}
    write_safetensors(weights_file(hf), header, rest + bytes(128 * 64 * size))
    assert faults_of(open_source, hf) == [f"{Q}: dtype {dtype}, expected BF16, F16, F32"]


def _swap_offsets(header: dict[str, Any]) -> None:
    header[Q]["data_offsets"] = header["model.norm.weight"]["data_offsets"]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (_swap_offsets, f"{Q}: BF16 [128, 64] needs 16384 bytes, its offsets span 128"),
        (lambda h: h[Q].update(data_offsets=[5, 3]), f"{Q}: malformed data_offsets [5, 3]"),
        (lambda h: h[Q].update(data_offsets=[-8, 16376]), f"{Q}: malformed data_offsets"),
        (lambda h: h[Q].update(data_offsets=[2**40, 2**40 + 16384]), f"{Q}: ends at byte"),
        (lambda h: h[Q].update(data_offsets=[0, 16384]), "overlaps"),
        (lambda h: h[Q].update(shape=[128, 65]), f"{Q}: BF16 [128, 65] needs 16640 bytes"),
        (lambda h: h[Q].update(shape=[128, -64]), f"{Q}: malformed shape"),
        (lambda h: h[Q].update(shape=[2**61, 2**61]), f"{Q}: BF16 "),
        (lambda h: h[Q].update(shape="big"), f"{Q}: malformed shape"),
        (lambda h: h[Q].update(dtype="F17"), f"{Q}: unknown dtype 'F17'"),
        (lambda h: h[Q].pop("dtype"), f"{Q}: header entry must have exactly"),
        (lambda h: h.update({Q: 7}), f"{Q}: header entry must have exactly"),
        (lambda h: h.pop(Q), "bytes that belong to no tensor"),
        (lambda h: h.update(__metadata__={"a": 1}), "__metadata__ must map names to strings"),
    ],
)
def test_damaged_header(hf: Path, edit: Any, words: str) -> None:
    edit_header(weights_file(hf), edit)
    found = faults_of(open_source, hf)
    assert any(words in fault for fault in found), found


def test_name_twice_in_one_header(hf: Path) -> None:
    header, data = read_safetensors(weights_file(hf))
    entry = json.dumps({Q: header[Q]})[1:-1]
    text = json.dumps(header)[:-1] + ", " + entry + "}"
    write_safetensors(weights_file(hf), text.encode(), data)
    assert any(f"header names '{Q}' twice" in fault for fault in faults_of(open_source, hf))


@pytest.mark.parametrize("length", [2**63, 2**40, 200_000_000, 10_000_000])
def test_huge_header_length(hf: Path, length: int) -> None:
    header, data = read_safetensors(weights_file(hf))
    write_safetensors(weights_file(hf), header, data, length=length)
    assert f"header length {length}" in faults_of(open_source, hf)[0]


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1, -5000])
def test_truncated_file(hf: Path, keep: int) -> None:
    data = weights_file(hf).read_bytes()
    weights_file(hf).write_bytes(data[:keep])
    found = faults_of(open_source, hf)
    assert all(fault.startswith("model.safetensors: ") for fault in found)


def test_bytes_after_the_last_tensor(hf: Path) -> None:
    with weights_file(hf).open("ab") as file:
        file.write(b"more")
    assert "4 bytes that belong to no tensor lie after" in faults_of(open_source, hf)[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        (b"PK\x03\x04" + bytes(100), "pickled PyTorch checkpoint"),
        (pickle.dumps({"a": 1}) + bytes(100), "pickled PyTorch checkpoint"),
        (b"GGUF\x03\0\0\0" + bytes(100), "but GGUF"),
        (b"<!DOCTYPE html><html></html>", "not a safetensors file"),
        (b"\x10\0\0\0\0\0\0\0not json at all!", "header is not JSON"),
        (b"\x02\0\0\0\0\0\0\0[]", "header is not a JSON object"),
        (b"\x02\0\0\0\0\0\0\0\xff\xfe", "header is not JSON"),
    ],
)
def test_not_safetensors(hf: Path, content: bytes, words: str) -> None:
    weights_file(hf).write_bytes(content)
    assert words in faults_of(open_source, hf)[0]


def test_pickle_only_checkpoint(hf: Path) -> None:
    weights_file(hf).rename(hf / "pytorch_model.bin")
    assert "only a pickled PyTorch checkpoint" in faults_of(open_source, hf)[0]


def test_no_weights_at_all(hf: Path) -> None:
    weights_file(hf).unlink()
    assert faults_of(open_source, hf) == ["has neither model.safetensors nor model.safetensors.index.json"]


def test_unreadable_file(hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.open

    def denied(path: Path, *arguments: Any, **keywords: Any) -> Any:
        if path.name == "model.safetensors":  # chmod would not stop root
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "open", denied)
    assert faults_of(open_source, hf) == ["model.safetensors: cannot be read: Permission denied"]


def test_weights_file_that_is_a_folder(hf: Path) -> None:
    weights_file(hf).unlink()
    weights_file(hf).mkdir()
    assert "cannot be read: Is a directory" in faults_of(open_source, hf)[0]


@pytest.mark.parametrize(("content", "words"), [("{", "is not JSON"), ("3", "must hold a JSON object")])
def test_malformed_config(hf: Path, content: str, words: str) -> None:
    (hf / "config.json").write_text(content)
    assert f"config.json: {words}" in faults_of(open_source, hf)[0]


def test_config_and_shards_are_reported_together(sharded: Path) -> None:
    edit_json(sharded / "config.json", attention_bias=True, some_new_trick=3)
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError) as caught:
        open_source(sharded)
    assert len(caught.value.faults) == 3
    message = str(caught.value)
    assert all(word in message for word in ("attention_bias", "some_new_trick", "model-00002-of-00003"))
    assert str(sharded) in message


def test_config_and_tensors_are_reported_together(tmp_path: Path) -> None:
    write_hf_model(tmp_path / "hf", "qwen3", **SHAPE, edit={Q: None}, attention_bias=True)
    assert faults_of(open_source, tmp_path / "hf") == [
        "config.json: attention_bias = True is not supported",
        f"{Q}: missing",
    ]


def test_malformed_generation_config(hf: Path) -> None:
    edit_json(hf / "generation_config.json", eos_token_id="2")
    assert "generation_config.json: eos_token_id must be" in faults_of(open_source, hf)[0]


def test_no_tokenizer_is_a_note(hf: Path) -> None:
    (hf / "tokenizer.json").unlink()
    source = open_source(hf)
    source.close()
    assert "no tokenizer.json" in source.notes[0]
