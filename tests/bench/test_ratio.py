"""What exactness costs, over processes: the rule, what is refused, and the exit codes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from bench import nightly
from bench.nightly import Entry
from bench.ratio import Pair, above, different, main, pairs, run_once, table
from kestrel.errors import KestrelError

Record = dict[str, Any]


def record(mode: str, ms: float, depth: int = 0, **more: Any) -> Record:
    usual = {"n_gen": 32, "graph": True, "taps": "off", "n_depth": depth, "mode": mode}
    return {**usual, "ms_per_token_median": ms, "output_hash": "a" if mode == "l2exact" else "b", **more}


def run_of(*ratios: float, output_hash: str = "a") -> dict[int, Pair]:
    return {1024 * i: Pair(2 * ratio, 2.0, output_hash) for i, ratio in enumerate(ratios)}


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
    found = pairs(records)
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
        pairs(records)


def test_other_bits_are_named() -> None:
    assert different([run_of(1.0, 1.0), run_of(1.0, 1.0)]) == []
    assert different([run_of(1.0), run_of(1.0, output_hash="c")]) == [0]


def processes(*ratios: float, hashes: str = "aaaaa") -> Callable[[Entry], list[Record]]:
    numbers = itertools.count()

    def run(entry: Entry) -> list[Record]:
        assert (entry.shape, entry.modes, entry.depths) == ("some", ["l2exact", "fast"], [0, 7])
        assert (entry.n_prompt, entry.n_gen, entry.device) == (0, 32, "cuda")
        number = next(numbers)
        exact = [record("l2exact", ratios[number], depth, output_hash=hashes[number]) for depth in (0, 7)]
        return [*exact, record("fast", 1.0), record("fast", 1.0, 7)]

    return run


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--shape", "some", "-d", "0,7", "--processes", "3"]
    assert main(argv, processes(1.0, 1.1, 1.2)) == 0
    captured = capsys.readouterr()
    assert "| 0 | 1.100 (1.000 to 1.200) |" in captured.out
    assert "process 3 of 3" in captured.err
    assert main([*argv, "--most", "1.1"], processes(1.0, 1.1, 1.2)) == 0
    assert main([*argv, "--most", "1.09"], processes(1.0, 1.1, 1.2)) == 1
    assert "above 1.09 at depth 0, 7" in capsys.readouterr().err
    assert main([*argv, "--most", "2"], processes(1.0, 1.1, 1.2, hashes="aba")) == 3
    assert "differ at depth 0, 7" in capsys.readouterr().err


def test_bits_that_differ_within_a_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_entry(entry: Entry, measured: nightly.Measured) -> list[Record]:
        measured.differing.append("repeat 2 differs")
        return [record("l2exact", 1.0), record("fast", 1.0)]

    monkeypatch.setattr(nightly, "run_entry", run_entry)
    assert main(["--shape", "some"]) == 3
    assert "repeat 2 differs" in capsys.readouterr().err


def test_the_cpu_has_no_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    """A real process: there every mode runs the exact reference, which is measured once."""
    small = ["--shape", "smollm2-135m", "-n", "1", "-r", "1", "--processes", "1", "--device", "cpu"]
    assert main(small) == 1
    assert "depth 0 was not measured in l2exact and fast, only in l2exact" in capsys.readouterr().err


def test_what_the_bench_said_is_passed_on() -> None:
    with pytest.raises(KestrelError, match="none-such"):
        run_once(Entry("cpu", shape="none-such"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--shape -m/--model is required"),
        (["--shape", "some", "-d", "0,x"], "argument -d/--n-depth"),
        (["--shape", "some", "--processes", "0"], "must be at least 1, not 0"),
        (["--shape", "some", "--m", "1"], "unrecognized arguments"),
    ],
)
def test_wrong_usage(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert error.value.code == 2
    assert message in capsys.readouterr().err
