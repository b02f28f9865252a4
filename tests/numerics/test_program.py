"""Programs and the thread pool: errors, ranges, sharing, Ctrl-C, fork."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kestrel import _native
from tests.support.bits import assert_bits_equal
from tests.support.run_op import op_args

ROOT = Path(__file__).parents[2]
ISAS = _native.isa_available()


def add_op(x: Any, y: Any) -> tuple[str, bytes]:
    return "add", bytes(op_args("add", x=x, y=y, out=x, n=x.size))


def test_isa_levels_and_threads() -> None:
    assert ISAS[0] == "scalar"
    assert [isa for isa in ("scalar", "avx2", "avx512") if isa in ISAS] == ISAS
    assert 1 <= _native.default_threads() <= len(os.sched_getaffinity(0))


def test_default_threads_respects_affinity() -> None:
    cpu = min(os.sched_getaffinity(0))
    script = f"import os; os.sched_setaffinity(0, {{{cpu}}}); from kestrel import _native; " + (
        "print(_native.default_threads())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"


@pytest.mark.parametrize(
    ("ops", "threads", "isa", "message"),
    [
        ([("nope", b"")], 1, "scalar", "op 0: no native op is called 'nope'"),
        ([("add", b"123")], 1, "scalar", r"op 0 \(add\): its arguments are 3 bytes"),
        ([], 0, "scalar", "threads must be 1 to 1024, not 0"),
        ([], 5000, "scalar", "threads must be 1 to 1024, not 5000"),
        ([], 1, "sse2", "no ISA level is called 'sse2'"),
    ],
)
def test_errors(ops: Any, threads: int, isa: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.Program(ops, threads, isa)


@pytest.mark.skipif("avx512" in ISAS, reason="this CPU has every level")
def test_missing_isa_is_refused() -> None:
    missing = next(isa for isa in ("avx2", "avx512") if isa not in ISAS)
    with pytest.raises(ValueError, match="cannot run ISA level"):
        _native.Program([], 1, missing)


def test_ranges() -> None:
    x, y = np.zeros(8, np.float32), np.ones(8, np.float32)
    program = _native.Program([add_op(x, y)] * 5, 2, ISAS[-1])
    assert len(program) == 5
    program.run()
    program.run(1, 3)
    program.run(4)
    program.run(3, 3)
    assert x.tolist() == [8.0] * 8
    for begin, end in ((-1, 2), (0, 6), (3, 2), (6, None)):
        with pytest.raises(IndexError):
            program.run(begin, end)
    _native.Program([], 3, ISAS[0]).run()


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_data_crosses_threads_between_ops(threads: int) -> None:
    """Large ops (all threads) and small ones (thread 0 alone) in turn, each reading what others wrote."""
    n = 200_000
    a, b = np.ones(n, np.float32), np.ones(n, np.float32)
    ops, small = [], np.zeros(4, np.float32)
    for i in range(60):
        # a += b and b += a, on the whole array, on parts that other threads own, and on four elements
        x, y = (a, b) if i % 2 == 0 else (b, a)
        ops += [add_op(x, y), add_op(x[::-1][::-1][-4:], y[:4]), add_op(small, x[n // 2 : n // 2 + 4])]
    expected_a, expected_b, expected_small = a.copy(), b.copy(), small.copy()
    for i in range(60):
        x, y = (expected_a, expected_b) if i % 2 == 0 else (expected_b, expected_a)
        x += y
        x[-4:] += y[:4]
        expected_small += x[n // 2 : n // 2 + 4]
    _native.Program(ops, threads, ISAS[-1]).run()
    assert_bits_equal(a, expected_a)
    assert_bits_equal(b, expected_b)
    assert_bits_equal(small, expected_small)


def test_python_threads_share_the_pools() -> None:
    """Programs of several thread counts run from several Python threads at once."""
    n, rounds, failures = 70_000, 30, []

    def work(threads: int) -> None:
        x, y = np.zeros(n, np.float32), np.ones(n, np.float32)
        program = _native.Program([add_op(x, y)] * 4, threads, ISAS[-1])
        for _ in range(rounds):
            program.run()
        if not (x == 4 * rounds).all():
            failures.append(threads)

    workers = [threading.Thread(target=work, args=(1 + i % 3,)) for i in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not failures
    assert not any(worker.is_alive() for worker in workers)


def test_gil_is_released() -> None:
    """Another Python thread makes progress while a program runs."""
    n = 1_000_000
    x, y = np.zeros(n, np.float32), np.ones(n, np.float32)
    program = _native.Program([add_op(x, y)] * 300, 1, ISAS[-1])
    ticks, stop = 0, threading.Event()

    def count() -> None:
        nonlocal ticks
        while not stop.wait(0.001):
            ticks += 1

    counter = threading.Thread(target=count)
    counter.start()
    try:
        program.run()
    finally:
        stop.set()
        counter.join()
    assert ticks >= 3


INTERRUPTED = """
import os, signal, sys, threading, time
import numpy as np
from kestrel import _native
from tests.support.run_op import op_args
threads = int(sys.argv[1])
x, y = np.zeros(300_000, np.float32), np.ones(300_000, np.float32)
small = np.zeros(4, np.float32)
ops = [("add", bytes(op_args("add", x=x, y=y, out=x, n=x.size)))] * 3 + [
    ("add", bytes(op_args("add", x=small, y=y, out=small, n=4)))] * 3
