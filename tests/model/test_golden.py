"""A trained checkpoint against logits that transformers computed in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kestrel import LLM
from kestrel.convert import convert
from kestrel.ops import WType
from kestrel.weights import load_model_folder
from tests.support.forward import make_model, run_tokens
from tests.support.shared import shared_path

# weights, head, largest mean KL divergence in nats, smallest share of equal top-1 choices
LIMITS = {
    "bf16": (WType.bf16, WType.bf16, 0.001, 0.97),
    "q8local": (WType.q8local, WType.q8local, 0.0015, 0.97),
    "q4local": (WType.q4local, WType.q8local, 0.021, 0.91),
}


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def kl_and_top1(expected: npt.NDArray[np.float32], actual: npt.NDArray[np.float32]) -> tuple[float, float]:
    """Mean over positions of KL(expected || actual), and the share of positions with the same best token."""
    p, q = _log_softmax(expected), _log_softmax(actual)
    kl = (np.exp(p) * (p - q)).sum(axis=-1)
    return float(kl.mean()), float((expected.argmax(axis=-1) == actual.argmax(axis=-1)).mean())


@pytest.mark.parametrize("name", LIMITS)
def test_logits_of_a_trained_model(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    source = shared_path("models", "tiny-qwen3-moe")
    golden = np.load(shared_path("models", "tiny-qwen3-moe", "golden_f32.npz"))
    wtype, head_wtype, most_kl, least_top1 = LIMITS[name]
    convert(source, tmp_path / "model", wtype=wtype, head_wtype=head_wtype)
    with LLM(tmp_path / "model") as llm:
        logits = llm.logits(golden["tokens"].tolist())
    kl, top1 = kl_and_top1(golden["logits"], logits)
    record_property("mean_kl", kl)
    record_property("top1", top1)
    print(f"{name}: mean KL {kl:.6f}, top-1 {top1:.4f}")
    assert kl < most_kl
    assert top1 >= least_top1


def test_the_measure_notices() -> None:
    """A little noise fails the limits of bf16 and q8local, logits of the position before fail all of them."""
    rng = np.random.default_rng(0)
    expected = rng.standard_normal((96, 512)).astype(np.float32) * 3
    assert kl_and_top1(expected, expected) == (0.0, 1.0)
    noisy = expected + rng.standard_normal(expected.shape).astype(np.float32) * np.float32(0.07)
    assert kl_and_top1(expected, noisy)[0] > 0.0015
    shifted_kl, shifted_top1 = kl_and_top1(expected, np.roll(expected, 1, axis=0))
    assert shifted_kl > 0.021
    assert shifted_top1 < 0.91


@pytest.mark.parametrize("mistake", ["theta", "norm_topk_prob"])
def test_golden_notices(mistake: str, tmp_path: Path) -> None:
    source = shared_path("models", "tiny-qwen3-moe")
    golden = np.load(shared_path("models", "tiny-qwen3-moe", "golden_f32.npz"))
    convert(source, tmp_path / "model", wtype=WType.bf16)
    config, weights = load_model_folder(tmp_path / "model")
    assert config.moe is not None
    if mistake == "theta":
        config = replace(config, rope=replace(config.rope, theta=10000.0))
    else:
        config = replace(config, moe=replace(config.moe, norm_topk_prob=False))
    logits = run_tokens(make_model(config, weights, threads=2), golden["tokens"]).logits
    assert kl_and_top1(golden["logits"], logits)[0] > 0.021
