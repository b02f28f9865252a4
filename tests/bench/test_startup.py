"""Start-up times: counted from the process's start to its first byte, cold and warm in turn."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import startup

SCRIPT = """
import os, sys, time
time.sleep(0.2); print("a", flush=True); time.sleep(0.3)
print(os.environ.get("KESTREL_CACHE_DIR", ""), file=open(sys.argv[1], "a"))
"""


def test_first_byte_and_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    found = startup.measure([sys.executable, "-c", SCRIPT, str(log)], 2, cold=True)
    for times in found.values():
        assert len(times) == 2
        for first, end in times:
            assert first >= 0.2
            assert end - first >= 0.25
    caches = log.read_text().split("\n")[:-1]
    assert [bool(cache) for cache in caches] == [False, False, True, False, True]
    assert len(set(filter(None, caches))) == 2


def test_the_command(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.json"
    assert startup.main(["-m", str(model_folder), "-r", "1", "--json", str(file)]) == 0
    assert "warm, first text: " in capsys.readouterr().out
    (((first, end),),) = json.loads(file.read_text())["seconds"].values()
    assert 0 < first <= end


def test_a_failing_command_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert startup.main(["-m", "no/such/model", "-r", "1"]) == 1
    assert "no model at no/such/model" in capsys.readouterr().err
