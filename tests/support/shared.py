"""The optional folder of larger test material: ``KESTREL_SHARED``, or ``shared`` beside the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def shared_root() -> Path | None:
    """The folder, or None where this machine has none. A ``KESTREL_SHARED`` that is no folder is an error."""
    named = os.environ.get("KESTREL_SHARED")
    if named:
        if not Path(named).is_dir():
            raise NotADirectoryError(f"KESTREL_SHARED={named} is not a folder: unset it or name the folder")
        return Path(named)
    beside = REPOSITORY.parent / "shared"
    return beside if beside.is_dir() else None


def shared_path(*parts: str) -> Path:
    """``parts`` below the shared folder; skips the calling test, with the reason, where it is absent."""
    root = shared_root()
    if root is None:
        pytest.skip(
            "needs the optional folder 'shared' beside the repository (or KESTREL_SHARED=FOLDER): absent"
        )
    path = root.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs {'/'.join(parts)} in the optional folder 'shared': absent")
    return path
