"""L2 dump files: ``#`` lines that say where a dump comes from, then one ``<key> <hash>`` line per value.

The lines below the header are equal as text for equal bits, whatever made them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

import kestrel
from kestrel.contract import CONTRACT
from kestrel.errors import KestrelError
from kestrel.l2_fields import Key, parse_key
from kestrel.model import Tap, TapLevel

FORMAT = "1"


class DumpWriter:
    """Writes a dump beside its final name and moves it there when it is whole. ``-`` writes to stdout.

    Give it to ``Engine.generate`` as the sink, then call ``commit`` or ``discard``.
    """

    def __init__(
        self, path: Path | str, level: TapLevel, header: Mapping[str, Any], command: Mapping[str, Any]
    ):
        """``header`` becomes ``# key value`` lines; ``command`` is what a re-run needs, kept as JSON."""
        self.path = Path(path)
        self.level = level
        self.keys = 0
        self._partial: Path | None = None
        self._file: IO[str]
        if str(path) == "-":
            self._file = sys.stdout
        else:
            try:
                handle, name = tempfile.mkstemp(
                    prefix=f".{self.path.name}.", suffix=".partial", dir=self.path.parent
                )
            except OSError as error:
                raise KestrelError(f"L2 dump {self.path} cannot be written: {error.strerror}") from error
            self._partial = Path(name)
            self._file = os.fdopen(handle, "w", encoding="utf-8")
        lines = {"kestrel-l2": FORMAT, "contract": CONTRACT, "kestrel": kestrel.__version__, **header}
        for key, value in lines.items():
            self._file.write(f"# {key} {value}\n")
        self._file.write(f"# command {json.dumps(command)}\n")

    def rows(self, taps: Sequence[Tap], start: int, hashes: npt.NDArray[np.uint64]) -> None:
        """One line per tap of each position. ``hashes`` is u64[taps, M]."""
        columns = hashes.T.tolist()
        for row, values in enumerate(columns):
            present = [(tap, value) for tap, value in zip(taps, values, strict=True) if row >= tap.rows_from]
            self._file.writelines(f"{tap.key(start + row)} {value:016x}\n" for tap, value in present)
            self.keys += len(present)

    def commit(self, generated: Sequence[int]) -> None:
        """Add the closing lines and give the file its name."""
        self._file.write(f"# generated {json.dumps(list(generated))}\n# end {self.keys}\n")
        self._file.flush()
        if self._partial is None:
            return
        os.fsync(self._file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        self._partial.chmod(0o666 & ~umask)  # mkstemp makes private files
        self._file.close()
        self._partial.replace(self.path)

    def discard(self) -> None:
        """Remove what was written; the file that had the name before stays."""
        if self._partial is not None:
            self._file.close()
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
        raise KestrelError(f"{path} cannot be read as an L2 dump: {error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path}, line {number}"
        try:
            if line.startswith("#"):
                key, _, value = line[1:].strip().partition(" ")
                if key == "command":
                    dump.command = json.loads(value)
                elif key == "generated":
                    dump.generated = json.loads(value)
                elif key == "end":
                    end = int(value)
                elif key:
                    dump.header[key] = value
            elif line.strip():
                tag, value = line.split()
                key_parts = parse_key(tag)
                if len(value) != 16:
                    raise ValueError(f"{value!r} is not a hash of 16 hex digits")
                if tag in dump.hashes:
                    raise ValueError(f"key {tag} occurs twice")
                dump.hashes[tag] = int(value, 16)
                dump.keys[tag] = key_parts
        except ValueError as error:
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
