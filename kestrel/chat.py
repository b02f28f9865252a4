"""``kestrel chat``: a conversation in turns, at a terminal or from a pipe (one message a line)."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from kestrel.cli import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    Parser,
    add_model_flags,
    add_output_flags,
    add_sampling_flags,
    check_stdin,
    command_parser,
    load_llm,
    note,
    progress_bar,
    run_command,
    sampling_params,
    write_out,
)
from kestrel.env import env
from kestrel.errors import ContextOverflowError
from kestrel.stats import Timings

if TYPE_CHECKING:
    from kestrel.llm import LLM
    from kestrel.sampling import SamplingParams

HELP = """\
/reset   forget the conversation
/quit    leave (also Ctrl-D)
/help    this text
//...    a message that starts with /
Ctrl-C ends an answer; without one it leaves."""


def build_parser() -> Parser:
    parser = command_parser(
        "chat",
        "Talk to a model in turns. Commands: /reset, /quit, /help. From a pipe, each line is a message.",
    )
    group = parser.add_argument_group("conversation")
    group.add_argument("--system", metavar="TEXT", help="system message of the chat template")
    group.add_argument("--no-think", action="store_true", help="enable_thinking=False for the chat template")
    add_model_flags(parser)
    add_sampling_flags(parser)
    add_output_flags(parser)
    return parser


class Conversation:
    """The messages so far, and the answer to the next one."""

    def __init__(self, llm: LLM, params: SamplingParams, args: argparse.Namespace) -> None:
        self.llm = llm
        self.params = params
        self.args = args
        self.totals = Timings()
        self.reset()

    def reset(self) -> None:
        system = self.args.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, text: str) -> bool:
        """Stream the answer to stdout; False when Ctrl-C ended it. After an error the turn is taken back."""
        self.messages.append({"role": "user", "content": text})
        try:
            ids = self.llm.chat_prompt(self.messages, enable_thinking=False if self.args.no_think else None)
            long = len(ids) > self.llm.engine.chunk
            with progress_bar("prompt", shown=long and not self.args.quiet) as on_prompt:
                stream = self.llm.stream(ids, params=self.params, reuse_cache=True, on_prompt=on_prompt)
                complete = True
                try:
                    with stream:
                        for chunk in stream:
                            write_out(chunk.text)
                except KeyboardInterrupt:
                    complete = False
        except BaseException:
            self.messages.pop()
            raise
        write_out("\n")
        self.messages.append({"role": "assistant", "content": stream.result.text})
        self.totals.add(stream.timings)
        if stream.result.finish_reason == "length" and self.params.max_tokens is None:
            note("the context is full: /reset starts again, -c raises the limit")
        if self.args.verbose:
            print("\n".join(stream.timings.closing_lines()), file=sys.stderr)
        return complete


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    params = sampling_params(args)
    if env.l2_dump is not None:
        note("KESTREL_L2_DUMP is not used by chat: use `kestrel decode` or `kestrel l2 dump`")
    check_stdin()
    terminal = sys.stdin.isatty()
    with load_llm(args) as llm:
        llm.chat_prompt(
            [{"role": "user", "content": ""}]
        )  # a model without a template is refused before a question
        conversation = Conversation(llm, params, args)
        if terminal and not args.quiet:
            note(f"{llm.path.name}, context {llm.ctx_size}; /help lists commands")
        code = _converse(conversation, terminal)
        if not args.quiet:
            print("\n".join(conversation.totals.closing_lines()), file=sys.stderr)
    return code


def _converse(conversation: Conversation, terminal: bool) -> int:
    while True:
        try:
            line = _read_line(terminal)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        if line is None or line in ("/quit", "/exit"):
            return 0
        if line == "/reset":
            conversation.reset()
        elif line == "/help":
            print(HELP, file=sys.stderr)
        elif line.startswith("/") and not line.startswith("//"):
            note(f"unknown command {line.split()[0]}: /help lists them; // starts a message with /")
            if not terminal:
                return EXIT_FAILURE
        elif line:
            try:
                complete = conversation.answer(line.removeprefix("/"))
            except ContextOverflowError as error:
                if not terminal:
                    raise
                note(f"{error}; or /reset")
                continue
            if not complete and not terminal:
                return EXIT_INTERRUPTED


def _read_line(terminal: bool) -> str | None:
    """The next message, None at the end of the input."""
    if terminal and sys.stdout.isatty():
        import readline  # noqa: F401  line editing and history for input()

        try:
            return input("> ").strip()
        except EOFError:
            return None
    if terminal:
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.strip() if line else None


if __name__ == "__main__":
    sys.exit(run_command(main))
