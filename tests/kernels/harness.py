"""Runs one op on the CPU reference and on the device kernels, from equal inputs, and compares all memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel import _native
from kestrel.launch import Launch, Mode, Tuning, launches
from kestrel.ops import OPS, Op, Weight, WType
from kestrel.simt import aligned_empty, run_launch
from tests.support.bits import assert_bits_equal
from tests.support.models import random_tensor

GUARD = 256  # bytes around every array that nobody may write

# Values that break careless code; drawn beside normal numbers. No huge ones: a single one makes a sum of
# squares infinite and every result of its row zero, whatever the order of the sum.
SPECIALS = np.array(
    [0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 2.0**-126, -(2.0**-100), 2.0**-101, 1.0, -1.0], np.float32
)


class Guarded:
    """An array with guard bytes before and after it, aligned as a GPU aligns."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._raw = aligned_empty((array.nbytes + 2 * GUARD,), np.uint8)
        self._raw.fill(0xA5)
        self.array = self._raw[GUARD : GUARD + array.nbytes].view(array.dtype).reshape(array.shape)
        self.array[...] = array

    @property
    def ptr(self) -> int:
        return int(self.array.ctypes.data)

    def check(self, what: str) -> None:
        outside = np.concatenate([self._raw[:GUARD], self._raw[GUARD + self.array.nbytes :]])
        assert (outside == 0xA5).all(), f"{what}: bytes outside of the array were written"


class Case:
    """An op with its memory: ``arrays`` by argument name, ``weights`` bound to ``w``, the rest numbers."""

    def __init__(
        self,
        op: str,
        arrays: Mapping[str, npt.NDArray[Any]],
        weights: list[Any] | None = None,
        **numbers: Any,
    ) -> None:
        self.op = op
        self.arrays = dict(arrays)
        self.weights = weights or []
        self.numbers = numbers

    def bind(self) -> tuple[Op, dict[str, Guarded]]:
        """The op on memory of its own."""
        memory = {name: Guarded(array) for name, array in self.arrays.items()}
        args = OPS[self.op].args()
        bound = []
        for i, tensor in enumerate(self.weights):
            codes = memory[f"codes{i}"] = Guarded(tensor.codes)
            scale = 0
            if tensor.scale is not None:
                memory[f"scale{i}"] = Guarded(tensor.scale)
                scale = memory[f"scale{i}"].ptr
            bound.append(Weight(codes.ptr, scale, int(tensor.wtype), tensor.n, tensor.k, 0))
        if self.op == "embed":
            args.w = bound[0]
        elif bound:
            for i, weight in enumerate(bound):
                args.w[i] = weight
            args.n_w = len(bound)
        for name in self.arrays:
            setattr(args, name, memory[name].ptr)
        for name, value in self.numbers.items():
            setattr(args, name, value)
        return Op(OPS[self.op], args, self.op), memory

    def on_cpu(self) -> dict[str, npt.NDArray[Any]]:
        """All memory after the CPU reference ran, in its scalar form."""
        op, memory = self.bind()
        _native.Program([(op.name, bytes(op.args))], 1, "scalar").run()
        return {name: guarded.array for name, guarded in memory.items()}

    def on_kernels(
        self, tuning: Tuning | None = None, seed: int = 0, mode: Mode = "l2exact"
    ) -> dict[str, npt.NDArray[Any]]:
        """All memory after the kernels ran."""
        op, memory = self.bind()
        for launch in launches(op, mode, tuning):
            run_launch(launch, seed)
        for name, guarded in memory.items():
            guarded.check(f"{self.op}: {name}")
        return {name: guarded.array for name, guarded in memory.items()}

    def launches(self, tuning: Tuning | None = None) -> list[Launch]:
        return launches(self.bind()[0], "l2exact", tuning)

    def check(self, tuning: Tuning | None = None, seed: int = 0, expected: Any = None) -> None:
        """Kernels and reference leave equal bits in every array but the workspace."""
        expected = self.on_cpu() if expected is None else expected
        actual = self.on_kernels(tuning, seed)
        for name in expected:
            if name != "work":
                assert_bits_equal(actual[name], expected[name], f"{self.op}: {name}", any_nan=True)


def values(
    rng: np.random.Generator, *shape: int, special: float = 0.0, non_finite: float = 0.0
) -> npt.NDArray[np.float32]:
    """Normal numbers over a few magnitudes, with a share of special and of non-finite ones."""
    x = (rng.standard_normal(shape) * 10.0 ** rng.uniform(-2, 1, shape)).astype(np.float32)
    if special:
        x = np.where(rng.random(shape) < special, rng.choice(SPECIALS, shape), x)
    if non_finite:
        odd = rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32), shape)
        x = np.where(rng.random(shape) < non_finite, odd, x)
    return x.astype(np.float32)


def quantised(
    rng: np.random.Generator, rows: int, k: int, scale: float = 0.05
) -> dict[str, npt.NDArray[Any]]:
    """Any a8 rows (the codes need not come from real numbers)."""
    q = rng.integers(-127, 128, (rows, k)).astype(np.int8)
    d = (rng.random((rows, k // 32)) * scale).astype(np.float32)
    return {"xq": q, "xd": d, "gsum": q.reshape(rows, k // 32, 32).sum(-1, dtype=np.int32)}


def tensor(rng: np.random.Generator, wtype: WType, n: int, k: int, experts: int | None = None) -> Any:
    return random_tensor(rng, wtype, n, k, experts=experts)
