"""Seconds from the start of `kestrel decode` to its first text, and to its end.

    python -m bench.startup -m models/smollm2-135m-instruct --cuda --cold

Processes run one after the other; medians with the lowest and highest. With ``--cold`` as many runs start
without compiled kernels (a cache folder of their own), in turn with the warm ones.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_once(command: Sequence[str], cache: str | None) -> tuple[float, float]:
    """Seconds until the first byte on stdout, and until the end. Raises RuntimeError with its message."""
    variables = {**os.environ, **({"KESTREL_CACHE_DIR": cache} if cache is not None else {})}
    begin = time.perf_counter()
    with subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first_byte = process.stdout.read(1)
        first = time.perf_counter() - begin
        process.stdout.read()
        message = process.stderr.read().decode(errors="replace").strip()
    if process.returncode != 0 or not first_byte:
        raise RuntimeError(f"{' '.join(command)} exited with {process.returncode}: {message}")
    return first, time.perf_counter() - begin


def measure(command: Sequence[str], repeats: int, *, cold: bool) -> dict[str, list[tuple[float, float]]]:
    """Times of warm starts and, in turn with them, of cold ones. The first warm one is not counted."""
    found: dict[str, list[tuple[float, float]]] = {"warm": []}
    run_once(command, None)
    for _ in range(repeats):
        found["warm"].append(run_once(command, None))
        if cold:
            with tempfile.TemporaryDirectory(prefix="kestrel-cold-") as cache:
                found.setdefault("cold", []).append(run_once(command, cache))
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("-m", "--model", metavar="FOLDER", help="default: as for kestrel decode")
    parser.add_argument("--cuda", action="store_true", help="on the GPU")
    parser.add_argument("--cold", action="store_true", help="also without compiled kernels")
    parser.add_argument("-r", "--repetitions", type=int, default=5, metavar="N", help="default 5")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times there too")
    args = parser.parse_args(argv)
    if args.repetitions < 1:
        parser.error("-r must be at least 1")
    command = [
        sys.executable,
        "-m",
        "kestrel.decode",
        "--raw",
        "-p",
        "The sky is",
        "-n",
        "1",
        "--ignore-eos",
        "-q",
    ]
    command += ["-m", args.model] if args.model is not None else []
    command += ["--cuda"] if args.cuda else []
    try:
        found = measure(command, args.repetitions, cold=args.cold)
    except RuntimeError as error:
        print(f"bench.startup: error: {error}", file=sys.stderr)
        return 1
    for name, times in found.items():
        for what, seconds in zip(("first text", "end"), zip(*times, strict=True), strict=True):
            middle = statistics.median(seconds)
            spread = f"{min(seconds):.2f} .. {max(seconds):.2f}, {len(seconds)} runs"
            print(f"{name}, {what}: {middle:.2f} s ({spread})")
    if args.json is not None:
        record = {"command": ["python", *command[1:]], "seconds": found}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
