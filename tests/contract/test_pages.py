"""The pages that show newcomers around name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.shared import REPOSITORY

PAGES = ["docs/architecture.md", "docs/adding-an-op.md"]
# A file that is named without its folder lies in one of these.
FOLDERS = [
    "kestrel/benchmark",
    "kestrel",
    "kestrel/checkpoints",
    "kestrel/text",
    "kestrel/cuda",
    "native",
    "kernels",
    "tests/support",
    "tests/ops",
]


def absent(text: str) -> list[str]:
    """What the text names in backticks, or links to, and the repository does not have."""
    missing = []
    for name in re.findall(r"`([\w./*-]+\.(?:py|cpp|h|cuh|cu)|\w[\w./-]*/)`", text):
        places = [name] if "/" in name else [f"{folder}/{name}" for folder in FOLDERS]
        places += [f"{parent}/{name}" for parent in ("tests", "kestrel") if name.endswith("/")]
        if "*" not in name and not any((REPOSITORY / place).exists() for place in places):
            missing.append(name)
    missing += [link for link in re.findall(r"\]\(([\w-]+\.md)\)", text) if not _page(link).exists()]
    return missing


def _page(name: str) -> Path:
    return REPOSITORY / "docs" / name


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    assert absent(text) == []


def test_absent_files_are_noticed() -> None:
    text = "`kestrel/ops.py`, `ops.py`, `native/`, `op.cpp`, `kestrel/opps.py`, `nowhere/`, [a](nopage.md)"
    assert absent(text) == ["op.cpp", "kestrel/opps.py", "nowhere/", "nopage.md"]
