"""Sampling: the random numbers, the filters and their tie rules."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kestrel import SamplingParams, UsageError
from kestrel._native import exp_f64
from kestrel.sampling import _top_p, philox4x32, sample, uniform

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        # Known answers published with Random123 (philox4x32, 10 rounds).
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple, key: tuple, words: tuple) -> None:
    assert philox4x32(counter, key) == words


def test_uniform_depends_on_seed_and_position() -> None:
    values = [uniform(seed, position) for seed in (0, 1, 1 << 63) for position in (0, 1, 1 << 33)]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 1 for value in values)
    # The first word of the known answer for key 0, counter 0, and the second below it.
    assert uniform(0, 0) == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53


def reference(logits: np.ndarray, params: SamplingParams, position: int) -> int:
    """The rule of docs/numerics.md section 10, one token at a time."""
    kept = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.top_k:
        kept = kept[: params.top_k]
    best = float(logits[kept[0]])
    p = {i: float(exp_f64(np.array([(float(logits[i]) - best) / params.temperature]))[0]) for i in kept}
    if params.top_p < 1:
        total = 0.0
        for i in sorted(kept):
            total += p[i]
        reached, run = [], 0.0
        for i in kept:
            reached.append(i)
            run += p[i]
            if run >= params.top_p * total:
                break
        kept = reached
    kept = sorted(i for i in kept if p[i] >= params.min_p)
    total = 0.0
    for i in kept:
        total += p[i]
    target, run = uniform(params.seed, position) * total, 0.0
    for i in kept:
        run += p[i]
        if run > target:
            return i
    return kept[-1]


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.3},
    {"top_p": 0.999},
    {"min_p": 0.2},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("ties", [False, True])
def test_sample_equals_the_rule(filters: dict, ties: bool) -> None:
    rng = np.random.default_rng(3)
    for position in range(40):
        logits = (rng.standard_normal(1500) * 3).astype(np.float32)
        if ties:
            logits = np.round(logits)  # many equal logits, at every border, +0 and -0 among them
        params = SamplingParams(temperature=0.8, seed=position % 3, **filters)
        assert sample(logits, params, position) == reference(logits, params, position)


@pytest.mark.parametrize("top_p", [0.02, 0.3, 0.95])
def test_top_p_over_a_large_flat_vocabulary(top_p: float) -> None:
    """The likeliest 512, 16384, and all tokens are needed."""
    logits = (np.random.default_rng(4).standard_normal(40_000) / 2).astype(np.float32)
    p = exp_f64(logits.astype(np.float64))
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    target, run, kept = top_p * float(np.cumsum(p)[-1]), 0.0, []
    for i in ranked:
        kept.append(i)
        run += float(p[i])
        if run >= target:
            break
    assert _top_p(logits, p, top_p).tolist() == sorted(kept)


def test_ties_go_to_the_lower_index() -> None:
    logits = np.zeros(10, np.float32)
    logits[[2, 5, 7]] = 1
    logits[3] = -0.0
    drawn = {sample(logits, SamplingParams(temperature=1, top_k=2, seed=s), 4) for s in range(60)}
    assert drawn == {2, 5}
    drawn = {sample(logits, SamplingParams(temperature=1, top_k=4, seed=s), 4) for s in range(200)}
    assert drawn == {0, 2, 5, 7}
    assert sample(logits, SamplingParams(), 4) == 2  # greedy


def test_frequencies_follow_the_probabilities() -> None:
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    logits = np.log(probabilities).astype(np.float32)
    count = 4000
    drawn = np.bincount(
        [sample(logits, SamplingParams(temperature=1), position) for position in range(count)], minlength=4
    )
    chi_squared = ((drawn - count * probabilities) ** 2 / (count * probabilities)).sum()
    assert chi_squared < 16.3  # the 99.9 % quantile of 3 degrees of freedom; the draws are fixed


def test_tiny_temperature_is_greedy_and_finite() -> None:
    logits = np.array([1.0, 3.0, 2.9999998], np.float32)
    assert sample(logits, SamplingParams(temperature=1e-300), 0) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("min_p", 1),
        ("min_p", -0.5),
        ("seed", -1),
        ("seed", 1 << 64),
        ("max_tokens", 0),
        ("stop", ("",)),
        ("stop", (3,)),
        ("ignore_eos", 1),
    ],
)
def test_wrong_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=name):
        SamplingParams(**{name: value})


def test_unknown_parameters_are_refused_with_a_hint() -> None:
    with pytest.raises(UsageError, match="did you mean 'temperature'"):
        SamplingParams.from_kwargs(temprature=1)
    with pytest.raises(UsageError, match="known: temperature"):
        SamplingParams.from_kwargs(presence_penalty=1)


def test_one_stop_string_may_stand_alone() -> None:
    assert SamplingParams(stop="end").stop == ("end",)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, 10**400) for name in ("temperature", "top_p", "min_p")),
        *((name, True) for name in ("temperature", "top_p")),
        *(("stop", value) for value in (5, b"x", {"a": 1}, {"a"}, ["a", 5])),
    ],
)
def test_values_of_another_kind_are_refused(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{field} must be"):
        SamplingParams(**{field: value})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = np.array([-3e38, 1, 3e38, 2], np.float32)
    assert sample(logits, SamplingParams(temperature=temperature), 0) == 2
