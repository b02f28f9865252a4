"""doctor: the report, as text and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kestrel
from kestrel import _native
from kestrel.cli import run_command
from kestrel.doctor import main


def test_the_report_as_json(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = tmp_path / "kestrel" / "models"
    models.mkdir(parents=True)
    (models / "mine").symlink_to(model_folder)
    (models / "broken").mkdir()
    (models / "broken" / "kestrel.json").write_text("{}")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("KESTREL_ISA", "scalar")
    monkeypatch.chdir(tmp_path)
    assert run_command(main, ["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kestrel"]["version"] == kestrel.__version__
    assert report["cpu"]["isa_levels"] == _native.isa_available()
    assert report["cpu"]["isa_used"] == "scalar"
    assert report["cpu"]["rounding"] == "nearest"
    assert report["cpu"]["threads"] == _native.default_threads()
    assert report["environment"]["KESTREL_ISA"] == "scalar"
    assert report["models"]["default"].startswith("none: ")
    broken, mine = report["models"]["found"]
    assert f"{models / 'mine'}: qwen3_moe, 2 layers, q4local, " in mine
    assert "is not the manifest of a kestrel model" in broken
    gpu = report["gpu"]
    assert gpu["usable"] or gpu["problem"]


def test_the_report_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(main, []) == 0
    text = capsys.readouterr().out
    for title in ("kestrel", "cpu", "gpu", "packages", "models", "environment"):
        assert f"{title}\n  " in text
    assert f"  version: {kestrel.__version__}\n" in text


def test_a_level_this_cpu_lacks_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = [level for level in ("scalar", "avx2", "avx512") if level not in _native.isa_available()]
    if not missing:
        pytest.skip("this CPU has every level")
    monkeypatch.setenv("KESTREL_ISA", missing[0])
    assert run_command(main, []) == 1
    assert f"problem: KESTREL_ISA={missing[0]}, but this CPU has scalar" in capsys.readouterr().out


def test_bandwidth_is_measured_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kestrel.doctor.BENCH_BYTES", 1 << 22)
    assert run_command(main, ["--bench", "--json"]) == 0
    rates = json.loads(capsys.readouterr().out)["cpu"]["read_gb_per_s"]
    assert "1 threads" in rates
    assert all(rate > 0 for rate in rates.values())
