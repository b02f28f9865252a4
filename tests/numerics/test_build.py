"""The object files of the native module: instruction sets stay where run-time selection expects them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OBJECTS = [
    path
    for path in sorted(ROOT.glob("build/temp*/kestrel._native/*.o"))
    if (ROOT / "native" / f"{path.stem}.cpp").exists()
]
VECTOR = re.compile(r"_avx(2|512|512vnni)$")

pytestmark = [
    pytest.mark.skipif(not OBJECTS, reason="the native module was not built from this folder (make native)"),
    pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump here"),
]


def tool(*command: object) -> str:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("path", [p for p in OBJECTS if VECTOR.search(p.stem)], ids=lambda p: p.stem)
def test_vector_objects_share_no_code(path: Path) -> None:
    """No weak symbol: the linker could pick such a copy for every file, also on a CPU without AVX."""
    lines = [line.split() for line in tool("nm", "-C", "--defined-only", path).splitlines()]
    shared = [" ".join(fields[2:]) for fields in lines if fields[1] in "WVu"]
    assert not shared


@pytest.mark.parametrize("path", [p for p in OBJECTS if not VECTOR.search(p.stem)], ids=lambda p: p.stem)
def test_other_objects_run_on_any_x86_64(path: Path) -> None:
    """No VEX or EVEX instruction: their names start with v."""
    text = tool("objdump", "-d", "--no-show-raw-insn", path)
    found = re.findall(r"^\s*[0-9a-f]+:\s+(v\w+)", text, re.MULTILINE)
    assert not set(found)
