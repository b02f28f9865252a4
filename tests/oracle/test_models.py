"""Whole models of each family against float64.

The oracle quantises where the contract does. Up to the first code that falls on the other side of a rounding
border the two differ by float32 rounding alone, which is checked tightly; from there on the difference is
quantisation noise, whose size the oracle itself tells. Short sequences keep most rows free of such codes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kestrel.config import Family, ModelConfig
from kestrel.ops import WType
from kestrel.weights import QuantTensor, Weights
from tests.oracle import reference as ref
from tests.oracle.canonical import oracle_of
from tests.oracle.model import Oracle
from tests.oracle.reference import F64
from tests.support.forward import make_model, random_ids, run_rows, run_tokens
from tests.support.models import AWKWARD, random_weights, tiny_config

# Float32 rounding through two or three layers: logits spread by 2, and 1e-5 of that is 80 roundings.
ROUNDING = 2e-5
SEQUENCES, LENGTH = 24, 3

CONFIGS: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie": True}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "moe-no-norm-topk": ("qwen3_moe", {"norm_topk_prob": False}),
    **AWKWARD,
}


def native_and_oracle(
    config: ModelConfig, weights: Weights, oracle_config: ModelConfig | None = None
) -> tuple[npt.NDArray[np.float32], F64, F64]:
    """Logits of several short sequences: native, of the quantising oracle, of the plain oracle."""
    ids = random_ids(SEQUENCES * LENGTH, config.vocab_size, 1).reshape(SEQUENCES, LENGTH)
    model = make_model(config, weights, threads=2, slots=SEQUENCES * LENGTH)
    positions, base = np.tile(np.arange(LENGTH), SEQUENCES), np.repeat(np.arange(SEQUENCES) * LENGTH, LENGTH)
    native = run_rows(model, ids.reshape(-1), positions, base).logits
    formats = {tensor.wtype for tensor in weights.values() if isinstance(tensor, QuantTensor)}
    int8_inputs = formats != {WType.bf16}
    quantising = oracle_of(oracle_config or config, weights, int8_attention=True, int8_inputs=int8_inputs)
    plain = oracle_of(oracle_config or config, weights)
    shape = (SEQUENCES * LENGTH, config.vocab_size)
    return native, quantising.forward(ids).reshape(shape), plain.forward(ids).reshape(shape)


def assert_same_meaning(native: npt.NDArray[np.float32], quantised: F64, plain: F64) -> None:
    assert native.shape == quantised.shape
    assert 1 < plain.std() < 4, "degenerate logits"
    worst = np.abs(native - quantised).max(axis=1)
    tight = int((worst < ROUNDING).sum())
    assert tight >= len(worst) / 2, f"only {tight} of {len(worst)} rows agree to {ROUNDING}"
    # Two independent draws of the same noise are sqrt(2) of its size apart.
    noise, off = (quantised - plain).std(), (native - quantised).std()
    assert off < np.sqrt(2) * noise, f"off by {off:.3g} where quantisation explains {noise:.3g}"


@pytest.mark.parametrize("wtype", WType, ids=lambda w: w.name)
@pytest.mark.parametrize("name", CONFIGS)
def test_model_means_what_it_should(name: str, wtype: WType) -> None:
    family, arguments = CONFIGS[name]
    config = tiny_config(family, **arguments)
    assert_same_meaning(*native_and_oracle(config, random_weights(config, wtype)))


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_long_sequence(family: Family) -> None:
    """Across the border of the first attention chunk, 256."""
    config = tiny_config(family, layers=1)
    weights = random_weights(config, WType.bf16)
    ids = random_ids(300, config.vocab_size, 2)
    native = run_tokens(make_model(config, weights, threads=2), ids).logits
    quantised = oracle_of(config, weights, int8_attention=True).forward(ids)
    plain = oracle_of(config, weights).forward(ids)
    # A flipped code of K or V touches every later row, by little: its share of a softmax over many positions.
    noise, off = (quantised - plain).std(), (native - quantised).std()
    assert off < 0.1 * noise
    late = np.abs(native - quantised)[256:].max()
    assert late < 0.1 * np.abs(quantised - plain)[256:].max()


# -- planted mistakes --------------------------------------------------------------------------------------


def _no_qk_norm(oracle: Oracle, p: str, x: F64, name: str) -> F64:
    return x


def _interleaved(x: F64, positions: F64, frequencies: F64, factor: float = 1.0) -> F64:
    turn = factor * np.exp(1j * positions[:, None] * frequencies[None, :])[:, None, :]
    rotated = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
    return np.stack([rotated.real, rotated.imag], axis=-1).reshape(x.shape)


MISTAKES: dict[str, tuple[Family, Any, str, Any]] = {
    "no QK-norm": ("qwen3", Oracle, "_qk_norm", _no_qk_norm),
    "interleaved RoPE pairs": ("llama", ref, "rope", _interleaved),
    "KV head by remainder": ("llama", ref, "kv_head_of", lambda h, heads, kv_heads: h % kv_heads),
    "gate and up swapped": ("qwen3", ref, "swiglu", lambda gate, up: ref.silu(up) * gate),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_oracle_notices(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, owner, name, wrong = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, wrong)
    config = tiny_config(family)
    with pytest.raises(AssertionError, match="rows agree"):
        assert_same_meaning(*native_and_oracle(config, random_weights(config, WType.bf16)))


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1e-3},
        {"rope": {"theta": 20000.0}},
        {"moe": {"norm_topk_prob": False}},
        {"moe": {"top_k": 3}},
    ],
    ids=str,
)
def test_oracle_notices_configuration(change: dict[str, Any]) -> None:
    config = tiny_config("qwen3_moe")
    other = config
    for key, value in change.items():
        if isinstance(value, dict):
            value = replace(getattr(config, key), **value)
        other = replace(other, **{key: value})
    with pytest.raises(AssertionError, match="rows agree"):
        assert_same_meaning(*native_and_oracle(config, random_weights(config, WType.bf16), other))
