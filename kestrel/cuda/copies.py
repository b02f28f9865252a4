"""Which copy of the compiled kernels a backend runs.

CuPy loads a file once for each device of a process, however often it is asked for, and knows it by its path.
What kernels keep from one block to another, such as the count of those that have arrived at the head, lies in
what was loaded. Backends run at the same time, so each takes a copy of its own: the same file by another
spelling of its path. A copy that was given back is taken again, so there are as many as backends lived at a
time.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

_taken: set[int] = set()
_lock = threading.Lock()


class Copy:
    """Taken from the moment it is made until ``release``, which may be called again."""

    def __init__(self) -> None:
        with _lock:
            self.number = next(n for n in range(len(_taken) + 1) if n not in _taken)
            _taken.add(self.number)
        self._held = True

    def path(self, file: Path) -> str:
        """``file``, spelled for this copy."""
        return f"{file.parent}{os.sep}{(os.curdir + os.sep) * self.number}{file.name}"  # a Path drops them

    def release(self) -> None:
        """Give it back. Nothing that was loaded by ``path`` may be running by now, or be run again."""
        with _lock:
            if self._held:
                _taken.discard(self.number)
            self._held = False
