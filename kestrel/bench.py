"""``kestrel bench``: time per token, rates, bandwidth, memory, and a hash of the output (docs/bench.md)."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kestrel.backend import Backend
from kestrel.backends import (
    MODES,
    Mode,
    Placement,
    choose_mode,
    make_backend,
    parse_device,
    parse_mode,
)
from kestrel.benchmark import environment, output
from kestrel.benchmark.matrix import Variant, backends_of, plan_cells, run_group
from kestrel.benchmark.records import (
    SPEED_KEY,
    Record,
    add_traffic,
    changed_bits,
    key_of,
    summarise,
)
from kestrel.benchmark.runner import BitsDifferError, Runner
from kestrel.benchmark.shapes import (
    SHAPES,
    kv_bytes_per_token,
    parameters,
    shape,
    weight_bytes_per_token,
)
from kestrel.benchmark.synthetic import VERSION, host_weights, pending_weights
from kestrel.checkpoints.manifest import read_manifest
from kestrel.cli import EXIT_DIFFERENT, Parser, command_parser, count, note, run_command
from kestrel.config import ModelConfig
from kestrel.engine import DEFAULT_CHUNK
from kestrel.env import env
from kestrel.errors import UsageError
from kestrel.ops import WType
from kestrel.paths import resolve_model
from kestrel.stats import peak_memory_bytes
from kestrel.weights import Weights, load_model_folder

READ_BYTES = 1 << 29  # of the plain read that CPU figures are compared with; well above any cache


def _list(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """``type=`` of a flag that takes values with commas between them."""

    def parse(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    parse.__name__ = "list"  # in argparse's message
    return parse


def _whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, not {value}")
    return value


def _flat(given: list[list[Any]] | None, default: list[Any]) -> list[Any]:
    """The values of a flag that may be repeated, each once."""
    return list(dict.fromkeys(value for part in given or [default] for value in part))


def build_parser() -> Parser:
    parser = command_parser("bench", "Time a model: prompts, decoding at any depth, every mode, interleaved.")
    wtypes = [w.name for w in WType]
    model = parser.add_argument_group("models (lists: commas, or the flag again)")
    model.add_argument("-m", "--model", action="append", metavar="FOLDER", help="model folder, or its name")
    model.add_argument(
        "--shape",
        action="append",
        type=_list(str),
        metavar="NAMES",
        help=f"synthetic weights of a model's shape: {', '.join(sorted(SHAPES))}",
    )
    model.add_argument("--wtype", choices=wtypes, default="q4local", help="of --shape (default: q4local)")
    model.add_argument(
        "--head-wtype", choices=wtypes, default="q8local", help="of --shape's tables (default: q8local)"
    )
    what = parser.add_argument_group("tests")
    what.add_argument(
        "-p", "--n-prompt", type=_whole, default=512, metavar="N", help="prompt tokens (default 512; 0: none)"
    )
    what.add_argument(
        "-n", "--n-gen", type=_whole, default=64, metavar="N", help="decoded tokens (default 64; 0: none)"
    )
    what.add_argument(
        "-d",
        "--n-depth",
        type=_list(_whole),
        action="append",
        metavar="LIST",
        help="positions before the test, filled with seeded KV rows (default 0)",
    )
    what.add_argument(
        "-r", "--repetitions", type=count, default=5, metavar="N", help="timed repeats (default 5)"
    )
    what.add_argument("-s", "--seed", type=_whole, default=0, metavar="N", help="of weights, KV rows, tokens")
    where = parser.add_argument_group("device")
    device = where.add_mutually_exclusive_group()
    device.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: cpu)")
    device.add_argument("--cuda", dest="device", action="store_const", const="cuda", help="--device cuda")
    where.add_argument(
        "--mode",
        type=_list(parse_mode),
        action="append",
        metavar="LIST",
        help=f"{', '.join(MODES)} (default: l2exact; on the CPU all are l2exact)",
    )
    where.add_argument(
        "--eager", action="store_true", help="also decode with every kernel launched by itself"
    )
    where.add_argument("--dump", action="store_true", help="also decode with the hashes of a full L2 dump")
    where.add_argument("-t", "--threads", type=count, metavar="N", help="CPU threads (default: all)")
    where.add_argument("--isa", choices=("scalar", "avx2", "avx512"), help="CPU instruction set")
    where.add_argument(
        "--chunk", type=count, default=DEFAULT_CHUNK, metavar="N", help="prompt rows of a pass (default 256)"
    )
    out = parser.add_argument_group("output")
    out.add_argument(
        "-o",
        "--output",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help=f"write the records too; the ending says how: {', '.join(output.WRITERS)}; may be repeated",
    )
    out.add_argument(
        "--compare",
        type=Path,
        metavar="FILE",
        help="earlier records (.json, .jsonl): changed bits are a failure (exit code 3), times are shown",
    )
    out.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    return parser


@dataclass(frozen=True)
class Subject:
    """A model to be timed. Synthetic weights are recipes until a device makes them."""

    name: str
    config: ModelConfig
    weights: Weights
    identity: str  # equal where the weights are
    wtype: str
    synthetic: bool


def subjects(args: argparse.Namespace) -> Iterator[Subject]:
    """The models that the flags name, one after the other."""
    shapes = _flat(args.shape, [])
    folders = args.model or ([] if shapes else [None])
    wtype = f"{args.wtype}, head {args.head_wtype}"
    for folder in folders:
        path = resolve_model(folder)
        config, weights = load_model_folder(path)
        manifest = read_manifest(path)
        stored = f"{manifest.wtype}, head {manifest.head_wtype}"
        yield Subject(path.absolute().name, config, weights, manifest.fingerprint, stored, False)
    for name in shapes:
        config = shape(name)
        weights = pending_weights(config, WType[args.wtype], WType[args.head_wtype], args.seed)
        identity = f"synthetic-{VERSION} {name} {wtype} seed {args.seed}"
        yield Subject(f"synthetic {name}", config, weights, identity, wtype, True)


def variants(args: argparse.Namespace, on_gpu: bool) -> list[Variant]:
    modes: list[Mode] = _flat(args.mode, [choose_mode()])
    graph = env.cuda_graph is not False
    if not on_gpu:
        if modes != ["l2exact"]:
            note("on the CPU every mode runs the exact reference: measured once, as l2exact")
        if args.eager:
            raise UsageError("--eager needs a GPU: the CPU has no graph")
        modes = ["l2exact"]
    found = [Variant(mode, graph) for mode in modes]
    found += [Variant(mode, graph=False) for mode in modes if args.eager and graph]
    found += [Variant(mode, graph, "standard") for mode in modes if args.dump]
    return found


def check_usage(args: argparse.Namespace) -> None:
    """UsageError for what would fail only after minutes."""
    if not args.n_prompt and not args.n_gen:
        raise UsageError("nothing to time: give -p/--n-prompt or -n/--n-gen")
    for name in _flat(args.shape, []):
        shape(name)
    for path in args.output:
        output.check_output(path)


def check_context(args: argparse.Namespace, subject: Subject, depths: Sequence[int]) -> int:
    """The positions that the tests need. Raises UsageError when the model has fewer."""
    count: int = max(args.n_prompt, args.n_gen)
    context = max(depths) + count
    if context > subject.config.max_position:
        raise UsageError(
            f"depth {max(depths)} and {count} tokens need {context} positions, "
            f"{subject.name} has {subject.config.max_position}: lower -d, -p or -n"
        )
    return context


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    check_usage(args)
    before = output.read(args.compare) if args.compare is not None else None
    device = Placement.choose(args.device).decode
    chosen = variants(args, parse_device(device)[0] == "cuda")
    depths = _flat(args.n_depth, [0])
    models = list(subjects(args))
    for subject in models:
        check_context(args, subject, depths)
    records: list[Record] = []
    failure: BitsDifferError | None = None
    try:
        for subject in models:
            records.extend(measure(args, subject, device, chosen, depths))
    except BitsDifferError as error:  # what is known so far is printed first
        failure = error
    finally:
        if records:
            print(output.markdown(records), end="", flush=True)
            for path in args.output:
                output.write(path, records)
    differences = changed_bits(records, before) if before is not None else []
    if before is not None:
        print("\n".join(["", *_ratios(records, before)]))
    for line in [*differences, *([str(failure)] if failure is not None else [])]:
        print(f"kestrel bench: bits differ: {line}", file=sys.stderr)
    return EXIT_DIFFERENT if differences or failure is not None else 0


def measure(
    args: argparse.Namespace, subject: Subject, device: str, chosen: Sequence[Variant], depths: Sequence[int]
) -> Iterator[Record]:
    """The records of one model, group of variants by group of variants."""
    config = subject.config
    context = check_context(args, subject, depths)

    def progress(text: str) -> None:
        if not args.quiet:
            note(f"{subject.name}: {text}")

    def promised(variant: Variant) -> bool:
        """Whether this variant's bits are fixed by the contract."""
        return variant.mode == "l2exact"

    with ExitStack() as stack:
        environment.reset_peak_memory()
        begin = time.perf_counter()
        progress("loading")
        weights, backends = open_backends(args, subject, device, chosen)
        for backend in backends.values():  # the first one owns the shared memory: it closes last
            stack.callback(backend.close)
        facts = environment_of(device, next(iter(backends.values())))
        runners: dict[tuple[Mode, bool], Runner] = {}
        uploaded = None  # seconds of the first one, which binds the weights
        for key, backend in backends.items():
            start = time.perf_counter()
            runners[key] = Runner(config, weights, backend, context=context, chunk=args.chunk, seed=args.seed)
            uploaded = uploaded or time.perf_counter() - start
        loaded = time.perf_counter() - begin
        size = sum(tensor.nbytes for tensor in subject.weights.values())
        from_file = uploaded is not None and facts["isa"] is None and not subject.synthetic
        bandwidth, kind = bandwidth_of(args, device, next(iter(backends.values())))
        for cells in plan_cells(chosen, args.n_prompt, args.n_gen, depths):
            run_group(runners, cells, args.repetitions, exact=promised)
            for cell in cells:
                record: Record = {
                    **environment.software(),
                    **facts,
                    "model_filename": subject.name,
                    "model_type": f"{config.family} {subject.wtype}",
                    "model_size": size,
                    "model_n_params": parameters(subject.weights),
                    "weights": subject.identity,
                    "synthetic": subject.synthetic,
                    "n_batch": args.chunk,
                    "n_ubatch": args.chunk,
                    "type_k": "i8",
                    "type_v": "i8",
                    "seed": args.seed,
                    "fill_version": VERSION,
                    "depth_contents": "seeded KV rows" if cell.n_depth else None,
                    **summarise(cell),
                    "bits_promised": promised(cell.variant),
                    "load_seconds": loaded,
                    "upload_gb_per_second": size / uploaded / 1e9 if uploaded and from_file else None,
                    "peak_memory_bytes": _memory(backends[cell.variant.backend]),
                    "host_peak_memory_bytes": peak_memory_bytes(),
                }
                traffic: float | None = None
                if cell.n_gen:
                    traffic = weight_bytes_per_token(config, weights) + kv_bytes_per_token(
                        config, cell.n_depth, cell.n_gen
                    )
                add_traffic(record, traffic, bandwidth, kind)
                progress(f"{cell.label}, {cell.variant.label}: {record['ms_per_token_median']:.3f} ms/token")
                yield record


