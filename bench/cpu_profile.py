"""Where the time of one step goes on the CPU: each op of a forward pass timed alone, grouped by role.

    .venv/bin/python bench/cpu_profile.py --shape qwen3-0.6b                  # decoding one token
    .venv/bin/python bench/cpu_profile.py --shape qwen3-0.6b --rows 256 --position 0

``whole step`` is the program run at once, as in decoding; the ops run one by one cost a few microseconds more
each (a call from Python, a hand-over between threads). ``--cpu-time`` counts the calling thread's CPU time
instead of wall time, for a machine that others use too; it needs one thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from synthetic import SHAPES, synthetic_weights

from kestrel import _native
from kestrel.config import ModelConfig
from kestrel.cpu import CpuBackend
from kestrel.errors import KestrelError
from kestrel.kvcache import KVCache
from kestrel.model import Model
from kestrel.ops import Op, WType
from kestrel.weights import Weights, load_model_folder


def role(op: Op) -> str:
    """ "matmul gate_up" of "l12.gate_up": the layers' ops of one kind together."""
    part = op.label.rpartition(".")[2]
    return f"{op.name} {part}" if op.name in ("matmul", "moe_matmul") else op.name


def op_bytes(op: Op, config: ModelConfig, positions: int) -> int:
    moved = op.spec.bytes_moved(op.args)
    if op.name == "attention":
        moved += positions * KVCache.bytes_per_slot(config) // config.num_layers
    return moved


def profile(config: ModelConfig, weights: Weights, args: argparse.Namespace, console: Console) -> None:
    backend = CpuBackend(args.threads, args.isa)
    if args.cpu_time and backend.threads != 1:
        raise KestrelError("--cpu-time sees the calling thread alone: give -t 1")
    clock = time.thread_time if args.cpu_time else time.perf_counter
    last = args.position + args.rows
    model = Model(config, weights, backend, slots=last, max_rows=max(args.rows, min(last, 256)))
    rng = np.random.default_rng(0)
    ids = rng.integers(0, config.vocab_size, last).astype(np.int32)
    for start in range(0, args.position, 256):  # KV rows before the step
        rows = min(256, args.position - start)
        model.load_rows(ids[start : start + rows], np.arange(start, start + rows, dtype=np.int32))
        model.step(rows, 0).program.run()
    model.load_rows(ids[args.position :], np.arange(args.position, last, dtype=np.int32))
    step = model.step(args.rows, 1)
    step.program.run()

    whole: list[float] = []
    single: dict[str, list[float]] = defaultdict(list)
    count: dict[str, int] = defaultdict(int)
    moved: dict[str, int] = defaultdict(int)
    for op in step.ops:
        count[role(op)] += 1
        moved[role(op)] += op_bytes(op, config, last)
    for _ in range(args.rounds):
        began = clock()
        step.program.run()
        whole.append(clock() - began)
        times: dict[str, float] = defaultdict(float)
        for index, op in enumerate(step.ops):
            began = clock()
            step.program.run(index, index + 1)
            times[role(op)] += clock() - began
        for name, seconds in times.items():
            single[name].append(seconds)
    _show(single, count, moved, statistics.median(whole), backend, args, console)


def _show(
    single: dict[str, list[float]],
    count: dict[str, int],
    moved: dict[str, int],
    whole: float,
    backend: CpuBackend,
    args: argparse.Namespace,
    console: Console,
) -> None:
    median = {name: statistics.median(times) for name, times in single.items()}
    total = sum(median.values())
    kind = "CPU time" if args.cpu_time else "wall time"
    title = f"{args.rows} rows at position {args.position}, {backend.threads} threads, {backend.isa}, {kind}"
    table = Table(title=title)
    table.add_column("op")
    for column in ("count", "us each", "ms", "share", "MB", "GB/s"):
        table.add_column(column, justify="right")

    def row(name: str, times: int | None, seconds: float, nbytes: int) -> None:
        table.add_row(
            name,
            "" if times is None else str(times),
            "" if times is None else f"{seconds / times * 1e6:.1f}",
            f"{seconds * 1e3:.3f}",
            f"{seconds / total:.1%}",
            f"{nbytes / 1e6:.2f}",
            f"{nbytes / seconds / 1e9:.1f}",
        )

    for name in sorted(median, key=lambda n: -median[n]):
        row(name, count[name], median[name], moved[name])
    table.add_section()
    row("sum of ops", None, total, sum(moved.values()))
    row("whole step", None, whole, sum(moved.values()))
    console.print(table)
    console.print(f"plain read {_native.read_bandwidth(1 << 28, backend.threads):.1f} GB/s")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("-m", "--model", type=Path, help="kestrel model folder")
    source.add_argument("--shape", choices=sorted(SHAPES), help="synthetic q4local weights, q8local tables")
    parser.add_argument("-t", "--threads", type=int, help="default: every CPU this process may use")
    parser.add_argument("--isa", choices=("scalar", "avx2", "avx512"), help="default: the best of this CPU")
    parser.add_argument("--rows", type=int, default=1, help="rows of the step (default 1: decoding)")
    parser.add_argument("--position", type=int, default=256, help="of the first row (default 256)")
    parser.add_argument("--rounds", type=int, default=9, help="repetitions; medians are shown (default 9)")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time instead of wall time, with -t 1")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args: Any = parser.parse_args(argv)
    if args.rows < 1 or args.position < 0 or args.rounds < 1:
        parser.error("--rows and --rounds must be at least 1, --position at least 0")
    console = Console(width=None if sys.stdout.isatty() else 110)
    try:
        with tempfile.TemporaryDirectory(prefix="kestrel-bench-") as folder:
            if args.model is not None:
                config, weights = load_model_folder(args.model)
            else:
                config = SHAPES[args.shape]
                file = Path(folder) / "weights"
                weights = synthetic_weights(config, file, wtype=WType.q4local, head_wtype=WType.q8local)
            profile(config, weights, args, console)
    except KestrelError as error:
        Console(stderr=True).print(f"bench/cpu_profile.py: {error}", style="red")
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
