"""Whole models against the contract restated in numpy: every key of every position, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kestrel.config import Family, RopeConfig
from kestrel.ops import WType
from tests.model.restated import Restated
from tests.ops import reference as ops
from tests.support.forward import assert_same_bits, make_model, random_ids, run_tokens
from tests.support.models import AWKWARD, random_weights, tiny_config

YARN = RopeConfig(type="yarn", factor=4.0, original_max_position=32, attention_factor=1.25)
CONFIGS: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-yarn": ("llama", {"tie": True, "rope": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "moe-no-norm-topk": ("qwen3_moe", {"norm_topk_prob": False}),
    "moe-mixed-dense": AWKWARD["moe-mixed-dense"],
    "qwen3-13-groups-gqa7": AWKWARD["qwen3-13-groups-gqa7"],
}
LENGTH = 9


@pytest.mark.parametrize("wtype", WType, ids=lambda w: w.name)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_is_what_the_document_says(name: str, wtype: WType) -> None:
    family, arguments = CONFIGS[name]
    config = tiny_config(family, **arguments)
    weights = random_weights(config, wtype)
    ids = random_ids(LENGTH, config.vocab_size, 5)
    expected = Restated(config, weights).forward(ids)
    actual = run_tokens(make_model(config, weights, threads=2), ids, taps="extended")
    assert_same_bits(actual, expected)


def test_two_attention_chunks() -> None:
    """Positions 256 and later merge the states of two chunks."""
    config = tiny_config("llama", hidden=32, layers=1, heads=1, kv_heads=1, ffn=32, vocab=32)
    weights = random_weights(config, WType.q8local)
    ids = random_ids(262, config.vocab_size, 5)
    expected = Restated(config, weights).forward(ids)
    actual = run_tokens(make_model(config, weights, max_rows=262), ids, taps="extended")
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("mistake", ["weights of the next layer", "eps", "last bit of h"])
def test_comparison_notices(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("qwen3")
    weights = random_weights(config, WType.q8local)
    ids = random_ids(LENGTH, config.vocab_size, 5)
    actual = run_tokens(make_model(config, weights), ids, taps="extended")
    if mistake == "weights of the next layer":
        weights = {**weights, "layers.0.o": weights["layers.1.o"]}
    elif mistake == "eps":
        config = replace(config, rms_norm_eps=1.1e-6)
    else:
        plain = ops.swiglu
        monkeypatch.setattr(ops, "swiglu", lambda gu: np.nextafter(plain(gu), np.float32(np.inf)))
    with pytest.raises(AssertionError, match="differ, the first is"):
        assert_same_bits(actual, Restated(config, weights).forward(ids))
