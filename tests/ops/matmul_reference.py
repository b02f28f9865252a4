"""Contract section 3 restated in numpy, and the inputs and forms that matmul and moe_matmul tests share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel import _native
from kestrel.ops import WType
from kestrel.weights import QuantTensor
from tests.ops.forms import FORMS
from tests.support.f32 import F32, fma, hsum8, hsum32

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Form:
    isa: str
    threads: int
    vnni: bool  # of the avx512 level

    def __str__(self) -> str:
        without = " without VNNI" if self.isa == "avx512" and not self.vnni else ""
        return f"{self.isa}{without}, {self.threads} threads"

    @contextmanager
    def chosen(self) -> Iterator[None]:
        before = _native.use_vnni()
        _native.use_vnni(self.vnni)
        try:
            yield
        finally:
            _native.use_vnni(before)


def all_forms() -> list[Form]:
    """Every ISA level of this CPU with 1, 2 and 3 threads; AVX-512 also without the VNNI that the CPU has."""
    has_vnni = _native.use_vnni()
    forms = [Form(isa, threads, has_vnni) for isa, threads in FORMS]
    if has_vnni:
        forms += [Form(isa, threads, False) for isa, threads in FORMS if isa == "avx512"]
    return forms


@dataclass(frozen=True)
class Input:
    """Rows in both forms that matrices read. The a8 part is random, not made from x: the op only reads it."""

    x: F32  # f32[M, K]
    xq: Array  # i8[M, K]
    xd: F32  # f32[M, G]
    gsum: Array  # i32[M, G]

    def take(self, rows: Any) -> Input:
        return Input(*(np.ascontiguousarray(a[rows]) for a in (self.x, self.xq, self.xd, self.gsum)))

    @property
    def arrays(self) -> dict[str, Array]:
        return {"x": self.x, "xq": self.xq, "xd": self.xd, "gsum": self.gsum}


def random_input(rng: np.random.Generator, rows: int, k: int) -> Input:
    """Codes that include the extremes in every row, scales of very different magnitude."""
    x = (rng.standard_normal((rows, k)) * 2.0 ** rng.integers(-6, 7, (rows, k))).astype(np.float32)
    xq = rng.integers(-127, 128, (rows, k)).astype(np.int8)
    extreme = rng.random((rows, k)) < 0.1
    xq[extreme] = rng.choice(np.array([-127, 127], np.int8), int(extreme.sum()))
    groups = k // 32
    xd = (rng.random((rows, groups)) * 2.0 ** rng.integers(-20, 4, (rows, groups))).astype(np.float32)
    return Input(x, xq, xd, sums(xq))


def sums(xq: Array) -> Array:
    """i32[M, G]; a K that is no multiple of 32 has a remainder that only bf16 reads."""
    rows, k = xq.shape
    grouped = xq[:, : k // 32 * 32].reshape(rows, k // 32, 32)
    return np.ascontiguousarray(grouped.sum(axis=2, dtype=np.int32))


def dots(w: QuantTensor, xq: Array) -> Array:
    """i64[M, N, G]: the exact integer dot of each group. float64 holds these integers exactly."""
    codes = w.codes
    if w.wtype == WType.q4local:
        codes = np.concatenate([codes & 15, codes >> 4], axis=-1).astype(np.int16) - 8
    grouped = xq.reshape(len(xq), -1, 32).astype(np.float64)
    return np.einsum("ngj,mgj->mng", codes.astype(np.float64), grouped, optimize=True)


def product(w: QuantTensor, data: Input) -> F32:
    """f32[M, N]."""
    rows = len(data.x)
    lanes = np.zeros((rows, w.n, 32 if w.wtype == WType.bf16 else 8), np.float32)
    with np.errstate(all="ignore"):
        if w.wtype == WType.bf16:
            values = (w.codes.astype(np.uint32) << 16).view(np.float32)
            for k in range(w.k):
                lanes[..., k % 32] = fma(values[:, k], data.x[:, k, None], lanes[..., k % 32])
            return hsum32(lanes)  # type: ignore[no-any-return]
        assert w.scale is not None
        scale = w.scale.view(np.float16).astype(np.float32)
        dot = dots(w, data.xq).astype(np.float32)
        for g in range(w.k // 32):
            ws = scale[:, g] * data.xd[:, g, None]
            lanes[..., g % 8] = fma(dot[..., g], ws, lanes[..., g % 8])
        return hsum8(lanes)  # type: ignore[no-any-return]


def expected(weights: Sequence[QuantTensor], data: Input) -> F32:
    return np.concatenate([product(w, data) for w in weights], axis=1)


def empty_y(shape: Sequence[int]) -> F32:
    """An output whose contents no product gives by accident."""
    y = np.empty(tuple(shape), np.float32)
    y.view(np.uint32)[...] = 0xA5A5A5A5
    return y
