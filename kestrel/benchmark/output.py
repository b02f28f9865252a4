"""Records as a Markdown table, JSON, JSON lines and CSV; reading the ones that hold everything back."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kestrel.benchmark.records import Record
from kestrel.errors import KestrelError, UsageError


def _size(count: float | None) -> str:
    return "-" if count is None else f"{count / 1e9:.2f} GB"


def _mode(record: Record) -> str:
    taps = "" if record["taps"] == "off" else ", full dump"
    return str(record["mode"]) + ("" if record["graph"] else ", eager") + taps


def _share(record: Record) -> str:
    share = record["share_of_bandwidth"]
    return "-" if share is None else f"{100 * share:.0f} %"


_COLUMNS: dict[str, Callable[[Record], str]] = {
    "model": lambda r: f"{r['model_filename']} {r['model_type']}",
    "size": lambda r: _size(r["model_size"]),
    "device": lambda r: f"{r['device']}{' t' + str(r['n_threads']) if r['isa'] else ''}",
    "mode": _mode,
    "test": lambda r: str(r["test"]),
    "ms/token": lambda r: f"{r['ms_per_token_median']:.3f}",
    "p5 .. p95": lambda r: f"{r['ms_per_token_p5']:.3f} .. {r['ms_per_token_p95']:.3f}",
    "tok/s": lambda r: f"{r['ts_median']:.1f}",
    "GB/s": lambda r: "-" if r["gb_per_second"] is None else f"{r['gb_per_second']:.1f}",
    "of bandwidth": _share,
    "peak memory": lambda r: _size(r["peak_memory_bytes"]),
    "output hash": lambda r: str(r["output_hash"]) + ("" if r["bits_promised"] else " (free)"),
}
_RIGHT = {"size", "ms/token", "p5 .. p95", "tok/s", "GB/s", "of bandwidth", "peak memory"}


def markdown(records: Sequence[Record]) -> str:
    """An aligned table, and the lines that say what the figures mean."""
    head = list(_COLUMNS)
    rows = [[column(record) for column in _COLUMNS.values()] for record in records]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if name in _RIGHT else cell.ljust(width)
            for name, cell, width in zip(head, cells, widths, strict=True)
        )
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join(
        "-" * (w + 1) + ":" if name in _RIGHT else "-" * (w + 2) for name, w in zip(head, widths, strict=True)
    )
    return "\n".join([line(head), rule + "|", *map(line, rows), "", *_notes(records)]) + "\n"


def _notes(records: Sequence[Record]) -> list[str]:
    found: dict[str, None] = {}
    for r in records:
        repeats = len(r["samples_ns"])
        found[f"ms/token: median of {repeats} repeats, 5th and 95th percentile over them."] = None
        found[
            f"{r['device']}: {r['gpu_info'] or r['cpu_info']}, {r['bandwidth_kind']} measured at "
            f"{r['bandwidth_gb_per_second']:.1f} GB/s."
        ] = None
        if r["n_depth"]:
            found["@ dN: N positions of seeded KV rows before the test, not N tokens that ran."] = None
        if r["synthetic"]:
            found["Synthetic weights: sizes and statistics of the named model, no meaning."] = None
        if not r["bits_promised"]:
            found["(free): this mode promises no bits."] = None
    r = records[0]
    found[
        f"kestrel {r['kestrel_version']} ({r['build_commit'] or 'no checkout'}), contract {r['contract']}."
    ] = None
    return [f"{note}  " for note in found]


def to_json(records: Sequence[Record]) -> str:
    return json.dumps(list(records), indent=1) + "\n"


def to_jsonl(records: Sequence[Record]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def to_csv(records: Sequence[Record]) -> str:
    """One column a key; lists as JSON."""
    names = list(dict.fromkeys(name for record in records for name in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    for record in records:
        writer.writerow({k: json.dumps(v) if isinstance(v, list) else v for k, v in record.items()})
    return text.getvalue()


WRITERS: dict[str, Callable[[Sequence[Record]], str]] = {
    ".md": markdown,
    ".json": to_json,
    ".jsonl": to_jsonl,
    ".csv": to_csv,
}


def check_output(path: Path) -> None:
    """UsageError unless the file's name says a format that is known, and its folder exists."""
    if path.suffix not in WRITERS:
        raise UsageError(f"{path}: the format follows from the ending: {', '.join(WRITERS)}")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}")


def write(path: Path, records: Sequence[Record]) -> None:
    """In the format that the file's ending names; the file appears whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(WRITERS[path.suffix](records), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise KestrelError(f"{path} cannot be written: {error.strerror}") from error


def read(path: Path) -> list[Record]:
    """Records of a ``.json`` or ``.jsonl`` file. Raises KestrelError naming the file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KestrelError(f"{path} cannot be read: {error}") from None
    records: list[Any] = []
    if path.suffix == ".jsonl":
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                records.append(_parse(line, f"{path}, line {number}"))
    else:
        parsed = _parse(text, str(path))
        records = parsed if isinstance(parsed, list) else [parsed]
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or "output_hash" not in record or "samples_ns" not in record:
            raise KestrelError(f"{path}: entry {number} is not a record of kestrel bench")
    return records


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise KestrelError(f"{where} is not JSON: {error}") from None
