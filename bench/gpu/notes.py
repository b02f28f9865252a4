"""What a kernel's cycles go to, within a whole step: ``python -m bench.gpu.notes FOLDER --depth 1024``.

FOLDER is a copy of ``kernels/`` in which lines ``note(1);``, ``note(2);`` ... up to 14 stand at the places
of interest. There the first lane of a block's first warp notes its multiprocessor's clock
(``note_as(2, 5);``: of warp 5). ``note(1);`` is where time is counted from, best behind
``wait_for_previous``; a place that is passed several times keeps the last. Prints, for each kernel with
notes, cycles from note 1: the least, the median and the most of its blocks, medians over its launches. Needs
a GPU.

A note takes its time itself, and holds the loads and stores around it in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.gpu.context import markdown_table
from bench.gpu.timeline import (
    BLOCKS,
    LAUNCHES,
    RULE,
    changed_port,
    notes_of_a_run,
    step_config,
    step_parser,
    synthetic_step,
    with_ends,
)
from kestrel.config import ModelConfig
from kestrel.cuda.sources import KernelSources, read_sources

WORDS = 16  # of a block: notes by number, the kernel's number plus one in the last
ZERO, KERNEL = 1, WORDS - 1

_NOTES = f"""
extern "C" {{ __device__ unsigned long long clock_notes[{LAUNCHES * BLOCKS * WORDS}]; }}
DEVICE void clock_note(int what, unsigned long long value) {{
    const unsigned block = blockIdx.y * gridDim.x + blockIdx.x;
    unsigned long long launch;
    asm volatile("mov.u64 %0, %%gridid;" : "=l"(launch));
    if (block < {BLOCKS}) clock_notes[((launch % {LAUNCHES}) * {BLOCKS} + block) * {WORDS} + what] = value;
}}
DEVICE void note_as(int what, int warp) {{
    unsigned long long now;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
    if ((int)threadIdx.x == 32 * warp && threadIdx.y == 0) clock_note(what, now);
}}
DEVICE void note(int what) {{ note_as(what, 0); }}
"""


def noting(sources: KernelSources) -> tuple[KernelSources, list[str]]:
    """Kernels whose text calls note(), made to compile, and their names by number."""
    port = changed_port(sources, [(RULE, _NOTES + RULE)])
    end = "if (threadIdx.x + threadIdx.y == 0) clock_note({}, {}ull);"
    return with_ends(port, lambda number: end.format(KERNEL, number + 1))


def cycles(notes: Sequence[npt.NDArray[np.int64]], names: Sequence[str]) -> list[list[str]]:
    """A row to each note of each kernel, from i64[LAUNCHES, BLOCKS, WORDS] of each module."""
    found: dict[tuple[int, int], list[npt.NDArray[np.int64]]] = {}
    for module in notes:
        for launch in module:
            blocks = launch[(launch[:, ZERO] > 0) & (launch[:, KERNEL] > 0)]
            for what in range(KERNEL):
                noted = blocks[blocks[:, what] > 0]
                if len(noted):
                    key = int(noted[0, KERNEL]) - 1, what
                    found.setdefault(key, []).append(noted[:, what] - noted[:, ZERO])
    rows = []
    for (kernel, what), launches in sorted(found.items()):
        if what != ZERO:
            spread = [(d.min(), np.median(d), d.max()) for d in launches]
            median = (f"{x:.0f}" for x in np.median(spread, axis=0))
            rows.append([names[kernel], str(what), str(len(launches)), *median])
    return rows


def record(folder: Path, config: ModelConfig, depth: int, mode: Any) -> list[list[str]]:
    """``cycles`` of one replayed step."""
    sources, names = noting(read_sources(folder))
    engine, program = synthetic_step(sources, config, depth, mode)
    notes = notes_of_a_run(engine, program, "clock_notes", (LAUNCHES, BLOCKS, WORDS))
    engine.close()
    return cycles(notes, names)


def main(argv: list[str] | None = None) -> None:
    parser = step_parser(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    given = parser.parse_args(argv)
    if not (given.folder / "op_args.h").is_file():
        parser.error(f"{given.folder} is no copy of the folder kernels/")
    rows = record(given.folder, step_config(parser, given), given.depth, given.mode)
    print(markdown_table(["kernel", "note", "launches", "least", "median", "most"], rows))


if __name__ == "__main__":
    main()
