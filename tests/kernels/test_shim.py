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

from kestrel.launch import Launch

_simt = pytest.importorskip("kestrel._simt", reason="the shim is built by `make native`")

from kestrel.simt import aligned_empty, run_launch  # noqa: E402

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
    cluster: int = 1,
    reserved: int = 0,
    gates: bool = True,
) -> npt.NDArray[np.int32]:
    args = SelftestArgs(out.ctypes.data, 0 if source is None else source.ctypes.data, n, reserved)
    _simt.launch(kernel, grid, block, shared, bytes(args), seed, cluster, gates)
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
    source = aligned_empty((32,), np.int32)
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
        ({"cluster": 0}, "1 to 16 blocks, not 0"),
        ({"cluster": 17, "grid": (17, 1, 1)}, "1 to 16 blocks, not 17"),
        ({"cluster": 4, "grid": (6, 4, 1)}, "6 blocks along x is no multiple of clusters of 4"),
    ],
)
def test_geometry_is_checked(geometry: dict[str, Dim3 | int], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        launch("t_grid", ints(1), **geometry)  # type: ignore[arg-type]


def test_names_and_argument_sizes_are_checked() -> None:
    with pytest.raises(KeyError, match="no kernel k_nothing"):
        launch("k_nothing", ints(1))
    with pytest.raises(ValueError, match="takes 24 bytes of arguments, not 3"):
        _simt.launch("t_grid", (1, 1, 1), (1, 1, 1), 0, b"abc", 0)


# -- clusters ------------------------------------------------------------------------------------------------

ROUNDS = 5


def exchanged(source: npt.NDArray[np.int32], cluster: int) -> npt.NDArray[np.int32]:
    """What t_cluster makes of source [clusters, blocks, threads]."""
    clusters, blocks, threads = source.shape
    block = np.arange(clusters * blocks).reshape(clusters, blocks, 1)
    mine = 1000 * block + np.roll(np.arange(threads), -1)
    total = source.astype(np.int64)
    for turn in range(ROUNDS):
        total = np.roll(total, -(turn + 2), axis=1) + mine + turn
    return total.astype(np.int32)


def run_exchange(
    kernel: str, cluster: int, threads: int, seed: int, clusters: Dim3 = (2, 1, 1)
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    shape = (int(np.prod(clusters)), cluster, threads)
    source = np.random.default_rng(seed).integers(0, 1000, shape).astype(np.int32)
    out = launch(
        kernel,
        ints(*shape),
        source,
        grid=(clusters[0] * cluster, *clusters[1:]),
        block=(threads, 1, 1),
        shared=3 * 32 * threads,
        n=ROUNDS,
        seed=seed,
        cluster=cluster,
    )
    return out, exchanged(source, cluster)


@pytest.mark.parametrize("kernel", ["t_cluster", "t_cluster_early"])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("cluster", "threads"), [(1, 64), (2, 33), (3, 32), (8, 96), (16, 256)])
def test_blocks_of_a_cluster_exchange_values(kernel: str, cluster: int, threads: int, seed: int) -> None:
    np.testing.assert_array_equal(*run_exchange(kernel, cluster, threads, seed))


def test_clusters_lie_along_x() -> None:
    np.testing.assert_array_equal(*run_exchange("t_cluster", 4, 32, 3, clusters=(3, 2, 2)))


@pytest.mark.parametrize("seed", range(4))
def test_a_missing_cluster_barrier_gives_wrong_values(seed: int) -> None:
    out, expected = run_exchange("t_missing_cluster_barrier_fault", 4, 64, seed)
    assert (out != expected).mean() > 0.5


def cluster_launch(kernel: str, n: int, seed: int = 0, cluster: int = 2) -> npt.NDArray[np.int32]:
    geometry = {"grid": (2, 1, 1), "block": (64, 1, 1), "shared": 128}
    return launch(kernel, ints(2, 64), n=n, seed=seed, cluster=cluster, **geometry)  # type: ignore[arg-type]


def test_a_block_that_has_left_cannot_be_reached() -> None:
    # In order, block 0 is the first to go on behind the second barrier.
    with pytest.raises(RuntimeError, match=r"block \(0,0,0\), of which threads have ended"):
        cluster_launch("t_cluster_access", 9)
    # Here the other block is still there; it need not be.
    with pytest.raises(RuntimeError, match="when that block may have ended"):
        cluster_launch("t_cluster_access", 8)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_static_and_own_shared_memory_can_be_reached(seed: int) -> None:
    assert cluster_launch("t_cluster_access", 0, seed).tolist() == [[8] * 64, [7] * 64]
    assert cluster_launch("t_cluster_access", 0, seed, cluster=1).tolist() == [[7] * 64] * 2
    assert (cluster_launch("t_cluster_access", 10, seed) == -1).all()


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("n", "message"),
    [
        (1, "before its first cluster barrier, when that block may not have begun"),
        (2, "not in its shared memory"),
        (3, "names block 2 of a cluster of 2"),
        (4, "names block -1 of a cluster of 2"),
        (5, "8 bytes that are not aligned"),
        (6, "not in its shared memory"),
        (7, r"thread \(3,0,0\) of block \(1,0,0\) has ended"),
        (8, "after its last cluster barrier, when that block may have ended|of which threads have ended"),
        (9, r"of which threads have ended|waits for its cluster at .* of block \(0,0,0\) has ended"),
    ],
)
def test_an_access_to_another_block_is_checked(n: int, message: str, seed: int) -> None:
    with pytest.raises(RuntimeError, match=message):
        cluster_launch("t_cluster_access", n, seed)
    np.testing.assert_array_equal(*run_exchange("t_cluster", 2, 32, seed))  # nothing is left behind


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("n", "message"),
    [
        (0, "divergent barrier: .* calls cluster_arrive at .*, another thread of its block at"),
        (1, r"divergent barrier: .* waits for its cluster at .*, but .* of block \(1,0,0\) has ended"),
        (2, r"divergent barrier: .* of block \(1,0,0\) has ended"),
        (3, r"divergent barrier: thread .* of block \(1,0,0\) waits at .*, thread .* at "),
        (4, "ended between cluster_arrive and cluster_wait"),
        (5, "calls cluster_wait at .* without cluster_arrive"),
        (6, "calls cluster_arrive at .* without cluster_wait"),
        (7, "divergent barrier: .* at .*, (another thread of its block|thread .*) at"),
        (8, "deadlock: .* of block .1,0,0. waits in the warp operation"),
    ],
)
def test_a_barrier_of_a_cluster_is_checked(n: int, message: str, seed: int) -> None:
    with pytest.raises(RuntimeError, match=message):
        cluster_launch("t_cluster_barrier_fault", n, seed)


