"""``kestrel doctor``: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import json
import os
import platform
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import kestrel
from kestrel.cli import EXIT_FAILURE, Parser, command_parser, run_command
from kestrel.contract import CONTRACT
from kestrel.env import FOREIGN, Env, env
from kestrel.errors import KestrelError
from kestrel.paths import MANIFEST, demo_model_folder, resolve_model, user_models

PACKAGES = ("numpy", "ml_dtypes", "safetensors", "tokenizers", "jinja2", "rich", "gguf")
GPU_PACKAGES = (
    "cupy-cuda12x",
    "cupy-cuda13x",
    "cuda-bindings",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-nvrtc",
)
BENCH_BYTES = 1 << 29  # well above any cache
FPENV_DEFAULT = {"rounding": "nearest", "flush_to_zero": False, "denormals_are_zero": False}


def build_parser() -> Parser:
    parser = command_parser("doctor", "Report on this machine: CPU, GPU, packages, models.")
    parser.add_argument(
        "--bench", action="store_true", help="measure the memory's read bandwidth too (seconds)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 when the CPU reference can run, else 1; a missing GPU is no failure."""
    args = build_parser().parse_args(argv)
    report = {
        "kestrel": _kestrel(),
        "cpu": _cpu(args.bench),
        "gpu": _gpu(),
        "packages": _packages(PACKAGES),
        "models": _models(),
        "environment": _environment(),
    }
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        for title, facts in report.items():
            print(title)
            for line in _lines(facts):
                print(f"  {line}")
    return EXIT_FAILURE if "problem" in report["cpu"] else 0


def _kestrel() -> dict[str, Any]:
    return {
        "version": kestrel.__version__,
        "contract": CONTRACT,
        "folder": str(Path(kestrel.__file__).parent),
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
    }


def _cpu(bench: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": cpu_name(), "memory_gb": _memory_gb()}
    try:
        from kestrel import _native
    except ImportError as error:
        return {**facts, "problem": f"the native module cannot be loaded ({error}): reinstall kestrel"}
    levels = _native.isa_available()
    state = _native.fpenv_state()
    facts |= {
        "isa_levels": levels,
        "isa_used": env.isa or levels[-1],
        "threads": env.threads or _native.default_threads(),
        "mxcsr": f"{state['mxcsr']:#06x}",
        **{name: state[name] for name in FPENV_DEFAULT},  # type: ignore[literal-required]
    }
    if env.isa is not None and env.isa not in levels:
        facts["problem"] = f"KESTREL_ISA={env.isa}, but this CPU has {', '.join(levels)}"
    elif any(facts[name] != value for name, value in FPENV_DEFAULT.items()):
        facts["note"] = "a library in this process changed the floating-point mode; kestrel sets its own"
    if bench:
        counts = sorted({1, _native.default_threads()})
        facts["read_gb_per_s"] = {
            f"{count} threads": round(_native.read_bandwidth(BENCH_BYTES, count), 1) for count in counts
        }
    return facts


def cpu_name() -> str:
    """The processor as the system names it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gb() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)


def _gpu() -> dict[str, Any]:
    facts: dict[str, Any] = {"packages": _packages(GPU_PACKAGES)}
    try:
        from kestrel.cuda.compile import cache_folder, nvrtc_version
        from kestrel.cuda.environment import open_device
    except ImportError as error:
        return {**facts, "usable": False, "problem": str(error)}
    try:
        facts["kernel_cache"] = str(cache_folder())
    except KestrelError as error:
        facts["kernel_cache"] = f"none: {error}"
    try:
        facts["nvrtc"] = ".".join(map(str, nvrtc_version()))
    except KestrelError as error:
        facts["nvrtc"] = f"not found: {error}"
    devices: list[dict[str, Any]] = []
    try:
        devices.append(_device(open_device(0)))
        while True:
            devices.append(_device(open_device(len(devices))))
    except KestrelError as error:
        if not devices:
            facts["problem"] = str(error)
    facts["usable"] = bool(devices)
    facts["devices"] = devices
    return facts


def _device(device: Any) -> dict[str, Any]:
    return {
        "device": f"cuda:{device.index}",
        "name": device.name,
        "architecture": device.architecture,
        "multiprocessors": device.multiprocessors,
        "memory_gb": round(device.total_bytes / 1e9, 1),
        "driver": f"{device.driver // 1000}.{device.driver % 1000 // 10}",
    }


def _packages(names: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _models() -> dict[str, Any]:
    facts: dict[str, Any] = {}
    try:
        facts["default"] = str(resolve_model(None))
    except KestrelError as error:
        facts["default"] = f"none: {error}"
    folders = {Path("models").absolute()}
    with suppress(KestrelError):  # no home folder: the line above says so
        folders = {demo_model_folder().parent.absolute(), user_models().absolute()}
    found = sorted(path.parent for folder in folders for path in folder.glob(f"*/{MANIFEST}"))
    facts["found"] = [_model(folder) for folder in found]
    return facts


def _model(folder: Path) -> str:
    from kestrel.checkpoints.manifest import read_manifest

    try:
        manifest = read_manifest(folder)
    except KestrelError as error:
        return f"{folder}: {error}"
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    config = manifest.config
    return f"{folder}: {config.family}, {config.num_layers} layers, {manifest.wtype}, {size / 1e6:.0f} MB"


def _environment() -> dict[str, str]:
    names = [name for variable in Env.table() for name in (variable.name, *variable.aliases)]
    return {name: os.environ[name] for name in [*names, *FOREIGN] if os.environ.get(name)}


def _lines(facts: dict[str, Any]) -> list[str]:
    """``name: value`` lines, nested parts indented."""
    lines: list[str] = []
    for name, value in facts.items():
        label = name if name in PACKAGES or name.isupper() else name.replace("_", " ")
        if isinstance(value, dict):
            lines.append(f"{label}:")
            lines += [f"  {line}" for line in _lines(value)]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for item in value:
                lines.append(f"{label}:")
                lines += [f"  {line}" for line in _lines(item)]
        elif isinstance(value, list):
            lines.append(f"{label}: {', '.join(map(str, value)) or 'none'}")
        elif isinstance(value, bool):
            lines.append(f"{label}: {'yes' if value else 'no'}")
        else:
            lines.append(f"{label}: {value}")
    return lines or ["none"]


if __name__ == "__main__":
    sys.exit(run_command(main))
