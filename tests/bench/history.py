"""A made-up history: runs of a GPU model and a CPU model, with faults planted in chosen runs."""

from __future__ import annotations

import random
from typing import Any

from kestrel.benchmark.records import Record

BASE = {  # (mode, depth) -> ms/token
    ("l2exact", 0): 0.98,
    ("l2exact", 16384): 1.36,
    ("fast", 0): 0.96,
    ("fast", 16384): 1.33,
    ("bitexact", 0): 0.97,
    ("bitexact", 16384): 1.36,
}


def record(
    run: int,
    mode: str = "l2exact",
    depth: int = 0,
    *,
    ms: float | None = None,
    noise: float = 0.003,
    repeats: int = 7,
    output_hash: str = "00112233aabbccdd",
    rng: random.Random | None = None,
    **values: Any,
) -> Record:
    """One record; ``noise`` is the relative deviation of repeats, a third of it moves the whole run."""
    rng = rng or random.Random(f"{run} {mode} {depth}")
    centre = (BASE[mode, depth] if ms is None else ms) * (1 + rng.gauss(0, noise / 3))
    samples = sorted(centre * (1 + abs(rng.gauss(0, noise))) for _ in range(repeats))
    count = int(values.get("n_gen", 64)) or int(values["n_prompt"])
    return {
        "model_filename": "synthetic qwen3-30b-a3b",
        "model_type": "qwen3_moe q4local, head q8local",
        "weights": "synthetic-1 qwen3-30b-a3b",
        "cpu_info": "a CPU",
        "gpu_info": "NVIDIA H200",
        "backends": "CUDA",
        "device": "cuda:0",
        "n_threads": 1,
        "isa": None,
        "mode": mode,
        "graph": True,
        "taps": "off",
        "n_ubatch": 256,
        "n_prompt": 0,
        "n_gen": 64,
        "n_depth": depth,
        "test": f"tg64 @ d{depth}" if depth else "tg64",
        "seed": 0,
        "fill_version": 1,
        "contract": "1",
        "bits_promised": mode == "l2exact",
        "output_hash": output_hash,
        "samples_ns": [round(1e6 * s * count) for s in samples],
        "ms_per_token_median": samples[repeats // 2],
        "ms_per_token_p5": samples[0],
        "ms_per_token_p95": samples[-1],
        "ts_median": 1e3 / samples[repeats // 2],
        "test_time": f"2026-11-{1 + run:02d}T02:00:00Z",
        "run": f"2026-11-{1 + run:02d}T02:00:00Z",
        "build_commit": f"{0xABC000 + run:x}",
        "kestrel_version": "0.1.0",
        "verdict": "ok",
        "reason": "",
        **values,
    }


CPU: dict[str, Any] = {
    "model_filename": "smollm2-135m-instruct",
    "model_type": "llama q8local, head q8local",
    "weights": "0123456789abcdef",
    "gpu_info": "",
    "backends": "CPU",
    "device": "cpu",
    "isa": "avx2",
    "n_threads": 2,
}


def history(runs: int) -> list[Record]:
    """``runs`` healthy runs."""
    found = []
    for run in range(runs):
        found += [record(run, mode, depth) for mode, depth in BASE]
        found.append(record(run, ms=9.1, noise=0.02, **CPU))
        found.append(
            record(run, ms=3.2, noise=0.02, **CPU, n_gen=0, n_prompt=128, test="pp128", output_hash="77" * 8)
        )
    return found
