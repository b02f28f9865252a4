"""What the converter needs of a source, whatever its format."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel.config import ModelConfig
from kestrel.ops import WType
from kestrel.weights import TensorSpec

F32 = npt.NDArray[np.float32]
Packed = tuple[npt.NDArray[Any], npt.NDArray[np.uint16]]


@dataclass(frozen=True)
class SourceTensor:
    """A canonical tensor as the source holds it, seen as rows of K over all experts."""

    spec: TensorSpec
    origin: str  # its name in the source, for messages
    stored: str  # its type in the source: "BF16", "Q4_0"
    read: Callable[[int, int], F32]  # rows begin .. end -> f32[rows, K]
    blocks: bool = False  # quantised blocks, whose values are products that f32 may round
    packed_wtype: WType | None = None  # the format that the source's blocks already are, bit for bit
    packed: Callable[[int, int], Packed] | None = None  # rows begin .. end -> (codes, f16 bits)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor under the name the source gives it."""

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass
class Findings:
    """What opening a source found before it was refused, for a report; filled in as far as it got."""

    format: str = ""
    config: ModelConfig | None = None
    stored: list[StoredTensor] = field(default_factory=list)


@dataclass
class Checkpoint:
    """An opened, checked source. ``close`` releases its files."""

    where: str
    format: str  # "hugging-face" or "gguf"
    config: ModelConfig
    tensors: list[SourceTensor]  # in the order of tensor_specs
    weight_files: list[Path]
    side_files: dict[str, bytes]  # tokenizer and templates
    notes: list[str] = field(default_factory=list)  # what a user should know and nothing refuses
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Segment:
    """Consecutive rows of one tensor of a source; ``read`` takes row numbers within the segment."""

    rows: int
    read: Callable[[int, int], F32]


def read_segments(segments: list[Segment]) -> Callable[[int, int], F32]:
    """Reader of the segments one after the other, as one run of rows."""
    if len(segments) == 1:
        return segments[0].read
    starts = [0, *accumulate(segment.rows for segment in segments)]

    def read(begin: int, end: int) -> F32:
        parts = []
        index = bisect_right(starts, begin) - 1
        while begin < end:
            stop = min(end, starts[index + 1])
            parts.append(segments[index].read(begin - starts[index], stop - starts[index]))
            begin, index = stop, index + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    return read
