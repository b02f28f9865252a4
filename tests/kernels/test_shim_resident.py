"""The CUDA shim where blocks wait for each other: what it must do, and the mistakes it must see."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("kestrel._simt", reason="the shim is built by `make native`")

from kestrel.simt import aligned_empty
from tests.kernels.test_shim import ints, launch

ROOT = Path(__file__).resolve().parents[2]
UNWRITTEN = -1  # as an int32

Ints = npt.NDArray[np.int32]


def words(count: int) -> Ints:
    """Words that nobody has written yet."""
    array: Ints = aligned_empty((count,), np.int32)
    array[:] = UNWRITTEN
    return array


# -- values --------------------------------------------------------------------------------------------------


def exchange(blocks: int, threads: int, rounds: int, seed: int) -> Ints:
    out = ints(2, blocks, threads)
    mail = words(rounds * blocks * threads)
    geometry = {"grid": (blocks, 1, 1), "block": (threads, 1, 1), "shared": 4 * threads}
    launch("t_exchange", out, mail, seed=seed, reserved=rounds, **geometry)  # type: ignore[arg-type]
    assert (out[1] == 1).all(), "shared memory must begin as poison in every block"
    return out[0]


def exchanged(blocks: int, threads: int, rounds: int) -> Ints:
    """What t_exchange makes."""
    v = np.arange(blocks * threads).reshape(blocks, threads)
    product = np.zeros((blocks, 1), np.int64)
    for r in range(rounds):
        v = (np.roll(v, -1, 0) + 3 * v[:, ::-1] + 5 * (np.roll(v, -1, 1) % 1000)) % 1000003
        v = v + 7 * v[:, np.arange(threads) ^ 5]
        product += 32 * (1 + (np.arange(blocks)[:, None] + r) % 100)
    return (v + product).astype(np.int32)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("blocks", "threads"), [(1, 32), (2, 64), (2, 384), (7, 96)])
def test_blocks_exchange_values_both_ways(blocks: int, threads: int, seed: int) -> None:
    # A launch of other blocks and threads lies between these, and must leave nothing behind.
    np.testing.assert_array_equal(exchange(blocks, threads, 4, seed), exchanged(blocks, threads, 4))


@pytest.mark.parametrize("seed", range(12))
def test_all_threads_of_all_blocks_await_all(seed: int) -> None:
    out = launch("t_all_await", ints(8, 96), words(768), grid=(8, 1, 1), block=(96, 1, 1), seed=seed)
    np.testing.assert_array_equal(out, ints(8, 96, value=768 * 769 // 2))


@pytest.mark.parametrize("seed", range(12))
def test_values_that_nobody_awaits_are_wrong(seed: int) -> None:
    out = launch("t_all_await", ints(8, 96), words(768), grid=(8, 1, 1), block=(96, 1, 1), seed=seed, n=2)
    assert (out != 768 * 769 // 2).any()


def chain(n: int, seed: int, *, kernel: str = "t_chain", blocks: int = 3) -> Ints:
    out = ints(blocks, 128)
    return launch(kernel, out, words(4 * blocks), grid=(blocks, 1, 1), block=(128, 1, 1), n=n, seed=seed)


@pytest.mark.parametrize("seed", range(12))
def test_a_chain_of_blocks_that_ends_where_it_began(seed: int) -> None:
    # What is given is the value and what follows it, of which thread 5 takes the second and adds one.
    held = 1000 + 2 * np.array([3, 1, 2])
    np.testing.assert_array_equal(chain(0, seed), np.repeat(held[:, None], 128, axis=1))


def test_a_launch_with_as_many_blocks_as_a_gpu_has_multiprocessors() -> None:
    for seed in (0, 1):
        np.testing.assert_array_equal(exchange(132, 384, 2, seed), exchanged(132, 384, 2))


# -- waits without end ---------------------------------------------------------------------------------------

AWAITS = r"deadlock: thread \(\d+,0,0\) of block \(\d,0,0\) at simt_selftest_resident\.cpp:\d+ awaits values"


@pytest.mark.parametrize("seed", range(6))
def test_a_word_that_nobody_writes_is_an_error(seed: int) -> None:
    with pytest.raises(RuntimeError, match=f"{AWAITS} that nobody writes"):
        launch("t_all_await", ints(768), words(768), grid=(8, 1, 1), block=(96, 1, 1), n=1, seed=seed)
    with pytest.raises(RuntimeError, match=f"{AWAITS} that nobody writes"):
        chain(1, seed)
    chain(0, seed)  # nothing is left behind


@pytest.mark.parametrize("seed", range(6))
def test_blocks_that_are_not_resident_may_not_await_each_other(seed: int) -> None:
    with pytest.raises(RuntimeError, match=f"{AWAITS} that nobody writes"):
        chain(0, seed, kernel="t_chain_not_resident_fault")


@pytest.mark.parametrize("seed", range(6))
def test_a_divergent_barrier_is_an_error_in_a_block_that_awaited(seed: int) -> None:
    with pytest.raises(RuntimeError, match=r"divergent barrier: .* of block \(1,0,0\) has ended"):
        chain(2, seed)


@pytest.mark.parametrize("n", range(3))
def test_awaited_values_are_aligned_and_in_global_memory(n: int) -> None:
    with pytest.raises(RuntimeError, match="awaits values that are not 16 aligned bytes of global memory"):
        launch("t_await_place_fault", ints(1), words(8), n=n, shared=16)


def test_a_launch_has_no_more_resident_blocks_than_a_gpu_holds() -> None:
    with pytest.raises(RuntimeError, match=r"no GPU holds so many blocks at once, .*: 257"):
        launch("t_turns", ints(1), grid=(257, 1, 1))


# -- what each block has for itself --------------------------------------------------------------------------


def overflow(n: int, block: int, seed: int) -> None:
    geometry = {"grid": (4, 1, 1), "shared": 64, "reserved": block}
    launch("t_overflow_together_fault", ints(4), words(16), n=n, seed=seed, **geometry)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block", range(4))
def test_a_write_past_dynamic_shared_memory_of_any_block_is_an_error(block: int, seed: int) -> None:
    overflow(15, block, seed)
    with pytest.raises(RuntimeError, match="past the end of dynamic shared memory"):
        overflow(16, block, seed)


@pytest.mark.parametrize("block", [0, 3])
def test_an_access_far_past_dynamic_shared_memory_of_any_block_ends_the_process(block: int) -> None:
    code = f"from tests.kernels.test_shim_resident import overflow\noverflow(40, {block}, 0)\n"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == -signal.SIGSEGV
    assert "simt: an access past the end of dynamic shared memory" in ended.stderr


def bulk(n: int, seed: int, *, blocks: int = 3, rounds: int = 4, gates: bool = True) -> tuple[Ints, Ints]:
    """What t_bulk_together makes of its copies, and what it should."""
    mail = 4 * blocks * rounds
    memory = words(mail + 64 * blocks * rounds)
    pieces = np.random.default_rng(seed).integers(0, 1 << 20, (blocks, rounds, 2, 32), dtype=np.int32)
    memory[mail:] = pieces.reshape(-1)
    out = ints(blocks, 96)
    geometry = {"grid": (blocks, 1, 1), "block": (96, 1, 1), "shared": 16 + 128}
    launch("t_bulk_together", out, memory, n=n, seed=seed, reserved=rounds, **geometry)  # type: ignore[arg-type]
    return out, np.tile((pieces[:, :, 0] + 2 * pieces[:, :, 1]).sum(1, dtype=np.int32), (1, 3))


def test_bulk_copies_of_each_block_while_others_run() -> None:
    for seed in range(20):
        np.testing.assert_array_equal(*bulk(0, seed))


GATE = r"turn 3 \(parity 1\) of the gate at byte 0 of dynamic shared memory"


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("n", "message"),
    [
        (1, rf"block \(\d,0,0\) ended without waiting for {GATE}"),
        (3, rf"deadlock: thread .* for {GATE}, which expects 128 bytes, of which 0 were asked for"),
    ],
)
def test_mistakes_with_gates_of_blocks_that_take_turns(n: int, message: str, seed: int) -> None:
    with pytest.raises(RuntimeError, match=message):
        bulk(n, seed)


def test_reads_and_writes_ahead_of_a_bulk_copy_while_other_blocks_run() -> None:
    out, expected = bulk(2, 0)
    assert (out != expected).all()
    asking = slice(0, 32)  # threads, which see poison, -1
    np.testing.assert_array_equal(out[:, asking], expected[:, asking] - 1)
    with pytest.raises(RuntimeError, match=r"the destination of the bulk copy .* while it was on its way"):
        bulk(4, 0)


# -- turns ---------------------------------------------------------------------------------------------------


def turns(seed: int) -> list[int]:
    log = launch("t_turns", ints(4 * 32 * 20), ints(1, value=0), grid=(4, 1, 1), n=20, seed=seed)
    assert (np.bincount(log, minlength=4) == 32 * 20).all()
    return [int(block) for block in log[np.flatnonzero(np.diff(log, prepend=-1))]]


def test_a_seed_says_when_blocks_take_turns() -> None:
    assert turns(0) == [0, 1, 2, 3], "each as far as it can"
    shuffled = [turns(seed) for seed in range(1, 21)]
    assert min(len(order) for order in shuffled) == 4, "some seeds leave no block early"
    assert sum(len(order) > 12 for order in shuffled) > 5, "others do so again and again"
    assert turns(3) == shuffled[2], "a seed repeats its order"
