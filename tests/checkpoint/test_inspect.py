"""kestrel inspect: the same report for every format, faults listed, hashes checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kestrel.cli import run_command
from kestrel.convert import convert
from kestrel.inspect import inspect, main
from kestrel.weights import tensor_specs
from tests.checkpoint.files import edit_json
from tests.checkpoint.gguf_model import write_gguf_model
from tests.support.models import tiny_config, write_hf_model

SHAPE: dict[str, Any] = {"layers": 2, "experts": 4, "top_k": 2, "moe_ffn": 32}


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    write_hf_model(tmp_path / "hf", "qwen3_moe", **SHAPE)
    convert(tmp_path / "hf", tmp_path / "k")
    shape = {"hidden": 96, "ffn": 160, "vocab": 384, **SHAPE}
    write_gguf_model(tmp_path / "model.gguf", "qwen3_moe", **shape)
    return {"hugging-face": tmp_path / "hf", "kestrel": tmp_path / "k", "gguf": tmp_path / "model.gguf"}


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str]:
    code = run_command(main, [str(a) for a in arguments])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("kind", ["hugging-face", "gguf", "kestrel"])
@pytest.mark.parametrize("flags", [[], ["--verify"]])
def test_sound_model(
    paths: dict[str, Path], capsys: pytest.CaptureFixture[str], kind: str, flags: list[str]
) -> None:
    code, text = run(capsys, paths[kind], *flags)
    assert code == 0
    assert f"{paths[kind]}: {kind}\n" in text
    parameters = sum(spec.rows * spec.k for spec in tensor_specs(tiny_config("qwen3_moe", **SHAPE)))
    for words in (
        f"qwen3_moe, {parameters / 1e6:.1f} M parameters, 2 layers, hidden 96",
        "4 query / 2 KV heads of 32, with QK-norm",
        "4 of width 32, 2 a token, norm_topk_prob true",
        "288 bytes per token",  # 2 x 2 layers x 2 heads x (32 codes + a scale of 4 bytes)
    ):
        assert words in text
    assert ("verified: every" in text) == bool(flags)


def test_json(paths: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, paths["kestrel"], "--json", "--verify")
    report = json.loads(text)
    assert (code, report["format"], report["verified"], report["faults"]) == (0, "kestrel", True, [])
    assert report["config"]["hidden_size"] == 96
    assert report["kv_bytes_per_token"] == 288
    assert report["wtype"] == "q4local"
    assert sum(t["nbytes"] for t in report["tensors"]) == sum(report["bytes_by_type"].values())


def test_promised_size_is_the_converted_size(paths: dict[str, Path], tmp_path: Path) -> None:
    from kestrel.ops import WType

    promised = inspect(paths["hugging-face"]).converted_bytes
    for wtype in WType:
        convert(paths["hugging-face"], tmp_path / wtype.name, wtype=wtype)
        assert sum(inspect(tmp_path / wtype.name).bytes_by_type.values()) == promised[wtype.name]


def test_refused_source_is_still_described(
    paths: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    edit_json(paths["hugging-face"] / "config.json", attention_bias=True, some_new_trick=4)
    code, text = run(capsys, paths["hugging-face"])
    assert code == 1
    assert "refused, 2 faults:" in text
    assert "attention_bias" in text
    assert "some_new_trick" in text
    assert "model.layers.*.self_attn.q_proj.weight" in text
    report = inspect(paths["hugging-face"])
    assert len(report.faults) == 2
    assert report.config == tiny_config("qwen3_moe", **SHAPE, eos_token_ids=(2, 0))


def test_refused_gguf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf_model(tmp_path / "m.gguf", "qwen3", metadata={"logit_scale": 0.5})
    code, text = run(capsys, tmp_path / "m.gguf")
    assert code == 1
    assert "qwen3.logit_scale = 0.5 is not supported" in text
    assert "blk.*.attn_q.weight" in text


def test_changed_byte_is_found_by_verify_alone(
    paths: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = paths["kestrel"] / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert run(capsys, paths["kestrel"])[0] == 0
    code, text = run(capsys, paths["kestrel"], "--verify")
    assert code == 1
    assert "refused, 1 fault:" in text
    assert "its bytes are not those that were converted" in text


def test_changed_and_missing_side_files(paths: dict[str, Path]) -> None:
    (paths["kestrel"] / "tokenizer.json").write_text("{}")
    (paths["kestrel"] / "chat_template.jinja").unlink()
    assert inspect(paths["kestrel"], verify=True).faults == [
        "tokenizer.json: changed since the conversion (sha256 differs)",
        "chat_template.jinja: missing",
    ]


def test_verify_finds_weights_that_are_not_finite(tmp_path: Path) -> None:
    values = np.zeros(96, np.float32)
    values[7] = np.nan
    write_hf_model(tmp_path / "hf", "qwen3", edit={"model.norm.weight": values})
    assert inspect(tmp_path / "hf").faults == []
    assert inspect(tmp_path / "hf", verify=True).faults == [
        "norm (model.norm.weight): 1 weight is NaN or infinite"
    ]


def test_damaged_kestrel_folder(paths: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = paths["kestrel"] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    code, text = run(capsys, paths["kestrel"], "--verify")
    assert code == 1
    assert "truncated?" in text
    (paths["kestrel"] / "kestrel.json").write_text("{}")
    code, text = run(capsys, paths["kestrel"])
    assert code == 1
    assert "is not the manifest of a kestrel model" in text


def test_not_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, tmp_path)
    assert code == 1
    assert f"{tmp_path}: not a model" in text
    assert run(capsys, tmp_path / "missing")[0] == 1
    assert run(capsys)[0] == 2
