"""The CUDA shim itself: what it must do, and the mistakes it must see."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

_simt = pytest.importorskip("kestrel._simt", reason="the shim is built by `make native`")


ROOT = Path(__file__).resolve().parents[2]


class SelftestArgs(ctypes.Structure):
    _fields_ = [
        ("out", ctypes.c_uint64),
        ("in_", ctypes.c_uint64),
        ("n", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


Dim3 = tuple[int, int, int]


def launch(
    kernel: str,
    out: npt.NDArray[np.int32],
    source: npt.NDArray[np.int32] | None = None,
    *,
    grid: Dim3 = (1, 1, 1),
    block: Dim3 = (32, 1, 1),
    shared: int = 0,
    n: int = 0,
    seed: int = 0,
) -> npt.NDArray[np.int32]:
    args = SelftestArgs(out.ctypes.data, 0 if source is None else source.ctypes.data, n, 0)
    _simt.launch(kernel, grid, block, shared, bytes(args), seed)
    return out


def ints(*shape: int, value: int = -7) -> npt.NDArray[np.int32]:
    return np.full(shape, value, np.int32)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("threads", [1, 31, 32, 33, 256, 1024])
def test_a_barrier_separates_writes_from_reads(threads: int, seed: int) -> None:
    source = np.arange(3 * threads, dtype=np.int32)
    out = launch("t_reverse", ints(3 * threads), source, grid=(3, 1, 1), block=(threads, 1, 1), seed=seed)
    np.testing.assert_array_equal(out.reshape(3, threads), source.reshape(3, threads)[:, ::-1])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_missing_barrier_gives_wrong_values(seed: int) -> None:
    source = np.arange(256, dtype=np.int32)
    out = launch("t_missing_barrier_fault", ints(256), source, block=(256, 1, 1), seed=seed)
    wrong = (out != source[::-1]).sum()
    assert wrong >= 32, f"only {wrong} of 256 values show the missing barrier"
    assert (out == -1).any(), "shared memory that nobody wrote must be poison"


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("t_divergent_barrier_fault", "divergent barrier"),
        ("t_early_exit_fault", "has ended"),
        ("t_missing_lane_fault", "deadlock: .* lanes 0xaaaaaaaa of mask 0xffffffff"),
    ],
)
def test_divergence_is_an_error(kernel: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        launch(kernel, ints(64))
    # An abandoned launch leaves nothing behind.
    source = np.arange(64, dtype=np.int32)
    np.testing.assert_array_equal(launch("t_reverse", ints(64), source, block=(64, 1, 1)), source[::-1])


def test_shared_memory_starts_as_poison_in_every_block() -> None:
    for _ in range(2):
        out = launch("t_uninitialised_shared", ints(64), grid=(2, 1, 1), shared=128)
        np.testing.assert_array_equal(out, ints(64, value=-1))


def test_a_write_past_dynamic_shared_memory_is_an_error() -> None:
    launch("t_shared_overflow_fault", ints(1), shared=64, n=15)
    with pytest.raises(RuntimeError, match="past the end of dynamic shared memory"):
        launch("t_shared_overflow_fault", ints(1), shared=64, n=16)


def test_an_access_far_past_dynamic_shared_memory_ends_the_process() -> None:
    code = (
        "from tests.kernels.test_shim import ints, launch\n"
        "launch('t_shared_overflow_fault', ints(1), shared=64, n=40)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == -signal.SIGSEGV
    assert "simt: an access past the end of dynamic shared memory" in ended.stderr


def test_shuffles() -> None:
    v = np.random.default_rng(1).integers(0, 1000, 32).astype(np.int32)
    lane = np.arange(32)
    out = launch("t_shuffles", ints(8, 32), v)
    np.testing.assert_array_equal(out[0], np.full(32, v[5]))
    np.testing.assert_array_equal(out[1], np.where(lane < 3, v, v[np.maximum(lane - 3, 0)]))
    np.testing.assert_array_equal(out[2], np.where(lane > 28, v, v[np.minimum(lane + 3, 31)]))
    np.testing.assert_array_equal(out[3], v[lane ^ 7])
    np.testing.assert_array_equal(out[4], v[lane ^ 2])
    ballot = sum(1 << i for i in range(32) if v[i] % 3 == 0)
    np.testing.assert_array_equal(out[5].view(np.uint32), np.full(32, ballot, np.uint32))
    np.testing.assert_array_equal(out[6], np.full(32, v.max()))
    np.testing.assert_array_equal(out[7], np.where(lane < 16, v[2], v[20]))


def rotated(v: npt.NDArray[np.int32], rounds: int) -> npt.NDArray[np.int32]:
    for _ in range(rounds):
        v = np.roll(v, -1) + 1
    return v.astype(np.int32)


@pytest.mark.parametrize("seed", [0, 3, 4])
def test_syncwarp(seed: int) -> None:
    v = np.arange(32, dtype=np.int32)
    np.testing.assert_array_equal(launch("t_syncwarp", ints(32), v, n=5, seed=seed), rotated(v, 5))
    broken = launch("t_missing_syncwarp_fault", ints(32), v, n=5, seed=seed)
    assert (broken != rotated(v, 5)).any()


def test_grids_and_blocks_of_three_dimensions() -> None:
    grid, block = (3, 2, 4), (2, 3, 5)
    out = launch("t_grid", ints(24, 30), grid=grid, block=block, seed=9)
    for b in range(24):
        for t in range(30):
            bx, by, bz = b % 3, b // 3 % 2, b // 6
            tx, ty, tz = t % 2, t // 2 % 3, t // 6
            assert out[b, t] == (bx + 10 * by + 100 * bz) * 1000 + tx + 10 * ty + 100 * tz


def test_atomics() -> None:
    out, ticket = ints(3, value=0), ints(1, value=0)
    launch("t_atomics", out, ticket, grid=(7, 1, 1), block=(96, 1, 1), seed=5)
    assert out.tolist() == [7 * 96, 7 * 96 - 1, 1]
    assert ticket[0] == 0, "the counter wraps to zero"


def test_asynchronous_copies_arrive_when_they_are_waited_for() -> None:
    raw = np.empty(40, np.int32)
    source = raw[(-raw.ctypes.data % 16) // 4 :][:32]
    source[:] = np.arange(32)
    np.testing.assert_array_equal(launch("t_copy_async", ints(32), source, shared=128), source)
    late = launch("t_missing_copy_wait_fault", ints(32), source, shared=128)
    np.testing.assert_array_equal(late, ints(32, value=-1))


def test_a_seed_shuffles_the_order_of_blocks() -> None:
    orders = []
    for seed in (0, 1, 2, 1):
        out = launch("t_order", ints(50), ints(1, value=0), grid=(50, 1, 1), seed=seed)
        assert sorted(out.tolist()) == list(range(50))
        orders.append(out.tolist())
    assert orders[0] == list(range(50))
    assert orders[1] != orders[0]
    assert orders[1] != orders[2]
    assert orders[1] == orders[3], "a seed repeats its order"


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        ({"block": (1025, 1, 1)}, "1 to 1024 threads"),
        ({"block": (0, 1, 1)}, "1 to 1024 threads"),
        ({"grid": (0, 1, 1)}, "grid out of range"),
        ({"grid": (1, 65536, 1)}, "grid out of range"),
        ({"shared": 228 << 10}, "227 KB"),
    ],
)
def test_geometry_is_checked(geometry: dict[str, Dim3], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        launch("t_grid", ints(1), **geometry)  # type: ignore[arg-type]


def test_names_and_argument_sizes_are_checked() -> None:
    with pytest.raises(KeyError, match="no kernel k_nothing"):
        launch("k_nothing", ints(1))
    with pytest.raises(ValueError, match="takes 24 bytes of arguments, not 3"):
        _simt.launch("t_grid", (1, 1, 1), (1, 1, 1), 0, b"abc", 0)
