"""Greedy decoding that does not wait for the host: queued steps, each one's token feeding the next."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kestrel.backend import Buffer
from kestrel.cuda.graph import Replays
from kestrel.launch import Launch, MergeBy, Plan

if TYPE_CHECKING:
    from kestrel.cuda.device import CudaBackend

AHEAD = 4  # steps in the queue while the host looks at the oldest one


class FeedbackArgs(ctypes.Structure):
    """Of ``k_feedback``, as in ``kernels/feedback.cu``."""

    _fields_ = [
        *(
            (name, ctypes.c_uint64)
            for name in ("ids", "pos", "next", "step", "token_log", "hashes", "hash_log")
        ),
        ("slots", ctypes.c_int32),
        ("taps", ctypes.c_int32),
    ]


class GreedyLoop:
    """A one-row program with the feedback behind it, and the log that the host reads.

    The log lies in pinned host memory that the device writes to; an event after each step says when its slot
    may be read.
    """

    def __init__(
        self,
        backend: CudaBackend,
        plan: Callable[[int], Plan],
        way: Callable[[int], MergeBy],
        ids: Buffer,
        pos: Buffer,
        chosen: Buffer,
        hashes: Buffer | None,
        taps: int,
    ) -> None:
        """``plan``, ``way``: as of ``Replays``."""
        self._backend = backend
        self._step = backend.zeros((1,), np.uint32)
        self._tokens_memory, self._tokens = backend.pinned((AHEAD,), np.int32)
        self._hashes_memory, self._hashes = backend.pinned((AHEAD, taps), np.uint64)
        args = FeedbackArgs(
            ids=ids.ptr,
            pos=pos.ptr,
            next=chosen.ptr,
            step=self._step.ptr,
            token_log=int(self._tokens_memory.ptr),
            hashes=hashes.ptr if hashes is not None else 0,
            hash_log=int(self._hashes_memory.ptr),
            slots=AHEAD,
            taps=taps,
        )
        feedback = Launch("k_feedback", (1, 1, 1), (256, 1, 1), 0, args)
        self._runs = Replays(
            backend,
            lambda position: backend.prepare_plan(plan(position), [feedback]),
            way,
            record=backend.graph,
        )
        self._events = [backend.event() for _ in range(AHEAD)]

    @property
    def recorded(self) -> bool:
        """Whether steps replay a graph by now."""
        return self._runs.recorded

    def run(self, position: int, count: int) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
        """Yield ``count`` times the token that a step chose and the hashes u64[taps] of its row.

        The first step is at ``position``, and its inputs are in their buffers. At most ``AHEAD`` steps run
        beyond the one that was yielded, never more than ``count`` in all. A token of -1 ends it.
        """
        backend = self._backend
        backend.write(self._step, np.zeros(1, np.uint32))
        queued = 0
        try:
            for read in range(count):
                with backend.current():
                    while queued < min(count, read + AHEAD):
                        self._runs.at(position + queued).queue()
                        self._events[queued % AHEAD].record(backend.stream)
                        queued += 1
                    slot = read % AHEAD
                    backend.wait(self._events[slot], lambda: "a decode step")
                    token, hashes = int(self._tokens[slot]), self._hashes[slot].copy()
                yield token, hashes
                if token < 0:
                    return
        finally:
            if not backend.closed:
                with backend.current():
                    backend.synchronize()
