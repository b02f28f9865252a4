"""The nightly comparison on a made-up history: planted regressions and changed bits, noise, acceptance."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import mpmath
import pytest

from bench import nightly, report
from bench.judge import _T999, MIN_HISTORY, WINDOW, judge
from bench.nightly import Measured, exit_code, judge_run, read_config
from kestrel.benchmark.output import to_jsonl
from kestrel.benchmark.records import Record
from kestrel.errors import UsageError
from tests.bench.history import BASE, CPU, history, record

RUNS = 11


def new_run(**planted: Any) -> list[Record]:
    """Run 11; ``planted`` changes its record of l2exact at depth 0."""
    records = [record(RUNS, mode, depth) for mode, depth in BASE if (mode, depth) != ("l2exact", 0)]
    return [record(RUNS, **planted), *records, record(RUNS, ms=9.1, noise=0.02, **CPU)]


# -- the rule ------------------------------------------------------------------------------------------------


def test_quantiles_are_students() -> None:
    for df, quantile in enumerate(_T999, 1):
        tail = mpmath.betainc(df / 2, 0.5, 0, df / (df + quantile**2), regularized=True) / 2
        assert float(tail) == pytest.approx(0.001, rel=2e-3)


def test_a_healthy_run_passes() -> None:
    verdicts = judge_run(new_run(), history(RUNS))
    assert {v.status for v in verdicts} == {"ok"}
    assert exit_code(verdicts, Measured()) == 0


def test_a_planted_regression_is_found() -> None:
    """3 % where repeats spread by 0.3 %."""
    verdicts = judge_run(new_run(ms=0.98 * 1.03), history(RUNS))
    assert [v.status for v in verdicts] == ["regression", *["ok"] * (len(verdicts) - 1)]
    assert "+3." in verdicts[0].reason or "+2.9%" in verdicts[0].reason
    assert exit_code(verdicts, Measured()) == 1


def test_the_same_slowdown_within_the_noise_is_none() -> None:
    """3 % where runs differ by 3 %: the limit follows the noise, it is no fixed percentage."""
    rng = random.Random(5)
    earlier = [record(run, ms=0.98 * (1 + rng.gauss(0, 0.03))) for run in range(RUNS)]
    assert judge(record(RUNS, ms=0.98 * 1.03), earlier).status == "ok"
    assert judge(record(RUNS, ms=0.98 * 1.30), earlier).status == "regression"


def test_noisy_repeats_widen_the_limit() -> None:
    quiet = judge(record(RUNS, ms=0.98 * 1.02), history(RUNS))
    noisy = judge(record(RUNS, ms=0.98 * 1.02, noise=0.06, rng=random.Random(1)), history(RUNS))
    assert quiet.status == "regression"
    assert quiet.limit is not None
    assert noisy.limit is not None
    assert noisy.limit > 4 * quiet.limit


def test_false_alarms_are_rare_and_real_slowdowns_are_not_missed() -> None:
    """The rule over 2000 simulated nights without a change, and 200 with one of five deviations."""
    rng = random.Random(0)

    def runs(count: int) -> list[Record]:
        made = []
        for run in range(count):
            ms = rng.gauss(1, 0.01)
            values = {"repeats": 7, "rng": rng, "noise": 0.002}
            made.append(record(run, ms=ms, **values))
        return made

    alarms = sum(judge(record(99, ms=rng.gauss(1, 0.01), rng=rng), runs(8)).failed for _ in range(2000))
    assert alarms < 2000 * 0.01
    missed = sum(not judge(record(99, ms=1.1, rng=rng), runs(20)).failed for _ in range(200))
    assert missed < 200 * 0.05


def test_few_runs_judge_no_time() -> None:
    verdict = judge(record(RUNS, ms=5.0), history(MIN_HISTORY - 1))
    assert (verdict.status, verdict.runs) == ("new", MIN_HISTORY - 1)
    assert judge(record(RUNS, ms=5.0), history(MIN_HISTORY)).status == "regression"


def test_a_faster_run_is_said() -> None:
    assert judge(record(RUNS, ms=0.90), history(RUNS)).status == "faster"


def test_a_regression_stays_one_until_it_is_accepted() -> None:
    """Nights at the slower time do not become the new normal by themselves."""
    earlier = history(RUNS)
    for run in range(RUNS, RUNS + 2 * WINDOW):
        slow = record(run, ms=1.05)
        verdict = judge(slow, earlier)
        assert verdict.status == "regression"
        earlier.append({**slow, "verdict": verdict.status})
    earlier.append({**record(30, ms=1.05), "verdict": "new", "accepted": "needed for correctness"})
    for run in range(31, 31 + WINDOW):
        verdict = judge(record(run, ms=1.05), earlier)
        assert verdict.status in ("new", "ok")
        earlier.append({**record(run, ms=1.05), "verdict": verdict.status})
    assert judge(record(60, ms=1.10), earlier).status == "regression"


@pytest.mark.parametrize(
    "changed",
    [
        {"gpu_info": "another GPU"},
        {"n_threads": 3},
        {"mode": "fast"},
        {"n_ubatch": 64},
        {"weights": "others"},
    ],
)
def test_times_of_other_machines_and_settings_are_not_compared(changed: dict[str, Any]) -> None:
    earlier = [old for old in history(RUNS) if old["mode"] == "l2exact"]
    assert judge({**record(RUNS, ms=5.0), **changed}, earlier).status == "new"


# -- bits ----------------------------------------------------------------------------------------------------


def test_planted_changed_bits_are_found_even_in_a_faster_run() -> None:
    verdicts = judge_run(new_run(ms=0.5, output_hash="deadbeef" * 2), history(RUNS))
    assert verdicts[0].status == "bits changed"
    assert "deadbeefdeadbeef" in verdicts[0].reason
    assert "abc00a" in verdicts[0].reason  # the commit before
    assert exit_code(verdicts, Measured()) == 3


def test_one_earlier_run_is_enough_for_bits() -> None:
    assert judge(record(1, output_hash="f" * 16), [record(0)]).status == "bits changed"


def test_changed_bits_stay_changed() -> None:
    earlier = [*history(3), {**record(3, output_hash="f" * 16), "verdict": "bits changed"}]
    assert judge(record(4, output_hash="f" * 16), earlier).status == "bits changed"
    assert not judge(record(4), earlier).failed


def test_another_contract_starts_anew() -> None:
    assert not judge(record(RUNS, output_hash="f" * 16, contract="2"), history(RUNS)).failed


def test_modes_without_a_promise_may_change() -> None:
    assert judge(record(RUNS, "fast", output_hash="f" * 16), history(RUNS)).status == "ok"


def test_devices_are_held_to_each_other_within_a_run() -> None:
    cpu = {**CPU, "weights": "synthetic-1 qwen3-30b-a3b"}
    verdicts = judge_run([record(0), record(0, ms=38.0, **cpu, output_hash="f" * 16)], [])
    assert [v.status for v in verdicts] == ["new", "bits changed"]
    assert "on cpu, before 00112233aabbccdd on cuda:0" in verdicts[1].reason


# -- the command ---------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return ["--history", str(tmp_path / "history.jsonl"), "--html", str(tmp_path / "page.html")]


@pytest.mark.parametrize(
    ("planted", "code", "word"),
    [
        ({}, 0, "All well"),
        ({"ms": 1.05}, 1, "regression"),
        ({"output_hash": "f" * 16}, 3, "bits changed"),
        ({"ms": 1.05, "output_hash": "f" * 16}, 3, "bits changed"),
    ],
)
def test_judging_a_history_file(
    tmp_path: Path,
    files: list[str],
    planted: dict[str, Any],
    code: int,
    word: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "history.jsonl").write_text(to_jsonl([*history(RUNS), *new_run(**planted)]))
    assert nightly.main(["--judge-only", *files]) == code
    assert word in (tmp_path / "page.html").read_text()
    assert ("FAILED" in capsys.readouterr().out) == (code != 0)


def write_config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


MATRIX = """
[defaults]
n_prompt = 4
n_gen = 4
repetitions = 2
depths = [0, 8]
threads = 1
[[models]]
model = "MODEL"
device = "cpu"
[[models]]
shape = "qwen3-0.6b"
device = "cuda:7"
optional = true
"""


def test_a_real_run_on_this_machine(
    tmp_path: Path, files: list[str], model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs of a tiny model: the second is held to the first one's bits; then a changed bit is planted."""
    config = write_config(tmp_path, MATRIX.replace("MODEL", str(model_folder)))
    arguments = ["--config", str(config), *files]
    assert nightly.main(arguments) == 0
    assert nightly.main(arguments) == 0
    output = capsys.readouterr().out
    assert output.count("ok     ") == 8
    assert "left out: qwen3-0.6b on cuda:7" in output
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    assert len(lines) == 8
    records = [json.loads(line) for line in lines]
    assert {r["verdict"] for r in records} == {"new"}
    for broken in records:
        broken["output_hash"] = "f" * 16
    (tmp_path / "history.jsonl").write_text(to_jsonl(records))
    assert nightly.main(arguments) == 3
    assert "bits changed" in capsys.readouterr().out


