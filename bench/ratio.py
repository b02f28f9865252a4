"""What exactness costs, as a ratio of times: ``python -m bench.ratio --shape qwen3-30b-a3b -d 0,1024``.

Runs ``kestrel bench --mode l2exact,fast`` in several processes, one after the other, because the ratio of the
two moves with where memory comes to lie in a process. Rule: within a process the ratio of the modes' median
times, which take turns; over the processes its median. Prints times and ratios with their least and most, and
exits with 1 where a depth's median ratio is above ``--most``, with 3 when exact outputs differ,
between processes or within one. Needs a GPU: on the CPU every mode runs the exact reference.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from bench import nightly
from bench.gpu.context import markdown_table
from bench.nightly import EXIT_DIFFERENT, EXIT_FAILURE, Entry
from kestrel.benchmark.records import Record
from kestrel.benchmark.runner import BitsDifferError
from kestrel.cli import count
from kestrel.errors import KestrelError

MODES = ("l2exact", "fast")


@dataclass(frozen=True)
class Pair:
    """One process at one depth: ms a token in each mode, and the hash of the exact output."""

    exact: float
    fast: float
    output_hash: str

    @property
    def ratio(self) -> float:
        return self.exact / self.fast


def pairs(records: Sequence[Record]) -> dict[int, Pair]:
    """By depth. KestrelError unless every depth has both modes."""
    decoding = [r for r in records if r.get("n_gen") and r.get("graph") and r.get("taps") == "off"]
    found = {}
    for depth in sorted({int(r["n_depth"]) for r in decoding}):
        both = {r["mode"]: r for r in decoding if r["n_depth"] == depth}
        if any(mode not in both for mode in MODES):
            raise KestrelError(
                f"depth {depth} was not measured in l2exact and fast, only in {', '.join(both)}"
            )
        exact, fast = (both[mode] for mode in MODES)
        found[depth] = Pair(exact["ms_per_token_median"], fast["ms_per_token_median"], exact["output_hash"])
    if not found:
        raise KestrelError("nothing was decoded: -n 0?")
    return found


def run_once(entry: Entry) -> list[Record]:
    """The records of one process. KestrelError if it failed, BitsDifferError if bits differed."""
    measured = nightly.Measured()
    records = nightly.run_entry(entry, measured)
    if measured.differing:
        raise BitsDifferError("; ".join(measured.differing))
    if measured.failures:
        raise KestrelError("; ".join(measured.failures))
    return records


def spread(values: Sequence[float], digits: int) -> str:
    low, high = min(values), max(values)
    return f"{median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def table(runs: Sequence[dict[int, Pair]]) -> list[list[str]]:
    """A row to each depth."""
    rows = []
    for depth in runs[0]:
        of_depth = [run[depth] for run in runs]
        exact, fast = [m.exact for m in of_depth], [m.fast for m in of_depth]
        ratios = [m.ratio for m in of_depth]
        rows.append([str(depth), spread(exact, 3), spread(fast, 3), spread(ratios, 3)])
    return rows


def above(runs: Sequence[dict[int, Pair]], most: float) -> list[int]:
    """The depths whose median ratio is above ``most``."""
    return [depth for depth in runs[0] if median([run[depth].ratio for run in runs]) > most]


def different(runs: Sequence[dict[int, Pair]]) -> list[int]:
    """The depths at which the exact outputs of the processes differ."""
    return [depth for depth in runs[0] if len({run[depth].output_hash for run in runs}) > 1]


def depths(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.ratio",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--shape", help="synthetic weights of a published shape")
    which.add_argument("-m", "--model", help="model folder, or a name")
    parser.add_argument(
        "-d", "--n-depth", type=depths, default=[0], metavar="LIST", help="positions before (default 0)"
    )
    parser.add_argument(
        "-n", "--n-gen", type=count, default=32, metavar="N", help="tokens decoded (default 32)"
    )
    parser.add_argument(
        "-r", "--repetitions", type=count, default=5, metavar="N", help="of each process (default 5)"
    )
    parser.add_argument(
        "--processes", type=count, default=5, metavar="N", help="one after the other (default 5)"
    )
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N (default cuda)")
    parser.add_argument("--most", type=float, metavar="X", help="exit with 1 above this ratio")
    return parser


def main(argv: Sequence[str] | None = None, run: Callable[[Entry], list[Record]] = run_once) -> int:
    args = build_parser().parse_args(argv)
    entry = Entry(
        device=args.device,
        shape=args.shape,
        model=args.model,
        modes=list(MODES),
        depths=args.n_depth,
        n_prompt=0,
        n_gen=args.n_gen,
        repetitions=args.repetitions,
    )
    runs = []
    try:
        for number in range(args.processes):
            print(f"process {number + 1} of {args.processes}", file=sys.stderr, flush=True)
            runs.append(pairs(run(entry)))
            if runs[-1].keys() != runs[0].keys():
                raise KestrelError("the processes measured different depths")
    except KestrelError as error:
        print(f"bench.ratio: error: {error}", file=sys.stderr)
        return EXIT_DIFFERENT if isinstance(error, BitsDifferError) else EXIT_FAILURE
    heads = ["depth", "l2exact ms/token", "fast", "l2exact / fast"]
    print(markdown_table(heads, table(runs)))
    if wrong := different(runs):
        print(f"the exact outputs differ at depth {', '.join(map(str, wrong))}", file=sys.stderr)
        return EXIT_DIFFERENT
    if args.most is not None and (slow := above(runs, args.most)):
        print(f"above {args.most} at depth {', '.join(map(str, slow))}", file=sys.stderr)
        return EXIT_FAILURE
    return 0


if __name__ == "__main__":
    sys.exit(main())
