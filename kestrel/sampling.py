"""Choosing a token from logits: contract section 10.

Everything here runs on the host in float64 with stated orders and a fixed exponential, so that equal logits
give equal tokens on every machine and backend.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel.errors import UsageError, shown

_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # Philox4x32 round multipliers
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # key increments per round
_MASK = 0xFFFFFFFF

# top-p sorts this many likeliest tokens first, then more, and all only if these do not reach p.
_TOP_P_STEPS = (512, 16384)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. All fields are checked; unknown names are refused.

    ``temperature`` 0 is greedy: the lowest index among equal maxima; ``top_k``, ``top_p``, ``min_p`` and
    ``seed`` then have no effect. Otherwise the filters apply in the order top-k, top-p, min-p.

    Raises ``UsageError`` naming the field for a value out of range.
    """

    temperature: float = 0.0  # >= 0
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # keep the likeliest tokens that together reach p, 0 < p <= 1
    min_p: float = 0.0  # keep tokens at least this fraction as likely as the likeliest, 0 <= p < 1
    seed: int = 0  # 0 .. 2**64 - 1; the same seed, prompt and model give the same text
    max_tokens: int | None = None  # None: up to the context limit
    stop: tuple[str, ...] = ()  # texts that end generation; not part of the result
    ignore_eos: bool = False  # go on after an end-of-sequence token

    def __post_init__(self) -> None:
        stop: object = self.stop  # callers may give one string
        if stop is None or isinstance(stop, (str, list, tuple)):
            object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop or ()))
        number = _is_number
        checks = [
            ("temperature", "a finite number >= 0", number(self.temperature) and self.temperature >= 0),
            ("top_k", "a whole number >= 0 (0: all)", _is_int(self.top_k) and self.top_k >= 0),
            ("top_p", "a number with 0 < p <= 1", number(self.top_p) and 0 < self.top_p <= 1),
            ("min_p", "a number with 0 <= p < 1", number(self.min_p) and 0 <= self.min_p < 1),
            ("seed", "a whole number from 0 to 2**64 - 1", _is_int(self.seed) and 0 <= self.seed < 1 << 64),
            (
                "max_tokens",
                "a whole number >= 1, or None",
                self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1),
            ),
            (
                "stop",
                "non-empty strings: one, a list or a tuple",
                isinstance(self.stop, tuple) and all(isinstance(text, str) and text for text in self.stop),
            ),
            ("ignore_eos", "True or False", isinstance(self.ignore_eos, bool)),
        ]
        for name, expected, ok in checks:
            if not ok:
                raise UsageError(f"{name} must be {expected}, not {shown(getattr(self, name))}")

    @classmethod
    def from_kwargs(cls, **values: Any) -> SamplingParams:
        """Like the constructor, but an unknown name gets a hint."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise UsageError(f"unknown sampling parameter {name!r}: {hint}")
        return cls(**values)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:  # an integer beyond every float
        return False


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four 32-bit words from a 128-bit counter and a 64-bit key (Salmon et al., SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A float64 in [0, 1) with 53 random bits, from the seed and the position of the token to be drawn."""
    counter = (position & _MASK, position >> 32, 0, 0)
    high, low, _, _ = philox4x32(counter, (seed & _MASK, seed >> 32))
    return ((high >> 5) * float(1 << 26) + float(low >> 6)) * 2.0**-53


def sample(logits: npt.NDArray[np.float32], params: SamplingParams, position: int) -> int:
    """The token at ``position`` (the number of tokens before it). ``logits`` is f32[V], all finite.

    In this order: ``p_i = exp((x_i - x_max) / temperature)`` for the top-k tokens; top-p keeps the shortest
    run of tokens, likeliest first, whose sum reaches ``top_p`` times the sum of all kept so far; min-p keeps
    ``p_i >= min_p``; then the first index whose running sum exceeds ``uniform * sum``. Sums run in index
    order except the one over likeliest tokens; equal logits rank by index.
    """
    if params.greedy:
        return int(np.argmax(logits))
    from kestrel._native import exp_f64  # not at the top: parameters and Philox need no native module

    index = _top_k(logits, params.top_k)
    x = logits[index].astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature: -inf, of which exp is 0
        p = exp_f64((x - x.max()) / float(params.temperature))
    if params.top_p < 1:
        kept = _top_p(logits[index], p, params.top_p)
        index, p = index[kept], p[kept]
    if params.min_p > 0:
        keep = p >= params.min_p  # the likeliest has p = 1
        index, p = index[keep], p[keep]
    sums = np.cumsum(p)  # in index order: numpy accumulates one by one
    target = uniform(params.seed, position) * sums[-1]
    chosen = min(int(np.searchsorted(sums, target, side="right")), len(p) - 1)
    return int(index[chosen])


def _top_k(logits: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int64]:
    """Indices, ascending, of the k largest logits; at the border the lower index wins."""
    if k == 0 or k >= len(logits):
        return np.arange(len(logits), dtype=np.int64)
    border = np.partition(logits, len(logits) - k)[len(logits) - k]
    above = np.flatnonzero(logits > border)
    ties = np.flatnonzero(logits == border)[: k - len(above)]
    return np.sort(np.concatenate([above, ties])).astype(np.int64)


def _top_p(
    logits: npt.NDArray[np.float32], p: npt.NDArray[np.float64], top_p: float
) -> npt.NDArray[np.int64]:
    """Indices, ascending, of the shortest likeliest-first run that reaches ``top_p`` times the whole sum."""
    target = top_p * np.cumsum(p)[-1]
    for count in (*(step for step in _TOP_P_STEPS if step < len(p)), len(p)):
        likeliest = _top_k(logits, count)
        ranked = likeliest[np.argsort(-logits[likeliest], kind="stable")]  # index order within ties
        sums = np.cumsum(p[ranked])
        reached = int(np.searchsorted(sums, target, side="left"))
        if reached < count:
            return np.sort(ranked[: reached + 1])
    return np.arange(len(p), dtype=np.int64)  # rounding kept the sum under the target: everything