long = _native.Program(ops * 100_000, threads, "scalar")  # minutes
start = time.monotonic()
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    long.run()
except KeyboardInterrupt:
    seconds = time.monotonic() - start
else:
    sys.exit("not interrupted")
if seconds > 5:
    sys.exit(f"interrupted only after {seconds} s")
x[:] = 0
short = _native.Program([("add", bytes(op_args("add", x=x, y=y, out=x, n=x.size)))] * 5, threads, "scalar")
for _ in range(3):
    short.run()
if not (x == 15).all():
    sys.exit("the pool is not usable any more")
print("interrupted")
"""


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_ctrl_c(threads: int) -> None:
    """KeyboardInterrupt comes out of a long run, and the pool works afterwards."""
    command = [sys.executable, "-c", INTERRUPTED, str(threads)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "interrupted"), done.stderr


def test_signal_handler_that_raises_another_error() -> None:
    x, y = np.zeros(300_000, np.float32), np.ones(300_000, np.float32)
    program = _native.Program([add_op(x, y)] * 500_000, 2, ISAS[-1])

    def handler(*_: Any) -> None:
        raise RuntimeError("from the handler")

    old = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(RuntimeError, match="from the handler"):
            program.run()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


FORKING = """
import os, threading, time
import numpy as np
from kestrel import _native
from tests.support.run_op import op_args

def program(threads, count):
    x, y = np.zeros(300_000, np.float32), np.ones(300_000, np.float32)
    op = ("add", bytes(op_args("add", x=x, y=y, out=x, n=x.size)))
    return _native.Program([op] * count, threads, "scalar"), x, y

busy, *keep = program(3, 4000)
worker = threading.Thread(target=busy.run)
worker.start()
time.sleep(0.1)  # the worker holds the lock of the runs and the pool is at work
children = []
for _ in range(5):
    pid = os.fork()
    if pid == 0:
        for threads in (3, 2, 1):
            mine, x, y = program(threads, 4)
            mine.run()
            if not (x == 4).all():
                os._exit(1)
        os._exit(0)
    children.append(pid)
for pid in children:
    _, status = os.waitpid(pid, 0)
    assert status == 0, status
worker.join()
again, x, y = program(3, 4)
again.run()
assert (x == 4).all()
print("forked")
"""


def test_fork_while_running() -> None:
    """A child forked in the middle of another thread's run starts with pools and a lock of its own."""
    command = [sys.executable, "-W", "ignore", "-c", FORKING]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "forked"), done.stderr


def test_run_costs_little() -> None:
    """A thousand small ops in one run have no barrier between them: one each would take far longer."""
    x, y = np.zeros(64, np.float32), np.ones(64, np.float32)
    program = _native.Program([add_op(x, y)] * 1000, 3, ISAS[-1])
    program.run()
    times = []
    for _ in range(20):
        start = time.perf_counter()
        program.run()
        times.append(time.perf_counter() - start)
    assert min(times) < 0.01


def test_read_bandwidth() -> None:
    assert 0.1 < _native.read_bandwidth(1 << 24, 2) < 10_000
    with pytest.raises(ValueError, match="threads"):
        _native.read_bandwidth(1 << 20, 0)


EXITING = """
import threading, time
import numpy as np
from kestrel import _native
from tests.support.run_op import op_args

x, y = np.zeros(300_000, np.float32), np.ones(300_000, np.float32)
op = ("add", bytes(op_args("add", x=x, y=y, out=x, n=x.size)))
program = _native.Program([op] * 20, {threads}, "scalar")

def work():
    while True:
        program.run()

for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
"""


@pytest.mark.parametrize("threads", [1, 3])
def test_the_interpreter_ends_while_a_daemon_thread_runs(threads: int) -> None:
    """Python ends a thread that asks for the GIL then; through C++ frames that would abort the process."""
    for _ in range(3):
        command = [sys.executable, "-c", EXITING.format(threads=threads)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
