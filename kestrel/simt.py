"""The kernels under ``kernels/`` on the CPU, as a backend: for tests, never for use (a thread is a fiber).

The same source text, launch table and argument structs as on a GPU, run by ``kestrel._simt``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel import _simt
from kestrel.config import ModelConfig
from kestrel.cpu import CpuBackend, CpuBuffer
from kestrel.launch import (
    ROW_SPREAD,
    Launch,
    MergeBy,
    Mode,
    Tuning,
    attention_work_bytes,
    check_head_dim,
    head_groups,
    launches,
    merge_by,
    plan,
)
from kestrel.ops import Op

ALIGNMENT = 256  # of every buffer, as on a GPU


def aligned_empty(shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array whose first byte lies at a multiple of 256."""
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(tuple(shape))


def run_launch(launch: Launch, seed: int = 0, *, gates: bool = True) -> None:
    """Run one launch to its end; raises RuntimeError on undefined behaviour that the shim sees.

    Without ``gates`` bulk copies are made as below sm_90, where there are no clusters.
    """
    args: Any = launch.args
    if launch.table:
        table = np.frombuffer(launch.table, np.uint8)
        args = type(args).from_buffer_copy(args)
        args.table = table.ctypes.data
    geometry = launch.grid, launch.block, launch.shared
    _simt.launch(launch.kernel, *geometry, bytes(args), seed, gates, launch.cluster)


class SimtProgram:
    """Ops as launches; a full run may hash neighbouring taps together, a partial one goes op by op."""

    def __init__(self, backend: SimtBackend, ops: Sequence[Op]) -> None:
        self._backend = backend
        self._ops = list(ops)
        self._by_op = [launches(op, backend.mode, backend.tuning) for op in ops]
        self._plans: dict[MergeBy, list[Launch]] = {}
        self._whole()  # what cannot be planned is an error now

    def _whole(self) -> list[Launch]:
        """The plan for the backend's position, made when first wanted."""
        backend = self._backend
        way = merge_by(backend.position, backend.tuning, head_groups(self._ops))
        if way not in self._plans:
            planned = plan(self._ops, backend.mode, backend.tuning, backend.position)
            self._plans[way] = planned.in_line(late=backend.seed % 2 == 1)
        return self._plans[way]

    def run(self, begin: int = 0, end: int | None = None) -> None:
        end = len(self._ops) if end is None else end
        whole = begin == 0 and end == len(self._ops)
        todo = self._whole() if whole else [launch for op in self._by_op[begin:end] for launch in op]
        for launch in todo:
            run_launch(launch, self._backend.seed)


class SimtBackend(CpuBackend):
    """Runs the device kernels on CPU memory; ``seed`` shuffles the order of blocks and threads (0: none)."""

    name = "simt"
    row_spread = ROW_SPREAD
    position = 0  # of at_position

    def __init__(self, mode: Mode = "l2exact", tuning: Tuning | None = None, seed: int = 0) -> None:
        self.mode = mode
        # A read past what a kernel needs is an error here, which more memory than that would hide.
        self.tuning = replace(tuning or Tuning(), apart=0)
        self.seed = seed

    def at_position(self, position: int) -> None:
        self.position = position

    def check_model(self, config: ModelConfig) -> None:
        check_head_dim(config.head_dim)

    def describe(self) -> dict[str, str]:
        return {"backend": self.name, "mode": self.mode}

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> CpuBuffer:
        array = aligned_empty(shape, dtype)
        array.view(np.uint8).fill(0xFF)  # what is read before it is written shows
        return CpuBuffer(array)

    def zeros(self, shape: Sequence[int], dtype: npt.DTypeLike) -> CpuBuffer:
        array = aligned_empty(shape, dtype)
        array.fill(0)
        return CpuBuffer(array)

    def upload(self, array: npt.NDArray[Any]) -> CpuBuffer:
        copy = aligned_empty(array.shape, array.dtype)
        copy[...] = array
        return CpuBuffer(copy)

    def attention_work_bytes(self, rows: int, heads: int, head_dim: int, context: int) -> int:
        return attention_work_bytes(rows, heads, head_dim, context)

    def compile(self, ops: Sequence[Op]) -> SimtProgram:  # type: ignore[override]
        return SimtProgram(self, ops)