def test_a_model_that_cannot_run_is_a_failure(
    tmp_path: Path, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, '[[models]]\nmodel = "no/such/model"\ndevice = "cpu"\n')
    assert nightly.main(["--config", str(config), *files]) == 1
    assert "FAILED no/such/model on cpu" in capsys.readouterr().out
    assert "no model at no/such/model" in (tmp_path / "page.html").read_text()


def test_what_looks_slower_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = nightly.Entry(device="cuda", shape="qwen3-30b-a3b")
    turns = iter([[record(RUNS, ms=1.2)], [record(RUNS, ms=0.98)]])
    monkeypatch.setattr(nightly, "run_entry", lambda *_: next(turns))
    (kept,) = nightly.measure([entry], history(RUNS)).records
    assert kept["ms_per_token_median"] < 1.0
    turns = iter([[record(RUNS, ms=1.2)], [record(RUNS, ms=1.25)]])
    (kept,) = nightly.measure([entry], history(RUNS)).records
    assert judge(kept, history(RUNS)).status == "regression"


def test_a_second_measurement_with_other_bits_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter([[record(RUNS, ms=1.2)], [record(RUNS, ms=1.3, output_hash="f" * 16)]])
    monkeypatch.setattr(nightly, "run_entry", lambda *_: next(turns))
    entry = nightly.Entry(device="cuda", shape="qwen3-30b-a3b")
    (kept,) = nightly.measure([entry], history(RUNS)).records
    assert judge(kept, history(RUNS)).status == "bits changed"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no \\[\\[models\\]\\]"),
        ("x = 1\n[[models]]\nshape='a'\ndevice='cpu'", "unknown keys x"),
        ("[[models]]\nshape='a'\ndevice='cpu'\nmode='fast'", "unknown keys mode"),
        ("[[models]]\nshape='a'", "model 1 needs a device"),
        ("[[models]]\ndevice='cpu'", "needs either shape or model"),
        ("[[models]]\nshape='a'\nmodel='b'\ndevice='cpu'", "needs either shape or model"),
        ("[[models]]\nshape='a'\ndevice='cpu'\ndepths=3", "depths must be list\\[int\\], not 3"),
        ("[[models]]\nshape='a'\ndevice='cpu'\ndepths=[]", "depths must be"),
        ("[[models]]\nshape='a'\ndevice='cpu'\nn_gen=true", "n_gen must be int, not True"),
        ("[[models]\n", "config.toml: "),
    ],
)
def test_faults_of_the_matrix_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_config(write_config(tmp_path, text))


