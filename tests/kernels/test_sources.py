"""Rules for the text of the kernels that no compiler checks."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import kestrel
from kestrel.cuda.sources import kernel_sources
from kestrel.launch import Tuning


def functions(text: str) -> list[tuple[str, str]]:
    """(head, body) of each function definition at the start of a line."""
    found = []
    for match in re.finditer(
        r"^((?:template[^\n]*\n?)?(?:KERNEL|DEVICE|KESTREL_FN)[^;{]*)\{", text, re.MULTILINE
    ):
        depth, end = 1, match.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        found.append((match[1], text[match.end() : end]))
    return found


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    read = kernel_sources()
    return {name: text.decode() for name, text in {**read.units, **read.headers}.items()}


def templates_with_shared_memory(text: str) -> list[str]:
    return [head for head, body in functions(text) if head.startswith("template") and "__shared__" in body]


def test_templates_hold_no_static_shared_memory(sources: dict[str, str]) -> None:
    # The shim cannot poison it there, so a missing barrier would go unseen.
    for name, text in sources.items():
        assert not templates_with_shared_memory(text), name
    planted = "template <int N> DEVICE void f() {\n    __shared__ float tile[N];\n}\n"
    assert templates_with_shared_memory(planted)


def test_every_kernel_takes_one_struct_by_value(sources: dict[str, str]) -> None:
    kernels = [head for text in sources.values() for head, _ in functions(text) if head.startswith("KERNEL")]
    assert len(kernels) > 15
    form = r"KERNEL (?:LAUNCH_BOUNDS\([\w, ]+\) )?void (?:k_\w+|FORM\(k_\w+\))\(const \w+Args a\) "
    for head in kernels:
        assert re.fullmatch(form, head), head


def test_lines_fit(sources: dict[str, str]) -> None:
    for name, text in sources.items():
        long = [i for i, line in enumerate(text.splitlines(), 1) if len(line) > 130]
        assert not long, f"{name}: lines {long} are longer than 130 characters"


def test_every_launch_parameter_is_read() -> None:
    """One that nothing reads passes any test of what it changes."""
    package = Path(kestrel.__file__).parent
    text = "".join(path.read_text() for path in package.rglob("*.py"))
    for field in fields(Tuning):
        assert re.search(rf"\b(?:t|tuning)\.{field.name}\b", text), field.name
