"""One model's measurements, interleaved: one repeat of every variant in turn, then the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kestrel.backends import Mode
from kestrel.benchmark.runner import BitsDifferError, Runner
from kestrel.taps import TapLevel

WARM_UP_TOKENS = 8  # compiled steps, the recorded graph, page tables


@dataclass(frozen=True)
class Variant:
    """One way to run the same computation."""

    mode: Mode = "l2exact"
    graph: bool = True  # of a GPU: one recorded graph a token, or every kernel launched by itself
    taps: TapLevel = "off"  # hashes of every key of every token

    @property
    def backend(self) -> tuple[Mode, bool]:
        """Variants of equal value share a backend."""
        return self.mode, self.graph

    @property
    def label(self) -> str:
        return self.mode + ("" if self.graph else ", eager") + ("" if self.taps == "off" else ", full dump")


@dataclass
class Cell:
    """One test: a prompt of ``n_prompt`` tokens or ``n_gen`` decoded tokens, behind ``n_depth`` positions."""

    variant: Variant
    n_prompt: int
    n_gen: int
    n_depth: int
    test_time: float = 0.0  # seconds since the epoch when its first repeat began
    seconds: list[float] = field(default_factory=list)  # of each repeat
    chosen: list[int] = field(default_factory=list)  # tokens
    output_hash: str = ""

    @property
    def count(self) -> int:
        return self.n_prompt or self.n_gen

    @property
    def label(self) -> str:
        """As llama-bench writes it: ``pp512``, ``tg64 @ d1024``."""
        name = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        return name + (f" @ d{self.n_depth}" if self.n_depth else "")


def plan_cells(
    variants: Sequence[Variant], n_prompt: int, n_gen: int, depths: Sequence[int]
) -> list[list[Cell]]:
    """Groups of cells that differ in their variant alone. Prompts run without taps, and graph or not is one
    for them.
    """
    groups = []
    for depth in depths:
        if n_prompt:
            first = {variant.mode: variant for variant in reversed(variants) if variant.taps == "off"}
            groups.append([Cell(first[mode], n_prompt, 0, depth) for mode in reversed(first)])
        if n_gen:
            groups.append([Cell(variant, 0, n_gen, depth) for variant in variants])
    return [group for group in groups if group]


def run_group(
    runners: Mapping[tuple[Mode, bool], Runner],
    cells: Sequence[Cell],
    repetitions: int,
    *,
    exact: Callable[[Variant], bool],
) -> None:
    """Warm up every cell, then ``repetitions`` rounds over all of them, every second one backwards.

    ``exact(variant)`` says whether equal bits are promised. Raises BitsDifferError when repeats, or variants
    that promise it, do not agree.
    """
    for cell in cells:
        _run(runners[cell.variant.backend], cell, warm_up=True)
    for round_ in range(repetitions):
        for cell in cells if round_ % 2 == 0 else list(reversed(cells)):
            runner = runners[cell.variant.backend]
            cell.test_time = cell.test_time or time.time()
            seconds, chosen = _run(runner, cell)
            cell.seconds.append(seconds)
            found = runner.output_hash(chosen, cell.n_depth, cell.count)
            if cell.output_hash and exact(cell.variant) and found != cell.output_hash:
                raise BitsDifferError(
                    f"{cell.label}, {cell.variant.label}: repeat {round_ + 1} gave output hash {found}, "
                    f"the repeats before it {cell.output_hash}"
                )
            cell.chosen, cell.output_hash = chosen, found
    promised = [cell for cell in cells if exact(cell.variant)]
    for cell in promised[1:]:
        if cell.output_hash != promised[0].output_hash:
            raise BitsDifferError(
                f"{cell.label}: {cell.variant.label} gave output hash {cell.output_hash}, "
                f"{promised[0].variant.label} {promised[0].output_hash}"
            )


def _run(runner: Runner, cell: Cell, *, warm_up: bool = False) -> tuple[float, list[int]]:
    if cell.n_prompt:
        return runner.prompt(cell.n_prompt, cell.n_depth)
    count = min(cell.n_gen, WARM_UP_TOKENS) if warm_up else cell.n_gen
    return runner.generate(count, cell.n_depth, cell.variant.taps)


def backends_of(variants: Sequence[Variant]) -> Iterator[tuple[Mode, bool]]:
    """Each backend that the variants need, once."""
    return iter(dict.fromkeys(variant.backend for variant in variants))
