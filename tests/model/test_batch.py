"""Rows of one forward pass do not know of each other."""

from __future__ import annotations

import numpy as np
import pytest

from kestrel.config import Family
from kestrel.ops import WType
from tests.support.bits import assert_bits_equal
from tests.support.forward import (
    Run,
    assert_same_bits,
    make_model,
    random_ids,
    run_rows,
    run_tokens,
)
from tests.support.models import tiny_config

FAMILIES: list[Family] = ["llama", "qwen3", "qwen3_moe"]
CONTEXT = 20


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 16, 17, 33, 128, 255, 256, 257, 1024])
@pytest.mark.parametrize("wtype", WType, ids=lambda w: w.name)
def test_a_row_among_others(wtype: WType, rows: int) -> None:
    """A row with a context, first, middle and last among rows of other sequences, has its own bits."""
    config = tiny_config("qwen3_moe", layers=1)
    model = make_model(config, threads=2, slots=CONTEXT + 1 + 1024, max_rows=1024, wtype=wtype)
    ids = random_ids(CONTEXT + 1, config.vocab_size, 1)
    run_tokens(model, ids[:-1])
    alone = run_rows(model, ids[-1:], [CONTEXT], taps="extended")
    others = random_ids(rows, config.vocab_size, 2)
    for at in sorted({0, rows // 2, rows - 1}):
        tokens, positions = others.copy(), np.zeros(rows, np.int32)
        tokens[at], positions[at] = ids[-1], CONTEXT
        base = np.arange(rows) + CONTEXT + 1  # a sequence of one token each
        base[at] = 0
        together = run_rows(model, tokens, positions, base, taps="extended")
        own = {key: value for key, value in together.keys.items() if key.startswith(f"t{CONTEXT}_")}
        assert_same_bits(Run(together.logits[at : at + 1], together.next[at : at + 1], own), alone)


@pytest.mark.parametrize("family", FAMILIES)
def test_interleaved_sequences(family: Family) -> None:
    """Three sequences advance together, row by row in turns, in steps of unequal size."""
    config = tiny_config(family)
    sequences = [random_ids(n, config.vocab_size, n) for n in (24, 17, 9)]
    alone = [run_tokens(make_model(config), ids, taps="extended") for ids in sequences]
    model = make_model(config, threads=2)
    bases = [100, 0, 40]
    rows = [(p, s) for p in range(24) for s in range(3) if p < len(sequences[s])]
    logits: list[list[np.ndarray]] = [[], [], []]
    at = 0
    for size in (5, 1, 13, 2, 29):
        part = rows[at : at + size]
        at += size
        run = run_rows(
            model,
            [sequences[s][p] for p, s in part],
            [p for p, _ in part],
            [bases[s] for _, s in part],
        )
        for (_, s), row in zip(part, run.logits, strict=True):
            logits[s].append(row)
    assert at == len(rows)
    for s in range(3):
        assert_bits_equal(np.stack(logits[s]), alone[s].logits, f"sequence {s}")
        for mine, theirs in zip(model.kv.layers, _cache_of(config, sequences[s]), strict=True):
            for name, expected in theirs.items():
                held = model.backend.read(getattr(mine, name))
                assert_bits_equal(held[bases[s] : bases[s] + len(expected)], expected, f"{name} of {s}")


def _cache_of(config, ids):  # type: ignore[no-untyped-def]
    model = make_model(config)
    run_tokens(model, ids)
    names = ("kq", "ks", "vq", "vs")
    return [
        {name: model.backend.read(getattr(layer, name))[: len(ids)] for name in names}
        for layer in model.kv.layers
    ]


def test_wrong_base_is_noticed() -> None:
    config = tiny_config("qwen3")
    ids = random_ids(12, config.vocab_size)
    model = make_model(config)
    alone = run_tokens(model, ids)
    together = run_rows(model, np.tile(ids, 2), np.tile(np.arange(12), 2), np.repeat([0, 11], 12))
    with pytest.raises(AssertionError):  # the second sequence overwrites the first one's last slot
        assert_bits_equal(together.logits[:12], alone.logits)


@pytest.mark.parametrize(
    ("ids", "positions", "base", "message"),
    [
        ([0], [32], [0], "positions"),
        ([0], [30], [2], "positions"),
        ([0], [-1], [0], "positions"),
        ([384], [0], [0], "token ids"),
        ([-1], [0], [0], "token ids"),
    ],
)
def test_rows_out_of_range_are_refused(
    ids: list[int], positions: list[int], base: list[int], message: str
) -> None:
    model = make_model(tiny_config("llama"), slots=32)
    with pytest.raises(ValueError, match=message):
        run_rows(model, ids, positions, base)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_what_lies_behind_the_last_row_is_not_read(family: Family, threads: int) -> None:
    """100 rows where there is room for 112, every buffer full of NaN before: nothing changes."""
    config = tiny_config(family)
    ids = random_ids(100, config.vocab_size)
    expected = run_tokens(make_model(config, max_rows=100), ids, taps="extended")
    model = make_model(config, threads=threads, max_rows=112)
    model.step(100, 100, "extended")
    for buffer in model.activations():
        model.backend.write(buffer, np.full(buffer.shape, -1, np.int64).astype(buffer.dtype))
        if buffer.dtype == np.float32:
            model.backend.write(buffer, np.full(buffer.shape, np.nan, np.float32))
    assert_same_bits(run_tokens(model, ids, chunk=100, taps="extended"), expected)
