"""How much of its code a kernel goes through: ``python -m bench.gpu.executed_code SOURCE.csv``.

Straight code that a multiprocessor has not run lately has to be fetched (``bench.gpu.code_reads``), so what
counts is not a kernel's size but what a launch executes of it. Two commands make the file:

ncu --section SourceCounters -k regex:k_ --launch-skip 60 --launch-count 7 -o steps \\
    python -m bench.gpu.profile_target 1024
ncu -i steps.ncu-rep --page source --csv > source.csv

Prints, for each launch, its kernel's size, the size of the instructions that at least one warp executed, and
in how many runs of neighbouring ones they lie.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.gpu.context import markdown_table

INSTRUCTION_BYTES = 16  # of every instruction since Volta


@dataclass
class Launch:
    """One launch of a kernel: whether each instruction, in the order of addresses, was executed."""

    kernel: str
    executed: list[bool] = field(default_factory=list)

    @property
    def size(self) -> float:
        """Of the whole kernel, KB."""
        return len(self.executed) * INSTRUCTION_BYTES / 1024

    @property
    def executed_size(self) -> float:
        """Of what was executed, KB."""
        return sum(self.executed) * INSTRUCTION_BYTES / 1024

    @property
    def runs(self) -> int:
        before = [False, *self.executed[:-1]]
        return sum(now and not last for now, last in zip(self.executed, before, strict=True))


def launches_of(lines: Iterable[str]) -> Iterator[Launch]:
    """The launches in the text of a source page. ValueError for a text that is none."""
    launch: Launch | None = None
    columns: list[str] = []
    address = -1
    for row in csv.reader(lines):
        if row[:1] == ["Kernel Name"]:
            if launch is not None and launch.executed:
                yield launch
            launch, columns, address = Launch(row[1]), [], -1
        elif launch is not None and row[:1] == ["Address"]:
            columns = row
            if "Instructions Executed" not in columns:
                raise ValueError(
                    "no column 'Instructions Executed': was it made with --section SourceCounters?"
                )
        elif launch is not None and columns and len(row) == len(columns):
            values = dict(zip(columns, row, strict=True))
            here = int(values["Address"], 0)
            if here <= address:  # another launch of the same kernel
                yield launch
                launch = Launch(launch.kernel)
            address = here
            launch.executed.append(int(values["Instructions Executed"] or 0) > 0)
    if launch is None or not launch.executed:
        raise ValueError("no kernel in it: a source page as CSV begins with 'Kernel Name'")
    yield launch


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="SOURCE.csv")
    args = parser.parse_args()
    try:
        with args.file.open(newline="") as lines:
            found = list(launches_of(lines))
    except (OSError, ValueError) as error:
        parser.error(f"{args.file}: {error}")
    rows = [
        [launch.kernel, f"{launch.size:.1f}", f"{launch.executed_size:.1f}", str(launch.runs)]
        for launch in found
    ]
    print(markdown_table(["kernel", "KB", "executed", "runs"], rows))


if __name__ == "__main__":
    main()
