"""What figures depend on, as found: machine, GPU, clocks, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import kestrel
from kestrel.contract import CONTRACT
from kestrel.doctor import cpu_name

_SMI = {
    "driver_version": "gpu_driver",
    "clocks.sm": "clock_sm_mhz",
    "clocks.max.sm": "clock_sm_max_mhz",
    "clocks.mem": "clock_memory_mhz",
    "power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
}


def software() -> dict[str, Any]:
    """Versions of kestrel and of what it runs on."""
    return {
        "build_commit": _commit(),
        "kestrel_version": kestrel.__version__,
        "contract": CONTRACT,
        "python": platform.python_version(),
        "numpy": importlib.metadata.version("numpy"),
        "system": f"{platform.system()} {platform.release()}",
        "cpu_info": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
    }


def gpu(bus_id: str) -> dict[str, Any]:
    """Driver, clocks and power of the GPU at this PCI address now, by nvidia-smi; an error is recorded."""
    command = [
        "nvidia-smi",
        f"--id={bus_id}",
        f"--query-gpu={','.join(_SMI)}",
        "--format=csv,noheader,nounits",
    ]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"nvidia_smi": str(error)}
    if result.returncode != 0:
        return {"nvidia_smi": (result.stderr or result.stdout).strip()}
    values = [value.strip() for value in result.stdout.strip().split(",")]
    return {name: _number(value) for name, value in zip(_SMI.values(), values, strict=False)}


def _number(text: str) -> float | int | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _commit() -> str | None:
    """The checkout's commit, with ``+`` when tracked files differ from it; None outside one."""
    root = Path(kestrel.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def reset_peak_memory() -> bool:
    """Start the process's peak resident size again from its present size; False where Linux refuses."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
