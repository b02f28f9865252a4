"""GGUF files: blocks without loss, rows in order, metadata read or refused by name, damage reported."""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

import kestrel.convert
from kestrel.checkpoints.quantize import dequantize, dequantize_rows
from kestrel.checkpoints.source import open_source
from kestrel.config import RopeConfig
from kestrel.convert import convert, main
from kestrel.errors import ModelError
from kestrel.ops import WType
from kestrel.rope import inv_freq
from kestrel.weights import QuantTensor, load_model_folder
from tests.checkpoint.files import assert_equal_bits, assert_equal_weights, faults_of, values_of
from tests.checkpoint.gguf_model import write_gguf_model
from tests.support.demo_model import demo_gguf
from tests.support.models import tiny_config, write_hf_model

SHAPE: dict[str, Any] = {
    "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96, "vocab": 300,
    "experts": 4, "top_k": 2, "moe_ffn": 32,
}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def stored(path: Path, name: str) -> np.ndarray:
    """What the gguf package says the tensor's values are."""
    (tensor,) = [t for t in gguf.GGUFReader(path).tensors if t.name == name]
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


# -- without loss --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "wtype"), [(Type.Q4_0, WType.q4local), (Type.Q8_0, WType.q8local)])
def test_blocks_import_bit_for_bit(tmp_path: Path, path: Path, kind: Type, wtype: WType) -> None:
    write_gguf_model(path, "qwen3_moe", type_of=lambda name: kind)
    result = convert(path, tmp_path / "k", wtype=wtype, head_wtype=wtype)
    _, weights = load_model_folder(tmp_path / "k")
    names = {
        "embed": "token_embd",
        "head": "output",
        **{f"layers.1.{x}": f"blk.1.attn_{x}" for x in "qkv"},
        "layers.0.o": "blk.0.attn_output",
        **{f"layers.0.experts.{x}": f"blk.0.ffn_{x}_exps" for x in ("gate", "up", "down")},
    }
    for ours, theirs in names.items():
        tensor = weights[ours]
        assert isinstance(tensor, QuantTensor)
        assert tensor.wtype == wtype
        assert_equal_bits(dequantize(tensor), stored(path, f"{theirs}.weight"), ours)
        assert result.manifest.tensors[ours].exact
    assert not [note for note in result.notes if "requantised" in note]


