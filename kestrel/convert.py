"""``python -m kestrel.convert SRC DST``: a Hugging Face folder or a GGUF file as a kestrel folder."""

from __future__ import annotations

import argparse
import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kestrel.checkpoint import Checkpoint, SourceTensor
from kestrel.errors import KestrelError, ModelError, UsageError
from kestrel.hf_folder import open_hf_folder
from kestrel.manifest import MANIFEST_FILE, WEIGHTS_FILE, FileRecord, Manifest, TensorRecord
from kestrel.ops import WType
from kestrel.quantize import DEFAULT_Q4_SCALE, Q4_SCALES, RangeError, quantize_rows
from kestrel.weights import GROUP, TensorSpec, stored_wtype

_BLOCK = 2**21  # weights read and quantised at a time: bounds memory whatever the size of a tensor
_ALIGN = 64  # bytes
_DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I8": 1}


# -- opening a source ------------------------------------------------------------------------------------------


def open_source(path: Path | str) -> Checkpoint:
    """Open and check a Hugging Face folder or a GGUF file. Raises ``ModelError`` that lists every fault.

    A name like ``org/model`` that is no path here is looked up in the local Hugging Face cache.
    """
    source = _from_hub_cache(Path(path))
    where = str(source)
    if source.is_dir():
        if (source / MANIFEST_FILE).exists():
            raise ModelError(where, ["is a kestrel folder already: convert its original source instead"])
        if (source / "config.json").exists():
            return open_hf_folder(source)
        gguf = sorted(source.glob("*.gguf"))
        if gguf:
            raise ModelError(where, [f"has no config.json; to convert a GGUF file, name it: {gguf[0]}"])
        raise ModelError(where, ["is neither a Hugging Face folder (no config.json) nor a GGUF file"])
    try:
        with source.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(where, [f"cannot be read: {error.strerror}"]) from None
    if magic == b"GGUF":
        from kestrel.gguf import open_gguf

        return open_gguf(source)
    if source.name.endswith(".safetensors"):
        raise ModelError(
            where, ["is one file of a checkpoint: name the folder that holds it and config.json"]
        )
    raise ModelError(where, ["is not a GGUF file (wrong magic) and not a folder"])


def _from_hub_cache(path: Path) -> Path:
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        return path
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    repository = cache / ("models--" + str(path).replace("/", "--"))
    try:
        snapshot = repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
    except OSError:
        raise ModelError(
            str(path),
            [f"is no path here and not in the local cache {cache}: fetch it with `hf download {path}`"],
        ) from None
    return snapshot


# -- layout of the weights file --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Array:
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class _Layout:
    header: bytes
    offsets: dict[str, int]  # array name -> byte in the file
    size: int


def _lay_out(wtypes: list[tuple[TensorSpec, WType | None]]) -> _Layout:
    """Offsets of every array. The data begin at a multiple of 64 bytes, and so does each array as far as possible.

    The format allows no padding between tensors; arrays whose size is a multiple of 64 come first, then those of
    32, 16 and so on, so that each begins at a multiple of the power of two that divides its own size.
    """
    arrays = []
    for spec, wtype in wtypes:
        for name, (dtype, shape) in spec.stored_arrays(wtype).items():
            arrays.append(
                _Array(name, dtype, shape, _DTYPE_BYTES[dtype] * int(np.prod(shape, dtype=np.int64)))
            )
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
    return _Layout(header, {name: begin + start for name, start in starts.items()}, begin + at)


# -- converting ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conversion:
    """What a conversion made, for the report."""

    folder: Path
    manifest: Manifest
    bytes_by_wtype: dict[str, int]
    notes: list[str]


