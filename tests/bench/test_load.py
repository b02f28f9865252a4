"""Load times: both kinds in turn, bytes and seconds written, nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import load


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[Path] = []
    monkeypatch.setattr(load, "drop_from_cache", dropped.append)
    file, report = tmp_path / "weights", tmp_path / "load.json"
    assert load.main(["--shape", "qwen3-0.6b", "-r", "2", "--file", str(file), "--json", str(report)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[2].split(":")[0] for line in lines] == ["cold", "warm"]
    facts = json.loads(report.read_text())
    assert {kind: len(times) for kind, times in facts["seconds"].items()} == {"cold": 2, "warm": 2}
    assert all(seconds > 0 for times in facts["seconds"].values() for seconds in times)
    assert 3e8 < facts["bytes"] < 6e8  # 0.6 G weights of 4.5 bits, the table of 8.5
    assert dropped == [file, file]
    assert not file.exists()


def test_a_file_goes_out_of_the_cache_and_stays_whole(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(range(256)) * 64)
    load.drop_from_cache(file)
    assert file.read_bytes() == bytes(range(256)) * 64


def test_an_existing_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine"
    file.write_text("mine")
    with pytest.raises(SystemExit):
        load.main(["--shape", "qwen3-0.6b", "--file", str(file)])
    assert "exists" in capsys.readouterr().err
    assert file.read_text() == "mine"
