"""Converted model folders for tests, and commands run on them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from kestrel.config import Family
from kestrel.convert import convert
from kestrel.ops import WType
from tests.support.models import SPECIAL_TOKENS, write_hf_model
from tests.support.shared import REPOSITORY


def converted_model(
    folder: Path, family: Family = "qwen3", wtype: WType = WType.q4local, **arguments: Any
) -> Path:
    """A tiny random model as ``kestrel convert`` leaves it, in ``folder / family``.

    Its head never gives a special token, so that generation ends where a test wants it to.
    """
    source = write_hf_model(folder / f"{family}-source", family, **arguments)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"][: len(SPECIAL_TOKENS)] = 0
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, folder / family, wtype=wtype)
    return folder / family


def clean_environment(**extra: str) -> dict[str, str]:
    """This environment without kestrel's variables, so that a developer's settings change no test."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KESTREL_", "VLLM_"))}
    return {**kept, "PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": "utf-8", **extra}


def run_kestrel(
    *arguments: str | Path,
    stdin: str | bytes = "",
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """``python -m kestrel.cli ...`` in a process of its own."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        [sys.executable, "-m", "kestrel.cli", *map(str, arguments)],
        input=data,
        capture_output=True,
        env=clean_environment(**(env or {})),
        cwd=cwd,
        check=False,
        timeout=120,
    )
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode("utf-8"), done.stderr.decode("utf-8")
    )
