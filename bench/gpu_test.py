"""Every check that needs the GPU, in one command: ``make gpu-test`` or ``python bench/gpu_test.py``.

Stages run in order and write their results into one JSON file as they finish, so that a run that is cut short
keeps what it found. ``--only`` picks stages, ``--list`` shows them. Exit code 1 when any check failed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.gpu.context import Context  # noqa: E402

# Stage -> module and function under bench/gpu; loaded when it starts, after the native module was built.
STAGES = {
    "isa": "ops.isa_levels",
    "compile": "compute.compile_kernels",
    "pytest": "compute.pytest_gpu",
    "unary": "unary.all_inputs",
    "quotients": "unary.quotients",
    "seed-table": "unary.seed_table",
    "ops": "ops.every_op",
    "geometry": "ops.geometries",
    "models": "models.cpu_against_gpu",
    "graph": "models.graph_against_eager",
    "mixtures": "models.mixtures",
    "modes": "models.modes",
    "commands": "compute.commands",
    "sanitizer": "compute.sanitizer",
    "synthetic": "synthetic.experiment",
    "native": "compute.native",
}


def stage(name: str) -> Callable[[Context], dict[str, Any]]:
    module, function = STAGES[name].split(".")
    found: Callable[[Context], dict[str, Any]] = getattr(
        importlib.import_module(f"bench.gpu.{module}"), function
    )
    return found


def environment() -> dict[str, Any]:
    """What the figures depend on, as found."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    cpuinfo = Path("/proc/cpuinfo").read_text()
    facts["cpu"] = next((x.split(":")[1].strip() for x in cpuinfo.splitlines() if "model name" in x), "?")
    query = "name,driver_version,clocks.sm,clocks.mem,memory.total"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        facts["gpu"] = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except OSError as error:
        facts["gpu"] = f"nvidia-smi: {error}"
    digest = hashlib.sha256()
    for path in sorted(p for folder in ("kernels", "native", "kestrel") for p in (ROOT / folder).rglob("*")):
        if path.suffix in {".cu", ".cuh", ".h", ".cpp", ".py"}:
            digest.update(f"{path.relative_to(ROOT)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    facts["sources_sha256"] = digest.hexdigest()  # of kernels/, native/ and kestrel/
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=STAGES, metavar="STAGE", help="repeatable")
    parser.add_argument("--skip", action="append", choices=STAGES, metavar="STAGE", default=[])
    parser.add_argument("--list", action="store_true", help="name the stages and stop")
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="folder of converted models")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and positions")
    parser.add_argument("--output", type=Path, help="folder for the JSON (default bench/results, or $OUT)")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no stage after this many seconds")
    given = parser.parse_args()
    if given.list:
        for name in STAGES:
            print(f"{name:12s} {(stage(name).__doc__ or '').splitlines()[0]}")
        return 0
    output = given.output or Path(os.environ.get("OUT", str(ROOT / "bench" / "results")))
    output.mkdir(parents=True, exist_ok=True)
    target = output / f"gpu-test-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    context = Context(root=ROOT, models=given.models, quick=given.quick, output=output)
    built = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if built.returncode != 0:
        print(f"the native module does not build:\n{built.stderr}", file=sys.stderr)
        return 1
    report: dict[str, Any] = {"environment": environment(), "stages": {}}
    began = time.monotonic()
    for name in STAGES:
        if (given.only and name not in given.only) or name in given.skip:
            continue
        if time.monotonic() - began > given.seconds:
            print(f"== {name}: not started, {given.seconds:.0f} s are over", flush=True)
            report["stages"][name] = {"ok": False, "failures": ["not started: out of time"]}
            continue
        print(f"== {name}", flush=True)
        start = time.monotonic()
        try:
            result = stage(name)(context)
        except Exception:
            result = {"failures": [traceback.format_exc()]}
        result["ok"] = not result.get("failures")
        result["seconds"] = round(time.monotonic() - start, 2)
        report["stages"][name] = result
        target.write_text(json.dumps(report, indent=1, default=str) + "\n")
        for failure in result.get("failures", [])[:20]:
            print(f"   FAILED {failure}", flush=True)
        print(f"== {name}: {'ok' if result['ok'] else 'FAILED'} in {result['seconds']} s", flush=True)
    print(f"{target}")
    for name, result in report["stages"].items():
        print(f"{name:12s} {'ok' if result['ok'] else 'FAILED':8s} {result.get('summary', '')}")
    return 0 if all(result["ok"] for result in report["stages"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
