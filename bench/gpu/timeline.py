"""How the launches of a recorded decode step really overlap: ``python -m bench.gpu.timeline --depth 1024``.

Runs copies of the kernels that note the device's clock in every block: where they begin to wait for the
launch before, when that wait ends, and at their end. So a step is somewhat slower than without. Prints, for
each kernel as medians over the layers, what passes between the end of the launch before and the end of the
wait, how long the blocks run after it, by how much the slowest block was ready before its wait ended, and how
many blocks the fullest multiprocessor had; then the launches of one layer. Needs a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.gpu.context import markdown_table
from bench.gpu.synthetic import SHAPE, DeviceWeights, fill_cache, make_weights, synthetic_config
from kestrel.benchmark.shapes import SHAPES
from kestrel.config import ModelConfig
from kestrel.cuda.sources import KernelSources, kernel_sources
from kestrel.engine import Engine

LAUNCHES, BLOCKS = 256, 300  # of the notes: launches by number, blocks noted of each
WORDS = 6  # of a block's notes: ready, waited, ended, kernel, multiprocessor, started
# Embedding, up to seven launches a layer, head: more would share their notes.
MOST_LAYERS = (LAUNCHES - 2) // 7

_NOTES = f"""
extern "C" {{ __device__ unsigned long long timeline_notes[{LAUNCHES * BLOCKS * WORDS}]; }}
DEVICE void timeline_note(int what, unsigned long long kernel) {{
    const unsigned block = blockIdx.y * gridDim.x + blockIdx.x;
    if (threadIdx.x != 0 || threadIdx.y != 0 || blockIdx.z != 0 || block >= {BLOCKS}) return;
    unsigned long long now, launch;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    asm volatile("mov.u64 %0, %%gridid;" : "=l"(launch));
    unsigned long long *const at =
        timeline_notes + ((launch % {LAUNCHES}) * {BLOCKS} + block) * {WORDS};
    at[what] = now;
    if (what != 2) return;
    unsigned place;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(place));
    at[3] = kernel;
    at[4] = place;
}}
"""
RULE = "// Programmatic dependent launch: "  # in port.cuh, ahead of what is changed
_WAITS = (
    (
        'DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }',
        "DEVICE void wait_for_previous() { timeline_note(0, 0);"
        ' asm volatile("griddepcontrol.wait;" ::: "memory"); timeline_note(1, 0); }',
    ),
    (
        "DEVICE void wait_for_previous(const void *ready) {\n    asm",
        "DEVICE void wait_for_previous(const void *ready) {\n    timeline_note(0, 0);\n    asm",
    ),
    (
        '@%%there griddepcontrol.wait;\\n\\t}" ::"l"(ready)\n                 : "memory");',
        '@%%there griddepcontrol.wait;\\n\\t}" ::"l"(ready)\n                 : "memory");\n'
        "    timeline_note(1, 0);",
    ),
)


def changed_port(sources: KernelSources, changes: Iterable[tuple[str, str]]) -> KernelSources:
    """The kernels with other text in port.cuh. ValueError if what is to be changed is not there once."""
    port = sources.headers["port.cuh"].decode()
    for old, new in changes:
        if port.count(old) != 1:
            raise ValueError(f"port.cuh holds {port.count(old)} times, not once: {old[:60]!r}")
        port = port.replace(old, new)
    return KernelSources(sources.units, {**sources.headers, "port.cuh": port.encode()})


def with_ends(
    sources: KernelSources, call: Callable[[int], str], begin: str = ""
) -> tuple[KernelSources, list[str]]:
    """The kernels with ``begin`` ahead of each and ``call(number)`` at its end; their names by number."""
    names: list[str] = []
    units = {}
    for unit, text in sources.units.items():
        lines = []
        kernel = False
        for line in text.decode().split("\n"):
            found = re.match(r"KERNEL .*?void (?:FORM\()?(k_\w+)", line)
            if found:
                names.append(found[1])
                line = line.replace("{", f"{{ {begin}", 1) if begin else line
            kernel = kernel or found is not None
            if kernel and line == "}":
                line = f"    {call(len(names) - 1)}\n}}"
                kernel = False
            elif kernel and line.endswith("}"):
                line = f"{line[:-1]} {call(len(names) - 1)} }}"
                kernel = False
            lines.append(line)
        units[unit] = "\n".join(lines).encode()
    return KernelSources(units, sources.headers), names


def instrumented(sources: KernelSources) -> tuple[KernelSources, list[str]]:
    """The kernels with notes, and their names by number. ValueError if the text is not as expected."""
    port = changed_port(sources, [(RULE, _NOTES + RULE), *_WAITS])
    return with_ends(port, lambda number: f"timeline_note(2, {number});", "timeline_note(5, 0);")


@dataclass(frozen=True)
class Noted:
    """One launch: nanoseconds of the device's clock, an element to each noted block that ran to its end."""

    kernel: str
    started: npt.NDArray[np.int64]
    ready: npt.NDArray[np.int64]
    waited: npt.NDArray[np.int64]
    ended: npt.NDArray[np.int64]
    place: npt.NDArray[np.int64]  # its multiprocessor

    @property
    def most_together(self) -> int:
        """Blocks on the multiprocessor that had the most of them."""
        return int(np.unique(self.place, return_counts=True)[1].max())


