"""Every kernel of a decode step alone: time, bytes, bandwidth, registers, occupancy. Needs a GPU.

    python -m bench.kernels --shape qwen3-30b-a3b --depth 1024 --mode l2exact,fast
    python -m bench.kernels -m models/smollm2-135m-instruct --ops     # unjoined: one kernel an op
    python -m bench.kernels --taps standard                           # with the hashes of a full dump

The launches of one kernel and grid in all layers are recorded as one graph and replayed, each on the weights
of its own layer, so that caches are as cold as in a real step; launches that may overlap their neighbour do.
Time is the median replay over its launches. Bytes are what has to come from memory: weights, KV rows, rows
that are hashed or searched; activations of one token stay in the cache. Share is of the measured copy
bandwidth.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from bench.gpu.context import markdown_table
from kestrel.backends import parse_mode
from kestrel.benchmark.runner import Runner
from kestrel.benchmark.shapes import SHAPES, shape
from kestrel.benchmark.synthetic import pending_weights
from kestrel.config import ModelConfig
from kestrel.errors import KestrelError
from kestrel.launch import Launch, taps_of
from kestrel.ops import OPS, WType
from kestrel.paths import resolve_model
from kestrel.taps import TapLevel
from kestrel.weights import Weights, load_model_folder

REPEATS = 20


# -- bytes ---------------------------------------------------------------------------------------------------


def parts_of(args: ctypes.Structure) -> Iterator[ctypes.Structure]:
    """The op arguments within a launch's arguments: itself, or the members of a stage."""
    if type(args) in {spec.args for spec in OPS.values()}:
        yield args
        return
    for name, *_ in args._fields_:
        member = getattr(args, str(name))
        if isinstance(member, ctypes.Structure):
            yield from parts_of(member)


def bytes_of(args: ctypes.Structure, depth: int) -> int:
    """Bytes that a launch has to take from memory when its one row stands at position ``depth``."""
    return sum(_op_bytes(type(part).__name__, part, depth) for part in parts_of(args))


def launch_bytes(launch: Launch, depth: int) -> int:
    """The same of a launch, which may share its arguments with another one of its stage."""
    if launch.kernel.startswith("k_attn_merge"):
        return 0  # partial states, from the cache; the K and V rows are k_attn_stage's
    if getattr(launch.args, "phase", 0):
        return 0  # a long row that is hashed, as the launch before left it
    if launch.table:
        return sum(bytes_of(tap, depth) for tap in taps_of(launch))
    return bytes_of(launch.args, depth)


def _op_bytes(name: str, a: Any, depth: int) -> int:
    match name:
        case "EmbedArgs":
            return int(a.M * WType(a.w.wtype).bytes_per_row(a.w.k))
        case "RmsNormArgs":
            return int(4 * a.d)
        case "MatmulArgs":
            return sum(_weight_bytes(a.w[i]) for i in range(a.n_w))
        case "MoeMatmulArgs":
            return int(a.M * a.T) * sum(_weight_bytes(a.w[i]) for i in range(a.n_w))
        case "AttentionArgs":
            return int(a.M * (depth + 1) * 2 * a.nkv * (a.hd + 4))
        case "ArgmaxArgs":
            return int(4 * a.M * a.V)
        case "L2HashArgs":
            return int(a.M * a.bytes)
        case _:
            return 0  # activations alone


def _weight_bytes(w: Any) -> int:
    return int(w.n) * WType(w.wtype).bytes_per_row(int(w.k))


# -- rows of the table ---------------------------------------------------------------------------------------


@dataclass
class Row:
    """One kernel with one grid, at one depth in one mode."""

    mode: str
    depth: int
    kernel: str
    grid: tuple[int, int, int]
    threads: int
    launches: int  # of a step
    us: float  # each
    bytes: int  # each, on average
    gb_per_second: float
    share_of_copy: float
    registers: int
    local_bytes: int  # of a thread: stack and spills
    shared_bytes: int  # of a block, static and dynamic
    blocks_per_sm: int
    occupancy: float  # resident threads over the most that fit


HEAD = (
    "kernel",
    "grid",
    "threads",
    "n",
    "us",
    "kB",
    "GB/s",
    "of copy",
    "regs",
    "local",
    "shared",
    "blocks/SM",
    "occupancy",
    "us a step",
)


def table(rows: Sequence[Row]) -> str:
    """Markdown, the kernel that costs a step most first."""
    ordered = sorted(rows, key=lambda r: -r.us * r.launches)
    lines = [
        [
            r.kernel,
            "x".join(map(str, r.grid)),
            r.threads,
            r.launches,
            f"{r.us:.2f}",
            f"{r.bytes / 1e3:.1f}",
            f"{r.gb_per_second:.0f}",
            f"{100 * r.share_of_copy:.0f} %",
            r.registers,
            r.local_bytes,
            r.shared_bytes,
            r.blocks_per_sm,
            f"{100 * r.occupancy:.0f} %",
            f"{r.us * r.launches:.1f}",
        ]
        for r in ordered
    ]
    return markdown_table(HEAD, lines)


def grouped(prepared: Sequence[Any]) -> dict[tuple[str, Any], list[Any]]:
    """Launches of equal kernel and grid, in order."""
    groups: dict[tuple[str, Any], list[Any]] = {}
    for item in prepared:
        launch: Launch = item.launch
        groups.setdefault((launch.kernel, launch.grid), []).append(item)
    return groups