def open_backends(
    args: argparse.Namespace, subject: Subject, device: str, chosen: Sequence[Variant]
) -> tuple[Weights, dict[tuple[Mode, bool], Backend]]:
    """The weights, made if they are synthetic, and one backend for each mode and way of launching."""
    kind, index = parse_device(device)
    if kind == "cpu":
        weights = (
            host_weights(subject.weights, threads=args.threads) if subject.synthetic else subject.weights
        )
        backend = make_backend(device, "l2exact", threads=args.threads, isa=args.isa)
        return weights, dict.fromkeys(backends_of(chosen), backend)
    from kestrel.benchmark.cuda import BenchBackend, SharedWeights

    shared = SharedWeights()
    backends: dict[tuple[Mode, bool], Backend] = {
        (mode, graph): BenchBackend(index, mode, graph, shared=shared) for mode, graph in backends_of(chosen)
    }
    return subject.weights, backends


def environment_of(device: str, backend: Any) -> Record:
    """What ran it, in llama-bench's words where it has some."""
    described = backend.describe()
    if parse_device(device)[0] == "cpu":
        return {
            "backends": "CPU",
            "device": "cpu",
            "gpu_info": "",
            "isa": described["isa"],
            "n_threads": int(described["threads"]),
        }
    gpu = backend.device
    return {
        "backends": "CUDA",
        "device": backend.name,
        "gpu_info": gpu.name,
        "isa": None,
        "n_threads": 1,
        "architecture": gpu.architecture,
        "multiprocessors": gpu.multiprocessors,
        "cuda_driver": described["driver"],
        "cupy": gpu.cupy,
        "nvrtc": gpu.nvrtc,
        **environment.gpu(backend.bus_id),
    }


