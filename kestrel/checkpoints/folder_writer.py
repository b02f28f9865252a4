"""Writing a kestrel folder: layout of the weights file, and a folder that appears complete or not at all."""

from __future__ import annotations

import ctypes
import errno
import glob
import hashlib
import json
import math
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kestrel.checkpoints.manifest import MANIFEST_FILE, FileRecord
from kestrel.errors import KestrelError, UsageError
from kestrel.ops import WType
from kestrel.weights import TensorSpec

_ALIGN = 64  # bytes
_DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I8": 1}


@dataclass(frozen=True)
class _Array:
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Layout:
    header: bytes
    offsets: dict[str, int]  # array name -> byte in the file
    size: int


def lay_out(wtypes: list[tuple[TensorSpec, WType | None]]) -> Layout:
    """Offsets of every array: the data begin at a multiple of 64 bytes, and so do arrays where possible.

    The format allows no padding between tensors; arrays whose size is a multiple of 64 come first, then those
    of 32, 16 and so on, so that each begins at a multiple of the power of two that divides its own size.
    """
    arrays = []
    for spec, wtype in wtypes:
        for name, (dtype, shape) in spec.stored_arrays(wtype).items():
            arrays.append(_Array(name, dtype, shape, _DTYPE_BYTES[dtype] * math.prod(shape)))
    arrays.sort(key=lambda a: -min(_ALIGN, a.nbytes & -a.nbytes))  # stable: data-flow order within a class
    entries: dict[str, Any] = {"__metadata__": {"format": "kestrel"}}
    starts, at = {}, 0
    for array in arrays:
        entries[array.name] = {
            "dtype": array.dtype,
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        starts[array.name] = at
        at += array.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    begin = 8 + len(text)
    header = len(text).to_bytes(8, "little") + text
    return Layout(header, {name: begin + start for name, start in starts.items()}, begin + at)


@contextmanager
def hashing(files: list[Path]) -> Iterator[Callable[[], tuple[FileRecord, ...]]]:
    """Hash the source files in another thread while the body converts; the yielded function waits for it."""
    stop = threading.Event()

    def work() -> tuple[FileRecord, ...]:
        records = []
        for path in files:
            digest, size = hashlib.sha256(), 0
            with path.open("rb", buffering=0) as file:
                while chunk := file.read(2**20):
                    if stop.is_set():
                        return ()
                    digest.update(chunk)
                    size += len(chunk)
            records.append(FileRecord(path.name, size, digest.hexdigest()))
        return tuple(records)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        try:
            yield future.result
        finally:
            stop.set()


def write_at(fd: int, offset: int, data: memoryview) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def write_file(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_destination(source: Path, target: Path, force: bool) -> None:
    resolved = target.resolve()
    if source.exists() and (resolved == source.resolve() or resolved in source.resolve().parents):
        raise UsageError(f"{target}: the destination may not be the source, nor a folder that holds it")
    if not target.name or re.search(r"\.partial-\d+$", target.name):
        raise UsageError(f"{target}: choose another name for the destination")
    if (target.exists() or target.is_symlink()) and not force:
        raise UsageError(f"{target}: exists; choose another destination, or replace it with --force")
    if (
        target.exists()
        and not (target / MANIFEST_FILE).is_file()
        and (not target.is_dir() or any(target.iterdir()))
    ):
        raise UsageError(f"{target}: exists and is not a kestrel folder, so --force does not replace it")
    if not resolved.parent.is_dir():
        raise UsageError(f"{resolved.parent}: no such folder")
    if not os.access(resolved.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{resolved.parent}: may not be written")


def check_disk(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target.resolve().parent).free
    if needed > free:
        raise KestrelError(
            f"{target}: needs {needed / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free on that disk"
        )


def stale_partials(target: Path) -> list[Path]:
    """Partial folders beside ``target`` whose process is gone."""
    stale = []
    for path in sorted(target.resolve().parent.glob(f"{glob.escape(target.name)}.partial-*")):
        pid = path.name.rpartition("-")[2]
        if pid.isdigit() and not Path("/proc", pid).exists():
            stale.append(path)
    return stale


def put_in_place(partial: Path, target: Path, force: bool) -> None:
    """Rename the finished folder; an old one is swapped out in one step and then deleted."""
    if force and target.exists():
        _exchange(partial, target)
        sync_folder(target.resolve().parent)
        shutil.rmtree(partial)
        return
    try:
        partial.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise UsageError(
                f"{target}: was made by something else meanwhile; nothing was replaced"
            ) from None
        raise
    sync_folder(target.resolve().parent)


def _exchange(a: Path, b: Path) -> None:
    """Swap two folders atomically (Linux renameat2, which Python does not offer)."""
    at_fdcwd, rename_exchange = -100, 2
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise KestrelError(f"{b}: this system cannot replace a folder atomically; delete it first")
    if libc.renameat2(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), rename_exchange):
        code = ctypes.get_errno()
        raise KestrelError(f"{b}: cannot be replaced atomically ({os.strerror(code)}); delete it first")
