"""L2 dumps in memory: the hashes of every tap of a generation, for comparing two runs key by key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kestrel.engine import Engine
from kestrel.sampling import SamplingParams
from kestrel.taps import Tap, TapLevel


@dataclass
class Recorder:
    """A tap sink that keeps ``key -> hash`` in the order of data flow."""

    level: TapLevel = "standard"
    keys: dict[str, int] = field(default_factory=dict)

    def rows(self, taps: Sequence[Tap], start: int, hashes: npt.NDArray[np.uint64]) -> None:
        for row in range(hashes.shape[1]):
            for tap, value in zip(taps, hashes[:, row], strict=True):
                if row >= tap.rows_from:
                    self.keys[tap.key(start + row)] = int(value)


@dataclass(frozen=True)
class Difference:
    """Where two dumps part."""

    count: int
    total: int
    first: str | None

    def __str__(self) -> str:
        return f"{self.count} of {self.total} keys differ" + (f", first {self.first}" if self.first else "")


def difference(a: Recorder, b: Recorder) -> Difference:
    """Compare two dumps; a key that only one has differs."""
    keys = list(a.keys) + [key for key in b.keys if key not in a.keys]
    different = [key for key in keys if a.keys.get(key) != b.keys.get(key)]
    return Difference(len(different), len(keys), different[0] if different else None)


def generate(
    engine: Engine, prompt: Sequence[int], count: int, level: TapLevel = "standard"
) -> tuple[list[int], Recorder]:
    """Greedy tokens and the dump of prompt and generated positions (none with level ``off``)."""
    recorder = Recorder(level)
    params = SamplingParams(max_tokens=count, temperature=0.0)
    sink = recorder if level != "off" else None
    return list(engine.generate(prompt, params, sink=sink)), recorder
