"""Models whose numbers are unusual on purpose: tied routers, dead heads, huge and subnormal rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kestrel import _native
from kestrel.config import Family, ModelConfig
from kestrel.cpu import CpuBackend
from kestrel.ops import WType
from kestrel.weights import QuantTensor, Weights
from tests.model.restated import Restated
from tests.oracle import reference as ref
from tests.oracle.canonical import oracle_of
from tests.support.forward import Run, assert_same_bits, make_model, random_ids, run_tokens
from tests.support.models import random_weights, tiny_config

T = 12  # tokens


def same_bits_everywhere(config: ModelConfig, weights: Weights) -> tuple[Run, Any]:
    """Run on every ISA level, with several thread counts and chunkings; the first run and its model."""
    ids = random_ids(T, config.vocab_size, 3)
    first = None
    for isa in _native.isa_available():
        for threads, chunk in ((1, 1), (2, None), (3, 5)):
            model = make_model(config, weights, backend=CpuBackend(threads, isa))
            run = run_tokens(model, ids, chunk=chunk, taps="extended")
            first = first or (run, model)
            assert_same_bits(run, first[0])
    assert first is not None
    return first


def edited(weights: Weights, name: str, **arrays: Any) -> Weights:
    tensor = weights[name]
    assert isinstance(tensor, QuantTensor)
    return {**weights, name: replace(tensor, **arrays)}


# -- router --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_all_experts_tie(top_k: int, norm_topk_prob: bool) -> None:
    """A router of zeros: the first experts in order, with equal weights."""
    config = tiny_config("qwen3_moe", top_k=top_k, norm_topk_prob=norm_topk_prob)
    weights = random_weights(config, WType.q4local)
    for layer in range(config.num_layers):
        name = f"layers.{layer}.router"
        router = weights[name]
        assert isinstance(router, QuantTensor)
        weights = edited(weights, name, codes=np.zeros_like(router.codes))
    run, model = same_bits_everywhere(config, weights)
    for layer in range(config.num_layers):  # of the last token; with taps each layer keeps its own
        ids = model.backend.read(model._buffers[f"rids.{layer}"])[0]
        shares = model.backend.read(model._buffers[f"rweights.{layer}"])[0]
        np.testing.assert_array_equal(ids, np.arange(top_k))
        assert (shares == np.float32(1 / (top_k if norm_topk_prob else 8))).all()
    assert len({run.keys[f"t{t}_l{layer}_rids"] for t in range(T) for layer in (0, 1)}) == 1


@pytest.mark.parametrize("top_k", [1, 2, 5, 8])
def test_some_experts_tie(top_k: int) -> None:
    """Experts 6, 1 and 3 share one router row: whenever chosen, they come in the order 1, 3, 6."""
    config = tiny_config("qwen3_moe", top_k=top_k, layers=1)
    weights = random_weights(config, WType.q8local)
    router = weights["layers.0.router"]
    assert isinstance(router, QuantTensor)
    codes = router.codes.copy()
    codes[[6, 3, 1]] = codes[1] + 0x80  # twice the row, to be chosen often
    weights = edited(weights, "layers.0.router", codes=codes)
    same_bits_everywhere(config, weights)
    ids = random_ids(T, config.vocab_size, 3)
    whole = make_model(config, weights)
    run_tokens(whole, ids)
    chosen = whole.backend.read(whole._buffers["rids"])[:T]
    oracle = oracle_of(config, weights, int8_attention=True, int8_inputs=True)
    oracle.forward(ids)
    np.testing.assert_array_equal(chosen, oracle.trace["l0_rids"])
    tied = [[int(e) for e in row if e in (1, 3, 6)] for row in chosen]
    assert all(row == [1, 3, 6][: len(row)] for row in tied)
    assert any(tied), "no tied expert was ever chosen"


# -- KV rows -------------------------------------------------------------------------------------------------


def _scaled_head(weights: Weights, name: str, head: int, hd: int, factor: float) -> Weights:
    """Multiply the weights of one head of a bf16 projection by a power of two, or by 0."""
    tensor = weights[name]
    assert isinstance(tensor, QuantTensor)
    codes = tensor.codes.copy()
    rows = (codes[head * hd : (head + 1) * hd].astype(np.uint32) << 16).view(np.float32)
    codes[head * hd : (head + 1) * hd] = ((rows * np.float32(factor)).view(np.uint32) >> 16).astype(np.uint16)
    return edited(weights, name, codes=codes)


@pytest.mark.parametrize("projection", ["k", "v", "q"])
@pytest.mark.parametrize("factor", [0.0, 2.0**-110, 2.0**-140], ids=["zero", "tiny", "subnormal"])
def test_dead_head(projection: str, factor: float) -> None:
    """A head row of zeros, or below 2^-100, is stored as zeros: attention is uniform, nothing is NaN."""
    config = tiny_config("llama", layers=1)
    weights = _scaled_head(random_weights(config, WType.bf16), f"layers.0.{projection}", 1, 32, factor)
    run, model = same_bits_everywhere(config, weights)
    assert np.isfinite(run.logits).all()
    layer = model.kv.layers[0]
    if projection != "q":
        scales = model.backend.read(layer.ks if projection == "k" else layer.vs)
        codes = model.backend.read(layer.kq if projection == "k" else layer.vq)
        assert (scales[:T, 1].view(np.uint32) == 0).all()
        assert (codes[:T, 1] == 0).all()
        assert (scales[:T, 0] > 0).all()
    # To float64 such a head is as good as zero.
    zeroed = _scaled_head(weights, f"layers.0.{projection}", 1, 32, 0.0)
    expected = oracle_of(config, zeroed, int8_attention=True).forward(random_ids(T, config.vocab_size, 3))
    assert np.abs(run.logits - expected).max() < 0.02


@pytest.mark.parametrize("projection", ["k", "v"])
def test_huge_head(projection: str) -> None:
    """Scores or values of 2^60 stay finite and defined."""
    config = tiny_config("llama", layers=1)
    weights = _scaled_head(random_weights(config, WType.bf16), f"layers.0.{projection}", 0, 32, 2.0**60)
    run, _ = same_bits_everywhere(config, weights)
    assert np.isfinite(run.logits).all()


def test_one_huge_value_in_a_row() -> None:
    """One element of a V row dwarfs the rest: the codes of the rest are zero, its own is 127."""
    config = tiny_config("llama", layers=1)
    weights = random_weights(config, WType.bf16)
    tensor = weights["layers.0.v"]
    assert isinstance(tensor, QuantTensor)
    codes = tensor.codes.copy()
    row = (codes[5].astype(np.uint32) << 16).view(np.float32)
    codes[5] = ((row * np.float32(2.0**30)).view(np.uint32) >> 16).astype(np.uint16)
    run, model = same_bits_everywhere(config, edited(weights, "layers.0.v", codes=codes))
    stored = model.backend.read(model.kv.layers[0].vq)[:T, 0]
    assert (np.abs(stored[:, 5].astype(int)) == 127).all()
    assert (np.delete(stored, 5, axis=1) == 0).all()
    assert np.isfinite(run.logits).all()


def test_infinity_and_nan_reach_the_logits() -> None:
    """A broken scale anywhere may not be clamped away: the greedy choice becomes -1, on every level alike."""
    config = tiny_config("qwen3_moe", layers=3, top_k=8)
    for name in ("layers.0.v", "layers.1.experts.up", "layers.2.o", "layers.1.k"):
        for bad in (0x7C00, 0x7E00, 0xFC00):
            weights = random_weights(config, WType.q4local)
            tensor = weights[name]
            assert isinstance(tensor, QuantTensor)
            assert tensor.scale is not None
            scale = tensor.scale.copy()
            scale.reshape(-1)[5] = bad
            broken = edited(weights, name, scale=scale)
            ids = random_ids(3, config.vocab_size, 3)
            with np.errstate(all="ignore"):
                expected = Restated(config, broken).forward(ids)
            for isa in _native.isa_available():
                for threads, chunk in ((1, 1), (2, None)):
                    model = make_model(config, broken, backend=CpuBackend(threads, isa))
                    run = run_tokens(model, ids, chunk=chunk, taps="extended")
                    assert (run.next == -1).all(), f"{name} with scale 0x{bad:04x}"
                    # Hashes read every NaN as one: payloads are the hardware's.
                    assert run.keys == expected.keys, f"{name} with scale 0x{bad:04x}"


# -- subnormal numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_subnormal_weights(family: Family) -> None:
    """Smallest bf16 and f16 numbers, -0 and f32 subnormals as weights: nothing is flushed, signs are kept."""
    config = tiny_config(family)
    weights = random_weights(config, WType.bf16)
    rng = np.random.default_rng(0)
    tiny = np.array([0x0001, 0x8001, 0x007F, 0x8000, 0x0000, 0x0080], np.uint16)
    for name in ("embed", "layers.0.q", "layers.0.k", "layers.1.v"):
        tensor = weights[name]
        assert isinstance(tensor, QuantTensor)
        codes = tensor.codes.copy()
        where = rng.random(codes.shape) < 0.5
        where[: len(codes) // 4] = True  # whole rows
        codes[where] = rng.choice(tiny, int(where.sum()))
        weights = edited(weights, name, codes=codes)
    norm = weights["layers.1.ffn_norm"]
    assert isinstance(norm, np.ndarray)
    bits = norm.view(np.uint32).copy()
    bits[::3] = rng.choice(np.array([1, 0x80000001, 0x007FFFFF, 0x80000000], np.uint32), len(bits[::3]))
    weights["layers.1.ffn_norm"] = bits.view(np.float32)
    run, _ = same_bits_everywhere(config, weights)
    assert np.isfinite(run.logits).all()
    restated = Restated(config, weights).forward(random_ids(T, config.vocab_size, 3))
    assert_same_bits(run, restated)
    for flushed in ("embed", "layers.1.v"):  # the comparison would notice a backend that flushes them
        tensor = weights[flushed]
        assert isinstance(tensor, QuantTensor)
        codes = np.where(tensor.codes & 0x7F80, tensor.codes, np.uint16(0))
        other = run_tokens(
            make_model(config, edited(weights, flushed, codes=codes)),
            random_ids(T, config.vocab_size, 3),
            taps="extended",
        )
        with pytest.raises(AssertionError, match="keys differ"):
            assert_same_bits(other, restated)


def test_subnormal_scales() -> None:
    """f16 subnormals as scales of q4local and q8local."""
    config = tiny_config("qwen3")
    for wtype in (WType.q4local, WType.q8local):
        weights = random_weights(config, wtype)
        for name in ("embed", "layers.0.k", "layers.1.down"):
            tensor = weights[name]
            assert isinstance(tensor, QuantTensor)
            assert tensor.scale is not None
            scale = tensor.scale.copy()
            scale[::2] = np.resize(np.array([0x0001, 0x8001, 0x03FF, 0x8000, 0], np.uint16), scale[::2].shape)
            weights = edited(weights, name, scale=scale)
        run, _ = same_bits_everywhere(config, weights)
        assert np.isfinite(run.logits).all()
        assert_same_bits(run, Restated(config, weights).forward(random_ids(T, config.vocab_size, 3)))


def test_a_head_of_zeros_is_what_float64_says() -> None:
    """The oracle agrees that a dead K head means the plain mean of V."""
    v = np.arange(12.0).reshape(4, 1, 3)
    out = ref.attention(np.ones((1, 1, 3)), np.zeros((4, 1, 3)), v)
    np.testing.assert_allclose(out[0, 0], v.mean(axis=0)[0])
