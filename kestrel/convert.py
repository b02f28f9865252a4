"""``python -m kestrel.convert SRC DST``: a Hugging Face folder or a GGUF file as a kestrel folder."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel.checkpoints.folder_writer import (
    check_destination,
    check_disk,
    hashing,
    lay_out,
    put_in_place,
    stale_partials,
    sync_folder,
    write_at,
    write_file,
)
from kestrel.checkpoints.manifest import MANIFEST_FILE, WEIGHTS_FILE, FileRecord, Manifest, TensorRecord
from kestrel.checkpoints.quantize import (
    DEFAULT_Q4_SCALE,
    Q4_SCALES,
    Q4Scale,
    RangeError,
    check_finite,
    quantize_rows,
)
from kestrel.checkpoints.source import open_source
from kestrel.checkpoints.source_model import Checkpoint, SourceTensor
from kestrel.cli import command_parser, count, note, progress_bar, run_command
from kestrel.errors import KestrelError, ModelError, UsageError
from kestrel.ops import WType
from kestrel.weights import GROUP, stored_wtype

_BLOCK = 2**21  # weights read and quantised at a time: bounds memory whatever the size of a tensor


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
    q4_scale: Q4Scale = DEFAULT_Q4_SCALE,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
    threads: int | None = None,
) -> Conversion:
    """Convert ``source`` into the new folder ``destination``, which appears complete or not at all.

    ``head_wtype`` is the format of embedding and head: q8local by default when ``wtype`` is q4local, else
    ``wtype``. ``q4_scale`` names a way to choose q4local scales (``kestrel.checkpoints.quantize.Q4_SCALES``).
    ``progress`` is called with the weights done and the weights in all. Peak memory depends on
    neither the size of the model nor that of its largest tensor. The same source gives the same bytes.

    Raises ``ModelError`` for a source that is damaged or not supported (every fault in one message),
    ``UsageError`` for a destination that may not be written, ``KestrelError`` when the disk is full or fails.
    """
    target = Path(destination)
    if q4_scale not in Q4_SCALES:
        raise UsageError(f"q4_scale must be one of {', '.join(Q4_SCALES)}, not {q4_scale!r}")
    if head_wtype is None:
        head_wtype = WType.q8local if wtype == WType.q4local else wtype
    threads = threads or min(8, len(os.sched_getaffinity(0)))
    check_destination(Path(source), target, force)
    checkpoint = open_source(source)
    try:
        job = _Job(checkpoint, wtype, head_wtype, q4_scale, progress, threads)
        check_disk(target, job.layout.size + sum(map(len, checkpoint.side_files.values())))
        manifest = job.run_into(target, force)
    except OSError as error:
        raise KestrelError(f"{target}: the conversion failed, nothing was kept: {error}") from error
    finally:
        checkpoint.close()
    sizes: dict[str, int] = {}
    for spec, stored in job.wtypes:
        row = 4 * spec.k if stored is None else stored.bytes_per_row(spec.k)
        sizes[_name(stored)] = sizes.get(_name(stored), 0) + spec.rows * row
    notes = [*checkpoint.notes, *job.notes()]
    stale = stale_partials(target)
    if stale:
        notes.append(f"left by interrupted conversions, may be deleted: {', '.join(map(str, stale))}")
    return Conversion(target, manifest, sizes, notes)


class _Job:
    def __init__(
        self,
        checkpoint: Checkpoint,
        wtype: WType,
        head_wtype: WType,
        q4_scale: Q4Scale,
        progress: Callable[[int, int], None] | None,
        threads: int,
    ) -> None:
        self.checkpoint = checkpoint
        self.wtype, self.head_wtype, self.q4_scale = wtype, head_wtype, q4_scale
        self.progress, self.threads = progress, threads
        self.wtypes = [(t.spec, stored_wtype(t.spec, wtype, head_wtype)) for t in checkpoint.tensors]
        self.layout = lay_out(self.wtypes)
        self.records: dict[str, TensorRecord] = {}

    def run_into(self, target: Path, force: bool) -> Manifest:
        """Make the folder beside ``target`` and put it in place; what is not finished is removed."""
        partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
        if partial.exists():  # of an earlier process that had this number
            shutil.rmtree(partial)
        partial.mkdir()
        try:
            manifest = self._run(partial)
            put_in_place(partial, target, force)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return manifest

    def _run(self, folder: Path) -> Manifest:
        """Write the folder's files, the manifest last, all of them flushed to disk."""
        checkpoint = self.checkpoint
        with hashing(checkpoint.weight_files) as source_records:
            with (folder / WEIGHTS_FILE).open("wb") as file:
                file.write(self.layout.header)
                file.flush()
                os.ftruncate(file.fileno(), self.layout.size)
                self._write_tensors(file.fileno())
                os.fsync(file.fileno())
            for name, content in checkpoint.side_files.items():
                (folder / name).parent.mkdir(exist_ok=True)
                write_file(folder / name, content)
            sources = source_records()
        manifest = Manifest(
            config=checkpoint.config,
            source_format=checkpoint.format,
            wtype=self.wtype.name,
            head_wtype=self.head_wtype.name,
            q4_scale=self.q4_scale,
            sources=sources,
            tensors=self.records,
            files=tuple(
                FileRecord(name, len(content), hashlib.sha256(content).hexdigest())
                for name, content in checkpoint.side_files.items()
            ),
        )
        write_file(folder / MANIFEST_FILE, manifest.to_json().encode())
        sync_folder(folder)
        return manifest

    def _write_tensors(self, fd: int) -> None:
        total = sum(spec.rows * spec.k for spec, _ in self.wtypes)
        done, faults = 0, []
        with ThreadPoolExecutor(self.threads) as pool:
            for tensor, (spec, wtype) in zip(self.checkpoint.tensors, self.wtypes, strict=True):
                writer = _TensorWriter(fd, self.layout.offsets, list(spec.stored_arrays(wtype)))
                encode = partial(_encode, tensor, wtype, self.q4_scale)
                try:
                    for rows, block in _in_order(pool, self.threads, encode, spec.rows, spec.k):
                        writer.write(block)
                        done += rows * spec.k
                        if self.progress is not None:
                            self.progress(done, total)
                except RangeError as error:
                    faults.append(f"{spec.name} ({tensor.origin}): {error}")
                    continue
                self.records[spec.name] = TensorRecord(
                    wtype=_name(wtype),
                    shape=spec.shape,
                    source=tensor.stored,
                    exact=writer.exact,
                    sha256=writer.digests(),
                )
        if faults:
            raise ModelError(self.checkpoint.where, faults)

    def notes(self) -> list[str]:
        """What was rounded without being asked for, and what the asked format could not hold."""
        requantised: dict[tuple[str, str], list[str]] = {}
        rounded: dict[str, list[str]] = {}
        for tensor in self.checkpoint.tensors:
            record = self.records[tensor.spec.name]
            if record.exact:
                continue
            if tensor.blocks:
                requantised.setdefault((record.source, record.wtype), []).append(tensor.spec.name)
            elif record.wtype == WType.bf16.name:
                rounded.setdefault(record.source, []).append(tensor.spec.name)
        notes = [
            f"requantised from {source} to {wtype}: {summarise(names)}"
            for (source, wtype), names in requantised.items()
        ]
        notes += [f"rounded from {source} to bf16: {summarise(names)}" for source, names in rounded.items()]
        wanted = {"matrix": self.wtype, "table": self.head_wtype}
        odd = [spec.name for spec, stored in self.wtypes if wanted.get(spec.role, stored) != stored]
        if odd:
            notes.append(f"kept in bf16, their rows being no multiple of {GROUP} weights: {summarise(odd)}")
        return notes


