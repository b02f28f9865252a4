"""Runs a matrix of models, modes and depths, compares it with the runs before, and writes a page of plots.

    make nightly                                     # bench/nightly.toml
    python -m bench.nightly --config my.toml --history h.jsonl --html h.html
    python -m bench.nightly --judge-only             # judge the history's last run again
    python -m bench.nightly --accept "new router"    # this run's times are the new normal

Exit code 0; 1 for a regression (rule: bench/judge.py) or a model that could not be run; 3 for changed bits.
A series that looks slower is measured a second time, and is a regression only when it is slower both times.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.judge import Verdict, judge
from bench.report import page
from kestrel.backends import parse_device
from kestrel.benchmark.output import read
from kestrel.benchmark.records import SPEED_KEY, Record, key_of
from kestrel.errors import KestrelError, UsageError
from kestrel.paths import resolve_model

ROOT = Path(__file__).resolve().parent.parent
EXIT_FAILURE, EXIT_USAGE, EXIT_DIFFERENT = 1, 2, 3


@dataclass(frozen=True)
class Entry:
    """One model of the matrix on one device."""

    device: str
    shape: str | None = None
    model: str | None = None
    modes: list[str] = field(default_factory=lambda: ["l2exact"])
    depths: list[int] = field(default_factory=lambda: [0])
    n_prompt: int = 128
    n_gen: int = 32
    repetitions: int = 7
    threads: int | None = None
    optional: bool = False

    @property
    def label(self) -> str:
        return f"{self.shape or self.model} on {self.device}"

    def command(self, output: Path) -> list[str]:
        """The ``kestrel bench`` that measures it."""
        which = ["--shape", self.shape] if self.shape is not None else ["--model", str(self.model)]
        tests = ["-p", str(self.n_prompt), "-n", str(self.n_gen), "-d", ",".join(map(str, self.depths))]
        threads = ["-t", str(self.threads)] if self.threads is not None else []
        modes = ["--mode", ",".join(self.modes)]
        repeats = ["-r", str(self.repetitions)]
        rest = ["--device", self.device, "--quiet", "-o", str(output)]
        return [sys.executable, "-m", "kestrel.bench", *which, *tests, *threads, *modes, *repeats, *rest]


def read_config(path: Path) -> list[Entry]:
    """The matrix. Raises UsageError that names what is wrong."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: {error}") from None
    unknown = raw.keys() - {"defaults", "models"}
    known = {f.name: str(f.type) for f in fields(Entry)}
    entries = []
    defaults = raw.get("defaults", {})
    for number, values in enumerate(raw.get("models", []), 1):
        where = f"{path}: model {number}"
        merged = {**defaults, **values}
        unknown |= merged.keys() - known.keys()
        if ("shape" in merged) == ("model" in merged):
            raise UsageError(f"{where} needs either shape or model")
        if "device" not in merged:
            raise UsageError(f"{where} needs a device")
        for name, value in merged.items():
            if name in known and not _fits(value, known[name]):
                raise UsageError(f"{where}: {name} must be {known[name]}, not {value!r}")
        if not unknown:
            entries.append(Entry(**merged))
    if unknown:
        raise UsageError(f"{path}: unknown keys {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    if not entries:
        raise UsageError(f"{path}: no [[models]] in it")
    return entries


def _fits(value: Any, kind: str) -> bool:
    if kind.startswith("list["):
        inner = int if "int" in kind else str
        return isinstance(value, list) and bool(value) and all(type(item) is inner for item in value)
    wanted = {"str": str, "int": int, "bool": bool}[kind.split(" ")[0]]
    return type(value) is wanted


# -- measuring -----------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """What a run of the matrix gave."""

    records: list[Record] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # optional entries that cannot run here
    failures: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)  # entries whose own repeats or variants disagreed


def run_entry(entry: Entry, measured: Measured) -> list[Record]:
    """Measure one entry in a process of its own, so that memory and caches are its own."""
    with tempfile.TemporaryDirectory(prefix="kestrel-nightly-") as folder:
        output = Path(folder) / "records.jsonl"
        result = subprocess.run(entry.command(output), cwd=ROOT, capture_output=True, text=True)
        records = read(output) if output.exists() else []
    message = " ".join(result.stderr.strip().splitlines()[-3:])
    if result.returncode == EXIT_DIFFERENT:
        measured.differing.append(f"{entry.label}: {message}")
    elif result.returncode != 0:
        measured.failures.append(f"{entry.label}: {message}")
    return records


def missing(entry: Entry) -> str | None:
    """Why this machine cannot run an entry at all: no such model or no such GPU."""
    try:
        if entry.model is not None:
            resolve_model(entry.model)
        kind, index = parse_device(entry.device)
        if kind == "cuda":
            from kestrel.cuda.environment import open_device

            open_device(index)
    except UsageError:
        raise
    except KestrelError as error:
        return str(error)
    return None


