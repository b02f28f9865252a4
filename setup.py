"""Builds ``kestrel._native`` from ``native/*.cpp``; everything else about the package is in pyproject.toml.

A file's name decides its instruction set: ``*_avx2.cpp``, ``*_avx512.cpp`` and ``*_avx512vnni.cpp`` may use
those instructions, every other file only those that any x86-64 CPU has, so that one wheel runs everywhere and
picks its forms at run time.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent

# Never fast-math: no flag here may change a bit. -fno-math-errno only drops the store to errno (sqrt becomes
# one instruction); contraction is off, so that fma happens exactly where the source says fma. The vectorisers
# are off because g++ 12 loses the order of an ordered float sum that takes its terms permuted (seen:
# (s + y) + x compiled as (s + x) + y); vector forms are written with intrinsics.
FLAGS = [
    *["-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"],
    *["-fno-tree-vectorize", "-fno-tree-slp-vectorize"],
    *["-fPIC", "-pthread", "-g0", "-DNDEBUG", "-Wall", "-Wextra"],
]
# GCC's own headers of these intrinsics read registers they leave undefined on purpose, and warn about it.
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
ISA_FLAGS = {
    "_avx2.cpp": AVX2,
    "_avx512.cpp": AVX512,
    "_avx512vnni.cpp": [*AVX512, "-mavx512vnni"],
}


def isa_flags(source: Path) -> list[str]:
    # Device code reads the same memory as bytes, words and vectors.
    if source.name.startswith("simt_"):
        return ["-fno-strict-aliasing", "-Wno-unknown-pragmas"]
    return next((flags for suffix, flags in ISA_FLAGS.items() if source.name.endswith(suffix)), [])


def dependencies(depfile: Path) -> list[Path] | None:
    """The files that a depfile of the compiler names; ``None`` when there is no depfile."""
    if not depfile.exists():
        return None
    text = depfile.read_text().replace("\\\n", " ")
    return [Path(name) for name in shlex.split(text.partition(": ")[2])]


def is_current(target: Path, inputs: list[Path]) -> bool:
    if not target.exists():
        return False
    made = target.stat().st_mtime_ns
    return all(path.exists() and path.stat().st_mtime_ns < made for path in inputs)


class BuildNative(build_ext):
    """Compiles what changed, a file to each CPU, and puts the module in place in one step."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        temp = Path(self.build_temp).resolve() / ext.name
        temp.mkdir(parents=True, exist_ok=True)
        sources = [ROOT / source for source in ext.sources]
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as workers:
            objects = list(workers.map(lambda source: self._compile(source, temp), sources))
        if is_current(target, [*objects, Path(__file__)]):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        # Linked beside the target and renamed: a process that has the old module mapped keeps it.
        partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
        try:
            self._run([*self._compiler(), "-shared", "-pthread", *map(str, objects), "-o", str(partial)])
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    def _compiler(self) -> list[str]:
        return shlex.split(os.environ.get("CXX", "g++"))

    def _compile(self, source: Path, temp: Path) -> Path:
        target = temp / (source.stem + ".o")
        depfile, command_file = target.with_suffix(".d"), target.with_suffix(".cmd")
        command = [
            *self._compiler(),
            *FLAGS,
            *isa_flags(source),
            f"-I{pybind11.get_include()}",
            f"-I{sysconfig.get_paths()['include']}",
            "-MMD",
            "-MF",
            str(depfile),
            "-c",
            str(source),
            "-o",
        ]
        inputs = dependencies(depfile)
        same_command = command_file.exists() and command_file.read_text() == shlex.join(command)
        if inputs is not None and same_command and is_current(target, inputs):
            return target
        partial = target.with_suffix(f".partial-{os.getpid()}")
        self._run([*command, str(partial)])
        partial.replace(target)
        command_file.write_text(shlex.join(command))
        return target

    def _run(self, command: list[str]) -> None:
        if self.verbose:
            print(shlex.join(command), file=sys.stderr)
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.stderr:
            sys.stderr.write(done.stderr)
        if done.returncode:
            raise SystemExit(
                f"kestrel: building the native module failed ({done.returncode}): {shlex.join(command)}"
            )


def native_sources(*, simt: bool) -> list[str]:
    """The files of ``kestrel._native``, or of ``kestrel._simt``: the kernels on the CPU, for tests."""
    found = ROOT.glob("native/*.cpp")
    return sorted(p.relative_to(ROOT).as_posix() for p in found if p.name.startswith("simt_") == simt)


# An editable install would compile in a temporary folder what `make native` then compiles in place.
skip = os.environ.get("KESTREL_SKIP_NATIVE") == "1"
extensions = [] if skip else [Extension("kestrel._native", native_sources(simt=False))]
if os.environ.get("KESTREL_BUILD_SIMT") == "1":
    extensions.append(Extension("kestrel._simt", native_sources(simt=True)))

setup(
    packages=[
        *sorted(
            {p.parent.relative_to(ROOT).as_posix().replace("/", ".") for p in ROOT.glob("kestrel/**/*.py")}
        ),
        "kestrel.kernels",
    ],
    package_dir={"kestrel": "kestrel", "kestrel.kernels": "kernels"},
    package_data={"kestrel": ["*.pyi", "py.typed"], "kestrel.kernels": ["*.cu", "*.cuh", "*.h"]},
    ext_modules=extensions,
    cmdclass={"build_ext": BuildNative},
    zip_safe=False,
)
