"""What the stages of ``bench/gpu_test.py`` share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Context:
    """Options of a run."""

    root: Path
    models: Path
    quick: bool
    output: Path

    def python(
        self,
        *arguments: str,
        timeout: float = 590,
        log: str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run this Python from the repository root; output goes to ``log`` in the output folder too."""
        result = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            text=True,
            capture_output=True,
            timeout=timeout,
            env={**os.environ, **(variables or {})},
        )
        if log is not None:
            (self.output / log).write_text(result.stdout + result.stderr)
        return result


def threaded(function: Callable[[T], R], items: Iterable[T], workers: int) -> list[R]:
    """``function`` of every item, in order, in ``workers`` threads (native code releases the GIL)."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(function, items))


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table for the log."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)
