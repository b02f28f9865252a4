"""Device code to machine code: the only place with NVRTC flags, and the cubin cache.

CuPy's own compilation appends ``-ftz=true`` and ignores the content of included files in its cache key, so
kernels are compiled here and only loaded through CuPy. ``python -m kestrel.cuda.compile --check`` compiles
every kernel for every supported architecture and lints the PTX; it needs no GPU.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kestrel.cuda.sources import KernelSources, kernel_sources
from kestrel.env import env
from kestrel.errors import BackendError

# What `make compile-check` covers: Ampere (A100, RTX 30), Ada, Hopper, Blackwell (B200, RTX 50).
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

# Contract section 0: IEEE arithmetic, gradual underflow, no contraction, correctly rounded / and sqrt.
EXACT_FLAGS = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
FAST_FLAGS = ("--use_fast_math",)
COMMON_FLAGS = ("-std=c++17", "--ptxas-options=-v")


@dataclass(frozen=True)
class Unit:
    """One compilation: a ``.cu`` file with the exact flags, or the fast ones for its ``*_fast`` kernels."""

    name: str  # "norm.cu"
    fast: bool

    @property
    def label(self) -> str:
        return f"{self.name.removesuffix('.cu')}{'-fast' if self.fast else ''}"


@dataclass(frozen=True)
class Compiled:
    """What NVRTC made of a unit; ``log`` holds the assembler's resource report."""

    cubin: bytes
    ptx: str
    log: str


def units(sources: KernelSources, *, exact: bool = True, fast: bool = True) -> list[Unit]:
    """The compilations of ``sources``; a file without ``_fast`` kernels has no fast unit."""
    found = [Unit(name, False) for name in sources.units] if exact else []
    if fast:
        both = (name for name, text in sources.units.items() if b"_fast" in text or b"FORM(" in text)
        found += [Unit(name, True) for name in both]
    return found


def options(arch: str, *, fast: bool) -> list[str]:
    """The NVRTC options; arithmetic flags stand last, so that nothing can override them."""
    flags = FAST_FLAGS if fast else EXACT_FLAGS
    return [*COMMON_FLAGS, f"-arch={arch}", f"-DKESTREL_FAST={int(fast)}", *flags]


# -- NVRTC ---------------------------------------------------------------------------------------------------


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise BackendError(
            f"compiling kernels needs the package cuda-bindings ({error}): "
            "pip install 'kestrel-exact[cuda13]' (or [cuda12] for a driver of CUDA 12)"
        ) from error
    return nvrtc


@cache
def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC library that is loaded."""
    nvrtc = _nvrtc()
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except (RuntimeError, ImportError, OSError) as error:
        raise BackendError(
            f"NVRTC, NVIDIA's run-time compiler, cannot be loaded ({_first_line(error)}): install the wheel "
            "of the same CUDA major as cuda-bindings, by pip install 'kestrel-exact[cuda13]' (or [cuda12])"
        ) from error
    _expect(status, "nvrtcVersion")
    return int(major), int(minor)


def supported_architectures() -> list[int]:
    """Compute capabilities as NVRTC writes them (80, 86, ..., 120)."""
    nvrtc_version()  # the clear error, if the library is missing
    status, archs = _nvrtc().nvrtcGetSupportedArchs()
    _expect(status, "nvrtcGetSupportedArchs")
    return sorted(int(a) for a in archs)


def architecture(major: int, minor: int, supported: Iterable[int] | None = None) -> str:
    """The newest architecture that NVRTC knows and whose machine code runs on compute capability major.minor.

    Machine code runs on the same major capability with the same or a higher minor one.
    """
    wanted = 10 * major + minor
    known = list(supported_architectures() if supported is None else supported)
    fitting = [a for a in known if a // 10 == major and a <= wanted]
    if major < 8:
        raise BackendError(
            f"this GPU has compute capability {major}.{minor}; kestrel needs 8.0 (Ampere) or newer"
        )
    if not fitting:
        raise BackendError(
            f"NVRTC {'.'.join(map(str, nvrtc_version()))} cannot compile for capability "
            f"{major}.{minor} (it knows {', '.join(f'sm_{a}' for a in known)}): "
            "install a newer nvidia-cuda-nvrtc"
        )
    return f"sm_{max(fitting)}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _expect(status: Any, what: str) -> None:
    if int(status) != 0:
        raise BackendError(f"{what} failed: {getattr(status, 'name', status)}")


def _fetch(program: Any, size_of: Any, get: Any, what: str) -> bytes:
    status, size = size_of(program)
    _expect(status, what)
    if int(size) <= 1:  # only the terminating zero; and b" " is one object shared by the whole process
        return b""
    data = b" " * int(size)  # NVRTC writes into it
    (status,) = get(program, data)
    _expect(status, what)
    return data


def compile_source(
    name: str, text: bytes, headers: Mapping[str, bytes], arch: str, *, fast: bool = False
) -> Compiled:
    """Compile one translation unit; raises BackendError with numbered source lines and the options.

    Included files are handed over in memory, so nothing but ``headers`` can be included: what the cache key
    covers is all that the compiler sees.
    """
    nvrtc_version()
    nvrtc = _nvrtc()
    flags = options(arch, fast=fast)
    names, contents = [n.encode() for n in headers], list(headers.values())
    status, program = nvrtc.nvrtcCreateProgram(text, name.encode(), len(names), contents, names)
    _expect(status, f"nvrtcCreateProgram({name})")
    try:
        encoded = [flag.encode() for flag in flags]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = _fetch(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, "compile log")
        message = log.rstrip(b"\0 \n").decode(errors="replace")
        if int(status) != 0:
            raise BackendError(compile_error_message(name, {**headers, name: text}, flags, message))
        ptx = _fetch(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, f"PTX of {name}")
        cubin = _fetch(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, f"cubin of {name}")
        return Compiled(cubin, ptx.rstrip(b"\0").decode(), message)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def compile_error_message(
    name: str, files: Mapping[str, bytes], flags: Iterable[str], log: str, around: int = 4
) -> str:
    """The compiler's log, then the numbered lines around every place it names, then the options."""
    places: dict[str, set[int]] = {}
    for file, line in re.findall(r"^(\S+?)\((\d+)\): (?:catastrophic )?error", log, re.MULTILINE):
        places.setdefault(file, set()).add(int(line))
    parts = [f"{name} does not compile (NVRTC {'.'.join(map(str, nvrtc_version()))})", log]
    for file, marked in places.items():
        if file not in files:
            continue
        lines = files[file].decode(errors="replace").splitlines()
        shown = sorted({n for m in marked for n in range(m - around, m + around + 1) if 1 <= n <= len(lines)})
        parts.append(f"{file}:")
        parts += [f"{'>' if n in marked else ' '}{n:5d} | {lines[n - 1]}" for n in shown]
    parts.append("options: " + " ".join(flags))
    return "\n".join(parts)


