"""Values of the wrong kind or of absurd size, in every JSON file: a fault by name, at once, never a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kestrel.checkpoints.hf_config import read_hf_config
from kestrel.checkpoints.hf_folder import open_hf_folder
from kestrel.config import ModelConfig
from kestrel.convert import convert
from kestrel.errors import ModelError
from kestrel.inspect import inspect
from kestrel.rope import attention_factor, inv_freq
from kestrel.text.tokenizer import Tokenizer
from kestrel.weights import load_model_folder
from tests.checkpoint.files import edit_header, edit_json
from tests.support.models import write_hf_model

HUGE = 10**400  # more than a float can hold


def short(value: object) -> str:
    return repr(value)[:8]


pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return write_hf_model(tmp_path / "hf", "qwen3_moe", layers=1, experts=2, moe_ffn=32)


@pytest.fixture
def folder(hf: Path) -> Path:
    convert(hf, hf.parent / "k")
    return hf.parent / "k"


VALUES: list[Any] = [
    HUGE,
    -HUGE,
    10**9,
    2**63,
    1e308,
    1e-320,
    -1.0,
    float("inf"),
    "x",
    True,
    [],
    [[]],
    {},
    [{}],
]


@pytest.mark.parametrize("value", VALUES, ids=short)
def test_any_key_of_config_json_may_hold_anything(hf: Path, value: Any) -> None:
    raw = json.loads((hf / "config.json").read_text())
    for key in raw:
        config, faults = read_hf_config({**raw, key: value})
        assert all(len(fault) < 300 for fault in faults), key
        if config is not None:
            inv_freq(config)


@pytest.mark.parametrize("value", VALUES, ids=short)
@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_any_key_of_the_rope_scaling_may_hold_anything(hf: Path, kind: str, value: Any) -> None:
    raw = json.loads((hf / "config.json").read_text())
    rope = {
        "rope_type": kind,
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "attention_factor": 1.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "truncate": True,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    for key in rope:
        config, _ = read_hf_config({**raw, "rope_parameters": {**rope, key: value}})
        if config is not None:
            assert (inv_freq(config) >= 0).all()
            assert attention_factor(config) > 0


@pytest.mark.parametrize("value", VALUES, ids=short)
def test_any_key_of_kestrel_json_may_hold_anything(folder: Path, value: Any) -> None:
    raw = json.loads((folder / "kestrel.json").read_text())
    for group in ((), ("moe",), ("rope",)):
        keys = raw["config"]
        for name in group:
            keys = keys[name]
        for key in keys:
            config = json.loads(json.dumps(raw["config"]))
            inner = config
            for name in group:
                inner = inner[name]
            inner[key] = value
            read, faults = ModelConfig.from_json(config)
            assert (read is None) == bool(faults)
            assert all(len(fault) < 300 for fault in faults), key
            if read is not None:
                assert (inv_freq(read) >= 0).all()


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_layers", 10**9), ("vocab_size", HUGE), ("max_position", HUGE), ("rms_norm_eps", HUGE)],
    ids=short,
)
def test_a_huge_size_is_refused_before_any_work(folder: Path, key: str, value: int) -> None:
    raw = json.loads((folder / "kestrel.json").read_text())
    edit_json(folder / "kestrel.json", config={**raw["config"], key: value})
    with pytest.raises(ModelError, match=key):
        load_model_folder(folder)
    assert any(key in fault for fault in inspect(folder).faults)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_local_experts"])
@pytest.mark.parametrize("value", [10**9, HUGE], ids=short)
def test_huge_counts_in_a_checkpoint(hf: Path, key: str, value: int) -> None:
    edit_json(hf / "config.json", **{key: value})
    with pytest.raises(ModelError, match=r"must be|cannot choose"):
        open_hf_folder(hf)


@pytest.mark.parametrize("dtype", [{}, [], None, 3])
def test_dtype_of_another_kind(hf: Path, dtype: Any) -> None:
    edit_header(hf / "model.safetensors", lambda raw: raw["lm_head.weight"].update(dtype=dtype))
    with pytest.raises(ModelError, match=r"lm_head\.weight: unknown dtype"):
        open_hf_folder(hf)


def test_a_manifest_nested_too_deep(folder: Path) -> None:
    (folder / "kestrel.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match="is not JSON"):
        load_model_folder(folder)
    assert inspect(folder).faults


def test_names_do_not_reach_the_terminal_raw(hf: Path) -> None:
    def add(raw: dict[str, Any]) -> None:
        raw["a\x1b[31m\nb\ud800"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}

    edit_header(hf / "model.safetensors", add)
    with pytest.raises(ModelError) as caught:
        open_hf_folder(hf)
    assert r"a\x1b[31m\nb\ud800: not part of such a model" in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("key", ["eos_token", "chat_template"])
def test_half_a_character_in_the_tokenizer_config(hf: Path, key: str) -> None:
    edit_json(hf / "tokenizer_config.json", **{key: "\ud800"})
    with pytest.raises(ModelError, match=r"tokenizer_config\.json holds a lone surrogate"):
        Tokenizer.from_folder(hf)