def convert(
    source: Path | str,
    destination: Path | str,
    *,
    wtype: WType = WType.q4local,
    head_wtype: WType | None = None,
    q4_scale: str = DEFAULT_Q4_SCALE,
    force: bool = False,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    threads: int | None = None,
) -> Conversion:
    """Convert ``source`` into the new folder ``destination``, which appears complete or not at all.

    ``head_wtype`` is the format of embedding and head: q8local by default when ``wtype`` is q4local, else
    ``wtype``. ``q4_scale`` names a way to choose q4local scales (``kestrel.quantize.Q4_SCALES``). ``progress`` is
    called with the tensor's name, weights done and weights in all. Peak memory depends on neither the size of the
    model nor that of its largest tensor. The same source gives the same bytes.

    Raises ``ModelError`` for a source that is damaged or not supported (every fault in one message), ``UsageError``
    for a destination that may not be written, ``KestrelError`` when the disk is too full.
    """
    target = Path(destination)
    _check_destination(Path(source), target, force)
    checkpoint = open_source(source)
    try:
        if head_wtype is None:
            head_wtype = WType.q8local if wtype == WType.q4local else wtype
        job = _Job(checkpoint, wtype, head_wtype, q4_scale, progress, threads or min(4, os.cpu_count() or 1))
        _check_disk(target, job.layout.size + sum(map(len, checkpoint.side_files.values())))
        partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
        partial.mkdir()
        try:
            manifest = job.run(partial)
            _put_in_place(partial, target, force)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        checkpoint.close()
    sizes: dict[str, int] = {}
    for spec, stored in job.wtypes:
        name = stored.name if stored is not None else "f32"
        size = spec.rows * (stored.bytes_per_row(spec.k) if stored is not None else 4 * spec.k)
        sizes[name] = sizes.get(name, 0) + size
    return Conversion(target, manifest, sizes, [*checkpoint.notes, *job.notes()])


