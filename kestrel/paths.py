"""Where models lie: the one place that decides."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from kestrel.env import env, home_folder
from kestrel.errors import KestrelError

DEMO_MODEL = "smollm2-135m-instruct"
MANIFEST = "kestrel.json"  # what makes a folder a converted model


def user_models() -> Path:
    """The user's own model folder: ``$XDG_DATA_HOME/kestrel/models`` or ``~/.local/share/kestrel/models``.

    Raises KestrelError where there is neither.
    """
    base = os.environ.get("XDG_DATA_HOME")
    parent = Path(base) if base else home_folder("XDG_DATA_HOME, or name a model folder") / ".local" / "share"
    return parent / "kestrel" / "models"


def demo_model_folder() -> Path:
    """Where the demo model is, or goes: ``./models`` in a source checkout, else the user's folder."""
    here = Path("models") / DEMO_MODEL
    in_checkout = Path("pyproject.toml").exists() and Path("kestrel", "model.py").exists()
    if (here / MANIFEST).exists():
        return here
    installed = user_models() / DEMO_MODEL
    return here if in_checkout and not (installed / MANIFEST).exists() else installed


def resolve_model(name: str | os.PathLike[str] | None) -> Path:
    """The folder of ``-m NAME``: a path, or a name in the user's model folder. Without a name:
    ``KESTREL_MODEL``, else the demo model.

    Raises KestrelError that says where it looked and how to get a model.
    """
    if name is None:
        named = env.model
        if named is not None:
            if not named.exists():
                raise KestrelError(f"KESTREL_MODEL names {named}, which does not exist")
            return named
        demo = demo_model_folder()
        if (demo / MANIFEST).exists():
            return demo
        raise KestrelError(
            f"no model given and the demo model is not at {demo}: name a model folder with -m, "
            "fetch the demo model with `kestrel demo` (or `make demo`), "
            "or make one with `kestrel convert SRC DST`"
        )
    path = Path(name)
    with suppress(RuntimeError):  # a ~name that nobody has is a plain name
        path = path.expanduser()
    if path.exists():
        return path
    installed = user_models() / path
    if installed.exists():
        return installed
    raise KestrelError(
        f"no model at {path}, nor at {installed}: name a folder made by `kestrel convert SRC DST` "
        "(SRC: a Hugging Face folder, a name in its cache, or a GGUF file; nothing is downloaded)"
    )
