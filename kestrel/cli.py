"""``kestrel COMMAND``: dispatch, and what all commands share: flags, error messages, exit codes.

Exit codes: 0 done, 1 failure, 2 wrong usage, 3 bits differ, 130 interrupted. Results go to stdout, everything
else to stderr.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import kestrel
from kestrel.contract import CONTRACT
from kestrel.env import env
from kestrel.errors import KestrelError, UsageError

if TYPE_CHECKING:
    from kestrel.llm import LLM
    from kestrel.sampling import SamplingParams

EXIT_FAILURE, EXIT_USAGE, EXIT_DIFFERENT, EXIT_INTERRUPTED = 1, 2, 3, 130

# Command -> one line of help. Each is a module of the package with main(argv) -> exit code.
COMMANDS = {
    "decode": "generate text from one prompt",
    "chat": "talk to a model in turns",
    "convert": "make a model folder from a Hugging Face folder or a GGUF file",
    "inspect": "show a model's config, tensors and bytes, and what would be refused",
    "l2": "dump the hashes of every value of a run, and compare two dumps",
    "bench": "time a model: ms per token, bandwidth, memory, and a hash of the output",
    "doctor": "report on this machine: CPU, GPU, packages, models",
    "demo": "fetch a small real model and decode with it",
}

MainFunction = Callable[[list[str] | None], int]


def version_text() -> str:
    return f"kestrel {kestrel.__version__} (contract {CONTRACT})"


# -- running a command ---------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """The ``kestrel`` program; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0] in COMMANDS:
        return run_command(importlib.import_module(f"kestrel.{arguments[0]}").main, arguments[1:])
    return run_command(_program, arguments, name="kestrel")


def _program(argv: list[str] | None) -> int:
    """What ``kestrel`` does without a command."""
    arguments = argv or []
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        text = _overview()
        print(text, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else EXIT_USAGE
    name = arguments[0]
    if name == "--version":
        print(version_text())
        return 0
    kind = "flag before the command" if name.startswith("-") else "command"
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"commands: {', '.join(COMMANDS)}"
    raise UsageError(f"unknown {kind} {name!r}: {hint}")


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: kestrel COMMAND [flags]   (the same as python -m kestrel.COMMAND)",
            "",
            *lines,
            "",
            "kestrel COMMAND --help shows a command's flags; docs/cli.md and docs/env.md have the rest.",
        ]
    )


def run_command(command: MainFunction, argv: list[str] | None = None, name: str | None = None) -> int:
    """Run a command's ``main`` and turn what it raises into a message and an exit code.

    ``name`` begins the messages; by default ``kestrel`` and the name of the command's module.
    """
    name = name or "kestrel " + _command_name(command)
    if getattr(sys, "stderr", None) is None:  # closed by the caller; print(file=None) would write to stdout
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  for the rest of the process
    code = _guarded(name, command, argv)
    # A full disk or a closed pipe is met here, not by the interpreter after the exit code is set.
    return _guarded(name, _flush, None) or code


def _flush(argv: list[str] | None) -> int:
    if getattr(sys, "stdout", None) is not None:
        sys.stdout.flush()
    return 0


def _guarded(name: str, command: MainFunction, argv: list[str] | None) -> int:
    try:
        with _terminate_as_exit():
            if command not in (_program, _flush):
                env.check()
            return command(argv)
    except UsageError as error:
        return _fail(name, error, EXIT_USAGE)
    except KestrelError as error:
        return _fail(name, error, EXIT_FAILURE)
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read the output has gone
        _drop_unwritten(sys.stdout)
        return EXIT_FAILURE
    except OSError as error:
        # What the machine refuses. A stream that cannot be written has no name.
        where = f"{error.filename}: " if error.filename is not None else "reading or writing failed: "
        return _fail(name, f"{where}{error.strerror or error}", EXIT_FAILURE)
    except MemoryError as error:
        return _fail(
            name, f"out of memory ({error}): lower -c/--ctx-size, or use a smaller model", EXIT_FAILURE
        )
    except SystemExit as leaving:  # argparse: --help, --version, usage errors
        return leaving.code if isinstance(leaving.code, int) else EXIT_USAGE


@contextmanager
def _terminate_as_exit() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that partial files go away; the exit code is the shell's 143."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _command_name(command: MainFunction) -> str:
    module = command.__module__
    if module == "__main__":
        spec = sys.modules[module].__spec__
        module = spec.name if spec is not None else module
    return module.removeprefix("kestrel.").removesuffix(".__main__")


def _fail(name: str, error: object, code: int) -> int:
    try:
        _flush(None)
    except OSError:
        _drop_unwritten(sys.stdout)
    try:
        print(f"{name}: error: {error}", file=sys.stderr)
    except OSError:  # the exit code still says it
        _drop_unwritten(sys.stderr)
    return code


def _drop_unwritten(stream: TextIO) -> None:
    """Keep the interpreter from writing the rest of a stream, which failed, once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


# -- flags ---------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """No abbreviations, ``--version``, and a hint for a flag that does not exist."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)
        self.add_argument(
            "--version", action="version", version=version_text(), help="show the version and exit"
        )

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            flags = [flag for action in self._actions for flag in action.option_strings]
            near = difflib.get_close_matches(unknown.split()[0].partition("=")[0], flags, n=1)
            message = f"unknown argument {unknown}" + (f": did you mean {near[0]}?" if near else "")
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message}; {self.prog} --help lists the flags\n")


def command_parser(name: str, description: str) -> Parser:
    """The parser of ``kestrel NAME``."""
    return Parser(prog=f"kestrel {name}", description=description)


