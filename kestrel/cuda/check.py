"""``python -m kestrel.cuda.compile --check``: every kernel for every architecture, without a GPU."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from kestrel.cuda import compile as nvrtc
from kestrel.cuda.ptx_lint import Finding, early_findings, entry_points, lint
from kestrel.cuda.sources import KernelSources, kernels_folder, read_sources
from kestrel.errors import KestrelError
from kestrel.launch import PROGRAMMATIC


@dataclass(frozen=True)
class Resources:
    """What the assembler reports of one kernel."""

    kernel: str
    unit: str
    arch: str
    registers: int
    shared_bytes: int  # static; dynamic shared memory is set at launch
    stack_bytes: int
    spill_bytes: int  # stored and loaded


def resources(log: str, unit: str, arch: str) -> list[Resources]:
    """Parse the report of ``--ptxas-options=-v``."""
    found = []
    blocks = re.split(r"ptxas info\s*:\s*Compiling entry function '", log)[1:]
    for block in blocks:
        name = block.split("'", 1)[0]

        def number(pattern: str, text: str = block) -> int:
            match = re.search(pattern, text)
            return int(match.group(1)) if match else 0

        found.append(
            Resources(
                kernel=name,
                unit=unit,
                arch=arch,
                registers=number(r"Used (\d+) registers"),
                shared_bytes=number(r"(\d+) bytes smem"),
                stack_bytes=number(r"(\d+) bytes stack frame"),
                spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
            )
        )
    return found


def summarised(findings: Sequence[Finding]) -> list[str]:
    """The first finding of each kernel and rule, with the number of those like it."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.kernel, finding.rule), []).append(finding)
    return [f"{g[0]}" + (f" (and {len(g) - 1} more)" if len(g) > 1 else "") for g in groups.values()]


@dataclass(frozen=True)
class UnitReport:
    """Outcome of compiling one unit for one architecture."""

    unit: str
    arch: str
    resources: list[Resources]
    faults: list[str]


def check_unit(sources: KernelSources, unit: nvrtc.Unit, arch: str) -> UnitReport:
    """Compile, lint (exact units) and read the resource report."""
    try:
        text = sources.units[unit.name]
        result = nvrtc.compile_source(unit.name, text, sources.headers, arch, fast=unit.fast)
    except KestrelError as error:
        return UnitReport(unit.label, arch, [], [f"{unit.label} {arch}: {error}"])
    used = [r for r in resources(result.log, unit.label, arch) if r.kernel.endswith("_fast") == unit.fast]
    findings = [] if unit.fast else lint(result.ptx)
    if int(arch.removeprefix("sm_")) >= 90:
        findings += early_findings(result.ptx, PROGRAMMATIC)
    faults = [f"{unit.label} {arch}: {text}" for text in summarised(findings)]
    missing = set(nvrtc.kernels_in(result.cubin)) ^ set(entry_points(result.ptx))
    if missing:
        faults.append(f"{unit.label} {arch}: kernels of cubin and PTX differ: {', '.join(sorted(missing))}")
    return UnitReport(unit.label, arch, used, faults)


def check(sources: KernelSources, architectures: Iterable[str], jobs: int) -> list[UnitReport]:
    """All units for all architectures, in ``jobs`` processes: NVRTC compiles one at a time in each."""
    work = [(sources, unit, arch) for arch in architectures for unit in nvrtc.units(sources)]
    if jobs == 1:
        return [check_unit(*item) for item in work]
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(check_unit, *zip(*work, strict=True)))


def table(reports: Sequence[UnitReport], architectures: Sequence[str]) -> str:
    """One line a kernel: registers for each architecture, then the worst shared memory, stack and spills."""
    rows: dict[tuple[str, str], dict[str, Resources]] = {}
    for report in reports:
        for r in report.resources:
            rows.setdefault((r.unit, r.kernel), {})[r.arch] = r
    width = max([len(kernel) for _, kernel in rows] + [len("kernel")])
    head = f"{'unit':14s} {'kernel':{width}s} " + "".join(
        f"{a.removeprefix('sm_'):>5s}" for a in architectures
    )
    lines = [f"{'':{16 + width}s}registers for sm_", head + f"{'shared':>9s}{'stack':>7s}{'spill':>7s}"]
    for (unit, kernel), by_arch in sorted(rows.items()):
        registers = "".join(f"{by_arch[a].registers if a in by_arch else '-':>5}" for a in architectures)
        worst = [
            max(getattr(r, f) for r in by_arch.values())
            for f in ("shared_bytes", "stack_bytes", "spill_bytes")
        ]
        lines.append(f"{unit:14s} {kernel:{width}s} {registers}{worst[0]:>9d}{worst[1]:>7d}{worst[2]:>7d}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 when anything does not compile or breaks a rule."""
    parser = argparse.ArgumentParser(prog="python -m kestrel.cuda.compile", description=__doc__)
    parser.add_argument("--check", action="store_true", required=True, help="compile and lint every kernel")
    parser.add_argument(
        "--arch", action="append", metavar="sm_XX", help="only this architecture (repeatable)"
    )
    parser.add_argument("--kernels", type=Path, help="folder of kernel sources (default: the installed ones)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilations side by side")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the resource table as JSON too")
    given = parser.parse_args(arguments)
    architectures = given.arch or list(nvrtc.ARCHITECTURES)
    try:
        known = {f"sm_{a}" for a in nvrtc.supported_architectures()}
        unknown = [a for a in architectures if a not in known]
        if unknown:
            parser.error(f"NVRTC does not know {', '.join(unknown)}; it knows {', '.join(sorted(known))}")
        sources = read_sources(given.kernels or kernels_folder())
        if not sources.units:
            parser.error(f"no .cu file in {given.kernels or kernels_folder()}")
        reports = check(sources, architectures, given.jobs)
    except (KestrelError, OSError) as error:
        print(f"kestrel: {error}", file=sys.stderr)
        return 1
    print(f"NVRTC {'.'.join(map(str, nvrtc.nvrtc_version()))}")
    print("exact: " + " ".join(nvrtc.options("sm_XX", fast=False)))
    print("fast:  " + " ".join(nvrtc.options("sm_XX", fast=True)))
    print(table(reports, architectures))
    faults = [fault for report in reports for fault in report.faults]
    for fault in faults:
        print(fault, file=sys.stderr)
    kernels = {r.kernel for report in reports for r in report.resources}
    print(f"{len(kernels)} kernels, {len(reports)} compilations, {len(faults)} faults")
    if given.json:
        given.json.write_text(json.dumps([asdict(r) for p in reports for r in p.resources], indent=1) + "\n")
    return 1 if faults else 0