@pytest.mark.parametrize(
    ("kind", "wtype", "size"), [(Type.Q4_0, WType.q4local, 18), (Type.Q8_0, WType.q8local, 34)]
)
def test_every_block_pattern_imports_bit_for_bit(
    tmp_path: Path, path: Path, kind: Type, wtype: WType, size: int
) -> None:
    """Random bytes as blocks, whatever a quantiser would write: subnormal and negative scales, code -128."""
    write_gguf_model(path, "qwen3", type_of=lambda name: kind)
    (tensor,) = [t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_up.weight"]
    blocks = np.random.default_rng(0).integers(0, 256, (tensor.n_bytes // size, size), np.uint8)
    blocks[:, 1] &= 0xBB  # no scale is NaN or infinite
    data = bytearray(path.read_bytes())
    data[tensor.data_offset : tensor.data_offset + tensor.n_bytes] = blocks.tobytes()
    path.write_bytes(data)
    convert(path, tmp_path / "k", wtype=wtype)
    assert_equal_bits(values_of(tmp_path / "k")["layers.0.up"], stored(path, "blk.0.ffn_up.weight"))


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("block", [2**21, 64 * 7])
def test_equals_the_hugging_face_source(
    tmp_path: Path, path: Path, family: Any, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same model from both formats: the same tensors, q and k rows of Llama back in half-split order."""
    monkeypatch.setattr(kestrel.convert, "_BLOCK", block)  # the small one ends inside heads
    write_gguf_model(path, family, type_of=lambda name: Type.BF16)
    write_hf_model(tmp_path / "hf", family, **SHAPE)
    convert(path, tmp_path / "a", wtype=WType.q4local)
    convert(tmp_path / "hf", tmp_path / "b", wtype=WType.q4local)
    (config_a, a), (config_b, b) = load_model_folder(tmp_path / "a"), load_model_folder(tmp_path / "b")
    assert replace(config_a, eos_token_ids=(), bos_token_id=None) == replace(
        config_b, eos_token_ids=(), bos_token_id=None
    )
    # Norms and routers are F32 in the GGUF file, bf16 in the folder.
    exact = {k: v for k, v in a.items() if isinstance(v, QuantTensor) and "router" not in k}
    assert_equal_weights(exact, {k: b[k] for k in exact})


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q8_0])
def test_llama_rows_are_put_back_without_loss(tmp_path: Path, path: Path, kind: Type) -> None:
    write_gguf_model(path, "llama", type_of=lambda name: kind)
    wtype = WType.q4local if kind == Type.Q4_0 else WType.q8local
    result = convert(path, tmp_path / "k", wtype=wtype)
    values = values_of(tmp_path / "k")
    for leaf in "qk":
        rows = stored(path, f"blk.1.attn_{leaf}.weight")
        for head in range(len(rows) // 32):
            ours = values[f"layers.1.{leaf}"][32 * head : 32 * head + 32]
            theirs = rows[32 * head : 32 * head + 32]
            assert_equal_bits(ours[:16], theirs[0::2])
            assert_equal_bits(ours[16:], theirs[1::2])
    assert result.manifest.tensors["layers.1.q"].exact


# -- other types ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Type.Q4_1, Type.Q5_0, Type.Q5_1])
def test_other_types_are_requantised_and_said(
    tmp_path: Path, path: Path, kind: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf_model(path, "qwen3", type_of=lambda name: kind)
    assert main([str(path), str(tmp_path / "k"), "--wtype", "q8local"]) == 0
    said = capsys.readouterr().err
    assert f"requantised from {kind.name} to q8local: 16 tensors: embed head layers.0-1.{{" in said
    values = values_of(tmp_path / "k")["layers.0.up"]
    original = stored(path, "blk.0.ffn_up.weight")
    assert np.abs(values - original).max() <= 0.51 * np.abs(original).max() / 127


def test_q8_0_to_q4local_is_requantised_and_said(tmp_path: Path, path: Path) -> None:
    write_gguf_model(path, "qwen3", type_of=lambda name: Type.Q8_0 if "embd" in name else Type.Q4_0)
    result = convert(path, tmp_path / "k")
    assert result.notes[1:] == ["requantised from Q4_0 to q8local: 1 tensor: head"]
    assert result.manifest.tensors["embed"].exact


def test_k_quant_types(tmp_path: Path, path: Path) -> None:
    """Types that the package reads but does not write: bytes made by hand, values as it reads them."""
    kind = Type.Q6_K
    shape = {"hidden": 256, "ffn": 256}
    write_gguf_model(path, "qwen3", type_of=lambda name: Type.F32, **shape)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    writer_values = np.random.default_rng(0).integers(0, 100, (256, 256 // block * size), np.uint8)
    writer_values[:, -1] = 0x20  # a small positive scale
    reader = gguf.GGUFReader(path)
    rewritten = path.with_name("k.gguf")
    writer = gguf.GGUFWriter(rewritten, "qwen3")
    for key, entry in reader.fields.items():
        if key.startswith("qwen3."):
            value = entry.contents()
            writer.add_float32(key, value) if isinstance(value, float) else writer.add_uint32(key, value)
    for tensor in reader.tensors:
        if tensor.name == "blk.0.ffn_up.weight":
            writer.add_tensor(tensor.name, writer_values, raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    result = convert(rewritten, tmp_path / "out", wtype=WType.bf16)
    expected = stored(rewritten, "blk.0.ffn_up.weight").astype("bfloat16").astype(np.float32)
    assert_equal_bits(values_of(tmp_path / "out")["layers.0.up"], expected)
    assert "requantised from Q6_K to bf16: 1 tensor: layers.0.up" in result.notes


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16])
def test_float_types(tmp_path: Path, path: Path, kind: Type) -> None:
    write_gguf_model(path, "qwen3", type_of=lambda name: kind)
    convert(path, tmp_path / "k", wtype=WType.bf16)
    expected = stored(path, "blk.0.ffn_up.weight").astype("bfloat16").astype(np.float32)
    assert_equal_bits(values_of(tmp_path / "k")["layers.0.up"], expected)


# -- config --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_config(path: Path, family: Any) -> None:
    write_gguf_model(path, family)
    source = open_source(path)
    source.close()
    expected = tiny_config(family, **SHAPE)
    assert source.config == replace(expected, eos_token_ids=(), bos_token_id=None, max_position=4096)


def test_tied_when_there_is_no_output(tmp_path: Path, path: Path) -> None:
    write_gguf_model(path, "llama", tie=True)
    convert(path, tmp_path / "k")
    config, weights = load_model_folder(tmp_path / "k")
    assert config.tie_word_embeddings
    assert "head" not in weights


def test_values_per_layer_that_are_all_equal(path: Path) -> None:
    write_gguf_model(
        path, "qwen3", metadata={"attention.head_count_kv": [2, 2], "feed_forward_length": [96, 96]}
    )
    source = open_source(path)
    source.close()
    assert (source.config.num_kv_heads, source.config.intermediate_size) == (2, 96)


def test_head_size_absent_is_hidden_by_heads(path: Path) -> None:
    none = {"attention.key_length": None, "attention.value_length": None}
    write_gguf_model(path, "llama", head_dim=16, metadata=none)
    source = open_source(path)
    source.close()
    assert source.config.head_dim == 16


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"rope.freq_base": None}, RopeConfig(theta=10000.0)),
        ({"rope.freq_base": 1e6}, RopeConfig(theta=1e6)),
        ({"rope.scaling.type": "none"}, RopeConfig()),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, RopeConfig(type="linear", factor=4.0)),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 1024,
                "rope.scaling.finetuned": True,
            },
            RopeConfig(type="yarn", factor=4.0, original_max_position=1024),
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_beta_slow": 2.0,
            },
            RopeConfig(type="yarn", factor=4.0, original_max_position=4096, beta_fast=16.0, beta_slow=2.0),
        ),
    ],
)
def test_rope(path: Path, metadata: dict[str, Any], expected: RopeConfig) -> None:
    write_gguf_model(path, "qwen3", metadata=metadata)
    source = open_source(path)
    source.close()
    assert source.config.rope == expected


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_freqs_of_llama3(path: Path, factor: float) -> None:
    plain = tiny_config("llama", **SHAPE)
    rope = RopeConfig(type="llama3", factor=factor, original_max_position=8192)
    divisors = inv_freq(plain) / inv_freq(replace(plain, rope=rope))
    write_gguf_model(path, "llama", edit={"rope_freqs.weight": divisors})
    source = open_source(path)
    source.close()
    assert source.config.rope == rope


def test_rope_freqs_of_another_rule_are_refused(path: Path) -> None:
    write_gguf_model(path, "llama", edit={"rope_freqs.weight": np.linspace(1, 8, 16)})
    assert "are not those of llama3 scaling" in faults_of(open_source, path)[0]


def test_rope_freqs_of_ones_are_no_scaling(path: Path) -> None:
    write_gguf_model(path, "llama", edit={"rope_freqs.weight": np.ones(16)})
    source = open_source(path)
    source.close()
    assert source.config.rope.type == "default"


# -- refused by name -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"rope.scaling.type": "longrope"}, "rope.scaling.type 'longrope' is not supported"),
        ({"rope.scaling.attn_factor": 0.5}, "rope.scaling.attn_factor = 0.5 is not supported"),
        ({"rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ({"attention.scale": 0.1}, "attention.scale"),
        ({"attention.sliding_window": 512}, "attention.sliding_window = 512"),
        ({"logit_scale": 0.5}, "logit_scale = 0.5"),
        ({"rope.dimension_count": 16}, "rope.dimension_count 16 differs from the head size 32"),
        ({"attention.value_length": 16}, "attention.value_length 16 differs"),
        ({"expert_count": 4, "expert_used_count": 2}, "experts are not supported in this architecture"),
        ({"vocab_size": 999}, "vocab_size is 999, but token_embd.weight has 300 rows"),
        ({"attention.head_count_kv": [2, 1]}, "attention.head_count_kv must be int"),
        ({"some_new_trick": 7}, "unknown key qwen3.some_new_trick = 7"),
        ({"embedding_length": None}, "embedding_length is missing"),
        ({"block_count": "two"}, "block_count must be int, not 'two'"),
        ({"split.count": 2}, "join the parts"),
        ({"general.type": "adapter"}, "general.type is 'adapter', not 'model'"),
    ],
)
def test_metadata_refused(path: Path, metadata: dict[str, Any], words: str) -> None:
    write_gguf_model(path, "qwen3", metadata=metadata)
    found = faults_of(open_source, path)
    assert any(words in fault for fault in found), found


def test_keys_of_other_tools_are_named_in_a_note(path: Path) -> None:
    write_gguf_model(path, "qwen3", metadata={"general.quantized_by": "me"})
    reader_unaware = path.read_bytes().replace(b"general.quantized_by", b"somebod.quantized_by")
    path.write_bytes(reader_unaware)
    source = open_source(path)
    source.close()
    assert "not read, as they belong to other tools: somebod.quantized_by" in source.notes


def test_metadata_and_tensor_faults_are_listed_together(path: Path) -> None:
    write_gguf_model(path, "qwen3", metadata={"logit_scale": 0.5}, edit={"blk.0.ffn_up.weight": None})
    assert faults_of(open_source, path) == [
        "qwen3.logit_scale = 0.5 is not supported",
        "blk.0.ffn_up.weight: missing",
    ]


def test_moe_without_normalised_weights_is_refused(path: Path) -> None:
    write_gguf_model(path, "qwen3_moe", metadata={"expert_weights_norm": False})
    assert "expert_weights_norm = False is not supported" in faults_of(open_source, path)[0]


def test_unknown_architecture(path: Path) -> None:
    write_gguf_model(path, "qwen3", architecture="gemma3")
    assert "architecture 'gemma3' is not supported; supported: llama, qwen3, qwen3moe" in faults_of(
        open_source, path
    )


def test_tensor_faults_are_listed_together(path: Path) -> None:
    write_gguf_model(
        path,
        "qwen3",
        edit={
            "blk.0.attn_q.bias": np.zeros(128),
            "blk.1.attn_k.weight": np.zeros((32, 64)),
            "blk.0.ffn_up.weight": None,
        },
    )
    assert sorted(faults_of(open_source, path)) == [
        "blk.0.attn_q.bias: not part of such a model",
        "blk.0.ffn_up.weight: missing",
        "blk.1.attn_k.weight: shape [32, 64], expected [64, 64]",
    ]


def test_type_that_cannot_be_dequantised(path: Path) -> None:
    write_gguf_model(path, "qwen3", type_of=lambda name: Type.Q8_0)
    data = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 16  # after the number of dimensions and two of them
    assert struct.unpack_from("<I", data, at)[0] == Type.Q8_0
    struct.pack_into("<I", data, at, Type.I8)
    path.write_bytes(data)
    assert any("type I8 cannot be dequantised" in fault for fault in faults_of(open_source, path))


def test_scale_that_is_not_finite(tmp_path: Path, path: Path) -> None:
    write_gguf_model(path, "qwen3", type_of=lambda name: Type.Q4_0)
    (tensor,) = [t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    struct.pack_into("<H", data, tensor.data_offset + 18, 0x7C00)
    path.write_bytes(data)
    for wtype in WType:
        (fault,) = faults_of(convert, path, tmp_path / "k", wtype=wtype)
        assert fault.startswith("layers.0.up (blk.0.ffn_up.weight): ")
        assert "infinite" in fault


# -- damage --------------------------------------------------------------------------------------------------


def test_wrong_magic_and_version(path: Path) -> None:
    write_gguf_model(path, "qwen3")
    data = path.read_bytes()
    for start, words in (
        (b"GGML" + data[4:8], "is not a GGUF file (wrong magic)"),
        (b"GGUF" + struct.pack("<I", 1), "has GGUF version 1; supported: 2 and 3"),
        (b"GGUF" + struct.pack("<I", 99), "has GGUF version 99"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian files are not supported"),
    ):
        path.write_bytes(start + data[8:])
        assert words in faults_of(open_source, path)[0]
    path.write_bytes(b"GGUF")
    assert "wrong magic" in faults_of(open_source, path)[0]


def test_truncated_anywhere(path: Path) -> None:
    write_gguf_model(path, "qwen3")
    data = path.read_bytes()
    for keep in [*range(8, 2000, 97), len(data) // 2, len(data) - 64]:
        path.write_bytes(data[:keep])
        (fault,) = faults_of(open_source, path)
        assert fault.startswith("is truncated or damaged: "), keep


@pytest.mark.parametrize("at", [8, 16])
@pytest.mark.parametrize("count", [2**63, 2**31, 10**6])
def test_impossible_counts(path: Path, at: int, count: int) -> None:
    write_gguf_model(path, "qwen3")
    data = bytearray(path.read_bytes())
    struct.pack_into("<Q", data, at, count)
    path.write_bytes(data)
    assert "is truncated or damaged" in faults_of(open_source, path)[0]


def test_unknown_type(path: Path) -> None:
    write_gguf_model(path, "qwen3")
    data = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    struct.pack_into("<I", data, data.index(name) + len(name) + 4 + 16, 12345)
    path.write_bytes(data)
    assert "12345) is not a valid GGMLQuantizationType" in faults_of(open_source, path)[0]


def test_overlapping_tensors(path: Path) -> None:
    write_gguf_model(path, "qwen3")
    data = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    struct.pack_into("<Q", data, data.index(name) + len(name) + 4 + 16 + 4, 0)
    path.write_bytes(data)
    assert any("overlaps" in fault for fault in faults_of(open_source, path))


def test_random_bytes_changed(path: Path) -> None:
    """Whatever byte of the metadata changes: a ModelError or a model, never another exception."""
    write_gguf_model(path, "qwen3_moe")
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(60):
        broken = bytearray(data)
        for at in rng.integers(8, 2500, 3):
            broken[at] = rng.integers(256)
        path.write_bytes(broken)
        with suppress(ModelError):
            open_source(path).close()


def test_demo_model() -> None:
    """A file that llama.cpp made: 135 M parameters, Q4_1 with a Q8_0 embedding, tied."""
    path = demo_gguf()
    source = open_source(path)
    try:
        config = source.config
        assert (config.family, config.num_layers, config.num_heads, config.num_kv_heads) == (
            "llama",
            30,
            9,
            3,
        )
        assert (config.rope, config.rms_norm_eps) == (RopeConfig(theta=100000.0), 1e-5)
        assert config.tie_word_embeddings
        embed = source.tensors[0]
        assert embed.packed is not None
        assert embed.packed_wtype == WType.q8local
        codes, scale = embed.packed(49000, 49152)
        (tensor,) = [t for t in gguf.GGUFReader(path).tensors if t.name == "token_embd.weight"]
        expected = gguf.quants.dequantize(tensor.data[49000:], tensor.tensor_type)
        assert_equal_bits(dequantize_rows(WType.q8local, codes, scale).reshape(152, 576), expected)
    finally:
        source.close()
