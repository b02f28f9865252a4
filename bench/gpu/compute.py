"""Stages that build, compile and run test suites on the GPU machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from typing import Any

from bench.gpu.context import Context

# Folders of tests that compare the reference across ISA levels; AVX-512 is often found on GPU hosts alone.
NATIVE_TESTS = ("tests/ops", "tests/numerics", "tests/model", "tests/oracle", "tests/kernels")


def _pytest_failures(text: str) -> list[str]:
    return re.findall(r"^(?:FAILED|ERROR) .*$", text, re.MULTILINE)


def _pytest(context: Context, log: str, *arguments: str) -> dict[str, Any]:
    result = context.python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=-ra", *arguments, log=log
    )
    lines = result.stdout.strip().splitlines() or [result.stderr[-300:]]
    failures = _pytest_failures(result.stdout)
    if result.returncode not in (0, 5) and not failures:
        failures = [f"pytest ended with {result.returncode}: {(result.stdout + result.stderr)[-1500:]}"]
    return {"failures": failures, "summary": lines[-1]}


def native(context: Context) -> dict[str, Any]:
    """The reference's own tests, at every ISA level this CPU has."""
    levels = context.python("-c", "from kestrel import _native; print(*_native.isa_available())")
    folders = [folder for folder in NATIVE_TESTS if any((context.root / folder).glob("test_*.py"))]
    result = _pytest(context, "native-tests.log", *folders)
    result["isa_levels"] = levels.stdout.split()
    result["folders"] = folders
    return result


def compile_kernels(context: Context) -> dict[str, Any]:
    """Compile every kernel for this GPU with an empty cache, then again with a full one."""
    from kestrel.cuda import compile as nvrtc
    from kestrel.cuda.environment import open_device
    from kestrel.cuda.sources import kernel_sources

    architecture = open_device(0).architecture
    sources = kernel_sources()
    folder = context.output / "cold-cache"
    old = os.environ.get("KESTREL_CACHE_DIR")
    os.environ["KESTREL_CACHE_DIR"] = str(folder)
    try:
        times = []
        for _ in range(2):
            begin = time.monotonic()
            nvrtc.cubin_paths(nvrtc.units(sources), architecture, sources)
            times.append(round(time.monotonic() - begin, 3))
    finally:
        os.environ.pop("KESTREL_CACHE_DIR")
        if old is not None:
            os.environ["KESTREL_CACHE_DIR"] = old
        shutil.rmtree(folder, ignore_errors=True)
    failures = [] if times[0] < 60 else [f"cold compilation took {times[0]} s, more than 60"]
    return {
        "failures": failures,
        "summary": f"{architecture}: cold {times[0]} s, warm {times[1]} s",
        "cold_seconds": times[0],
        "warm_seconds": times[1],
    }


def pytest_gpu(context: Context) -> dict[str, Any]:
    """tests/gpu: ops at awkward shapes, memory and errors, small whole models."""
    return _pytest(context, "gpu-tests.log", "tests/gpu")


def commands(context: Context) -> dict[str, Any]:
    """The command line: decode on CPU, GPU and mixtures, dumps compared by ``kestrel l2 diff``."""
    folder = next((p.parent for p in sorted(context.models.glob("*/kestrel.json"))), None)
    if folder is None:
        return {"failures": [f"no converted model in {context.models}"]}
    runs = {
        "cpu": ([], {}),
        "cuda": (["--cuda", "--l2exact"], {}),
        "no-graph": (["--cuda", "--l2exact", "--no-graph"], {}),
        "force-cpu": (["--cuda", "--l2exact"], {"KESTREL_FORCE_CPU": "1"}),
        "decode-cpu": (["--cuda", "--l2exact"], {"KESTREL_CUDA_DECODE": "0"}),
        "old-spelling": (["--cuda"], {"VLLM_CUDA_L2EXACT": "1"}),
        "bitexact": (["--cuda", "--bitexact"], {}),
        "fast": (["--cuda", "--mode", "fast"], {}),
    }
    failures, texts = [], {}
    for name, (flags, variables) in runs.items():
        dump = context.output / f"{name}.l2"
        command = ["-m", "kestrel.decode", "-m", str(folder), "-p", "The memory of a computer", "-n", "48"]
        result = context.python(*command, "--l2-dump", str(dump), *flags, variables=variables)
        texts[name] = result.stdout
        if result.returncode != 0:
            failures.append(f"{name}: exit code {result.returncode}: {result.stderr[-600:]}")
            continue
        different = context.python("-m", "kestrel.l2", "diff", str(context.output / "cpu.l2"), str(dump))
        exact = name not in ("bitexact", "fast")
        if different.returncode != (0 if exact else 3):
            failures.append(f"{name}: l2 diff gave {different.returncode}: {different.stdout[-600:]}")
        if exact and result.stdout != texts["cpu"]:
            failures.append(f"{name}: text differs: {result.stdout!r}")
    for name, flags, code, message in (
        ("no such GPU", ["--device", "cuda:77"], 1, "cuda:77"),
        ("too much context", ["--cuda", "-c", "999999999"], 2, "context"),
    ):
        result = context.python("-m", "kestrel.decode", "-m", str(folder), "-p", "x", "-n", "1", *flags)
        if result.returncode != code or message not in result.stderr:
            failures.append(f"{name}: exit code {result.returncode}: {result.stderr[-600:]}")
    return {"failures": failures, "summary": f"{len(runs)} runs of decode", "text": texts.get("cuda")}


def sanitizer(context: Context) -> dict[str, Any]:
    """compute-sanitizer (memcheck, racecheck) over every op and a small whole model."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"failures": ["compute-sanitizer is not on the PATH"]}
    failures, summaries = [], []
    for name in ("memcheck", "racecheck"):
        # API errors are not looked for: cuda-bindings asks older drivers for functions that they do not have.
        options = [
            "--tool",
            name,
            "--error-exitcode",
            "9",
            "--print-limit",
            "20",
            "--report-api-errors",
            "no",
        ]
        result = subprocess.run(
            [tool, *options, sys.executable, "-m", "bench.gpu.sanitizer_target", name],
            cwd=context.root,
            text=True,
            capture_output=True,
            timeout=280,
        )
        text = result.stdout + result.stderr
        (context.output / f"sanitizer-{name}.log").write_text(text)
        errors = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: \d.*", text)
        summaries.append(f"{name}: {errors[-1] if errors else 'no summary'}")
        if result.returncode != 0 or "target finished" not in text:
            failures.append(f"{name} ended with {result.returncode}: {text[-1500:]}")
    return {"failures": failures, "summary": "; ".join(summaries)}
