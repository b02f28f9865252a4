"""Clusters of blocks in the CUDA shim: what it must do, and the mistakes it must see."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("kestrel._simt", reason="the shim is built by `make native`")

from kestrel.launch import Launch
from kestrel.simt import aligned_empty, run_launch
from tests.kernels.test_shim import Dim3, SelftestArgs, ints, launch

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 5


def exchanged(source: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """What t_cluster makes of source [clusters, blocks, threads]."""
    clusters, blocks, threads = source.shape
    block = np.arange(clusters * blocks).reshape(clusters, blocks, 1)
    i = np.arange(threads)
    mine = 2000 * block + np.roll(i, -1) + (i ^ 5)
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
        shared=3 * 4 * threads,
        n=ROUNDS,
        seed=seed,
        cluster=cluster,
    )
    return out, exchanged(source)


@pytest.mark.parametrize("kernel", ["t_cluster", "t_cluster_early"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("cluster", "threads"), [(1, 64), (2, 32), (3, 32), (8, 96), (8, 256)])
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
    assert (cluster_launch("t_cluster_access", 10, seed) == 5).all()


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("n", "message"),
    [
        (1, "before its first cluster barrier, when that block may not have begun"),
        (2, "not in its shared memory"),
        (3, "names block 2 of a cluster of 2"),
        (4, "names block -1 of a cluster of 2"),
        (5, "4 bytes that are not aligned"),
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
        (5, "at .* calls cluster_wait without cluster_arrive"),
        (6, "at .* calls cluster_arrive again without cluster_wait"),
        (7, "divergent barrier: .* at .*, (another thread of its block|thread .*) at"),
        (8, r"deadlock: .* of block \(1,0,0\) waits in the warp operation"),
    ],
)
def test_a_barrier_of_a_cluster_is_checked(n: int, message: str, seed: int) -> None:
    with pytest.raises(RuntimeError, match=message):
        cluster_launch("t_cluster_barrier_fault", n, seed)


def test_a_barrier_of_a_cluster_names_the_line_that_calls_it() -> None:
    with pytest.raises(
        RuntimeError, match=r"simt_selftest_clusters\.cpp:\d+, another .* simt_selftest_clusters\.cpp:\d+"
    ):
        cluster_launch("t_cluster_barrier_fault", 0)


@pytest.mark.parametrize("seed", [0, 1])
def test_blocks_of_a_cluster_may_meet_from_different_places(seed: int) -> None:
    assert (cluster_launch("t_cluster_barrier_fault", 9, seed) == 1).all()


def test_every_block_of_a_cluster_starts_as_poison() -> None:
    for seed in (0, 1):
        out = launch("t_uninitialised_shared", ints(64), grid=(6, 1, 1), shared=128, seed=seed, cluster=3)
        np.testing.assert_array_equal(out, ints(64, value=-1))


def turns(seed: int) -> list[int]:
    """Which blocks have run, one after another, of three clusters of four that need each other nowhere."""
    log = launch(
        "t_cluster_order", ints(12 * 32 * 20), ints(1, value=0), grid=(12, 1, 1), n=20, seed=seed, cluster=4
    )
    assert (np.bincount(log, minlength=12) == 32 * 20).all()
    assert [len(set(part // 4)) for part in log.reshape(3, -1)] == [1, 1, 1], "one cluster after another"
    return [int(block) for block in log[np.flatnonzero(np.diff(log, prepend=-1))]]


def test_a_seed_says_when_blocks_take_turns() -> None:
    assert turns(0) == list(range(12)), "each as far as it can"
    shuffled = [turns(seed) for seed in range(1, 21)]
    assert len({tuple(dict.fromkeys(order)) for order in shuffled}) > 10, (
        "clusters and blocks come in other orders"
    )
    assert sum(len(order) > 36 for order in shuffled) > 5, "some seeds leave blocks again and again"
    assert turns(3) == shuffled[2], "a seed repeats its order"


@pytest.mark.parametrize("block", [0, 1, 7])
def test_dynamic_shared_memory_of_every_block_has_an_end(block: int) -> None:
    geometry = {"grid": (8, 1, 1), "shared": 64, "cluster": 8, "reserved": block}
    launch("t_cluster_overflow_fault", ints(1), n=15, **geometry)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="past the end of dynamic shared memory"):
        launch("t_cluster_overflow_fault", ints(1), n=16, **geometry)  # type: ignore[arg-type]
    code = (
        "from tests.kernels.test_shim_clusters import ints, launch\n"
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

PIECES = 4
GATE = r"turn 3 \(parity 1\) of the gate at byte 0 of dynamic shared memory"


def bulk(n: int, seed: int, cluster: int = 3) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """What t_cluster_bulk makes of its copies, and what it should."""
    pieces = aligned_empty((2 * cluster, PIECES, 2, 32), np.int32)
    pieces[...] = np.random.default_rng(seed).integers(0, 1 << 20, pieces.shape)
    geometry = {"grid": (2 * cluster, 1, 1), "block": (96, 1, 1), "shared": 16 + 128, "cluster": cluster}
    out = ints(2 * cluster, 96)
    launch("t_cluster_bulk", out, pieces, n=n, seed=seed, reserved=PIECES, **geometry)  # type: ignore[arg-type]
    return out, np.tile((pieces[:, :, 0] + 2 * pieces[:, :, 1]).sum(1, dtype=np.int32), (1, 3))


@pytest.mark.parametrize("cluster", [1, 2, 3, 8])
def test_bulk_copies_of_each_block_while_others_run(cluster: int) -> None:
    for seed in range(12):
        np.testing.assert_array_equal(*bulk(0, seed, cluster))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("n", "message"),
    [
        (1, rf"block \(\d,0,0\) ended without waiting for {GATE}"),
        (3, rf"deadlock: thread .* for {GATE}, which expects 128 bytes, of which 0 were asked for"),
        (5, rf"deadlock: thread .* for {GATE}, which expects nothing yet; 0 bytes were asked for"),
    ],
)
def test_mistakes_with_gates_of_blocks_that_take_turns(n: int, message: str, seed: int) -> None:
    with pytest.raises(RuntimeError, match=message):
        bulk(n, seed)
    np.testing.assert_array_equal(*bulk(0, seed))  # nothing is left behind


def test_reads_and_writes_ahead_of_a_bulk_copy_while_other_blocks_run() -> None:
    out, expected = bulk(2, 0)
    np.testing.assert_array_equal(out, expected - 1)  # poison, -1
    with pytest.raises(RuntimeError, match=r"the destination of the bulk copy .* while it was on its way"):
        bulk(4, 0)


# -- sends ---------------------------------------------------------------------------------------------------


def run_sends(
    cluster: int, threads: int, seed: int, rounds: int = ROUNDS, gates: bool = True
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """What t_cluster_send makes of its input, and what it should."""
    shape = (2, cluster, threads)
    source = np.random.default_rng(seed).integers(0, 1000, shape).astype(np.int32)
    shared = 2 * (16 + 4 * cluster) * threads
    geometry = {"grid": (2 * cluster, 1, 1), "block": (threads, 1, 1), "shared": shared, "cluster": cluster}
    out = ints(*shape)
    launch("t_cluster_send", out, source, n=rounds, seed=seed, gates=gates, **geometry)  # type: ignore[arg-type]
    total = source.astype(np.int64)
    i, rank = np.arange(threads), np.arange(cluster)[:, None]
    for turn in range(rounds):
        quad = (total & 0xFFF) + 2 * i + 3 * rank + 5 * turn
        words = ((rank + 1) * total).sum(1, keepdims=True)
        total = np.roll(np.roll(quad, 1, axis=1), -3, axis=2) + np.roll(words, -1, axis=2)
        total = total.astype(np.int32).astype(np.int64)
    return out, total.astype(np.int32)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("cluster", "threads"), [(1, 64), (2, 32), (3, 32), (4, 64), (8, 96), (8, 256)])
def test_blocks_of_a_cluster_send_values(cluster: int, threads: int, seed: int) -> None:
    np.testing.assert_array_equal(*run_sends(cluster, threads, seed))


@pytest.mark.parametrize("rounds", [0, 1, 2, 9])
def test_any_number_of_turns_of_sends(rounds: int) -> None:
    for seed in range(8):
        np.testing.assert_array_equal(*run_sends(2, 64, seed, rounds=rounds))


def test_sends_below_sm_90_are_plain_stores() -> None:
    for seed in range(3):
        np.testing.assert_array_equal(*run_sends(1, 64, seed, gates=False))


OF_GATE = r"turn 0 \(parity 0\) of the gate at byte \d+ of static shared memory of block \(\d,0,0\)"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("n", "message"),
    [
        (1, "before its first cluster barrier, when that block may not have begun"),
        (
            2,
            "that was opened behind the last cluster barrier, which that block may not have opened yet|"
            r"uses a gate, of block \(\d,0,0\), that nobody has opened yet",
        ),
        (3, "uses a gate.* that nobody has opened yet"),
        (4, f"{OF_GATE} expects 252 bytes, and more were sent: 256|which is in turn|begins turn"),
        (5, f"deadlock: thread .* for {OF_GATE}, which expects nothing yet; 256 bytes were sent"),
        (6, f"deadlock: thread .* for {OF_GATE}, which expects 260 bytes, of which 256 were sent"),
        (
            7,
            f"ended without waiting for {OF_GATE}|ended while {OF_GATE} expects .* that nobody has sent|"
            "of which threads have ended",
        ),
        (8, "and not all of its threads have received each turn"),
        (9, r"calls cluster_begin, which does not publish what it has stored at .* to block \(\d,0,0\)"),
        (10, "and more were sent|before anyone has waited for the one before|has been written while"),
        (11, "a second time what to expect"),
        (12, "names block 2 of a cluster of 2"),
        (13, "4 bytes that are not aligned"),
        (14, "not in its shared memory"),
        (15, "uses a gate of bulk copies for sends"),
        (17, r"waits for turn 1 .* of block \(\d,0,0\), which is in turn 0"),
        (19, "expects before all threads have received the one before"),
        (20, "ended between cluster_arrive and cluster_wait"),
        (21, "whose memory has been written since it was opened"),
        (22, "opens a gate a second time"),
        (23, "before its first cluster barrier"),
        (25, "expects 2 bytes, no multiple of 4|a second time what to expect"),
        (26, "uses a gate of sends for bulk copies"),
        (27, "of which threads have ended|and more were sent|that .* does not expect|begins turn"),
    ],
)
def test_a_mistake_with_sends_is_seen(n: int, message: str, seed: int) -> None:
    with pytest.raises(RuntimeError, match=message):
        cluster_launch("t_cluster_send_fault", n, seed)
    np.testing.assert_array_equal(*run_sends(2, 64, seed))  # nothing is left behind


def test_reads_and_writes_ahead_of_a_send() -> None:
    good = np.tile(63 - np.arange(64), (2, 1))
    np.testing.assert_array_equal(cluster_launch("t_cluster_send_fault", 0), good)
    np.testing.assert_array_equal(
        cluster_launch("t_cluster_send_fault", 16), good
    )  # poison until it is received
    with pytest.raises(RuntimeError, match=r"the destination of the send .* while it was on its way"):
        cluster_launch("t_cluster_send_fault", 18)