def test_the_committed_matrix_is_sound() -> None:
    entries = read_config(nightly.ROOT / "bench" / "nightly.toml")
    assert any(entry.device == "cpu" and not entry.optional for entry in entries)
    assert all(entry.optional for entry in entries if entry.device == "cuda")


def test_wrong_usage_exits_with_2(tmp_path: Path, files: list[str]) -> None:
    assert nightly.main(["--config", str(tmp_path / "absent.toml"), *files]) == 2
    with pytest.raises(SystemExit, match="2"):
        nightly.main(["--accepted"])


# -- the page ------------------------------------------------------------------------------------------------


def made_page() -> str:
    planted = {**record(RUNS, ms=1.05), "verdict": "regression", "reason": "slower <b>"}
    changed = {**record(RUNS, depth=16384, output_hash="f" * 16), "verdict": "bits changed", "reason": "hash"}
    rest = [record(RUNS, mode, depth) for mode, depth in BASE if mode != "l2exact"]
    return report.page([*history(RUNS), planted, changed, *rest], ["x on cpu: broke"], ["y on cuda: no GPU"])


def test_the_page_stands_alone_and_fits_a_phone() -> None:
    text = made_page()
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"<script|src=|href=|url\(|@import|https?:", text)
    assert "font: 18px" in text


