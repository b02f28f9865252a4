"""Launch parameters tried out: the time of each kernel of a decode step under other values of Tuning.

python -m bench.gpu.tune --layers 8 --depth 1024 attention_threads=96,160,256 attention_slots=16,64

python -m bench.gpu.tune --depth 1024 attention_threads=96,160,256 attention_slots=16,64
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import fields

from bench.gpu.context import markdown_table
from bench.gpu.profile import kernel_table, pair_table
from bench.gpu.synthetic import DeviceWeights, make_weights, qwen3_30b_a3b
from kestrel.engine import Engine
from kestrel.launch import Tuning


def variants(texts: list[str]) -> Iterator[tuple[str, Tuning]]:
    """The defaults, then each value given."""
    yield "defaults", Tuning()
    known = {f.name for f in fields(Tuning)}
    for text in texts:
        name, _, values = text.partition("=")
        if name not in known or not values:
            raise SystemExit(f"{text!r} is not NAME=VALUE,VALUE; names: {', '.join(sorted(known))}")
        for value in values.split(","):
            yield f"{name}={value}", Tuning(**{name: int(value)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--depth", type=int, default=1024)
    parser.add_argument("--mode", default="l2exact")
    parser.add_argument("--pairs", action="store_true", help="also what neighbouring kernels cost each other")
    parser.add_argument("variants", nargs="*", metavar="NAME=VALUE,...")
    given = parser.parse_args()
    config = qwen3_30b_a3b(given.layers)
    first = DeviceWeights()
    weights = make_weights(config, first)
    columns: dict[str, dict[str, str]] = {}
    for name, tuning in variants(given.variants):
        backend = DeviceWeights(given.mode, tuning=tuning)
        backend.present = first.present
        engine = Engine(config, weights, backend, context=given.depth + 64)
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