# -- on the device -------------------------------------------------------------------------------------------


def resources(backend: Any, item: Any) -> dict[str, Any]:
    """Registers, memory and occupancy of a launch, from the driver."""
    from cuda.bindings import driver

    kinds, function = driver.CUfunction_attribute, item.function
    threads = int(np.prod(item.launch.block))

    def ask(result: tuple[Any, ...]) -> int:
        if int(result[0]) != 0:
            raise KestrelError(f"the driver refused a question about {item.launch.kernel}: {result[0]}")
        return int(result[1])

    with backend.current():
        properties = backend._cupy.cuda.runtime.getDeviceProperties(backend.device.index)
        blocks = ask(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, item.launch.shared)
        )
        static = ask(driver.cuFuncGetAttribute(kinds.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function))
        local = ask(driver.cuFuncGetAttribute(kinds.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function))
        registers = ask(driver.cuFuncGetAttribute(kinds.CU_FUNC_ATTRIBUTE_NUM_REGS, function))
    return {
        "threads": threads,
        "registers": registers,
        "local_bytes": local,
        "shared_bytes": static + item.launch.shared,
        "blocks_per_sm": blocks,
        "occupancy": blocks * threads / int(properties["maxThreadsPerMultiProcessor"]),
    }


def measure(
    runner: Runner, mode: str, depth: int, copy: float, *, ops: bool, taps: TapLevel = "off"
) -> tuple[list[Row], float]:
    """A row for each kernel and grid, and microseconds of the whole step as one graph."""
    from bench.gpu.profile import replay_microseconds
    from kestrel.launch import launches

    backend: Any = runner.backend
    runner.fill_depth(depth)
    model = runner.model
    model.load_rows(np.array([1], np.int32), np.array([depth], np.int32))
    step = model.step(1, 1, taps)
    program: Any = step.program
    whole = replay_microseconds(backend, program.whole.main, REPEATS)
    prepared = program.whole.main
    if ops:
        prepared = [
            item for op in step.ops for item in backend.prepare(launches(op, backend.mode, backend.tuning))
        ]
    rows = []
    for (kernel, grid), items in grouped(prepared).items():
        us = replay_microseconds(backend, items, REPEATS) / len(items)
        nbytes = sum(launch_bytes(item.launch, depth) for item in items) // len(items)
        rate = nbytes / us * 1e6
        row = Row(
            mode=mode,
            depth=depth,
            kernel=kernel,
            grid=grid,
            launches=len(items),
            us=us,
            bytes=nbytes,
            gb_per_second=rate / 1e9,
            share_of_copy=rate / copy,
            **resources(backend, items[0]),
        )
        rows.append(row)
    return rows, whole


def load(args: argparse.Namespace) -> tuple[str, ModelConfig, Weights]:
    """The model that the flags name."""
    if args.model is not None:
        path = resolve_model(args.model)
        return (path.name, *load_model_folder(path))
    config = shape(args.shape)
    return f"synthetic {args.shape}", config, pending_weights(config, WType[args.wtype], WType.q8local)


def model_flags(parser: argparse.ArgumentParser) -> None:
    """Which model, mode and depth; shared with ``bench.profile_decode``."""
    parser.add_argument("-m", "--model", metavar="FOLDER", help="model folder instead of --shape")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-30b-a3b", help="synthetic weights")
    parser.add_argument("--wtype", choices=[w.name for w in WType], default="q4local", help="of --shape")
    parser.add_argument("--mode", default="l2exact", metavar="LIST", help="commas between (default l2exact)")
    parser.add_argument("-d", "--depth", default="1024", metavar="LIST", help="positions before the token")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="GPU number")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    model_flags(parser)
    parser.add_argument("--ops", action="store_true", help="one kernel an op, as in passes of many rows")
    parser.add_argument("--taps", choices=get_args(TapLevel), default="off", help="with the hashes of a dump")
    args = parser.parse_args(argv)
    try:
        modes = [parse_mode(mode) for mode in args.mode.split(",")]
        depths = [int(depth) for depth in args.depth.split(",")]
    except (KestrelError, ValueError) as error:
        parser.error(str(error))
    try:
        from kestrel.benchmark.cuda import BenchBackend, SharedWeights, copy_bandwidth

        name, config, weights = load(args)
        shared = SharedWeights()
        found: list[Row] = []
        backends = [BenchBackend(args.device, mode, shared=shared) for mode in modes]
        copy = copy_bandwidth(backends[0])
        print(f"{name} on {backends[0].device.name}: device copy {copy / 1e9:.0f} GB/s")
        for mode, backend in zip(modes, backends, strict=True):
            runner = Runner(config, weights, backend, context=max(depths) + 8, chunk=1, seed=0)
            for depth in depths:
                rows, whole = measure(runner, mode, depth, copy, ops=args.ops, taps=args.taps)
                total = sum(row.us * row.launches for row in rows)
                print(
                    f"\n{mode}, depth {depth}: whole step {whole:.1f} us, sum of the parts {total:.1f} us\n"
                )
                print(table(rows), flush=True)
                found += rows
    except KestrelError as error:
        print(f"bench.kernels: error: {error}", file=sys.stderr)
        return 1
    if args.json is not None:
        values = {"model": name, "copy_gb_per_second": copy / 1e9, "rows": [asdict(row) for row in found]}
        args.json.write_text(json.dumps(values, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
