"""What the model needs of a backend, as protocols: memory, and programs made of ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kestrel.config import ModelConfig
from kestrel.ops import Op


class Buffer(Protocol):
    """Memory of a backend; ``ptr`` is an address in that backend's space."""

    @property
    def ptr(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...


class Program(Protocol):
    """A list of ops made ready to run; buffers are bound, so it may be run again with new contents."""

    def run(self, begin: int = 0, end: int | None = None) -> None:
        """Run ops ``begin`` to ``end`` (exclusive; ``None`` is all), and return when they are done."""


@runtime_checkable
class GreedyProgram(Protocol):
    """A one-row program that can feed the token it chose to the next step without the host."""

    def greedy_loop(
        self, ids: Buffer, pos: Buffer, chosen: Buffer, hashes: Buffer | None, taps: int, count: int
    ) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
        """Yield ``count`` times the token a step chose (-1: not finite, the end) and its hashes u64[taps].

        ``ids`` and ``pos`` hold the first step's input. Steps beyond the one yielded may have run, within
        ``count``; when the iterator is closed early their KV rows are to be ignored.
        """


class Backend(Protocol):
    name: str  # "cpu", "cuda:0", "simt"
    row_spread: int  # elements to leave out behind every 32 of x in steps of one row; 0 for none

    def describe(self) -> dict[str, str]:
        """Facts for dump headers and reports: isa, threads, device, versions."""

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Buffer:
        """New memory, contents undefined."""

    def zeros(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Buffer:
        """New memory, all bytes zero."""

    def upload(self, array: npt.NDArray[Any]) -> Buffer:
        """The array in backend memory; the CPU backend keeps the array itself (no copy)."""

    def write(self, buffer: Buffer, array: npt.NDArray[Any]) -> None:
        """Copy ``array`` to the start of ``buffer`` (dtypes equal, size at most the buffer's)."""

    def read(self, buffer: Buffer, shape: Sequence[int] | None = None) -> npt.NDArray[Any]:
        """A host copy of the first elements of ``buffer``, in ``shape`` (all of it by default)."""

    def at_position(self, position: int) -> None:
        """The next run goes no further than ``position``: a hint for its speed, which changes no bit."""

    def attention_work_bytes(self, rows: int, heads: int, head_dim: int, context: int) -> int:
        """Bytes of scratch that attention of these maxima needs in ``AttentionArgs.work``; 0 for none."""

    def check_model(self, config: ModelConfig) -> None:
        """BackendError naming what of the model this backend cannot run; asked before an upload."""

    def check_memory(self, parts: Mapping[str, int]) -> None:
        """BackendError with the numbers unless ``parts`` (what it is for -> bytes) fit together."""

    def compile(self, ops: Sequence[Op]) -> Program: ...

    def close(self) -> None:
        """Release the memory; its buffers are void afterwards. Closing twice is allowed."""