class _Job:
    def __init__(
        self,
        checkpoint: Checkpoint,
        wtype: WType,
        head_wtype: WType,
        q4_scale: str,
        progress: Callable[[str, int, int], None],
        threads: int,
    ) -> None:
        self.checkpoint = checkpoint
        self.wtype, self.head_wtype, self.q4_scale = wtype, head_wtype, q4_scale
        self.progress, self.threads = progress, threads
        self.wtypes = [(t.spec, stored_wtype(t.spec, wtype, head_wtype)) for t in checkpoint.tensors]
        self.layout = _lay_out(self.wtypes)

    def run(self, folder: Path) -> Manifest:
        """Write the folder's files, the manifest last, all of them flushed to disk."""
        checkpoint = self.checkpoint
        with _hashing(checkpoint.weight_files) as source_records:
            with (folder / WEIGHTS_FILE).open("wb") as file:
                file.write(self.layout.header)
                file.flush()
                os.ftruncate(file.fileno(), self.layout.size)
                tensors = self._write_tensors(file.fileno())
                os.fsync(file.fileno())
            for name, content in checkpoint.side_files.items():
                _write_file(folder / name, content)
            sources = source_records()
        manifest = Manifest(
            config=checkpoint.config,
            source_format=checkpoint.format,
            wtype=self.wtype.name,
            head_wtype=self.head_wtype.name,
            q4_scale=self.q4_scale,
            sources=sources,
            tensors=tensors,
            files=tuple(
                FileRecord(name, len(content), hashlib.sha256(content).hexdigest())
                for name, content in checkpoint.side_files.items()
            ),
        )
        _write_file(folder / MANIFEST_FILE, manifest.to_json().encode())
        _sync_folder(folder)
        return manifest

    def _write_tensors(self, fd: int) -> dict[str, TensorRecord]:
        total = sum(spec.rows * spec.k for spec, _ in self.wtypes)
        done, faults = 0, []
        records = {}
        with ThreadPoolExecutor(self.threads) as pool:
            for tensor, (_, wtype) in zip(self.checkpoint.tensors, self.wtypes, strict=True):
                try:
                    for rows, hashes in self._write_tensor(fd, tensor, wtype, pool):
                        done += rows * tensor.spec.k
                        self.progress(tensor.spec.name, done, total)
                except RangeError as error:
                    faults.append(f"{tensor.spec.name} ({tensor.origin}): {error}")
                    continue
                records[tensor.spec.name] = TensorRecord(
                    wtype=wtype.name if wtype is not None else "f32",
                    shape=tensor.spec.shape,
                    source=tensor.stored,
                    exact=_is_exact(tensor, wtype),
                    sha256={name: digest.hexdigest() for name, digest in hashes.items()},
                )
        if faults:
            raise ModelError(self.checkpoint.where, faults)
        return records

    def _write_tensor(
        self, fd: int, tensor: SourceTensor, wtype: WType | None, pool: ThreadPoolExecutor
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Write a tensor by blocks of rows; yields the rows written and the hashes so far."""
        spec = tensor.spec
        step = max(1, _BLOCK // spec.k)
        names = list(spec.stored_arrays(wtype))
        offsets = [self.layout.offsets[name] for name in names]
        hashes: dict[str, Any] = {name: hashlib.sha256() for name in names}
        pending: deque[tuple[int, Future[tuple[npt.NDArray[Any], ...]]]] = deque()

        def finish() -> int:
            rows, future = pending.popleft()
            for i, (name, array) in enumerate(zip(names, future.result(), strict=True)):
                data = memoryview(np.ascontiguousarray(array)).cast("B")
                hashes[name].update(data)
                _write_at(fd, offsets[i], data)
                offsets[i] += len(data)
            return rows

        try:
            for begin in range(0, spec.rows, step):
                end = min(begin + step, spec.rows)
                pending.append((end - begin, pool.submit(_encode, tensor, wtype, self.q4_scale, begin, end)))
                if len(pending) > self.threads:
                    yield finish(), hashes
            while pending:
                yield finish(), hashes
        finally:
            for _, future in pending:
                future.cancel()

    def notes(self) -> list[str]:
        """What was rounded against expectation: requantised blocks, rows that do not divide into groups."""
        notes = []
        requantised: dict[tuple[str, str], list[str]] = {}
        for tensor, (spec, wtype) in zip(self.checkpoint.tensors, self.wtypes, strict=True):
            name = wtype.name if wtype is not None else "f32"
            if tensor.stored.startswith(("Q", "I", "T", "M", "N")) and not _is_exact(tensor, wtype):
                requantised.setdefault((tensor.stored, name), []).append(spec.name)
        for (stored, name), tensors in requantised.items():
            notes.append(f"requantised from {stored} to {name}: {summarise(tensors)}")
        odd = [spec.name for spec, _ in self.wtypes if spec.role in ("matrix", "table") and spec.k % GROUP]
        wanted = {self.wtype, self.head_wtype} - {WType.bf16}
        if odd and wanted:
            notes.append(f"kept in bf16, their rows being no multiple of {GROUP} weights: {summarise(odd)}")
        return notes


def _encode(
    tensor: SourceTensor, wtype: WType | None, q4_scale: str, begin: int, end: int
) -> tuple[npt.NDArray[Any], ...]:
    """The stored arrays of rows ``begin`` to ``end``."""
    if tensor.packed is not None and tensor.packed_wtype == wtype:
        codes, scale = tensor.packed(begin, end)
        if ((scale & 0x7C00) == 0x7C00).any():
            raise RangeError("a scale is NaN or infinite")
        return codes, scale
    values = tensor.read(begin, end)
    if wtype is None:
        if not np.isfinite(values).all():
            raise RangeError("a weight is NaN or infinite")
        return (values,)
    codes, scales = quantize_rows(values, wtype, q4_scale)
    return (codes,) if scales is None else (codes, scales)


def _is_exact(tensor: SourceTensor, wtype: WType | None) -> bool:
    if wtype is None:
        return tensor.packed is None
    return tensor.packed_wtype == wtype or (wtype == WType.bf16 and tensor.stored == "BF16")


def summarise(names: list[str]) -> str:
    """``210 tensors: layers.0-29.{q,k,v}``: names of many layers in one short text."""
    layers: dict[str, list[int]] = {}
    others = []
    for name in names:
        found = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
        if found:
            layers.setdefault(found[2], []).append(int(found[1]))
        else:
            others.append(name)
    grouped: dict[str, list[str]] = {}
    for leaf, numbers in layers.items():
        grouped.setdefault(_ranges(numbers), []).append(leaf)
    texts = others + [
        f"layers.{numbers}.{leaves[0] if len(leaves) == 1 else '{' + ','.join(leaves) + '}'}"
        for numbers, leaves in grouped.items()
    ]
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}: {' '.join(texts)}"


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return text if len(runs) == 1 else f"[{text}]"


# -- files -----------------------------------------------------------------------------------------------------


@contextmanager
def _hashing(files: list[Path]) -> Iterator[Callable[[], tuple[FileRecord, ...]]]:
    """Hash the source files in a thread of its own while the body converts; the yielded function waits for it."""
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


def _write_at(fd: int, offset: int, data: memoryview) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def _write_file(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check_destination(source: Path, target: Path, force: bool) -> None:
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


def _check_disk(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target.resolve().parent).free
    if needed > free:
        raise KestrelError(
            f"{target}: needs {needed / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free on that disk"
        )


def _put_in_place(partial: Path, target: Path, force: bool) -> None:
    """Rename the finished folder; an old one is swapped out in one step and then deleted."""
    if force and target.exists():
        _exchange(partial, target)
        _sync_folder(target.resolve().parent)
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
    _sync_folder(target.resolve().parent)


def _exchange(a: Path, b: Path) -> None:
    """Swap two folders atomically (Linux renameat2, which Python does not offer)."""
    at_fdcwd, rename_exchange = -100, 2
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise KestrelError(f"{b}: this system cannot replace a folder atomically; delete it first")
    if libc.renameat2(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), rename_exchange):
        code = ctypes.get_errno()
        raise KestrelError(f"{b}: cannot be replaced atomically ({os.strerror(code)}); delete it first")


# -- command ---------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kestrel convert",
        description="Convert a Hugging Face folder or a GGUF file to a kestrel folder.",
        allow_abbrev=False,
    )
    names = [wtype.name for wtype in WType]
    parser.add_argument(
        "source", metavar="SRC", help="folder with config.json, GGUF file, or cached org/model"
    )
    parser.add_argument("destination", metavar="DST", help="folder to make")
    parser.add_argument(
        "--wtype", choices=names, default="q4local", help="format of the matrices (%(default)s)"
    )
    parser.add_argument(
        "--head-wtype",
        choices=names,
        help="format of embedding and head (q8local with q4local, else as --wtype)",
    )
    parser.add_argument(
        "--q4-scale",
        choices=list(Q4_SCALES),
        default=DEFAULT_Q4_SCALE,
        help="choice of q4local scales (%(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="replace DST if it is a kestrel folder")
    parser.add_argument("-t", "--threads", type=int, help="threads that quantise")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bar, no report")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = build_parser().parse_args(argv)
    if args.threads is not None and args.threads < 1:
        raise UsageError(f"--threads must be at least 1, not {args.threads}")
    console = Console(stderr=True, highlight=False)
    bar = _progress_bar(console) if console.is_terminal and not args.quiet else None
    with _terminate_as_exit(), bar or nullcontext():
        result = convert(
            args.source,
            args.destination,
            wtype=WType[args.wtype],
            head_wtype=WType[args.head_wtype] if args.head_wtype else None,
            q4_scale=args.q4_scale,
            force=args.force,
            progress=_updater(bar) if bar is not None else lambda name, done, total: None,
            threads=args.threads,
        )
    if not args.quiet:
        for note in result.notes:
            print(f"note: {note}", file=sys.stderr)
        sizes = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in result.bytes_by_wtype.items())
        print(f"{result.folder}: {len(result.manifest.tensors)} tensors ({sizes})", file=sys.stderr)
    return 0


def _progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def _updater(bar: Progress) -> Callable[[str, int, int], None]:
    task = bar.add_task("converting", total=None)
    return lambda name, done, total: bar.update(task, description=name, completed=done, total=total)


@contextmanager
def _terminate_as_exit() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that the partial folder goes away."""

    def stop(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