def test_every_plot_is_sound_svg_with_a_point_for_each_run() -> None:
    text = made_page()
    plots = re.findall(r'<svg viewBox="0 0 360.*?</svg>', text)
    assert len(plots) == 4  # GPU decode at two depths, CPU decode, CPU prompt
    trees = [ElementTree.fromstring(plot) for plot in plots]
    assert [len(tree.findall("polyline")) for tree in trees] == [3, 3, 1, 1]
    assert [len(tree.findall("g")) for tree in trees] == [36, 36, 11, 11]
    assert [len(tree.findall("circle[@class='ring']")) for tree in trees] == [1, 1, 0, 0]
    assert [len(tree.findall("path[@class='ring']")) for tree in trees] == [0, 1, 0, 0]
    for tree in trees:
        for line in tree.findall("polyline"):
            for place in line.attrib["points"].split():
                x, y = map(float, place.split(","))
                assert report.LEFT <= x <= report.WIDTH - report.RIGHT
                assert report.TOP <= y <= report.HEIGHT - report.BOTTOM


def test_depths_are_in_order_and_verdicts_are_escaped() -> None:
    text = made_page()
    assert text.index("depth 0<") < text.index("depth 16384<")
    assert "slower &lt;b&gt;" in text
    assert "4 to look at" not in text
    assert "3 to look at" in text
    assert "no GPU" in text


@pytest.mark.parametrize(
    "values", [(0.0, 0.0), (1.0, 1.0), (0.4, 0.5), (1e-5, 2e-5), (9.9, 123.0), (-1.0, 1.0)]
)
def test_ticks_span_what_is_shown(values: tuple[float, float]) -> None:
    ticks = report.nice_ticks(*values)
    assert ticks[0] <= values[0] <= values[1] <= ticks[-1] + 1e-12
    assert 2 <= len(ticks) <= 8
    labels = [report._number(tick, ticks[1] - ticks[0]) for tick in ticks]
    assert len(set(labels)) == len(labels)


def test_a_page_of_one_run_and_of_none() -> None:
    assert "1 series, no regression" in report.page([record(0)])
    assert "no run yet" in report.page([])


def test_the_report_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "h.jsonl").write_text(to_jsonl(history(2)))
    assert report.main([str(tmp_path / "h.jsonl"), str(tmp_path / "p.html")]) == 0
    assert "kestrel nightly" in (tmp_path / "p.html").read_text()
    (tmp_path / "h.jsonl").write_text('{"a": 1}\n')
    assert report.main([str(tmp_path / "h.jsonl"), str(tmp_path / "p.html")]) == 1
    assert "entry 1 is not a record" in capsys.readouterr().err
