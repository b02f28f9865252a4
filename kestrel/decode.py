"""``kestrel decode``: generate text from one prompt."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kestrel.cli import (
    EXIT_INTERRUPTED,
    Parser,
    add_model_flags,
    add_output_flags,
    add_sampling_flags,
    command_parser,
    load_llm,
    note,
    progress_bar,
    read_text,
    run_command,
    sampling_params,
    write_out,
)
from kestrel.env import env
from kestrel.errors import UsageError

if TYPE_CHECKING:
    from kestrel.llm import LLM, Stream
    from kestrel.sampling import SamplingParams
    from kestrel.taps import TapLevel


def build_parser() -> Parser:
    parser = command_parser("decode", "Generate text from one prompt.")
    add_prompt_flags(parser)
    add_model_flags(parser)
    add_sampling_flags(parser)
    group = parser.add_argument_group("L2 hashes")
    group.add_argument(
        "--l2-dump",
        metavar="FILE",
        help="write the hashes of every position to FILE (default: KESTREL_L2_DUMP)",
    )
    add_level_flag(group)
    add_output_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    return parser


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompt")
    prompt = group.add_mutually_exclusive_group(required=True)
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; - reads it from stdin")
    prompt.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file; - is stdin")
    form = group.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        action="store_true",
        default=None,
        help="the prompt is a user's message (default if the model has a chat template)",
    )
    form.add_argument(
        "--raw", dest="chat", action="store_false", help="the prompt is plain text to go on with"
    )
    group.add_argument("--system", metavar="TEXT", help="system message of the chat template")
    group.add_argument("--no-think", action="store_true", help="enable_thinking=False for the chat template")


def add_level_flag(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--l2-level",
        choices=("standard", "extended"),
        help="which values are hashed (default: standard)",
    )


def prompt_ids(args: argparse.Namespace, llm: LLM) -> list[int]:
    """Token ids of the prompt that the flags describe."""
    text = (
        read_text(args.prompt if args.prompt == "-" else args.file)
        if args.prompt in (None, "-")
        else args.prompt
    )
    chat = bool(llm.tokenizer.chat_templates) if args.chat is None else args.chat
    if not chat:
        for flag, value in (("--system", args.system), ("--no-think", args.no_think or None)):
            if value is not None:
                reason = "--raw was given" if args.chat is False else "the model has no chat template"
                raise UsageError(f"{flag} needs a chat template, but {reason}")
        return llm.encode(text)
    messages = [{"role": "user", "content": text}]
    if args.system is not None:
        messages.insert(0, {"role": "system", "content": args.system})
    return llm.chat_prompt(messages, enable_thinking=False if args.no_think else None)


def generate(
    args: argparse.Namespace,
    llm: LLM,
    params: SamplingParams,
    l2_dump: str | Path | None,
    on_text: Callable[[str], None],
) -> tuple[Stream, bool]:
    """Run the request of the flags. Returns the ended stream, and whether Ctrl-C ended it."""
    ids = prompt_ids(args, llm)
    with progress_bar("prompt", shown=len(ids) > llm.engine.chunk and not args.quiet) as on_prompt:
        level: TapLevel = args.l2_level or "standard"
        stream = llm.stream(ids, params=params, l2_dump=l2_dump, l2_level=level, on_prompt=on_prompt)
        try:
            with stream:
                for chunk in stream:
                    on_text(chunk.text)
        except KeyboardInterrupt:
            if l2_dump is not None:
                note(f"interrupted: {l2_dump} was not written")
            return stream, True
    return stream, False


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    params = sampling_params(args)
    l2_dump = args.l2_dump if args.l2_dump is not None else env.l2_dump
    if l2_dump is not None and str(l2_dump) == "-":
        raise UsageError("--l2-dump - would mix with the text on stdout: use `kestrel l2 dump -`")
    if l2_dump is None and args.l2_level is not None:
        raise UsageError("--l2-level says what --l2-dump FILE writes, which is not given")
    began = time.perf_counter()
    with load_llm(args) as llm:
        if args.verbose:
            facts = ", ".join(f"{key} {value}" for key, value in llm.describe().items())
            note(
                f"{llm.path}: loaded in {time.perf_counter() - began:.2f} s; {facts}; context {llm.ctx_size}"
            )
        stream, interrupted = generate(
            args, llm, params, l2_dump, (lambda text: None) if args.json else write_out
        )
        result = stream.result
        if args.json:
            print(json.dumps(_as_json(llm, stream), ensure_ascii=False))
        else:
            write_out("\n")
        if not args.quiet:
            print("\n".join(stream.timings.closing_lines()), file=sys.stderr)
        if args.verbose:
            note(f"finish reason: {result.finish_reason}")
    return EXIT_INTERRUPTED if interrupted else 0


def _as_json(llm: LLM, stream: Stream) -> dict[str, object]:
    result = stream.result
    return {
        "model": str(llm.path),
        **llm.describe(),
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "stop": result.stop,
        "prompt_token_ids": list(result.prompt_token_ids),
        "l2_dump": None if result.l2_dump is None else str(result.l2_dump),
        **result.timings.as_json(),
    }


if __name__ == "__main__":
    sys.exit(run_command(main))
