"""The errors that kestrel raises on purpose: each message says what, where and what to do."""

from __future__ import annotations

from collections.abc import Sequence


def shown(value: object) -> str:
    """A value for a message, cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def printable(text: str) -> str:
    """``text`` with every character that would not print escaped: names in files may hold any."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class KestrelError(Exception):
    """Base of every error a user can cause; commands print it in one message and exit with 1."""


class UsageError(KestrelError):
    """A wrong flag, argument or environment value; commands exit with 2."""


class ModelError(KestrelError):
    """A model folder or file that is damaged or not supported.

    Collects every fault found, so that a user sees the whole list at once.
    """

    def __init__(self, where: str, faults: Sequence[str]) -> None:
        self.where = where
        self.faults = [printable(fault) for fault in faults]
        if len(self.faults) == 1:
            message = f"{printable(where)}: {self.faults[0]}"
        else:
            listed = "\n".join(f"  - {fault}" for fault in self.faults)
            message = f"{printable(where)}: {len(self.faults)} faults\n{listed}"
        super().__init__(message)


class ContextOverflowError(KestrelError):
    """A request that needs more positions than the context has; nothing was written."""


class NonFiniteError(KestrelError):
    """A NaN or infinity in the logits, with the first position, layer and operation that produced it.

    ``layer`` is None before layer 0 and after the last; all three are None when a second run was finite.
    """

    def __init__(
        self, message: str, position: int | None = None, layer: int | None = None, op: str | None = None
    ) -> None:
        super().__init__(message)
        self.position = position
        self.layer = layer
        self.op = op


class BackendError(KestrelError):
    """A device that is missing, too small, or refused an operation."""


class ChatTemplateError(KestrelError):
    """A chat template that is broken, refuses its messages, or reaches for what templates may not touch."""
