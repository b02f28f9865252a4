"""The oracle itself against transformers, where torch and transformers are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.oracle.model import Oracle
from tests.support.models import AWKWARD, write_hf_model

torch = pytest.importorskip("torch", reason="the comparison with transformers needs torch")
transformers = pytest.importorskip("transformers", reason="the comparison needs transformers")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie": True}),
    "llama-absent-head-dim": ("llama", {"omit": ("head_dim",), "head_dim": 24}),
    "qwen3": ("qwen3", {}),
    "qwen3-eps": ("qwen3", {"rms_norm_eps": 0.01}),
    "qwen3_moe": ("qwen3_moe", {}),
    "moe-no-norm": ("qwen3_moe", {"norm_topk_prob": False}),
    "moe-norm-absent": ("qwen3_moe", {"omit": ("norm_topk_prob",)}),
    "moe-stacked": ("qwen3_moe", {"experts_layout": "stacked"}),
    "style4-theta": ("qwen3", {"config_style": 4, "theta": 1e6}),
    "yarn": ("qwen3", {"rope": YARN, "max_position": 128}),
    "yarn-style4": ("qwen3", {"rope": YARN, "max_position": 128, "config_style": 4}),
    "yarn-attention-factor": ("llama", {"rope": {**YARN, "attention_factor": 1.5}, "max_position": 128}),
    "yarn-mscale": ("llama", {"rope": {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5}, "max_position": 128}),
    "yarn-betas-untruncated": (
        "qwen3",
        {"rope": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}, "max_position": 128},
    ),
    "linear": ("llama", {"rope": {"rope_type": "linear", "factor": 2.5}}),
    "llama3": ("llama", {"rope": LLAMA3, "theta": 500000.0}),
    **AWKWARD,
}


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case: str, tmp_path: Path) -> None:
    family, arguments = CASES[case]
    folder = write_hf_model(tmp_path, family, dtype="f32", **arguments)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    ids = np.random.default_rng(1).integers(0, 299, 48)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    actual = Oracle.from_folder(folder).forward(ids)
    assert expected.std() > 0.5
    # transformers keeps angles, softmax and routing in float32 even in a float64 model.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-5)
