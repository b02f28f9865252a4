"""Hashes at the end of a step: many taps in one launch, one long row by many blocks."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("kestrel._simt", reason="the shim is built by `make native`")

from kestrel.launch import LONG_TILES, Tuning, hash_last, taps_of
from kestrel.ops import OPS
from kestrel.simt import run_launch
from tests.kernels.harness import values
from tests.ops.reference import fnv1a


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


def test_rows_of_all_lengths_in_one_launch(rng: np.random.Generator) -> None:
    """Blocks with more warps than their row has words for, and with several tiles of it."""
    sizes = [1, 4, 16, 30, 1020, 1024, 1028, 2048, 8192, 8196, 16384, 20000, 32768]
    rows = [rng.integers(0, 256, size).astype(np.uint8) for size in sizes]
    out = np.zeros(len(rows), np.uint64)
    taps = []
    for i, row in enumerate(rows):
        tap: Any = OPS["l2_hash"].args()
        tap.x, tap.out, tap.M, tap.bytes = row.ctypes.data, out[i:].ctypes.data, 1, row.nbytes
        taps.append(tap)
    for threads in (256, 96):
        out[:] = 7
        (launch,) = hash_last(taps, Tuning(hash_threads=threads))
        assert [bytes(tap) for tap in taps_of(launch)] == [bytes(tap) for tap in taps]
        run_launch(launch, seed=threads)
        assert out.tolist() == [fnv1a(row.tobytes()) for row in rows]


def long_row_hash(
    row: npt.NDArray[Any], start: int, tuning: Tuning, grid: tuple[int, int] | None = None, seed: int = 0
) -> tuple[int, list[str]]:
    """The hash at a step's end of the bytes from ``start`` on, and the kernels that made it."""
    out = np.full(1, 7, np.uint64)
    tap: Any = OPS["l2_hash"].args()
    tap.x, tap.out, tap.M = row.ctypes.data + start, out.ctypes.data, 1
    tap.bytes = tap.stride = row.nbytes - start
    tap.is_f32 = int(row.dtype == np.float32)
    found = hash_last([tap], tuning)
    for launch in found:
        other = grid is not None and launch.kernel == "k_l2_hash_long"
        run_launch(replace(launch, grid=(*grid, 1)) if other else launch, seed)
    return int(out[0]), [launch.kernel for launch in found]


LONG = ["k_l2_hash_long"] * 3


@pytest.mark.parametrize("words", [257, 512, 2048, 2049, 4100, 20001])
@pytest.mark.parametrize("grid", [None, (1, 1), (3, 2), (99, 11)])
def test_l2_hash_of_a_long_row(rng: np.random.Generator, words: int, grid: Any) -> None:
    for threads in (32, 96, 256):
        x = rng.integers(0, 256, 4 * words + 4).astype(np.uint8)
        x[: len(x) // 2] = rng.integers(0, 2) * 255  # long runs
        tuning = Tuning(hash_threads=threads, hash_long_bytes=1)
        for start in (0, 4):
            found, kernels = long_row_hash(x, start, tuning, grid, seed=words)
            assert found == fnv1a(x[start:].tobytes())
            tiles = -(-(x.nbytes - start) // (32 * threads))
            assert kernels == (LONG if 1 < tiles <= LONG_TILES else ["k_l2_hash_many"])


def test_l2_hash_of_long_rows_with_nan(rng: np.random.Generator) -> None:
    x = values(rng, 5000, special=0.1, non_finite=0.05)
    x.view(np.uint32)[:3] = 0xFFC12345
    canonical = np.where(np.isnan(x), np.float32(np.nan), x).astype(np.float32)
    found, kernels = long_row_hash(x, 0, Tuning(hash_threads=64, hash_long_bytes=1))
    assert kernels == LONG
    assert found == fnv1a(canonical.tobytes())


def test_rows_that_many_blocks_do_not_share(rng: np.random.Generator) -> None:
    """Short ones, those of bytes that make no words, those of too many tiles."""
    for nbytes, tuning in (
        (4096, Tuning()),
        (4099, Tuning(hash_threads=32, hash_long_bytes=1)),
        (32 * 32 * (LONG_TILES + 1), Tuning(hash_threads=32)),
    ):
        x = rng.integers(0, 256, nbytes).astype(np.uint8)
        found, kernels = long_row_hash(x, 0, tuning)
        assert kernels == ["k_l2_hash_many"]
        assert found == fnv1a(x.tobytes())