def count(text: str) -> int:
    """A whole number of at least 1, for ``type=``."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Which model, where it runs, and how exactly."""
    group = parser.add_argument_group("model and device")
    group.add_argument(
        "-m", "--model", metavar="FOLDER", help="model folder (default: KESTREL_MODEL, else the demo model)"
    )
    group.add_argument(
        "-c",
        "--ctx-size",
        type=count,
        metavar="N",
        help="positions of the KV cache (default: 4096 or the model's)",
    )
    group.add_argument(
        "-t", "--threads", type=count, metavar="N", help="CPU threads (default: all; same bits)"
    )
    group.add_argument(
        "--isa",
        choices=("scalar", "avx2", "avx512"),
        help="CPU instruction set (default: the best; same bits)",
    )
    device = group.add_mutually_exclusive_group()
    device.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: cpu)")
    device.add_argument(
        "--cuda", dest="device", action="store_const", const="cuda", help="short for --device cuda"
    )
    group.add_argument("--prompt-device", metavar="DEVICE", help="run the prompt elsewhere than --device")
    group.add_argument("--decode-device", metavar="DEVICE", help="run the generated positions elsewhere")
    mode = group.add_mutually_exclusive_group()
    mode.add_argument(
        "--mode",
        choices=("fast", "bitexact", "l2exact"),
        help="what is exact: nothing, attention, or everything (default: l2exact)",
    )
    mode.add_argument("--l2exact", dest="mode", action="store_const", const="l2exact", help="--mode l2exact")
    mode.add_argument(
        "--bitexact", dest="mode", action="store_const", const="bitexact", help="--mode bitexact"
    )
    group.add_argument("--no-graph", action="store_true", help="launch GPU kernels one by one (same bits)")
    group.add_argument(
        "--chunk", type=count, metavar="N", help="prompt rows of one forward pass (default: 256; same bits)"
    )


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("generation")
    group.add_argument(
        "-n",
        "--max-tokens",
        type=count,
        metavar="N",
        help="tokens to generate (default: until the context is full)",
    )
    group.add_argument(
        "--temp", type=float, default=0.0, metavar="T", help="temperature (default: 0, greedy)"
    )
    group.add_argument("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
    group.add_argument(
        "--top-p", type=float, metavar="P", help="... from the likeliest that together reach P"
    )
    group.add_argument(
        "--min-p", type=float, metavar="P", help="... from those at least P times as likely as the best"
    )
    group.add_argument("-s", "--seed", type=int, metavar="N", help="seed of sampling (default: 0)")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be given several times"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("-q", "--quiet", action="store_true", help="no statistics and no progress on stderr")
    group.add_argument("-v", "--verbose", action="store_true", help="more on stderr")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """SamplingParams from the flags. Warns of flags that greedy decoding does not use."""
    from kestrel.sampling import SamplingParams

    given = {"top_k": args.top_k, "top_p": args.top_p, "min_p": args.min_p, "seed": args.seed}
    given = {name: value for name, value in given.items() if value is not None}
    if args.temp == 0 and given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        note(f"{flags} has no effect at temperature 0 (greedy): give --temp")
    return SamplingParams(
        temperature=args.temp,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop or ()),
        ignore_eos=args.ignore_eos,
        **given,
    )


def load_llm(args: argparse.Namespace) -> LLM:
    """The model that the flags name; flags beat environment variables."""
    from kestrel.backends import Placement, choose_mode
    from kestrel.engine import DEFAULT_CHUNK
    from kestrel.llm import LLM

    placement = Placement.choose(args.device, args.prompt_device, args.decode_device)
    mode = choose_mode(args.mode)
    if mode != "l2exact" and not placement.uses_gpu:
        note(f"mode {mode} on the CPU runs the exact reference, as every mode does there")
    with progress_bar("loading", shown=placement.uses_gpu and not args.quiet) as on_load:
        return LLM(
            args.model,
            device=placement.decode,
            prompt_device=placement.prompt,
            mode=mode,
            threads=args.threads,
            ctx_size=args.ctx_size,
            isa=args.isa,
            graph=not args.no_graph and env.cuda_graph is not False,
            chunk=args.chunk or DEFAULT_CHUNK,
            on_load=on_load,
        )


# -- streams -------------------------------------------------------------------------------------------------


def note(message: str) -> None:
    """A line on stderr."""
    print(f"kestrel: {message}", file=sys.stderr)


def read_text(path: str) -> str:
    """A prompt from a file, or from stdin for ``-``; one newline at its end is not part of it."""
    where = "stdin" if path == "-" else path
    if path == "-":
        check_stdin()
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{where} cannot be read: {error.strerror}") from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}"
        ) from error
    return text.removesuffix("\n").removesuffix("\r")


def check_stdin() -> None:
    """Raise UsageError where the caller has closed stdin."""
    if getattr(sys, "stdin", None) is None:
        raise UsageError("stdin is closed: there is nothing to read")


def write_out(text: str) -> None:
    """Text to stdout, at once."""
    if getattr(sys, "stdout", None) is None:
        raise KestrelError("stdout is closed: the text has nowhere to go")
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:  # a terminal that is not UTF-8
        sys.stdout.write(text.encode(sys.stdout.encoding, "replace").decode(sys.stdout.encoding))
    sys.stdout.flush()


@contextmanager
def progress_bar(title: str, shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """``update(done, total)`` of a bar on stderr; None unless ``shown`` and stderr is a drawing terminal."""
    if not shown or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = TextColumn(title), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            if done == total:
                bar.stop()  # before the first text

        yield update


if __name__ == "__main__":
    sys.exit(main())
