"""When is a run slower, or different? The rule of ``bench/nightly.py``, on records of ``kestrel bench``.

Times. The run's median ms/token is compared with the medians of up to ``WINDOW`` earlier runs of the same
series (same model, machine, threads, mode, test) since the last accepted change. With k earlier runs,

    centre = median of the earlier medians
    spread = the largest of: 1.4826 x MAD of the earlier medians (noise from run to run);
             the typical standard error of their medians, and this run's own (noise of repeats)
    limit  = t(0.999, k - 1) x spread x sqrt(1 + pi / (2 k))

and the run is a regression when its median is above centre + limit, faster when below centre - limit.
t is Student's quantile: few earlier runs say little about the noise, so they allow much. With fewer than
``MIN_HISTORY`` earlier runs no time is judged. Runs that were judged regressions never become history, so a
regression stays one every night until it is mended or accepted.

Bits. A record that promises equal bits must have the output hash of every earlier one with the same contract,
weights, seed and test, on whatever device.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kestrel.benchmark.records import BITS_KEY, SPEED_KEY, Record, key_of

Status = Literal["new", "ok", "faster", "regression", "bits changed"]

WINDOW = 20
MIN_HISTORY = 4
FAILED = ("regression", "bits changed")

# Student's t, one-sided 0.999, for 1 to 19 degrees of freedom.
_T999 = (
    318.309,
    22.327,
    10.215,
    7.173,
    5.893,
    5.208,
    4.785,
    4.501,
    4.297,
    4.144,
    4.025,
    3.930,
    3.852,
    3.787,
    3.733,
    3.686,
    3.646,
    3.610,
    3.579,
)


@dataclass(frozen=True)
class Verdict:
    status: Status
    reason: str
    centre: float | None = None  # ms/token
    limit: float | None = None  # ms/token above or below the centre
    runs: int = 0  # earlier runs it was judged by

    @property
    def failed(self) -> bool:
        return self.status in FAILED


def mad(values: Sequence[float]) -> float:
    """Median absolute deviation, scaled to the deviation of a normal distribution."""
    middle = statistics.median(values)
    return 1.4826 * statistics.median(abs(value - middle) for value in values)


def median_error(record: Record) -> float:
    """Standard error of a run's median ms/token, from the spread of its repeats."""
    count = record["n_prompt"] or record["n_gen"]
    ms = [ns / 1e6 / count for ns in record["samples_ns"]]
    return math.sqrt(math.pi / 2) * mad(ms) / math.sqrt(len(ms))


def baseline(record: Record, history: Sequence[Record]) -> list[Record]:
    """The earlier runs that ``record`` is judged by, oldest first."""
    key = key_of(record, SPEED_KEY)
    same = [old for old in history if key_of(old, SPEED_KEY) == key]
    accepted = [i for i, old in enumerate(same) if old.get("accepted")]
    since = same[accepted[-1] :] if accepted else same
    return [old for old in since if old.get("verdict") not in FAILED][-WINDOW:]


def judge(record: Record, history: Sequence[Record]) -> Verdict:
    """The verdict on one record, by the rule above."""
    bits = _changed_bits(record, history)
    if bits is not None:
        return Verdict("bits changed", bits)
    earlier = baseline(record, history)
    k = len(earlier)
    if k < MIN_HISTORY:
        return Verdict("new", f"{k} earlier runs, {MIN_HISTORY} are needed to judge a time", runs=k)
    medians = [old["ms_per_token_median"] for old in earlier]
    centre = statistics.median(medians)
    spread = max(mad(medians), statistics.median(map(median_error, earlier)), median_error(record))
    limit = _T999[k - 2] * spread * math.sqrt(1 + math.pi / (2 * k))
    now = record["ms_per_token_median"]
    change = (
        f"{now:.4g} ms/token, {now / centre - 1:+.1%} of {centre:.4g} (limit {limit / centre:.1%}, {k} runs)"
    )
    if now > centre + limit:
        return Verdict("regression", change, centre, limit, k)
    return Verdict("faster" if now < centre - limit else "ok", change, centre, limit, k)


def _changed_bits(record: Record, history: Sequence[Record]) -> str | None:
    if not record["bits_promised"]:
        return None
    key = key_of(record, BITS_KEY)
    for old in reversed(history):
        same = old.get("bits_promised") and key_of(old, BITS_KEY) == key
        if same and old.get("verdict") != "bits changed":
            if old["output_hash"] == record["output_hash"]:
                return None
            return (
                f"output hash {record['output_hash']} on {record['device']}, before {old['output_hash']} on "
                f"{old['device']} ({old['test_time']}, commit {old.get('build_commit')}, contract "
                f"{old['contract']})"
            )
    return None
