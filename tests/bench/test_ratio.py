"""What exactness costs, over processes: the rule, what is refused, and the exit codes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from bench.ratio import Measured, above, bench, different, main, measured, table
from kestrel.errors import KestrelError

Record = dict[str, Any]


def record(mode: str, ms: float, depth: int = 0, **more: Any) -> Record:
    usual = {"n_gen": 32, "graph": True, "taps": "off", "n_depth": depth, "mode": mode}
    return {**usual, "ms_per_token_median": ms, "output_hash": "a" if mode == "l2exact" else "b", **more}


def run_of(*ratios: float, output_hash: str = "a") -> dict[int, Measured]:
    return {1024 * i: Measured(2 * ratio, 2.0, output_hash) for i, ratio in enumerate(ratios)}


def test_the_median_over_the_processes_counts() -> None:
    runs = [run_of(1.01, 1.2), run_of(1.04, 1.0), run_of(1.30, 1.1)]
    assert above(runs, 1.05) == [1024]
    assert above(runs, 1.03) == [0, 1024]
    assert above(runs, 1.1) == []
    assert table(runs)[0] == [
        "0",
        "2.080 (2.020 to 2.600)",
        "2.000 (2.000 to 2.000)",
        "1.040 (1.010 to 1.300)",
    ]


def test_times_of_a_process_are_divided_by_its_own() -> None:
    records = [record("l2exact", 1.2), record("fast", 1.0), record("fast", 2.0, 9), record("l2exact", 2.1, 9)]
    records += [record("l2exact", 9.0, graph=False), record("l2exact", 9.0, taps="standard")]
    records += [record("l2exact", 9.0, n_gen=0)]
    found = measured(records)
    assert list(found) == [0, 9]
    assert (found[0].ratio, found[9].ratio) == (1.2, 1.05)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([record("l2exact", 1.0)], "depth 0 was not measured in l2exact and fast, only in l2exact"),
        ([record("fast", 1.0, 7)], "depth 7 .* only in fast"),
        ([], "nothing was decoded"),
    ],
)
def test_a_mode_that_is_missing_is_an_error(records: list[Record], message: str) -> None:
    with pytest.raises(KestrelError, match=message):
        measured(records)


def test_other_bits_are_named() -> None:
    assert different([run_of(1.0, 1.0), run_of(1.0, 1.0)]) == []
    assert different([run_of(1.0), run_of(1.0, output_hash="c")]) == [0]


def processes(*ratios: float, hashes: str = "aaaaa") -> Callable[[Sequence[str]], list[Record]]:
    numbers = itertools.count()

    def run(arguments: Sequence[str]) -> list[Record]:
        assert list(arguments[:2]) == ["--shape", "some"]
        assert "l2exact,fast" in arguments
        number = next(numbers)
        exact = record("l2exact", ratios[number], output_hash=hashes[number])
        return [exact, record("fast", 1.0)]

    return run


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--shape", "some", "--processes", "3"]
    assert main(argv, processes(1.0, 1.1, 1.2)) == 0
    captured = capsys.readouterr()
    assert "| 0 | 1.100 (1.000 to 1.200) |" in captured.out
    assert "process 3 of 3" in captured.err
    assert main([*argv, "--most", "1.1"], processes(1.0, 1.1, 1.2)) == 0
    assert main([*argv, "--most", "1.09"], processes(1.0, 1.1, 1.2)) == 1
    assert "above 1.09 at depth 0" in capsys.readouterr().err
    assert main([*argv, "--most", "2"], processes(1.0, 1.1, 1.2, hashes="aba")) == 3
    assert "differ at depth 0" in capsys.readouterr().err


def test_the_cpu_has_no_ratio() -> None:
    """A real process: there every mode runs the exact reference, which is measured once."""
    shape = ["--shape", "smollm2-135m", "-p", "0", "-n", "1", "-r", "1", "--mode", "l2exact,fast"]
    records = bench([*shape, "--device", "cpu"])
    with pytest.raises(KestrelError, match="only in l2exact"):
        measured(records)


def test_what_the_bench_said_is_passed_on() -> None:
    with pytest.raises(KestrelError, match=r"ended with 2: .*no such shape|ended with 2: .*none-such"):
        bench(["--shape", "none-such", "--device", "cpu"])