@dataclass(frozen=True)
class _Block:
    """Consecutive rows of a tensor as stored."""

    arrays: tuple[npt.NDArray[Any], ...]  # in the order of TensorSpec.stored_arrays
    exact: bool  # the arrays hold the source's values, none of them rounded


def _encode(tensor: SourceTensor, wtype: WType | None, q4_scale: Q4Scale, begin: int, end: int) -> _Block:
    if tensor.packed is not None and tensor.packed_wtype == wtype:
        codes, scale = tensor.packed(begin, end)
        if ((scale & 0x7C00) == 0x7C00).any():
            raise RangeError("a scale is NaN or infinite")
        return _Block((codes, scale), True)
    values = tensor.read(begin, end)
    if wtype is None:
        check_finite(values)
        return _Block((values,), not tensor.blocks)
    codes, scales = quantize_rows(values, wtype, q4_scale)
    if scales is not None:
        return _Block((codes, scales), False)
    return _Block((codes,), not tensor.blocks and not (values.view(np.uint32) & 0xFFFF).any())


def _in_order(
    pool: ThreadPoolExecutor, ahead: int, encode: Callable[[int, int], _Block], rows: int, k: int
) -> Iterator[tuple[int, _Block]]:
    """Blocks of rows in order, each with its number of rows, at most ``ahead`` + 1 of them in memory."""
    step = max(1, _BLOCK // k)
    pending: deque[tuple[int, Future[_Block]]] = deque()
    try:
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            pending.append((end - begin, pool.submit(encode, begin, end)))
            if len(pending) > ahead:
                count, future = pending.popleft()
                yield count, future.result()
        while pending:
            count, future = pending.popleft()
            yield count, future.result()
    finally:
        for _, future in pending:
            future.cancel()


class _TensorWriter:
    """Puts the arrays of one tensor at their places, hashing them on the way."""

    def __init__(self, fd: int, offsets: dict[str, int], names: list[str]) -> None:
        self._fd = fd
        self._at = [offsets[name] for name in names]
        self._hashes = {name: hashlib.sha256() for name in names}
        self.exact = True

    def write(self, block: _Block) -> None:
        self.exact = self.exact and block.exact
        for i, (digest, array) in enumerate(zip(self._hashes.values(), block.arrays, strict=True)):
            data = np.ascontiguousarray(array).view(np.uint8).data.cast("B")
            digest.update(data)
            write_at(self._fd, self._at[i], data)
            self._at[i] += len(data)

    def digests(self) -> dict[str, str]:
        return {name: digest.hexdigest() for name, digest in self._hashes.items()}


def _name(wtype: WType | None) -> str:
    return "f32" if wtype is None else wtype.name


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


# -- command -----------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser("convert", "Convert a Hugging Face folder or a GGUF file to a kestrel folder.")
    names = [wtype.name for wtype in WType]
    parser.add_argument(
        "source", metavar="SRC", help="Hugging Face folder, GGUF file, or org/model in the cache"
    )
    parser.add_argument("destination", metavar="DST", help="folder to make")
    parser.add_argument(
        "--wtype", choices=names, default="q4local", help="format of matrices (default: %(default)s)"
    )
    parser.add_argument(
        "--head-wtype",
        choices=names,
        help="format of embedding and head (default: q8local with q4local, else as --wtype)",
    )
    parser.add_argument(
        "--q4-scale",
        choices=list(Q4_SCALES),
        default=DEFAULT_Q4_SCALE,
        help="how q4local scales are chosen (default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="replace DST if it is a kestrel folder")
    parser.add_argument(
        "-t", "--threads", type=count, metavar="N", help="threads that quantise (default: all, up to 8)"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bar and no report on stderr")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = build_parser().parse_args(argv)
    with terminated_as_exit(), progress_bar("converting", shown=not args.quiet) as bar:
        result = convert(
            args.source,
            args.destination,
            wtype=WType[args.wtype],
            head_wtype=WType[args.head_wtype] if args.head_wtype else None,
            q4_scale=args.q4_scale,
            force=args.force,
            progress=bar,
            threads=args.threads,
        )
    if not args.quiet:
        for text in result.notes:
            note(text)
        sizes = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in result.bytes_by_wtype.items())
        note(f"{result.folder}: {len(result.manifest.tensors)} tensors ({sizes})")
    return 0


@contextmanager
def terminated_as_exit() -> Iterator[None]:
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
    sys.exit(run_command(main))
