"""Runs a model over token ids, in chunks, and collects logits and L2 hashes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kestrel.backend import Backend
from kestrel.config import ModelConfig
from kestrel.cpu import CpuBackend
from kestrel.model import Model
from kestrel.ops import WType
from kestrel.taps import TapLevel
from kestrel.weights import Weights
from tests.support.bits import assert_bits_equal
from tests.support.models import random_weights


@dataclass
class Run:
    """What a run over T positions left behind."""

    logits: npt.NDArray[np.float32]  # [T, V]
    next: npt.NDArray[np.int32]  # [T]: greedy choices
    keys: dict[str, int] = field(default_factory=dict)  # tap key -> hash


def make_model(
    config: ModelConfig,
    weights: Weights | None = None,
    *,
    backend: Backend | None = None,
    threads: int = 1,
    slots: int = 512,
    max_rows: int = 256,
    wtype: WType = WType.q4local,
) -> Model:
    """A model with random weights of ``wtype`` unless ``weights`` are given."""
    if weights is None:
        weights = random_weights(config, wtype, WType.bf16 if wtype == WType.bf16 else WType.q8local)
    return Model(config, weights, backend or CpuBackend(threads=threads), slots=slots, max_rows=max_rows)


def run_rows(
    model: Model,
    ids: npt.ArrayLike,
    positions: npt.ArrayLike,
    base: npt.ArrayLike | None = None,
    *,
    taps: TapLevel = "off",
) -> Run:
    """One forward pass over the rows, with logits for all of them. Keys name positions, not sequences."""
    ids, positions = np.asarray(ids, np.int32), np.asarray(positions, np.int32)
    base = np.zeros_like(positions) if base is None else np.asarray(base, np.int32)
    rows = len(ids)
    step = model.step(rows, rows, taps)
    model.load_rows(ids, positions, base)
    step.program.run()
    run = Run(model.logits(rows), model.argmax(rows))
    if taps != "off":
        hashes = model.hashes(step, rows)
        for tap, row_hashes in zip(step.taps, hashes, strict=True):
            for position, value in zip(positions, row_hashes, strict=True):
                run.keys[tap.key(int(position))] = int(value)
    return run


def run_tokens(
    model: Model,
    ids: Sequence[int] | npt.NDArray[np.int32],
    *,
    chunk: int | Sequence[int] | None = None,
    taps: TapLevel = "off",
    base: int = 0,
) -> Run:
    """The tokens from an empty cache, in passes of ``chunk`` rows (one size, a list of sizes, or all)."""
    ids = np.asarray(ids, np.int32)
    if chunk is None:
        chunk = min(len(ids), model.max_rows)
    sizes = [chunk] * -(-len(ids) // chunk) if isinstance(chunk, int) else list(chunk)
    runs, begin = [], 0
    for size in sizes:
        end = min(begin + size, len(ids))
        positions = np.arange(begin, end)
        runs.append(run_rows(model, ids[begin:end], positions, np.full(end - begin, base), taps=taps))
        begin = end
    if begin != len(ids):
        raise ValueError(f"chunks of {begin} rows for {len(ids)} tokens")
    keys = {key: value for run in runs for key, value in run.keys.items()}
    return Run(np.concatenate([r.logits for r in runs]), np.concatenate([r.next for r in runs]), keys)


def assert_same_bits(actual: Run, expected: Run) -> None:
    """Equal logits and hashes, or AssertionError that names the first differing key in data-flow order.

    Keys that only one of the two has are differences too.
    """
    if actual.keys.keys() != expected.keys.keys():
        only = sorted(actual.keys.keys() ^ expected.keys.keys())
        raise AssertionError(f"{len(only)} keys are in one run only: {', '.join(only[:5])}")
    # A run lists its keys step by step and tap by tap; the expected run's order is the data flow.
    different = [key for key, value in expected.keys.items() if actual.keys[key] != value]
    if different:
        total = len(expected.keys)
        raise AssertionError(f"{len(different)} of {total} keys differ, the first is {different[0]}")
    assert_bits_equal(actual.logits, expected.logits, "logits")
    assert_bits_equal(actual.next, expected.next, "greedy choices")


def random_ids(count: int, vocab: int, seed: int = 0) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, vocab, count).astype(np.int32)
