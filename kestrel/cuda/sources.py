"""The text of the device code: the files under ``kernels/``, from a checkout or the installed package."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import kestrel
from kestrel.errors import BackendError


@dataclass(frozen=True)
class KernelSources:
    """``units`` are the ``.cu`` files, one compilation each; ``headers`` are all files they may include."""

    units: dict[str, bytes]
    headers: dict[str, bytes]


def kernels_folder() -> Path:
    """Where the kernel sources lie; an installed package carries them as ``kestrel/kernels``."""
    package = Path(kestrel.__file__).resolve().parent
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / "op_args.h").is_file():
            return folder
    raise BackendError(
        f"the kernel sources are missing: neither {package / 'kernels'} nor {package.parent / 'kernels'} "
        "holds op_args.h; install kestrel again"
    )


def read_sources(folder: Path) -> KernelSources:
    """All units and headers of ``folder``, sorted by name."""
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    return KernelSources(
        units={name: text for name, text in files.items() if name.endswith(".cu")},
        headers={name: text for name, text in files.items() if name.endswith((".cuh", ".h"))},
    )


@cache
def kernel_sources() -> KernelSources:
    """The sources of this installation, read once."""
    sources = read_sources(kernels_folder())
    if not sources.units:
        raise BackendError(f"no .cu file in {kernels_folder()}; install kestrel again")
    return sources
