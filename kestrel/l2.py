"""``kestrel l2 dump|diff``: write the L2 hashes of a run, and compare two dumps."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kestrel.cli import (
    EXIT_DIFFERENT,
    EXIT_INTERRUPTED,
    Parser,
    add_model_flags,
    add_output_flags,
    add_sampling_flags,
    command_parser,
    load_llm,
    run_command,
    sampling_params,
)
from kestrel.errors import UsageError


def build_parser() -> Parser:
    from kestrel.decode import add_level_flag, add_prompt_flags

    parser = command_parser("l2", "Hashes of every value of a run (docs/l2.md).")
    commands = parser.add_subparsers(dest="command", required=True, metavar="dump|diff")

    dump = commands.add_parser("dump", help="run a prompt and write the hashes of every position")
    dump.add_argument("output", metavar="FILE", help="the dump; - is stdout")
    add_prompt_flags(dump)
    add_model_flags(dump)
    add_sampling_flags(dump)
    add_level_flag(dump)
    add_output_flags(dump)

    diff = commands.add_parser(
        "diff", help="compare two dumps", description="Compare two dumps. Exit code 0: equal, 3: different."
    )
    diff.add_argument("a", metavar="A")
    diff.add_argument("b", metavar="B")
    diff.add_argument("--json", action="store_true", help="print one JSON object")
    diff.add_argument(
        "--tensor",
        metavar="KEY",
        help="run both sides again up to this key ('first': the first that differs) and compare its values",
    )
    diff.add_argument(
        "--out", type=Path, default=Path(), metavar="FOLDER", help="where --tensor saves (default: here)"
    )
    diff.add_argument("--model-a", metavar="FOLDER", help="where A's model is now, for --tensor")
    diff.add_argument("--model-b", metavar="FOLDER", help="where B's model is now, for --tensor")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return _dump(args) if args.command == "dump" else _diff(args)


def _dump(args: argparse.Namespace) -> int:
    from kestrel.decode import generate

    with load_llm(args) as llm:
        stream, interrupted = generate(args, llm, sampling_params(args), args.output, lambda text: None)
    if interrupted:
        return EXIT_INTERRUPTED
    if not args.quiet:
        result = stream.result
        positions = result.prompt_tokens + len(result.token_ids) - 1
        print(f"{args.output}: {positions} positions", file=sys.stderr)
    if args.verbose:
        print("\n".join(stream.timings.closing_lines()), file=sys.stderr)
    return 0


def _diff(args: argparse.Namespace) -> int:
    from kestrel import l2_diff, l2_tensor
    from kestrel.l2_dump import read_dump
    from kestrel.l2_fields import parse_key

    if args.tensor is None and (args.model_a or args.model_b):
        raise UsageError("--model-a and --model-b belong to --tensor")
    result = l2_diff.compare(read_dump(args.a), read_dump(args.b))
    tensor = None
    if args.tensor is not None and not (args.tensor == "first" and result.first is None):
        try:
            key = result.first.key if args.tensor == "first" and result.first else parse_key(args.tensor)
        except ValueError as error:
            raise UsageError(f"--tensor: {error}") from None
        tensor = l2_tensor.compare_tensors(result.a, result.b, key, args.out, (args.model_a, args.model_b))
    if args.json:
        facts: dict[str, Any] = result.as_json()
        facts["tensor"] = None if tensor is None else tensor.as_json()
        print(json.dumps(facts))
    else:
        print(l2_diff.report(result))
        if tensor is not None:
            print("\n" + l2_tensor.report(tensor))
    return 0 if result.equal else EXIT_DIFFERENT


if __name__ == "__main__":
    sys.exit(run_command(main))
