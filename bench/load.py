"""How fast a model comes to its device: python -m bench.load --cuda --shape qwen3-8b

Seeded weights of the shape are written to a file in the temporary folder (--file elsewhere) and mapped from
it, as a model folder's are; an engine on the device then binds them all, which on a GPU copies them there.
Every other load begins with the file out of the system's page cache ("cold"), as far as the system lets it
go. Medians of whole loads, kernels compiled before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.synthetic import SHAPES, synthetic_weights
from kestrel.benchmark.shapes import shape
from kestrel.config import ModelConfig
from kestrel.engine import Engine
from kestrel.errors import KestrelError
from kestrel.ops import WType
from kestrel.weights import Weights


def drop_from_cache(file: Path) -> None:
    """Write the file's pages out and let them go; pages that are mapped and in use may stay."""
    with file.open("rb+") as f:
        os.fsync(f.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load_seconds(config: ModelConfig, weights: Weights, make_backend: Any) -> float:
    """Seconds from a ready backend to an engine that could take its first token."""
    backend = make_backend()
    begin = time.perf_counter()
    engine = Engine(config, weights, backend, context=min(1024, config.max_position))
    seconds = time.perf_counter() - begin
    engine.close()
    return seconds


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument(
        "--cuda", action="store_true", help="on the GPU; otherwise the CPU, which copies nothing"
    )
    parser.add_argument("--file", type=Path, help="where the weights are written; removed at the end")
    parser.add_argument(
        "-r", "--repetitions", type=int, default=3, metavar="N", help="of each kind, default 3"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times there too")
    args = parser.parse_args(argv)
    if args.repetitions < 1:
        parser.error("-r must be at least 1")
    if args.file is not None and args.file.exists():
        parser.error(f"{args.file} exists")

    def make_backend() -> Any:
        if args.cuda:
            from kestrel.cuda.device import CudaBackend

            return CudaBackend()
        from kestrel.cpu import CpuBackend

        return CpuBackend()

    config = shape(args.shape)
    found: dict[str, list[float]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory(prefix="kestrel-load-") as folder:
        file = args.file or Path(folder) / "weights"
        try:
            make_backend().close()  # compiles kernels, or says why it cannot, ahead of the long part
            weights = synthetic_weights(config, file, wtype=WType.q4local, head_wtype=WType.q8local)
            nbytes = sum(tensor.nbytes for tensor in weights.values())
            load_seconds(config, weights, make_backend)
            for _ in range(args.repetitions):
                drop_from_cache(file)
                found["cold"].append(load_seconds(config, weights, make_backend))
                found["warm"].append(load_seconds(config, weights, make_backend))
        except KestrelError as error:
            print(f"bench.load: error: {error}", file=sys.stderr)
            return 1
        finally:
            file.unlink(missing_ok=True)
    for name, seconds in found.items():
        middle = statistics.median(seconds)
        spread = f"{min(seconds):.2f} .. {max(seconds):.2f}, {len(seconds)} loads"
        rate = f"{nbytes / 1e9 / middle:.2f} GB/s" if args.cuda else "nothing copied"
        print(f"{args.shape}, {nbytes / 1e9:.2f} GB, {name}: {middle:.2f} s ({spread}), {rate}")
    if args.json is not None:
        facts = {"shape": args.shape, "bytes": nbytes, "cuda": args.cuda, "seconds": found}
        args.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
