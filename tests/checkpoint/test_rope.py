"""Rotary frequencies: exact powers, scaling rules as transformers has them."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest

from kestrel.checkpoints.hf_config import parse_hf_config
from kestrel.config import RopeConfig
from kestrel.rope import attention_factor, inv_freq
from tests.support.models import tiny_config


@pytest.mark.parametrize("theta", [10000.0, 100000.0, 500000.0, 1e6, 5e6, 12345.678])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_plain_frequencies_are_correctly_rounded(theta: float, head_dim: int) -> None:
    config = tiny_config(head_dim=head_dim, rope=RopeConfig(theta=theta))
    with mpmath.workdps(50):
        powers = [mpmath.mpf(theta) ** (mpmath.mpf(-2 * i) / head_dim) for i in range(head_dim // 2)]
        expected = np.array([float(p) for p in powers]).astype(np.float32)
    assert inv_freq(config).view(np.uint32).tolist() == expected.view(np.uint32).tolist()
    assert attention_factor(config) == 1.0


def test_result_is_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        inv_freq(tiny_config())[0] = 0


def test_linear_divides_every_frequency() -> None:
    plain = inv_freq(tiny_config())
    scaled = inv_freq(tiny_config(rope=RopeConfig(type="linear", factor=4.0)))
    assert (scaled == plain / 4).all()


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones() -> None:
    rope = RopeConfig(theta=1e6, type="yarn", factor=4.0, original_max_position=32768)
    plain = inv_freq(tiny_config(head_dim=128, rope=RopeConfig(theta=1e6)))
    scaled = inv_freq(tiny_config(head_dim=128, rope=rope))
    assert (scaled[:16] == plain[:16]).all()
    np.testing.assert_allclose(scaled[-8:], plain[-8:] / 4, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 0.1 * np.log(4.0) + 1.0),
        ({"attention_factor": 1.25}, 1.25),
        ({"factor": 0.5}, 1.0),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
        (
            {"mscale": 2.0, "mscale_all_dim": 1.0},
            (0.1 * 2.0 * np.log(4.0) + 1.0) / (0.1 * np.log(4.0) + 1.0),
        ),
        ({"mscale": 2.0, "mscale_all_dim": 0.0}, 0.1 * np.log(4.0) + 1.0),
    ],
)
def test_yarn_attention_factor(fields: dict[str, float], expected: float) -> None:
    rope = RopeConfig(**{"type": "yarn", "factor": 4.0, "original_max_position": 4096, **fields})
    assert attention_factor(tiny_config(rope=rope)) == pytest.approx(expected, rel=1e-15)


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 0.9,
    },
    "yarn-betas": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn-not-truncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "truncate": False,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.5,
        "mscale_all_dim": 0.5,
    },
    "yarn-no-original": {"rope_type": "yarn", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3-other": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 16.0,
        "original_max_position_embeddings": 1024,
    },
}


@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("name", ROPES)
def test_equals_transformers(name: str, head_dim: int, theta: float) -> None:
    """transformers computes in f32, so its last bits differ; the rule must be the same."""
    transformers = pytest.importorskip("transformers", reason="compares with transformers: not installed")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 256,
        "hidden_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "head_dim": head_dim,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_theta": theta, **ROPES[name]},
    }
    config = parse_hf_config(raw, "test")
    theirs = transformers.Qwen3Config(**{k: v for k, v in raw.items() if k != "architectures"})
    if name == "default":
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

        expected, factor = Qwen3RotaryEmbedding.compute_default_rope_parameters(theirs)
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[ROPES[name]["rope_type"]](theirs, "cpu")
    np.testing.assert_allclose(inv_freq(config), expected.numpy(), rtol=2e-6)
    assert attention_factor(config) == pytest.approx(factor, rel=1e-12)