def measure(entries: Sequence[Entry], history: Sequence[Record]) -> Measured:
    """All entries; those with a series that looks slower a second time, of which the faster one counts."""
    measured = Measured()
    for entry in entries:
        absent = missing(entry) if entry.optional else None
        if absent is not None:
            measured.left_out.append(f"{entry.label}: {absent}")
            continue
        print(f"{entry.label} ...", file=sys.stderr, flush=True)
        records = run_entry(entry, measured)
        if any(judge(record, history).status == "regression" for record in records):
            print(f"{entry.label}: looks slower, measured again", file=sys.stderr, flush=True)
            again = {key_of(r, SPEED_KEY): r for r in run_entry(entry, measured)}
            records = [_faster(record, again.get(key_of(record, SPEED_KEY))) for record in records]
        measured.records += records
    return measured


def _faster(first: Record, second: Record | None) -> Record:
    """Of two measurements of a series the faster one, unless their bits differ: then the second."""
    if second is None or second["output_hash"] != first["output_hash"]:
        return second or first
    return min(first, second, key=lambda record: float(record["ms_per_token_median"]))


# -- history -------------------------------------------------------------------------------------------------


def runs_of(history: Sequence[Record]) -> list[str]:
    """Names of the runs, in order."""
    return list(dict.fromkeys(str(record.get("run")) for record in history))


def judge_run(records: Sequence[Record], history: Sequence[Record]) -> list[Verdict]:
    """A verdict for each record of a run; within the run, devices are held to each other's bits."""
    verdicts: list[Verdict] = []
    seen = list(history)
    for record in records:
        verdict = judge(record, seen)
        verdicts.append(verdict)
        # Only the bits: a record of this run must not count as an earlier time.
        seen.append({**record, "verdict": verdict.status, "model_filename": None})
    return verdicts


def append(path: Path, records: Sequence[Record]) -> None:
    """Add a run to the history in one write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def exit_code(verdicts: Sequence[Verdict], measured: Measured) -> int:
    """Changed bits before slower times before all else."""
    if measured.differing or any(verdict.status == "bits changed" for verdict in verdicts):
        return EXIT_DIFFERENT
    if measured.failures or any(verdict.status == "regression" for verdict in verdicts):
        return EXIT_FAILURE
    return 0


def summary(records: Sequence[Record], verdicts: Sequence[Verdict], measured: Measured) -> str:
    """Lines for a terminal."""
    lines = []
    for record, verdict in zip(records, verdicts, strict=True):
        mark = "FAILED" if verdict.failed else "ok"
        mode = record["mode"]
        name = f"{record['model_filename']}, {record['device']}, {mode}, {record['test']}"
        lines.append(f"{mark:6s} {name}: {verdict.status}: {verdict.reason}")
    lines += [f"FAILED {text}" for text in [*measured.differing, *measured.failures]]
    lines += [f"left out: {text}" for text in measured.left_out]
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.nightly",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    results = ROOT / "bench" / "results"
    parser.add_argument("--config", type=Path, default=ROOT / "bench" / "nightly.toml", metavar="FILE")
    parser.add_argument("--history", type=Path, default=results / "nightly.jsonl", metavar="FILE")
    parser.add_argument("--html", type=Path, default=results / "nightly.html", metavar="FILE")
    parser.add_argument("--accept", metavar="REASON", help="times are judged from this run on")
    parser.add_argument(
        "--judge-only", action="store_true", help="judge the history's last run and write the page"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        history = read(args.history) if args.history.exists() else []
        if args.judge_only:
            return judge_last(args, history)
        measured = measure(read_config(args.config), history)
    except UsageError as error:
        print(f"bench.nightly: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KestrelError as error:
        print(f"bench.nightly: error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    verdicts = judge_run(measured.records, history)
    if args.accept is not None:
        verdicts = [
            Verdict("new", f"accepted: {args.accept}") if verdict.status == "regression" else verdict
            for verdict in verdicts
        ]
    records = [
        {**record, "run": now, "verdict": verdict.status, "reason": verdict.reason, "accepted": args.accept}
        for record, verdict in zip(measured.records, verdicts, strict=True)
    ]
    append(args.history, records)
    finish(args.html, [*history, *records], records, verdicts, measured)
    return exit_code(verdicts, measured)


def judge_last(args: argparse.Namespace, history: list[Record]) -> int:
    """Judge the last run of the history by the runs before it; the file stays as it is."""
    if not history:
        raise KestrelError(f"{args.history} holds no run: measure one without --judge-only")
    last = runs_of(history)[-1]
    before = [record for record in history if str(record.get("run")) != last]
    records = [record for record in history if str(record.get("run")) == last]
    verdicts = judge_run(records, before)
    judged = [
        {**record, "verdict": verdict.status, "reason": verdict.reason}
        for record, verdict in zip(records, verdicts, strict=True)
    ]
    finish(args.html, [*before, *judged], records, verdicts, Measured())
    return exit_code(verdicts, Measured())


def finish(
    html: Path,
    history: Sequence[Record],
    records: Sequence[Record],
    verdicts: Sequence[Verdict],
    measured: Measured,
) -> None:
    """Write the page and print the summary."""
    html.parent.mkdir(parents=True, exist_ok=True)
    troubles = [*measured.differing, *measured.failures]
    html.write_text(page(history, troubles, measured.left_out), encoding="utf-8")
    print(summary(records, verdicts, measured))
    print(html)


if __name__ == "__main__":
    sys.exit(main())
