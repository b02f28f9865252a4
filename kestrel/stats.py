"""Counts and times of a request, and the closing lines that commands print."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass
class Timings:
    """Wall times in seconds, token counts, rates in tokens per second (None before anything was counted)."""

    prompt_tokens: int = 0  # of the request
    reused_tokens: int = 0  # of these, rows that were still in the KV cache
    prompt_seconds: float = 0.0  # until the first new token was chosen
    generated_tokens: int = 0
    decoded_tokens: int = 0  # of these, all but the first, which belongs to the prompt's time
    generation_seconds: float = 0.0  # of the decoded tokens

    @property
    def prompt_rate(self) -> float | None:
        return _rate(self.prompt_tokens - self.reused_tokens, self.prompt_seconds)

    @property
    def generation_rate(self) -> float | None:
        return _rate(self.decoded_tokens, self.generation_seconds)

    def add(self, other: Timings) -> None:
        """Count another request in."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "prompt_seconds": self.prompt_seconds,
            "prompt_tokens_per_second": self.prompt_rate,
            "generated_tokens": self.generated_tokens,
            "generation_seconds": self.generation_seconds,
            "generation_tokens_per_second": self.generation_rate,
            "peak_memory_bytes": peak_memory_bytes(),
        }

    def closing_lines(self) -> list[str]:
        """The three lines that follow the text, for stderr."""
        reused = f", {self.reused_tokens} reused" if self.reused_tokens else ""
        return [
            f"prompt:      {_tokens(self.prompt_tokens)}{reused} in {self.prompt_seconds:.2f} s, "
            f"{_shown(self.prompt_rate)} tok/s",
            f"generation:  {_tokens(self.generated_tokens)} in {self.generation_seconds:.2f} s, "
            f"{_shown(self.generation_rate)} tok/s",
            f"peak memory: {peak_memory_bytes() / 1e9:.2f} GB",
        ]


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None


def _tokens(count: int) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"


def _shown(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1f}"


def peak_memory_bytes() -> int:
    """The largest resident size of this process so far, mapped model pages included."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss of a child starts at its parent's size
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
