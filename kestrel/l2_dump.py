"""L2 dump files: ``#`` lines that say where a dump comes from, then one ``<key> <hash>`` line per value.

The lines below the header are equal as text for equal bits, whatever made them.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

import kestrel
from kestrel.contract import CONTRACT
from kestrel.errors import KestrelError, printable
from kestrel.l2_fields import Key, parse_key
from kestrel.taps import Tap, TapLevel

FORMAT = "1"

_HASH = re.compile("[0-9a-fA-F]{16}")


class DumpWriter:
    """Writes a dump beside its final name and moves it there when it is whole. ``-`` writes to stdout;
    a name that is there already and is no plain file (a device, a named pipe) is written to as it is.

    Give it to ``Engine.generate`` as the sink, then call ``commit`` or ``discard``.
    """

    def __init__(
        self, path: Path | str, level: TapLevel, header: Mapping[str, Any], command: Mapping[str, Any]
    ):
        """``header`` becomes ``# key value`` lines; ``command`` is what a re-run needs, kept as JSON."""
        self.path = Path(path)
        self.level = level
        self.keys = 0
        self._taps: Sequence[Tap] = []  # of the last rows, and their names
        self._names: list[tuple[str, int]] = []
        self._partial: Path | None = None
        self._target = Path(os.path.realpath(self.path))  # a link stays one
        self._file: IO[str] = sys.stdout
        with self._named():
            self._file = self._open()
            lines = {"kestrel-l2": FORMAT, "contract": CONTRACT, "kestrel": kestrel.__version__, **header}
            for key, value in lines.items():
                self._file.write(f"# {key} {printable(str(value))}\n")
            self._file.write(f"# command {json.dumps(command)}\n")

    def _open(self) -> IO[str]:
        if str(self.path) == "-":
            return sys.stdout
        # The name of a model's folder need not be Unicode.
        if self.path.exists() and not self.path.is_file():
            return self.path.open("w", encoding="utf-8", errors="backslashreplace")  # refuses a folder
        handle, name = tempfile.mkstemp(
            prefix=f".{self._target.name}.", suffix=".partial", dir=self._target.parent
        )
        self._partial = Path(name)
        return os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace")

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of writing name the dump; nothing partial stays."""
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            self.discard()
            raise KestrelError(f"L2 dump {self.path} cannot be written: {error.strerror}") from error

    def rows(self, taps: Sequence[Tap], start: int, hashes: npt.NDArray[np.uint64]) -> None:
        """One line per tap of each position. ``hashes`` is u64[taps, M]."""
        if taps is not self._taps:  # each step of one length has the same list
            self._taps, self._names = taps, [(tap.name, tap.rows_from) for tap in taps]
        for row, column in enumerate(hashes.T):
            text, key = column.astype(">u8").tobytes().hex(), f"t{start + row}_"
            lines = [
                f"{key}{name} {text[at : at + 16]}\n"
                for (name, rows_from), at in zip(self._names, range(0, len(text), 16), strict=True)
                if row >= rows_from
            ]
            with self._named():
                self._file.write("".join(lines))
            self.keys += len(lines)

    def commit(self, generated: Sequence[int]) -> None:
        """Add the closing lines and give the file its name."""
        with self._named():
            self._file.write(f"# generated {json.dumps(list(generated))}\n# end {self.keys}\n")
            self._file.flush()
            if self._partial is not None:
                os.fsync(self._file.fileno())
                umask = os.umask(0)
                os.umask(umask)
                self._partial.chmod(0o666 & ~umask)  # mkstemp makes private files
            if self._file is not sys.stdout:
                self._file.close()
            if self._partial is not None:
                self._partial.replace(self._target)

    def discard(self) -> None:
        """Remove what was written; the file that had the name before stays."""
        if self._file is not sys.stdout:
            with suppress(OSError):  # of what was still to be written
                self._file.close()
        if self._partial is not None:
            self._partial.unlink(missing_ok=True)


@dataclass
class Dump:
    """A dump that was read."""

    path: Path
    header: dict[str, str] = field(default_factory=dict)
    command: dict[str, Any] | None = None
    generated: list[int] | None = None
    hashes: dict[str, int] = field(default_factory=dict)  # key -> hash, in file order
    keys: dict[str, Key] = field(default_factory=dict)  # the same keys, taken apart

    @property
    def tokens(self) -> list[int] | None:
        """Prompt and generated ids: token ``i`` is at position ``i``."""
        if self.command is None or "prompt_ids" not in self.command:
            return None
        return [*self.command["prompt_ids"], *(self.generated or [])]


def read_dump(path: Path | str) -> Dump:
    """Read a dump. A file without header lines (another program's) is read too; one cut off is refused.

    Raises KestrelError naming the file and line.
    """
    dump = Dump(Path(path))
    end: int | None = None
    try:
        text = dump.path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise KestrelError(f"{path} cannot be read as an L2 dump: {reason}") from None
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{path}, line {number}"
        try:
            if line.startswith("#"):
                key, _, value = line[1:].strip().partition(" ")
                if key == "command":
                    dump.command = _command(value)
                elif key == "generated":
                    dump.generated = _token_ids(json.loads(value), key)
                elif key == "end":
                    end = int(value)
                elif key:
                    dump.header[key] = value
            elif line.strip():
                tag, *values = line.split()
                key_parts = parse_key(tag)
                value = " ".join(values)
                if not _HASH.fullmatch(value):
                    raise ValueError(f"{value!r} is not a hash of 16 hex digits")
                if tag in dump.hashes:
                    raise ValueError(f"key {tag} occurs twice")
                dump.hashes[tag] = int(value, 16)
                dump.keys[tag] = key_parts
        except (ValueError, RecursionError) as error:
            raise KestrelError(f"{where}: {error}") from None
    if "kestrel-l2" in dump.header:
        if dump.header["kestrel-l2"] != FORMAT:
            raise KestrelError(
                f"{path}: dump format {dump.header['kestrel-l2']}, this kestrel reads {FORMAT}"
            )
        if end != len(dump.hashes):
            state = "has no end line" if end is None else f"should hold {end} keys"
            raise KestrelError(f"{path}: the dump is cut off: it {state} and holds {len(dump.hashes)} keys")
    if not dump.hashes:
        raise KestrelError(f"{path}: no keys in it: is it an L2 dump?")
    return dump


def _command(text: str) -> dict[str, Any]:
    command = json.loads(text)
    if not isinstance(command, dict):
        raise ValueError("command must be a JSON object")
    if "prompt_ids" in command:
        _token_ids(command["prompt_ids"], "command.prompt_ids")
    return command


def _token_ids(value: object, what: str) -> list[int]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError(f"{what} must be a list of token ids")
    return value
