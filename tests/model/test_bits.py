"""One set of bits, whatever the ISA level, the threads, the chunking of the prompt, and the taps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from kestrel import _native
from kestrel.backend import Program
from kestrel.config import Family, ModelConfig
from kestrel.cpu import CpuBackend
from kestrel.ops import Op, WType
from tests.support.bits import assert_bits_equal
from tests.support.forward import Run, assert_same_bits, make_model, random_ids, run_tokens
from tests.support.models import AWKWARD, tiny_config

FAMILIES: list[Family] = ["llama", "qwen3", "qwen3_moe"]
LEVELS = _native.isa_available()
LENGTH = 262  # two attention chunks, and no multiple of 7
SHORT = 19


@lru_cache(maxsize=64)
def reference(family: Family, wtype: WType, length: int, awkward: str = "") -> Run:
    """Scalar, one thread, token by token."""
    config = _config(family, awkward)
    model = make_model(config, backend=CpuBackend(threads=1, isa="scalar"), wtype=wtype)
    return run_tokens(model, random_ids(length, config.vocab_size), chunk=1, taps="extended")


def _config(family: Family, awkward: str) -> ModelConfig:
    return tiny_config(family, **AWKWARD[awkward][1]) if awkward else tiny_config(family)


def check(
    family: Family, wtype: WType, length: int, isa: str, threads: int, chunk: int | None, awkward: str = ""
) -> None:
    config = _config(family, awkward)
    model = make_model(config, backend=CpuBackend(threads, isa), max_rows=length, wtype=wtype)
    run = run_tokens(model, random_ids(length, config.vocab_size), chunk=chunk, taps="extended")
    assert_same_bits(run, reference(family, wtype, length, awkward))


@pytest.mark.parametrize("chunk", [None, 1, 7, 256])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_isa_threads_and_chunks(family: Family, isa: str, threads: int, chunk: int | None) -> None:
    check(family, WType.q4local, LENGTH, isa, threads, chunk)


@pytest.mark.parametrize("wtype", [WType.bf16, WType.q8local], ids=lambda w: w.name)
@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_weight_formats(family: Family, isa: str, wtype: WType) -> None:
    for threads, chunk in ((1, 1), (2, None), (3, 7)):
        check(family, wtype, 3 * SHORT, isa, threads, chunk)


@pytest.mark.parametrize("wtype", WType, ids=lambda w: w.name)
@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("awkward", AWKWARD)
def test_awkward_shapes(awkward: str, isa: str, wtype: WType) -> None:
    for threads, chunk in ((1, None), (3, 7)):
        check(AWKWARD[awkward][0], wtype, SHORT, isa, threads, chunk, awkward)


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_change_nothing(family: Family) -> None:
    config = tiny_config(family)
    ids = random_ids(40, config.vocab_size)
    plain = run_tokens(make_model(config), ids)
    standard = run_tokens(make_model(config), ids, taps="standard")
    extended = run_tokens(make_model(config), ids, taps="extended")
    assert_bits_equal(standard.logits, plain.logits)
    assert_bits_equal(extended.logits, plain.logits)
    assert standard.keys.items() < extended.keys.items()


@pytest.mark.parametrize("logit_rows", [0, 1, 5])
def test_logits_of_the_last_rows_only(logit_rows: int) -> None:
    """A prompt needs the logits of its last row; leaving the others out changes nothing."""
    config = tiny_config("qwen3_moe")
    ids = random_ids(20, config.vocab_size)
    expected = run_tokens(make_model(config), ids, taps="extended")
    model = make_model(config)
    step = model.step(20, logit_rows, "extended")
    model.load_rows(ids, np.arange(20, dtype=np.int32))
    step.program.run()
    if logit_rows:
        assert_bits_equal(model.logits(logit_rows), expected.logits[20 - logit_rows :])
        assert_bits_equal(model.argmax(logit_rows), expected.next[20 - logit_rows :])
    for tap, hashes in zip(step.taps, model.hashes(step, 20), strict=True):
        for t in range(tap.rows_from, 20):
            assert int(hashes[t]) == expected.keys[tap.key(t)]


def test_standard_keys_of_a_48_layer_model() -> None:
    config = tiny_config("qwen3_moe", layers=48, hidden=32, heads=1, kv_heads=1, moe_ffn=32)
    run = run_tokens(make_model(config, slots=2, max_rows=2), [1, 2], taps="standard")
    assert len(run.keys) == 2 * 530


@pytest.mark.parametrize("family", FAMILIES)
def test_cache_contents_and_untouched_slots(family: Family) -> None:
    """Equal KV bytes for every chunking; slots before, after and between sequences keep what they held."""
    config = tiny_config(family)
    ids = random_ids(29, config.vocab_size)
    caches = []
    for chunk in (None, 1, 7):
        model = make_model(config, threads=2, slots=64)
        for layer in model.kv.layers:
            for buffer, mark in ((layer.kq, 77), (layer.ks, np.nan), (layer.vq, 77), (layer.vs, np.nan)):
                model.backend.write(buffer, np.full(buffer.shape, mark, buffer.dtype))
        run_tokens(model, ids, chunk=chunk, base=9)
        arrays = [
            model.backend.read(buffer)
            for layer in model.kv.layers
            for buffer in (layer.kq, layer.ks, layer.vq, layer.vs)
        ]
        for array in arrays:
            others = np.concatenate([array[:9], array[9 + 29 :]])
            assert (np.isnan(others) if array.dtype == np.float32 else others == 77).all()
        caches.append(arrays)
    for arrays in caches[1:]:
        for actual, expected in zip(arrays, caches[0], strict=True):
            assert_bits_equal(actual, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_stale_buffers_change_nothing(family: Family) -> None:
    """Rows and columns that an op need not read may hold anything, NaN included."""
    config = tiny_config(family)
    ids = random_ids(20, config.vocab_size)
    expected = run_tokens(make_model(config), ids, chunk=20, taps="extended")
    model = make_model(config)
    model.step(20, 20, "extended")  # makes the buffers
    for name, buffer in model._buffers.items():
        filler = np.full(buffer.shape, 0, buffer.dtype)
        filler.view(np.uint8)[:] = 0xFF  # NaN, -1
        if name not in ("ids", "pos", "base"):
            model.backend.write(buffer, filler)
    assert_same_bits(run_tokens(model, ids, chunk=20, taps="extended"), expected)


# -- planted faults ------------------------------------------------------------------------------------------


class FaultyBackend(CpuBackend):
    """Changes one argument of one op before it compiles a step."""

    def __init__(self, label: str, **change: Any) -> None:
        super().__init__(threads=1)
        self.label, self.change = label, change
        self.hits = 0

    def compile(self, ops: Sequence[Op]) -> Program:
        for op in ops:
            if op.label == self.label:
                self.hits += 1
                for name, value in self.change.items():
                    setattr(op.args, name, value)
        return super().compile(ops)


@pytest.mark.parametrize(
    ("label", "change", "key"),
    [
        ("l1.attn_norm", {"eps": 2e-6}, "t0_l1_nrm"),
        ("l0.rope", {"factor": 1.0000001}, "t0_l0_krope"),
        ("l0.attention", {"qscale": 0.17}, "t1_l0_attn"),  # a softmax over one position has no scale
        ("l1.router_topk", {"norm_topk_prob": 0}, "t0_l1_rweights"),
        ("l1.ffn_residual", {"n": 96 * 18}, "t18_l1_x"),
    ],
)
def test_comparison_names_the_first_difference(label: str, change: dict[str, Any], key: str) -> None:
    config = tiny_config("qwen3_moe")
    ids = random_ids(19, config.vocab_size)
    expected = run_tokens(make_model(config), ids, chunk=19, taps="extended")
    backend = FaultyBackend(label, **change)
    actual = run_tokens(make_model(config, backend=backend), ids, chunk=19, taps="extended")
    assert backend.hits == 1
    with pytest.raises(AssertionError, match=f"first is {key}$"):
        assert_same_bits(actual, expected)
