"""Every pair of GQA ratio and head size, against float64 and on every ISA level."""

from __future__ import annotations

import numpy as np
import pytest

from kestrel import _native
from kestrel.cpu import CpuBackend
from kestrel.ops import WType
from tests.oracle.canonical import oracle_of
from tests.support.forward import assert_same_bits, make_model, random_ids, run_tokens
from tests.support.models import random_weights, tiny_config


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("ratio", [1, 2, 4, 5, 7, 8, 16])
def test_head_shape(ratio: int, head_dim: int) -> None:
    kv_heads = 2 if ratio < 7 else 1
    config = tiny_config(
        "qwen3", hidden=64, layers=1, heads=ratio * kv_heads, kv_heads=kv_heads, head_dim=head_dim, vocab=259
    )
    weights = random_weights(config, WType.bf16, seed=ratio)
    ids = random_ids(16, config.vocab_size, head_dim)
    runs = [
        run_tokens(
            make_model(config, weights, backend=CpuBackend(threads, isa)), ids, chunk=chunk, taps="extended"
        )
        for isa in _native.isa_available()
        for threads, chunk in ((1, 5), (3, None))
    ]
    for run in runs[1:]:
        assert_same_bits(run, runs[0])
    quantised = oracle_of(config, weights, int8_attention=True).forward(ids)
    plain = oracle_of(config, weights).forward(ids)
    # Rounding alone until a code falls on the other side of a border, then a part of quantisation noise.
    assert np.abs(runs[0].logits[0] - quantised[0]).max() < 2e-5
    assert (runs[0].logits - quantised).std() < 0.3 * (quantised - plain).std()
