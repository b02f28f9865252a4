"""Where a decode step's time goes: a table of its kernels in their real order, and a timeline. Needs a GPU.

    python -m bench.profile_decode --shape qwen3-30b-a3b --depth 1024 --trace step.json

Each launch of a step stands between two events. The host queues all of them behind a long copy, so that
the device never waits for Python. Events keep a kernel from overlapping the one before it, so the sum is
above the time of the recorded graph, which is printed beside it. The trace opens in chrome://tracing or
ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu.context import markdown_table
from bench.kernels import launch_bytes, load, model_flags
from kestrel.backends import parse_mode
from kestrel.benchmark.runner import Runner
from kestrel.errors import KestrelError

COPY_BYTES = 1 << 28
STEPS = 15


@dataclass(frozen=True)
class Span:
    """One launch of the step, in order."""

    kernel: str
    grid: tuple[int, int, int]
    us: float  # median over the steps
    bytes: int


def summary(spans: Sequence[Span]) -> list[list[str]]:
    """Rows of kernel, launches, us each (median, range), us a step, share, GB/s; costliest first."""
    total = sum(span.us for span in spans)
    names = dict.fromkeys(span.kernel for span in spans)
    rows: list[tuple[float, list[str]]] = []
    for name in names:
        of_name = [span for span in spans if span.kernel == name]
        times = [span.us for span in of_name]
        whole = sum(times)
        rate = sum(span.bytes for span in of_name) / whole / 1e3
        row = [
            name,
            str(len(times)),
            f"{float(np.median(times)):.2f}",
            f"{min(times):.2f} .. {max(times):.2f}",
            f"{whole:.1f}",
            f"{100 * whole / total:.1f} %",
            f"{rate:.0f}",
        ]
        rows.append((whole, row))
    return [row for _, row in sorted(rows, key=lambda item: -item[0])]


def chrome_trace(spans: Sequence[Span], title: str) -> dict[str, Any]:
    """The step as trace events: one after the other, times in microseconds."""
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": title}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "one decode step"}},
    ]
    at = 0.0
    for number, span in enumerate(spans):
        facts = {
            "launch": number,
            "grid": list(span.grid),
            "bytes": span.bytes,
            "gb_per_second": span.bytes / span.us / 1e3 if span.us else None,
        }
        events.append(
            {"name": span.kernel, "ph": "X", "pid": 1, "tid": 1, "ts": at, "dur": span.us, "args": facts}
        )
        at += span.us
    return {"displayTimeUnit": "ns", "traceEvents": events}


def time_launches(backend: Any, prepared: Sequence[Any], steps: int = STEPS) -> np.ndarray[Any, Any]:
    """f64[steps, launches]: microseconds between the events around each launch of each step."""
    cupy = backend._cupy
    source, target = (backend.zeros((COPY_BYTES,), np.uint8) for _ in range(2))
    copy = cupy.cuda.runtime.memcpyAsync
    with backend.current():
        events = [cupy.cuda.Event() for _ in range(len(prepared) + 1)]

        def queue() -> None:
            events[0].record(backend.stream)
            for item, event in zip(prepared, events[1:], strict=True):
                backend.launch([item])
                event.record(backend.stream)

        def copies(count: int) -> None:
            for _ in range(count):
                copy(target.ptr, source.ptr, COPY_BYTES, 3, backend.stream.ptr)

        queue()
        backend.stream.synchronize()
        begin = time.perf_counter()
        queue()
        host = time.perf_counter() - begin
        backend.stream.synchronize()
        copies(4)
        backend.stream.synchronize()
        begin = time.perf_counter()
        copies(16)
        backend.stream.synchronize()
        ahead = 1 + int(2 * host / ((time.perf_counter() - begin) / 16))
        found = np.empty((steps, len(prepared)))
        for step in range(steps):
            copies(ahead)
            queue()
            backend.stream.synchronize()
            for number in range(len(prepared)):
                elapsed = cupy.cuda.get_elapsed_time(events[number], events[number + 1])
                found[step, number] = 1e3 * elapsed
    return found


def profile(runner: Runner, depth: int) -> tuple[list[Span], float]:
    """The launches of a step with their median times, and microseconds of the same step as one graph."""
    from bench.gpu.profile import replay_microseconds

    backend: Any = runner.backend
    runner.fill_depth(depth)
    model = runner.model
    model.load_rows(np.array([1], np.int32), np.array([depth], np.int32))
    program: Any = model.step(1, 1).program
    prepared = program.whole.main
    graph = replay_microseconds(backend, prepared)
    medians = np.median(time_launches(backend, prepared), axis=0)
    spans = [
        Span(item.launch.kernel, item.launch.grid, float(us), launch_bytes(item.launch, depth))
        for item, us in zip(prepared, medians, strict=True)
    ]
    return spans, graph


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    model_flags(parser)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace of the last step")
    args = parser.parse_args(argv)
    try:
        modes = [parse_mode(mode) for mode in args.mode.split(",")]
        depths = [int(depth) for depth in args.depth.split(",")]
    except (KestrelError, ValueError) as error:
        parser.error(str(error))
    records: list[dict[str, Any]] = []
    try:
        from kestrel.benchmark.cuda import BenchBackend, SharedWeights

        name, config, weights = load(args)
        shared = SharedWeights()
        backends = [BenchBackend(args.device, mode, shared=shared) for mode in modes]
        for mode, backend in zip(modes, backends, strict=True):
            runner = Runner(config, weights, backend, context=max(depths) + 8, chunk=1, seed=0)
            for depth in depths:
                spans, graph = profile(runner, depth)
                total = sum(span.us for span in spans)
                title = f"{name}, {mode}, depth {depth}, {backend.device.name}"
                head = ["kernel", "launches", "us each", "range", "us a step", "share", "GB/s"]
                print(f"\n{title}\n\n{markdown_table(head, summary(spans))}")
                print(
                    f"\n{len(spans)} launches one after the other {total:.1f} us, one graph {graph:.1f} us "
                    f"({graph / total:.2f} of it)",
                    flush=True,
                )
                records.append(
                    {"title": title, "graph_us": graph, "launches": [vars(span) for span in spans]}
                )
                if args.trace is not None:
                    args.trace.write_text(json.dumps(chrome_trace(spans, title)))
    except KestrelError as error:
        print(f"bench.profile_decode: error: {error}", file=sys.stderr)
        return 1
    if args.json is not None:
        args.json.write_text(json.dumps(records, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
