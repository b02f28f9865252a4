"""The CPU backend: the C++ reference in ``kestrel._native``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel import _native
from kestrel.backend import Buffer
from kestrel.config import ModelConfig
from kestrel.env import env
from kestrel.errors import BackendError, UsageError
from kestrel.ops import Op

MAX_THREADS = 1024  # the native module's own limit


class CpuBuffer:
    """A numpy array as a backend buffer."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        if not array.flags.c_contiguous:
            raise ValueError("a buffer needs a C-contiguous array")
        self.array = array

    @property
    def ptr(self) -> int:
        return int(self.array.ctypes.data)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype


def _array(buffer: Buffer) -> npt.NDArray[Any]:
    if not isinstance(buffer, CpuBuffer):
        raise TypeError(f"expected a CPU buffer, got {type(buffer).__name__}")
    return buffer.array


class CpuBackend:
    """Runs ops on the CPU. ``threads=None`` takes all the CPUs this process may use.

    ``isa`` is ``scalar``, ``avx2`` or ``avx512``; ``None`` takes ``KESTREL_ISA``, else the best this CPU has.
    All give the same bits.
    """

    name = "cpu"
    row_spread = 0

    def __init__(self, threads: int | None = None, isa: str | None = None) -> None:
        available = _native.isa_available()
        isa = isa or env.isa
        if isa is not None and isa not in available:
            raise BackendError(
                f"ISA level {isa!r} is not available on this CPU: choose from {', '.join(available)}"
            )
        self.isa = isa or available[-1]
        self.threads = threads if threads is not None else _native.default_threads()
        if not 1 <= self.threads <= MAX_THREADS:
            raise UsageError(f"threads must be 1 to {MAX_THREADS}, not {self.threads}")

    def describe(self) -> dict[str, str]:
        return {"backend": self.name, "isa": self.isa, "threads": str(self.threads)}

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> CpuBuffer:
        return CpuBuffer(np.empty(tuple(shape), dtype))

    def zeros(self, shape: Sequence[int], dtype: npt.DTypeLike) -> CpuBuffer:
        return CpuBuffer(np.zeros(tuple(shape), dtype))

    def upload(self, array: npt.NDArray[Any]) -> CpuBuffer:
        return CpuBuffer(array)

    def write(self, buffer: Buffer, array: npt.NDArray[Any]) -> None:
        target = _array(buffer)
        if array.dtype != target.dtype:
            raise TypeError(f"buffer holds {target.dtype}, array is {array.dtype}")
        target.reshape(-1)[: array.size] = array.reshape(-1)

    def read(self, buffer: Buffer, shape: Sequence[int] | None = None) -> npt.NDArray[Any]:
        source = _array(buffer)
        if shape is None:
            return source.copy()
        count = int(np.prod(shape))
        return source.reshape(-1)[:count].reshape(tuple(shape)).copy()

    def at_position(self, position: int) -> None:
        pass

    def attention_work_bytes(self, rows: int, heads: int, head_dim: int, context: int) -> int:
        return 0

    def check_model(self, config: ModelConfig) -> None:
        """Every model that loads runs here."""

    def check_memory(self, parts: Mapping[str, int]) -> None:
        """Nothing to check: weights are views of the mapped file, and memory is taken as it is used."""

    def close(self) -> None:
        """Nothing to do: numpy frees its arrays with their last reference."""

    def compile(self, ops: Sequence[Op]) -> _native.Program:
        """A native program: all threads walk the op list, with a barrier where data crosses threads."""
        return _native.Program([(op.name, bytes(op.args)) for op in ops], self.threads, self.isa)
