"""The object files of the native module: instruction sets stay where run-time selection expects them."""

from __future__ import annotations

import ast
import ctypes
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

needs_objects = pytest.mark.skipif(
    not OBJECTS or shutil.which("objdump") is None,
    reason="no objdump, or the native module was not built from this folder (make native)",
)


def tool(*command: object) -> str:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout


@needs_objects
@pytest.mark.parametrize("path", [p for p in OBJECTS if VECTOR.search(p.stem)], ids=lambda p: p.stem)
def test_vector_objects_share_no_code(path: Path) -> None:
    """No weak symbol: the linker could pick such a copy for every file, also on a CPU without AVX."""
    lines = [line.split() for line in tool("nm", "-C", "--defined-only", path).splitlines()]
    shared = [" ".join(fields[2:]) for fields in lines if fields[1] in "WVu"]
    assert not shared


@needs_objects
@pytest.mark.parametrize("path", [p for p in OBJECTS if not VECTOR.search(p.stem)], ids=lambda p: p.stem)
def test_other_objects_run_on_any_x86_64(path: Path) -> None:
    """No VEX or EVEX instruction: their names start with v."""
    text = tool("objdump", "-d", "--no-show-raw-insn", path)
    found = re.findall(r"^\s*[0-9a-f]+:\s+(v\w+)", text, re.MULTILINE)
    assert not set(found)


# An ordered sum that takes its terms permuted: g++ 12 -O3 vectorises it into ascending order, though nothing
# allows that. With 2^24 and ones the two orders give different sums.
PERMUTED_SUM = """
extern "C" __attribute__((visibility("default"))) float permuted_sum(const float *p) {
    float s = 0.0f;
    for (int i = 0; i < 64; i += 2) {
        s += p[i + 1];
        s += p[i];
    }
    return s;
}
"""


def build_flags() -> list[str]:
    """``FLAGS`` of setup.py, which cannot be imported without running it."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "FLAGS":
            return [str(flag) for flag in eval(compile(ast.Expression(node.value), "setup.py", "eval"))]
    raise LookupError("setup.py has no FLAGS")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
def test_ordered_sums_keep_their_order(tmp_path: Path) -> None:
    source, library = tmp_path / "sum.cpp", tmp_path / "sum.so"
    source.write_text(PERMUTED_SUM)
    tool("g++", *build_flags(), "-shared", "-o", library, source)
    terms = [1.0, 2.0**24, 1.0, -(2.0**24)] * 16
    permuted_sum = ctypes.CDLL(str(library)).permuted_sum
    permuted_sum.restype = ctypes.c_float
    # 2^24 + 1 stays 2^24 in f32 (ties to even); then -2^24 leaves 0, and 1 is added to that.
    assert permuted_sum((ctypes.c_float * 64)(*terms)) == 1.0
