"""`make setup` on a fresh machine, where the new virtual environment brings an old setuptools."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.shared import REPOSITORY


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_setup_installs_what_the_build_requires(tmp_path: Path) -> None:
    """pip is called without build isolation, so nothing else would."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    python, log = tmp_path / "bin" / "python", tmp_path / "log"
    python.parent.mkdir()
    # An environment whose Python writes down what it is asked for, and installs nothing.
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exec "{sys.executable}" "$@"\nprintf "%s\\n" "$*" >>"{log}"\n'
    )
    python.chmod(0o755)
    stamp = tmp_path / ".kestrel-installed-with-gguf-dev"
    command = ["make", f"VENV={tmp_path}", "EXTRAS=gguf,dev", str(stamp)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    first, second = log.read_text().splitlines()
    assert first.split()[:4] == ["-m", "pip", "install", "--quiet"]
    assert first.split()[4:] == project["build-system"]["requires"]
    assert "--no-build-isolation --editable" in second
    assert stamp.exists()
