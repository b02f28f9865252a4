"""The fast forms promise no bits; they must still mean the same, and must be the kernels that run."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("kestrel._simt", reason="the shim is built by `make native`")

from kestrel.launch import Mode, Tuning, plan
from kestrel.ops import WType
from kestrel.simt import SimtBackend
from tests.kernels.test_ops import attention_case
from tests.support.forward import make_model, run_tokens
from tests.support.models import tiny_config


@pytest.mark.parametrize("mode", ["fast", "bitexact"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_logits_are_close_to_the_exact_ones(family: str, mode: Mode) -> None:
    # bf16 weights: no step quantises the activations, so small differences stay small.
    config = tiny_config(family)
    ids = np.random.default_rng(3).integers(0, config.vocab_size, 8)
    exact = run_tokens(make_model(config, wtype=WType.bf16), ids, chunk=8, taps="extended")
    model = make_model(config, wtype=WType.bf16, backend=SimtBackend(mode=mode), slots=16)
    fast = run_tokens(model, ids, chunk=[5, 1, 1, 1], taps="extended")
    spread = exact.logits.std()
    assert np.abs(fast.logits - exact.logits).max() < 0.1 * spread
    assert any(fast.keys[key] != value for key, value in exact.keys.items()), "the fast kernels did not run"


@pytest.mark.parametrize("position", [0, 5, 255, 256, 600])
@pytest.mark.parametrize("slots", [1, 4])
def test_fast_attention(position: int, slots: int) -> None:
    case = attention_case(np.random.default_rng(position), [position], 8, 2, 64, scale=0.003)
    exact = case.on_cpu()["out"]
    fast = case.on_kernels(Tuning(attention_slots=slots), seed=slots, mode="fast")["out"]
    np.testing.assert_allclose(fast, exact, rtol=1e-4, atol=1e-5)


def test_modes_choose_kernels() -> None:
    config = tiny_config("qwen3_moe")
    model = make_model(config, backend=SimtBackend(), slots=8)
    ops = model.step(1, 1, "off").ops
    names = {
        mode: {launch.kernel for launch in plan(ops, mode).main} for mode in ("fast", "bitexact", "l2exact")
    }
    assert not any("fast" in name for name in names["l2exact"])
    assert {"k_attn_stage", "k_norm_router_fast", "k_moe_gate_up_any_fast"} <= names["bitexact"]
    assert "k_attn_stage_fast" in names["fast"]
    assert "k_attn_stage" not in names["fast"]

    prompt = {launch.kernel for launch in plan(model.step(5, 1, "off").ops, "bitexact").main}
    assert {"k_qk_norm_cpu", "k_rope", "k_kv_append", "k_attn_decode_online"} <= prompt