def launches_of(notes: Sequence[npt.NDArray[np.int64]], names: Sequence[str]) -> list[Noted]:
    """From i64[LAUNCHES, BLOCKS, WORDS] of each module, in the order of the ends of their waits."""
    found = []
    for module in notes:
        for launch in module:
            blocks = launch[(launch[:, 1] > 0) & (launch[:, 2] > 0)]
            if len(blocks):
                found.append(Noted(names[int(blocks[0, 3])], *(blocks[:, i] for i in (5, 0, 1, 2, 4))))
    return sorted(found, key=lambda noted: int(noted.waited.min()))


def summary(launches: Sequence[Noted]) -> list[list[str]]:
    """A row to each kernel in the order of its first launch, medians over its launches but the very first."""
    rows: dict[str, list[list[float]]] = {}
    for before, noted in itertools.pairwise(launches):
        begin = noted.waited.min()
        rows.setdefault(noted.kernel, []).append(
            [
                float(begin - before.ended.max()),
                float(np.median(noted.ended) - begin),
                float(noted.ended.max() - begin),
                float(begin - noted.ready.max()),
                float(noted.most_together),
            ]
        )
    return [[k, str(len(r)), *(f"{x:.0f}" for x in np.median(r, axis=0))] for k, r in rows.items()]


def layer(launches: Sequence[Noted], number: int) -> list[list[str]]:
    """A row to each launch from the ``number``-th of the most frequent first kernel up to the next."""
    counts = [noted.kernel for noted in launches]
    most = max(map(counts.count, counts))
    first = next(kernel for kernel in counts if counts.count(kernel) == most)
    starts = [i for i, kernel in enumerate(counts) if kernel == first]
    begin = starts[min(number, len(starts) - 1)]
    end = next((i for i in starts if i > begin), len(launches))
    zero = launches[begin].waited.min()
    return [
        [
            noted.kernel,
            str(len(noted.ended)),
            str(len(np.unique(noted.place))),
            *(f"{x - zero:.0f}" for x in (noted.started.max(), noted.ready.max(), noted.waited.min())),
            *(f"{x - zero:.0f}" for x in (noted.ended.min(), np.median(noted.ended), noted.ended.max())),
        ]
        for noted in launches[begin:end]
    ]


def notes_of_a_run(
    engine: Any, program: Any, name: str, shape: tuple[int, ...]
) -> list[npt.NDArray[np.int64]]:
    """What one run leaves in the array ``name`` of each module of kernels, i64 of ``shape``."""
    backend = engine.decode_model.backend
    runtime = backend._cupy.cuda.runtime
    modules = {id(module): module for module in backend._kernels._modules.values()}
    addresses = [int(module.get_global(name).ptr) for module in modules.values()]
    size = 8 * int(np.prod(shape))
    found = []
    with backend.current():
        for address in addresses:
            runtime.memset(address, 0, size)
        runtime.deviceSynchronize()
        program.run()
        for address in addresses:
            notes = np.empty(shape, np.int64)
            runtime.memcpy(notes.ctypes.data, address, size, 2)
            found.append(notes)
    return found


def synthetic_step(sources: KernelSources, config: ModelConfig, depth: int, mode: Any) -> tuple[Any, Any]:
    """An engine on other kernels with synthetic weights, and its step at ``depth``, recorded.

    The cache holds random rows.
    """
    backend = DeviceWeights(mode, sources=sources)
    engine = Engine(config, make_weights(config, backend), backend, context=depth + 64)
    fill_cache(engine, backend)
    model = engine.decode_model
    model.load_rows(np.array([1], np.int32), np.array([depth], np.int32))
    program = model.step(1, 1).program
    for _ in range(4):  # the first ones load and record
        program.run()
    return engine, program


def step_parser(doc: str | None) -> argparse.ArgumentParser:
    """Of a command about one step: depth, shape, layers and mode."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "-d", "--depth", type=int, default=1024, metavar="N", help="positions before the token"
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default=SHAPE, help="of random weights")
    parser.add_argument("--layers", type=int, default=8, metavar="N", help=f"at most {MOST_LAYERS}")
    parser.add_argument("--mode", default="l2exact", choices=("l2exact", "bitexact", "fast"))
    return parser


def step_config(parser: argparse.ArgumentParser, given: argparse.Namespace) -> ModelConfig:
    """The config that was asked for; ends the program where layers are too many."""
    if not 1 <= given.layers <= MOST_LAYERS:
        parser.error(f"--layers must be 1 to {MOST_LAYERS}, not {given.layers}")
    return synthetic_config(given.layers, given.shape)


def record(config: ModelConfig, depth: int, mode: Any) -> list[Noted]:
    """The launches of one replayed step."""
    sources, names = instrumented(kernel_sources())
    engine, program = synthetic_step(sources, config, depth, mode)
    found = notes_of_a_run(engine, program, "timeline_notes", (LAUNCHES, BLOCKS, WORDS))
    engine.close()
    return launches_of(found, names)


def main(argv: list[str] | None = None) -> None:
    parser = step_parser(__doc__)
    given = parser.parse_args(argv)
    launches = record(step_config(parser, given), given.depth, given.mode)
    whole = max(noted.ended.max() for noted in launches) - launches[0].waited.min()
    print(f"{len(launches)} launches, {whole / 1e3:.1f} us with notes; nanoseconds:\n")
    head = ["kernel", "launches", "end before to wait over", "to median block's end", "to last block's end"]
    print(markdown_table([*head, "ready ahead of it", "most on one SM"], summary(launches)))
    print("\nOne layer, nanoseconds from its first wait:\n")
    head = [
        "kernel",
        "blocks",
        "SMs",
        "last start",
        "last ready",
        "waited",
        "first end",
        "median end",
        "last end",
    ]
    print(markdown_table(head, layer(launches, min(3, given.layers - 1))))


if __name__ == "__main__":
    main()
