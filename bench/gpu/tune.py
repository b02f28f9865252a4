"""Variants tried out: the time of each kernel of a decode step, and of the step.

A variant is another value of Tuning, or a folder with changed kernels.

python -m bench.gpu.tune --layers 8 --depth 1024 attention_blocks=132,264 router_rows=2

cp -r kernels /tmp/later; edit /tmp/later/stages.cu
python -m bench.gpu.tune --depth 1024 --whole /tmp/later router_rows=2

Passing the bit tests is the caller's business: a variant that leaves something out may be worth timing, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu.context import markdown_table
from bench.gpu.profile import kernel_table, pair_table, replay_microseconds
from bench.gpu.synthetic import DeviceWeights, make_weights, qwen3_30b_a3b
from kestrel.cuda.sources import KernelSources, read_sources
from kestrel.engine import Engine
from kestrel.launch import Tuning


def variants(texts: list[str]) -> Iterator[tuple[str, Tuning, KernelSources | None]]:
    """The defaults, then each value given and each folder of kernels."""
    yield "defaults", Tuning(), None
    known = {f.name for f in fields(Tuning)}
    for text in texts:
        name, _, values = text.partition("=")
        if not values and (Path(text) / "op_args.h").is_file():
            yield text, Tuning(), read_sources(Path(text))
        elif name in known and values:
            for value in values.split(","):
                yield f"{name}={value}", Tuning(**{name: int(value)}), None
        else:
            names = ", ".join(sorted(known))
            raise SystemExit(
                f"{text!r} is neither NAME=VALUE,VALUE nor a folder with kernels; names: {names}"
            )


def whole_step(engine: Engine, depth: int) -> float:
    """Microseconds of a recorded step."""
    model = engine.decode_model
    model.load_rows(np.array([1], np.int32), np.array([depth], np.int32))
    program: Any = model.step(1, 1).program
    backend: Any = model.backend
    return replay_microseconds(backend, program.whole.main)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--depth", type=int, default=1024)
    parser.add_argument("--mode", default="l2exact")
    parser.add_argument("--pairs", action="store_true", help="also what neighbouring kernels cost each other")
    parser.add_argument("--whole", action="store_true", help="the whole step alone")
    parser.add_argument("variants", nargs="*", metavar="NAME=VALUE,... | FOLDER")
    given = parser.parse_args()
    config = qwen3_30b_a3b(given.layers)
    first = DeviceWeights()
    weights = make_weights(config, first)
    columns: dict[str, dict[str, str]] = {}
    for name, tuning, sources in list(variants(given.variants)):
        backend = DeviceWeights(given.mode, tuning=tuning, sources=sources)
        backend.present = first.present
        engine = Engine(config, weights, backend, context=given.depth + 64)
        if given.whole:
            columns[name] = {"whole step, one graph": f"{whole_step(engine, given.depth):.1f}"}
        else:
            table = kernel_table(engine, given.depth)
            columns[name] = {row[0]: row[3] or row[4] for row in table[1:]}
        if given.pairs:
            print(name)
            pairs = pair_table(engine, given.depth)
            print(markdown_table(pairs[0], pairs[1:]))
        del engine
        backend.present = {}
        backend.close()
    kernels = list(dict.fromkeys(kernel for column in columns.values() for kernel in column))
    rows = [[name, *(column.get(kernel, "-") for kernel in kernels)] for name, column in columns.items()]
    print(markdown_table(["us", *kernels], rows))


if __name__ == "__main__":
    main()
