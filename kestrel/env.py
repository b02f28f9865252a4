"""Every environment variable kestrel reads, in one table; ``docs/env.md`` is generated from it.

Values are read when asked for, so a variable set after the import still counts. An empty value means unset. A
flag on the command line beats its variable.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar, overload

from kestrel.errors import KestrelError, UsageError

T = TypeVar("T")

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


class Variable(Generic[T]):
    """One row of the table. As an attribute of ``Env`` it gives the parsed value, ``None`` when unset."""

    def __init__(
        self,
        name: str,
        values: str,
        parse: Callable[[str], T],
        default: str,
        help: str,
        aliases: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.values = values  # the accepted values, in words
        self.parse = parse
        self.default = default  # what happens when it is unset, in words
        self.help = help
        self.aliases = aliases  # other spellings, accepted with a warning

    @overload
    def __get__(self, instance: None, owner: type) -> Variable[T]: ...
    @overload
    def __get__(self, instance: Env, owner: type) -> T | None: ...
    def __get__(self, instance: Env | None, owner: type) -> Variable[T] | T | None:
        if instance is None:
            return self
        found = instance._lookup(self)
        if found is None:
            return None
        spelling, text = found
        try:
            return self.parse(text)
        except ValueError:
            raise UsageError(f"{spelling}={text!r} is not valid: expected {self.values}") from None


def _parse_flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError(text)


def _flag(name: str, default: str, help: str, *aliases: str) -> Variable[bool]:
    return Variable(name, "1 or 0 (also true/false, yes/no, on/off)", _parse_flag, default, help, aliases)


def _count(name: str, default: str, help: str) -> Variable[int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < 1:
            raise ValueError(text)
        return value

    return Variable(name, "a whole number of at least 1", parse, default, help)


def _choice(name: str, choices: tuple[str, ...], default: str, help: str) -> Variable[str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return Variable(name, " or ".join(choices), parse, default, help)


def _path(name: str, default: str, help: str, *aliases: str) -> Variable[Path]:
    return Variable(name, "a path", lambda text: Path(text).expanduser(), default, help, aliases)


class Env:
    """The table. ``from kestrel.env import env`` and read ``env.isa``, ``env.threads``, ..."""

    model = _path("KESTREL_MODEL", "the demo model's folder", "Model folder of commands called without `-m`.")
    threads = _count(
        "KESTREL_THREADS",
        "every CPU this process may use",
        "CPU threads. Results do not depend on it. Flag: `-t`.",
    )
    isa = _choice(
        "KESTREL_ISA",
        ("scalar", "avx2", "avx512"),
        "the best level this CPU has",
        "Instruction set of the CPU reference. All levels give the same bits. Flag: `--isa`.",
    )
    l2exact = _flag(
        "KESTREL_L2EXACT",
        "`--mode` decides",
        "1: mode `l2exact`, everything by the contract. 0: `bitexact` if `KESTREL_ATTN_BITEXACT` is 1, "
        "else `fast`.",
        "VLLM_CUDA_L2EXACT",
    )
    attn_bitexact = _flag(
        "KESTREL_ATTN_BITEXACT",
        "`--mode` decides",
        "1: mode `bitexact`, attention by the contract and the rest fast, unless `KESTREL_L2EXACT` is 1. "
        "0 alone changes nothing.",
        "VLLM_CUDA_ATTN_BITEXACT",
    )
    l2_dump = _path(
        "KESTREL_L2_DUMP",
        "no dump",
        "File that `decode` writes its L2 dump to. Flag: `--l2-dump`.",
        "VLLM_L2_DUMP",
    )
    cuda_infer = _flag(
        "KESTREL_CUDA_INFER",
        "`--device` decides",
        "1: run on the GPU, as `--cuda` does. 0 alone changes nothing.",
        "VLLM_CUDA_INFER",
    )
    cuda_decode = _flag(
        "KESTREL_CUDA_DECODE",
        "where the prompt runs",
        "1: decode on the GPU, as `--cuda` does. 0: with the prompt on the GPU, decode on the CPU.",
        "VLLM_CUDA_DECODE",
    )
    force_cpu = _flag(
        "KESTREL_FORCE_CPU",
        "0",
        "1: with a GPU, run the prompt on the CPU and decode on the GPU, to find out which one differs.",
        "VLLM_CUDA_FORCE_CPU",
    )
    cuda_graph = _flag(
        "KESTREL_CUDA_GRAPH",
        "1",
        "0: launch every kernel of a decode step by itself, not as one captured graph. Flag: `--no-graph`.",
    )
    cache_dir = _path(
        "KESTREL_CACHE_DIR",
        "`$XDG_CACHE_HOME/kestrel` or `~/.cache/kestrel`",
        "Folder of compiled kernels; it may be deleted at any time.",
    )

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = environ
        self._warned: set[str] = set()

    @property
    def environ(self) -> Mapping[str, str]:
        return os.environ if self._environ is None else self._environ

    @classmethod
    def table(cls) -> Iterator[Variable[object]]:
        """The rows, in the order of the documentation."""
        for value in vars(cls).values():
            if isinstance(value, Variable):
                yield value

    def _lookup(self, variable: Variable[T]) -> tuple[str, str] | None:
        """The spelling in use and its text; two spellings that disagree are an error."""
        spellings = [variable.name, *variable.aliases]
        found = [(name, self.environ[name]) for name in spellings if self.environ.get(name)]
        if not found:
            return None
        if len({text for _, text in found}) > 1:
            raise UsageError(
                " and ".join(f"{name}={text!r}" for name, text in found) + " disagree: set one of them"
            )
        for name, _ in found:
            if name != variable.name:
                self._warn(name, f"{name} is an old spelling: use {variable.name}")
        return found[0]

    def check(self) -> None:
        """Parse every variable that is set (UsageError on the first wrong one) and warn of unknown ones.

        Commands call it before any work, so that a spelling mistake never runs a job with the wrong options.
        """
        for variable in self.table():
            variable.__get__(self, Env)
        known = [variable.name for variable in self.table()]
        for name in sorted(self.environ):
            if name.startswith("KESTREL_") and name not in known and name not in DEVELOPMENT:
                near = difflib.get_close_matches(name[8:], [other[8:] for other in known], n=1)
                hint = f"; did you mean KESTREL_{near[0]}?" if near else ", it is ignored; see docs/env.md"
                self._warn(name, f"unknown environment variable {name}{hint}")

    def _warn(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            print(f"kestrel: warning: {message}", file=sys.stderr)

    def cache_folder(self) -> Path:
        """Where compiled kernels are kept."""
        if self.cache_dir is not None:
            return self.cache_dir
        base = self.environ.get("XDG_CACHE_HOME")
        if base:
            return Path(base) / "kestrel"
        return home_folder("KESTREL_CACHE_DIR to a folder for compiled kernels") / ".cache" / "kestrel"


env = Env()

# Variables of the build and the tests, read there alone.
DEVELOPMENT = {
    "KESTREL_BUILD_SIMT": "1: `setup.py` also builds the kernels for the CPU, which only tests use.",
    "KESTREL_SKIP_NATIVE": "1: `setup.py` builds no native module; `make native` builds it in place.",
    "KESTREL_DEMO_GGUF": "The demo model's GGUF file, for tests that need it.",
    "KESTREL_SHARED": "Folder of larger test material; `shared` beside the repository without it.",
}

# Variables of other projects that change what kestrel does; listed in docs/env.md.
FOREIGN = {
    "NO_COLOR": "No colour in progress bars and tables on stderr.",
    "HF_HOME": "Hugging Face cache in which `convert` finds a source given as `owner/name`.",
    "HF_HUB_OFFLINE": "Honoured trivially: kestrel never downloads a model.",
    "CUDA_VISIBLE_DEVICES": "GPUs that `cuda:N` counts; read by the CUDA driver.",
    "XDG_CACHE_HOME": "Parent of the default cache folder.",
    "XDG_DATA_HOME": "Parent of the user's model folder, `kestrel/models`.",
}


def markdown() -> str:
    """The tables of ``docs/env.md``."""
    lines = ["| variable | values | unset | meaning | other spelling |", "|---|---|---|---|---|"]
    for v in Env.table():
        alias = ", ".join(f"`{name}`" for name in v.aliases)
        lines.append(f"| `{v.name}` | {v.values} | {v.default} | {v.help} | {alias} |")
    for title, table in (
        ("Variables of other projects", FOREIGN),
        ("Variables of the build and the tests", DEVELOPMENT),
    ):
        lines += ["", f"{title}:", "", "| variable | meaning |", "|---|---|"]
        lines += [f"| `{name}` | {text} |" for name, text in table.items()]
    return "\n".join(lines) + "\n"


def home_folder(instead: str) -> Path:
    """The user's home. Without one, as where a container runs under a number only, KestrelError says what
    else can be set: ``HOME``, or ``instead``.
    """
    try:
        return Path.home()
    except RuntimeError:
        raise KestrelError(f"this user has no home folder: set HOME, or {instead}") from None
