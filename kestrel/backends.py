"""Which backend runs what: the one place that makes backends."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kestrel.backend import Backend
from kestrel.env import env
from kestrel.errors import UsageError

Mode = Literal["fast", "bitexact", "l2exact"]
MODES: tuple[Mode, ...] = ("fast", "bitexact", "l2exact")


def parse_device(text: str) -> tuple[str, int]:
    """``cpu``, ``cuda`` or ``cuda:N`` as kind and index. Raises UsageError for anything else."""
    match = re.fullmatch(r"(cpu)|cuda(?::(\d+))?", text)
    if not match:
        raise UsageError(f"unknown device {text!r}: choose cpu, cuda or cuda:N")
    return ("cpu", 0) if match[1] else ("cuda", int(match[2] or 0))


def parse_mode(text: str) -> Mode:
    for mode in MODES:
        if text == mode:
            return mode
    raise UsageError(f"unknown mode {text!r}: choose from {', '.join(MODES)}")


@dataclass(frozen=True)
class Placement:
    """Where the prompt and the generated positions run. The bits do not depend on it in mode l2exact."""

    prompt: str = "cpu"
    decode: str = "cpu"

    @classmethod
    def choose(
        cls, device: str | None = None, prompt: str | None = None, decode: str | None = None
    ) -> Placement:
        """From the command's flags (None: not given) and, below them, the environment."""
        if device is None:
            device = "cuda" if env.cuda_infer or env.cuda_decode else "cpu"
        on_gpu = parse_device(device)[0] == "cuda"
        if prompt is None:
            prompt = "cpu" if on_gpu and env.force_cpu else device
        if decode is None:
            decode = "cpu" if on_gpu and env.cuda_decode is False else device
        parse_device(prompt)
        parse_device(decode)
        return cls(prompt, decode)

    @property
    def uses_gpu(self) -> bool:
        return any(parse_device(device)[0] == "cuda" for device in self.devices)

    @property
    def devices(self) -> tuple[str, ...]:
        """The prompt's device, then the other one if there are two."""
        same = parse_device(self.prompt) == parse_device(self.decode)
        return (self.prompt,) if same else (self.prompt, self.decode)


def choose_mode(mode: str | None = None) -> Mode:
    """From the command's flag (None: not given) and, below it, the environment; ``l2exact`` by default."""
    if mode is not None:
        return parse_mode(mode)
    if env.l2exact is not False:
        return "bitexact" if env.l2exact is None and env.attn_bitexact else "l2exact"
    return "bitexact" if env.attn_bitexact else "fast"


def make_backend(
    device: str,
    mode: Mode,
    *,
    threads: int | None = None,
    isa: str | None = None,
    graph: bool = True,
    on_upload: Callable[[int], None] | None = None,
) -> Backend:
    """The backend of ``device``. On the CPU every mode runs the exact reference: it keeps each one's promise.

    ``on_upload`` gets the bytes of each piece of an upload to a GPU. Raises BackendError when the device or
    what it needs is missing: there is no fallback to another device.
    """
    kind, index = parse_device(device)
    if kind == "cpu":
        from kestrel.cpu import CpuBackend

        return CpuBackend(threads if threads is not None else env.threads, isa)
    from kestrel.cuda.device import CudaBackend

    return CudaBackend(index, mode, graph, on_upload)
