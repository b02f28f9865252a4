"""When taps are hashed whose values something overwrites: several in one launch, beside the kernels of the
step instead of between them. (The others are hashed behind the step.)

A tap may be hashed from the moment its value is there (``ready``) until something overwrites it
(``deadline``). In that time it can run beside other kernels, so that a dump costs little; taps whose times
overlap share a launch. Positions count the main launches of a step: ``ready`` 5 is after the first five,
``deadline`` 7 before the eighth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TimedTap:
    """The arguments of one ``l2_hash`` op, and when it may run."""

    args: Any
    ready: int
    deadline: int


@dataclass(frozen=True)
class TapGroup:
    """Taps hashed together after ``after`` main launches; main launch ``before`` has to wait for them."""

    taps: list[Any]
    after: int
    before: int


def group_taps(taps: Sequence[TimedTap], beside: int) -> list[TapGroup]:
    """As few groups as leave each ``beside`` main launches to run beside, where the times allow that.

    Earliest end first: the tap whose time ends first opens a group, which takes every tap ready by then.
    """

    def end(tap: TimedTap) -> int:
        return max(tap.ready, tap.deadline - beside)

    groups: list[list[TimedTap]] = []
    limit = -1
    for tap in sorted(taps, key=end):
        if groups and tap.ready <= limit:
            groups[-1].append(tap)
        else:
            groups.append([tap])
            limit = end(tap)
    found = [
        TapGroup([tap.args for tap in g], max(tap.ready for tap in g), min(tap.deadline for tap in g))
        for g in groups
    ]
    return sorted(found, key=lambda group: group.after)
