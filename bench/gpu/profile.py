"""Where the time of a decode step goes: each kernel of the step alone, timed on the device."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from kestrel.cuda.device import CudaBackend, PreparedLaunch
from kestrel.cuda.graph import Graph
from kestrel.engine import Engine


def replay_microseconds(backend: CudaBackend, launches: list[PreparedLaunch], repeats: int = 20) -> float:
    """Median device time of one replay of ``launches`` recorded as a graph."""
    cupy = backend._cupy
    with backend.current():
        backend.launch(launches)
        backend.stream.synchronize()
        graph = Graph.record(backend.stream, lambda: backend.launch(launches))
        events = [cupy.cuda.Event() for _ in range(repeats + 1)]
        for _ in range(3):
            graph.launch()
        for number, event in enumerate(events):
            event.record(backend.stream)
            if number < repeats:
                graph.launch()
        backend.stream.synchronize()
        pairs = itertools.pairwise(events)
        times = [1e3 * cupy.cuda.get_elapsed_time(a, b) for a, b in pairs]
    return float(np.median(times))


def kernel_table(engine: Engine, depth: int) -> list[list[Any]]:
    """Rows of: kernel, launches a step, us each, us a step, share; the first row names the columns.

    The launches of one kernel and grid in all layers are replayed one after the other, on the weights of
    their own layers, so caches are as cold as in a real step.
    """
    model = engine.decode_model
    backend: Any = model.backend
    model.load_rows(np.array([1], np.int32), np.array([depth], np.int32))
    program: Any = model.step(1, 1).program
    groups: dict[tuple[str, Any], list[PreparedLaunch]] = {}
    for item in program.whole.main:
        groups.setdefault((item.launch.kernel, item.launch.grid), []).append(item)
    whole = replay_microseconds(backend, program.whole.main)
    rows = []
    for (kernel, grid), launches in groups.items():
        total = replay_microseconds(backend, launches)
        rows.append([kernel, "x".join(map(str, grid)), len(launches), total / len(launches), total])
    rows.sort(key=lambda row: -row[4])
    listed = sum(row[4] for row in rows)
    table = [["kernel", "grid", "launches", "us each", "us a step", "share"]]
    table += [[k, g, n, f"{e:.2f}", f"{t:.1f}", f"{100 * t / listed:.1f} %"] for k, g, n, e, t in rows]
    table.append(["sum of the parts", "", len(program.whole.main), "", f"{listed:.1f}", ""])
    table.append(["whole step, one graph", "", "", "", f"{whole:.1f}", ""])
    return table


def pair_table(engine: Engine, depth: int) -> list[list[Any]]:
    """What neighbours cost each other: each two kernels that follow one another in every layer, replayed in
    turn, against the sum of their times alone. The first row names the columns.
    """
    model = engine.decode_model
    backend: Any = model.backend
    model.load_rows(np.array([1], np.int32), np.array([depth], np.int32))
    main = model.step(1, 1).program.whole.main
    names = [item.launch.kernel for item in main]
    pairs: dict[tuple[str, str], list[PreparedLaunch]] = {}
    for first, second in itertools.pairwise(main):
        pairs.setdefault((first.launch.kernel, second.launch.kernel), []).extend((first, second))
    alone = {
        name: replay_microseconds(backend, [item for item in main if item.launch.kernel == name])
        / names.count(name)
        for name in dict.fromkeys(names)
    }
    table: list[list[Any]] = [["first", "second", "us alone, both", "us in turn", "more"]]
    for (first, second), launches in pairs.items():
        if len(launches) < 4:
            continue
        in_turn = replay_microseconds(backend, launches) * 2 / len(launches)
        both = alone[first] + alone[second]
        table.append([first, second, f"{both:.2f}", f"{in_turn:.2f}", f"{in_turn - both:.2f}"])
    return table