def test_a_barrier_of_a_cluster_names_the_line_that_calls_it() -> None:
    with pytest.raises(RuntimeError, match=r"simt_selftest\.cpp:\d+, another .* simt_selftest\.cpp:\d+"):
        cluster_launch("t_cluster_barrier_fault", 0)


@pytest.mark.parametrize("seed", [0, 1])
def test_blocks_of_a_cluster_may_meet_from_different_places(seed: int) -> None:
    assert (cluster_launch("t_cluster_barrier_fault", 9, seed) == 1).all()


def test_every_block_of_a_cluster_starts_as_poison() -> None:
    for seed in (0, 1):
        out = launch("t_uninitialised_shared", ints(64), grid=(6, 1, 1), shared=128, seed=seed, cluster=3)
        np.testing.assert_array_equal(out, ints(64, value=-1))


def test_a_seed_shuffles_the_blocks_of_a_cluster() -> None:
    orders = []
    for seed in (0, 1, 2, 1):
        out = launch("t_cluster_order", ints(24), ints(1, value=0), grid=(8, 1, 1), n=3, seed=seed, cluster=4)
        assert sorted(out.tolist()) == sorted([*range(8)] * 3)
        assert len({block // 4 for block in out[:12]}) == 1, "one cluster after the other"
        orders.append(out.tolist())
    assert orders[0] == sorted(orders[0]), "in order, each as far as it gets"
    assert orders[1] != orders[0]
    assert orders[1] != orders[2]
    assert orders[1] == orders[3]
    assert any(order != sorted(order, key=order.index) for order in orders), "blocks take turns"


@pytest.mark.parametrize("block", [0, 1, 15])
def test_dynamic_shared_memory_of_every_block_has_an_end(block: int) -> None:
    geometry = {"grid": (16, 1, 1), "shared": 64, "cluster": 16, "reserved": block}
    launch("t_cluster_overflow_fault", ints(1), n=15, **geometry)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="past the end of dynamic shared memory"):
        launch("t_cluster_overflow_fault", ints(1), n=16, **geometry)  # type: ignore[arg-type]
    code = (
        "from tests.kernels.test_shim import ints, launch\n"
        f"launch('t_cluster_overflow_fault', ints(1), n=40, **{geometry})\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == -signal.SIGSEGV
    assert "simt: an access past the end of dynamic shared memory" in ended.stderr


def test_the_backend_runs_a_launch_in_its_clusters() -> None:
    out = ints(2, 64)
    args = SelftestArgs(out.ctypes.data, 0, 0, 0)
    run_launch(Launch("t_cluster_access", (2, 1, 1), (64, 1, 1), 128, args, cluster=2))
    assert out.tolist() == [[8] * 64, [7] * 64]
    run_launch(Launch("t_cluster_access", (2, 1, 1), (64, 1, 1), 128, args))
    assert out.tolist() == [[7] * 64] * 2


# -- bulk copies ---------------------------------------------------------------------------------------------

WARPS, PIECES = 3, 7

# How t_bulk errs, by number, as in native/simt_selftest.cpp, and what the shim says to it with seed 0.
TURN = r"turn \d+ \(parity [01]\) of the gate at byte \d+ of dynamic shared memory"
BULK_ERRORS = {
    1: "uses a gate that nobody has opened yet",
    2: "opens a gate a second time",
    3: f"waits for {TURN}, which is in turn 0",
    4: f"tells {TURN} a second time what to expect",
    5: f"{TURN} expects 64 bytes, and more were asked for: 128",
    6: f"deadlock: thread .* waits at .* for {TURN}, which expects 144 bytes, of which 128 were asked for",
    7: f"deadlock: thread .* waits at .* for {TURN}, which expects nothing yet; 128 bytes were asked for",
    8: f"tells {TURN} a second time what to expect",
    9: "copies to where the bulk copy asked for at .* has yet to arrive",
    10: f"{TURN} expects 128 bytes, and more were asked for: 192",
    11: "copies from or to an address that is not aligned to 16 bytes",
    12: "copies from or to an address that is not aligned to 16 bytes",
    13: "copies 60 bytes, no multiple of 16",
    14: "copies to what is not in its shared memory",
    15: "names a gate that is not 8 aligned bytes of its shared memory",
    16: "uses a gate whose memory has been written since it was opened",
    17: "the destination of the bulk copy asked for at .* has been written while it was on its way",
    18: "the source of the bulk copy asked for at .* has been written while it was on its way",
    19: rf"block \(\d,0,0\) ended without waiting for {TURN}, expected at ",
    20: f"deadlock: thread .* for {TURN}, which expects nothing yet; 0 bytes were asked for",
    24: rf"block \(\d,0,0\) ended with a bulk copy, asked for at .*, that {TURN} does not expect",
    25: rf"block \(\d,0,0\) ended while {TURN} expects 16 bytes that nobody asks for",
}
# Read before they are there, or not protected while they are read: wrong values, or what follows from them.
BULK_WRONG_VALUES = (21, 22, 23)


def bulk(n: int, seed: int, *, gates: bool = True) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """What t_bulk makes of its pieces, and what it should."""
    source = aligned_empty((2, WARPS, PIECES, 32), np.int32)
    source[...] = np.random.default_rng(seed).integers(0, 1 << 30, source.shape)
    expected = source[..., ::-1].copy()
    geometry = {"grid": (2, 1, 1), "block": (32 * WARPS, 1, 1), "shared": (16 + 2 * 128) * WARPS}
    out = ints(*source.shape)
    launch("t_bulk", out, source, n=n, seed=seed, reserved=PIECES, gates=gates, **geometry)  # type: ignore[arg-type]
    return out, expected


@pytest.mark.parametrize("gates", [True, False])
def test_bulk_copies_arrive_when_they_are_waited_for(gates: bool) -> None:
    for seed in range(20):
        np.testing.assert_array_equal(*bulk(0, seed, gates=gates))


@pytest.mark.parametrize(("n", "message"), BULK_ERRORS.items())
def test_a_mistake_with_a_bulk_copy_is_an_error(n: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        bulk(n, 0)
    np.testing.assert_array_equal(*bulk(0, 0))  # nothing is left behind


@pytest.mark.parametrize("n", [*BULK_ERRORS, *BULK_WRONG_VALUES])
def test_a_mistake_with_a_bulk_copy_is_seen_with_any_seed(n: int) -> None:
    for seed in range(20):
        try:
            out, expected = bulk(n, seed)
        except RuntimeError:
            continue
        assert n in (9, 17, 18, *BULK_WRONG_VALUES), "an error may be missing only where a copy was early"
        # What a copy has brought may change in its source.
        assert n == 18 or (out != expected).any(), seed


def test_bulk_copies_that_are_not_there_are_poison() -> None:
    out, expected = bulk(21, 0)
    assert ((out == expected) | (out == -1)).all()
    assert (out == -1).mean() > 0.5


def test_an_error_of_a_bulk_copy_names_the_line() -> None:
    with pytest.raises(RuntimeError, match=r"at simt_selftest\.cpp:\d+ opens"):
        bulk(2, 0)


def bulk_shared(n: int, seed: int) -> npt.NDArray[np.int32]:
    source = aligned_empty((128,), np.int32)
    source[:] = np.arange(128)
    geometry = {"grid": (2, 1, 1), "block": (96, 1, 1), "cluster": 2}
    return launch("t_bulk_shared", ints(2, 96), source, n=n, seed=seed, **geometry)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(8))
def test_a_gate_shows_copies_to_the_whole_block(seed: int) -> None:
    halves = np.arange(128).reshape(2, 64).sum(1, keepdims=True)
    np.testing.assert_array_equal(bulk_shared(0, seed), np.repeat(halves, 96, axis=1))


@pytest.mark.parametrize("seed", range(1, 8))
@pytest.mark.parametrize(
    ("n", "message"),
    [
        (1, "uses a gate that nobody has opened yet"),
        (
            2,
            r"waits for turn 0 \(parity 0\) of the gate at byte \d+ of static .*, which is in turn 2",
        ),
        (
            3,
            r"deadlock: thread \(\d+,0,0\) of .* for turn 1 .*, which expects nothing yet; 0 bytes",
        ),
    ],
)
def test_mistakes_of_a_block_that_shares_gates(n: int, message: str, seed: int) -> None:
    with pytest.raises(RuntimeError, match=message):
        bulk_shared(n, seed)


def test_a_seed_says_when_bulk_copies_arrive() -> None:
    source = aligned_empty((32,), np.int32)
    source[:] = np.arange(32)
    early = [launch("t_bulk_early", ints(8), source, grid=(8, 1, 1), seed=seed).tolist() for seed in range(9)]
    assert early[0] == [0] * 8, "as late as they can"
    assert {count for counts in early for count in counts} == set(range(9))
    assert early[1] == launch("t_bulk_early", ints(8), source, grid=(8, 1, 1), seed=1).tolist()
