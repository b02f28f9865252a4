"""Variants tried out: the time of each kernel of a decode step, and of the step.

A variant is other values of Tuning, a folder with changed kernels, or both, joined by +.

python -m bench.gpu.tune --layers 8 --depth 1024 attention_blocks=132,264 router_rows=2

cp -r kernels /tmp/later; edit /tmp/later/stages.cu
python -m bench.gpu.tune --whole --depth 0,1024 /tmp/later /tmp/later+router_rows=2

With --whole the variants are timed in turn, for several rounds, and their logits must have the same bits.
Give one variant twice to see the noise.
Take all layers for it: with few of them, one variant under two names differs by 2 % from one place in memory
to another. Passing the other bit tests is the caller's business: without --whole, a variant that leaves
something out may be worth timing, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu.context import markdown_table
from bench.gpu.profile import kernel_table, pair_table, replay_microseconds
from bench.gpu.synthetic import SHAPE, DeviceWeights, fill_cache, make_weights, synthetic_config
from kestrel.benchmark.shapes import SHAPES
from kestrel.cuda.sources import KernelSources, read_sources
from kestrel.engine import Engine
from kestrel.launch import Tuning


@dataclass(frozen=True)
class Variant:
    """What to time under a name; ``sources``: other kernels than the installation's."""

    name: str
    tuning: Tuning
    sources: KernelSources | None = None


def variants(texts: Sequence[str]) -> Iterator[Variant]:
    """The defaults, then what each text says. Raises SystemExit for a text that names nothing."""
    yield Variant("defaults", Tuning())
    for text in texts:
        found = [Variant(text, Tuning())]
        for part in text.split("+"):
            found = [changed for variant in found for changed in _changed(variant, part)]
        yield from found


def _changed(variant: Variant, part: str) -> Iterator[Variant]:
    """``variant`` with one part of its text; a part with several values gives several variants."""
    known = {f.name for f in fields(Tuning)}
    name, _, values = part.partition("=")
    if not values and (Path(part) / "op_args.h").is_file():
        yield replace(variant, sources=read_sources(Path(part)))
    elif name in known and values:
        for value in values.split(","):
            text = "+".join(f"{name}={value}" if p == part else p for p in variant.name.split("+"))
            if not value.removeprefix("-").isdecimal():
                raise SystemExit(f"{part!r}: {value!r} is not a number")
            yield replace(variant, name=text, tuning=replace(variant.tuning, **{name: int(value)}))
    else:
        names = ", ".join(sorted(known))
        raise SystemExit(f"{part!r} is neither NAME=VALUE,VALUE nor a folder with kernels; names: {names}")


def whole_steps(
    config: Any, mode: str, depths: Sequence[int], rounds: int, wanted: Sequence[Variant]
) -> list[list[str]]:
    """A row to each variant: its name, and for each depth the median of the rounds with their range.

    Microseconds of a recorded step over a cache of random rows. Raises SystemExit where the logits of one
    differ from the first one's (not in mode fast, which promises no bits).
    """
    first = DeviceWeights()
    weights = make_weights(config, first)
    made: list[tuple[int, int, DeviceWeights, Engine, Any]] = []
    logits: dict[int, Any] = {}
    for number, variant in enumerate(wanted):
        backend = DeviceWeights(mode, tuning=variant.tuning, sources=variant.sources)
        backend.present = first.present
        for depth in depths:
            engine = Engine(config, weights, backend, context=depth + 64)
            fill_cache(engine, backend)
            model = engine.decode_model
            model.load_rows(np.array([1], np.int32), np.array([depth], np.int32))
            program: Any = model.step(1, 1).program
            program.run()
            bits = model.logits(1).view(np.uint32)
            if mode != "fast" and (bits != logits.setdefault(depth, bits)).any():
                raise SystemExit(f"{variant.name}: other logits than {wanted[0].name} at depth {depth}")
            made.append((number, depth, backend, engine, program.whole.main))
    times: dict[tuple[int, int], list[float]] = {}
    for _ in range(rounds):
        for number, depth, backend, _, launches in made:
            step = replay_microseconds(backend, launches, 12)
            times.setdefault((number, depth), []).append(step)

    def spread(found: Sequence[float]) -> str:
        return f"{np.median(found):.1f} ({min(found):.1f} to {max(found):.1f})"

    return [[v.name, *(spread(times[i, depth]) for depth in depths)] for i, v in enumerate(wanted)]


def by_kernel(
    config: Any, mode: str, depth: int, wanted: Sequence[Variant], pairs: bool
) -> dict[str, dict[str, str]]:
    """Variant -> kernel -> microseconds of each launch."""
    first = DeviceWeights()
    weights = make_weights(config, first)
    columns: dict[str, dict[str, str]] = {}
    for variant in wanted:
        backend = DeviceWeights(mode, tuning=variant.tuning, sources=variant.sources)
        backend.present = first.present
        engine = Engine(config, weights, backend, context=depth + 64)
        table = kernel_table(engine, depth)
        columns[variant.name] = {row[0]: row[3] or row[4] for row in table[1:]}
        if pairs:
            print(variant.name)
            found = pair_table(engine, depth)
            print(markdown_table(found[0], found[1:]))
        del engine
        backend.present = {}
        backend.close()
    return columns


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--layers", type=int, default=None, help="8; with --whole all")
    parser.add_argument("--shape", choices=sorted(SHAPES), default=SHAPE, help="of random weights")
    parser.add_argument("--depth", default="1024", metavar="N,...", help="several with --whole alone")
    parser.add_argument("--mode", default="l2exact", choices=("l2exact", "bitexact", "fast"))
    parser.add_argument("--pairs", action="store_true", help="also what neighbouring kernels cost each other")
    parser.add_argument("--whole", action="store_true", help="the whole step alone")
    parser.add_argument("--rounds", type=int, default=3, help="of --whole")
    parser.add_argument("variants", nargs="*", metavar="NAME=VALUE,... | FOLDER")
    given = parser.parse_args()
    wanted = list(variants(given.variants))
    depths = [int(text) for text in given.depth.split(",")]
    config = synthetic_config(given.layers or (None if given.whole else 8), given.shape)
    if given.whole:
        rows = whole_steps(config, given.mode, depths, given.rounds, wanted)
        print(markdown_table(["us a step", *(f"depth {depth}" for depth in depths)], rows))
        return
    if len(depths) > 1:
        parser.error("several depths go with --whole")
    columns = by_kernel(config, given.mode, depths[0], wanted, given.pairs)
    kernels = list(dict.fromkeys(kernel for column in columns.values() for kernel in column))
    rows = [[name, *(column.get(kernel, "-") for kernel in kernels)] for name, column in columns.items()]
    print(markdown_table(["us", *kernels], rows))


if __name__ == "__main__":
    main()