def bandwidth_of(args: argparse.Namespace, device: str, backend: Any) -> tuple[float, str]:
    """Bytes per second that the device reaches with no work at all, and what was measured."""
    if parse_device(device)[0] == "cpu":
        from kestrel import _native

        return 1e9 * _native.read_bandwidth(READ_BYTES, backend.threads), "plain read"
    from kestrel.benchmark.cuda import copy_bandwidth

    return copy_bandwidth(backend), "device copy"


def _memory(backend: Any) -> int:
    """Bytes: of a GPU the buffers of this backend, weights included; else the process's largest size."""
    device_bytes: int | None = getattr(backend, "device_bytes", None)
    return peak_memory_bytes() if device_bytes is None else device_bytes


def _ratios(new: Sequence[Record], old: Sequence[Record]) -> list[str]:
    """Median times against earlier ones of the same machine and settings."""
    known = {key_of(record, SPEED_KEY): record for record in old}
    lines = []
    for record in new:
        before = known.get(key_of(record, SPEED_KEY))
        if before is not None:
            ratio = record["ms_per_token_median"] / before["ms_per_token_median"]
            name = f"{record['model_filename']} {record['test']}, {record['mode']}"
            lines.append(f"{name}: {ratio:.3f} x the time of {before['test_time']}")
    return lines or ["no earlier record of this machine and these settings to compare times with"]


if __name__ == "__main__":
    sys.exit(run_command(main))