# -- cache ---------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where cubins are kept: below ``KESTREL_CACHE_DIR``, or the user's cache folder."""
    return env.cache_folder() / "cubin"


def cache_key(unit: Unit, sources: KernelSources, arch: str) -> str:
    """SHA-256 over everything the machine code depends on, each part preceded by its length."""
    digest = hashlib.sha256()
    parts = [unit.name.encode(), sources.units[unit.name], repr(nvrtc_version()).encode()]
    parts += [flag.encode() for flag in options(arch, fast=unit.fast)]
    for name, text in sorted(sources.headers.items()):
        parts += [name.encode(), text]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


def _content_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def find_cached(folder: Path, prefix: str) -> Path | None:
    """The cached cubin whose name starts with ``prefix`` and whose bytes have the hash that ends its name.

    A damaged entry is named on stderr and removed, so that it is made again.
    """
    for path in sorted(folder.glob(f"{prefix}-*.cubin")):
        if path.stem.rsplit("-", 1)[1] == _content_hash(path.read_bytes()):
            return path
        print(f"kestrel: damaged cubin cache entry {path} removed, compiling again", file=sys.stderr)
        path.unlink(missing_ok=True)
    return None


def store(folder: Path, prefix: str, cubin: bytes) -> Path:
    """Write a cubin atomically, its own hash in its name."""
    target = folder / f"{prefix}-{_content_hash(cubin)}.cubin"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".partial-")
        with os.fdopen(handle, "wb") as file:
            file.write(cubin)
        Path(temporary).replace(target)
    except OSError as error:
        raise BackendError(
            f"the cubin cache {folder} cannot be written ({error}): "
            "set KESTREL_CACHE_DIR to a folder that can"
        ) from error
    return target


def cubin_path(unit: Unit, arch: str, sources: KernelSources | None = None) -> Path:
    """The unit's cubin file, compiled unless the cache has it."""
    sources = sources or kernel_sources()
    folder, prefix = cache_folder(), f"{unit.label}-{arch}-{cache_key(unit, sources, arch)}"
    cached = find_cached(folder, prefix)
    if cached is not None:
        return cached
    text = sources.units[unit.name]
    return store(folder, prefix, compile_source(unit.name, text, sources.headers, arch, fast=unit.fast).cubin)


def cubin_paths(wanted: Iterable[Unit], arch: str, sources: KernelSources | None = None) -> dict[Unit, Path]:
    """Cubins of several units; missing ones are compiled side by side."""
    listed = list(wanted)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return dict(zip(listed, pool.map(lambda unit: cubin_path(unit, arch, sources), listed), strict=True))


def kernels_in(cubin: bytes) -> list[str]:
    """Names of the kernels in a cubin, read from its section names (``.text.NAME``)."""
    return sorted(name.decode() for name in set(re.findall(rb"\.text\.(\w+)\0", cubin)))


if __name__ == "__main__":
    from kestrel.cuda.check import main

    sys.exit(main())
