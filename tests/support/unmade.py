"""A backend for plans alone, at the size of real models."""

from __future__ import annotations

from typing import Any

from kestrel.simt import SimtBackend


class Unmade(SimtBackend):
    """A backend that keeps arrays as they are and compiles nothing: plans need addresses alone."""

    def __init__(self) -> None:
        super().__init__()
        self._address = 1 << 20

    def upload(self, array: Any) -> Any:
        class Buffer:
            ptr = self._address
            shape, dtype = array.shape, array.dtype

        self._address += array.nbytes + 256
        return Buffer()

    def compile(self, ops: Any) -> Any:
        return None
