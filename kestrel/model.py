"""A model on a backend: its weights, activations and KV cache, and its steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kestrel.backend import Backend, Buffer, GreedyProgram
from kestrel.config import ModelConfig
from kestrel.kvcache import KVCache
from kestrel.ops import SPREAD_LINE, spread_width
from kestrel.rope import inv_freq
from kestrel.step import BoundWeight, Step, StepBuilder
from kestrel.taps import TapLevel
from kestrel.weights import QuantTensor, Weights


class Model:
    """Weights, activations and KV cache of one model on one backend.

    ``max_rows`` bounds the rows of one forward pass; ``slots`` is the number of KV positions.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        backend: Backend,
        *,
        slots: int,
        max_rows: int = 256,
        max_logit_rows: int | None = None,
    ) -> None:
        self.config = config
        self.backend = backend
        self.max_rows = max_rows
        self.max_logit_rows = max_logit_rows or max_rows
        self.kv = KVCache(backend, config, slots)
        self._weights = {name: self._bind(tensor) for name, tensor in weights.items()}
        self._buffers: dict[str, Buffer] = {}
        self._inv_freq = backend.upload(inv_freq(config))
        self._step = lru_cache(maxsize=32)(self._build_step)

    # -- memory --------------------------------------------------------------------------------------------

    def _bind(self, tensor: QuantTensor | npt.NDArray[np.float32]) -> BoundWeight | Buffer:
        if not isinstance(tensor, QuantTensor):
            return self.backend.upload(tensor)
        scale = self.backend.upload(tensor.scale) if tensor.scale is not None else None
        return BoundWeight(tensor, self.backend.upload(tensor.codes), scale)

    def _matrix(self, name: str) -> BoundWeight:
        bound = self._weights[name]
        assert isinstance(bound, BoundWeight), name
        return bound

    def _vector(self, name: str) -> Buffer:
        bound = self._weights[name]
        assert not isinstance(bound, BoundWeight), name
        return bound

    def buffer(self, name: str, width: int, dtype: npt.DTypeLike, rows: int | None = None) -> Buffer:
        """The activation ``name``, [rows, width], made at first use and kept: programs hold its address."""
        if name not in self._buffers:
            rows = self.max_rows if rows is None else rows
            self._buffers[name] = self.backend.empty((rows, width), dtype)
        return self._buffers[name]

    def activations(self) -> list[Buffer]:
        """Every activation buffer made so far."""
        return list(self._buffers.values())

    # -- running -------------------------------------------------------------------------------------------

    def step(self, rows: int, logit_rows: int, taps: TapLevel = "off") -> Step:
        """The compiled forward pass; cached, so that decoding compiles once."""
        if not 1 <= rows <= self.max_rows:
            raise ValueError(f"rows must be 1 to {self.max_rows}, not {rows}")
        if not 0 <= logit_rows <= min(rows, self.max_logit_rows):
            raise ValueError(f"logit_rows must be 0 to {min(rows, self.max_logit_rows)}, not {logit_rows}")
        return self._step(rows, logit_rows, taps)

    def load_rows(
        self,
        ids: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        base: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Set the inputs of the next step: token ids, positions, first slot of each row's sequence."""
        if base is None:
            base = np.zeros_like(positions)
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self.config.vocab_size):
            raise ValueError(f"token ids must lie in 0 .. {self.config.vocab_size - 1}")
        if positions.size and (int(positions.min()) < 0 or int((base + positions).max()) >= self.kv.slots):
            raise ValueError(f"positions must lie in 0 .. {self.kv.slots - 1}")
        self.backend.at_position(int(positions.max()) if positions.size else 0)
        for name, array in (("ids", ids), ("pos", positions), ("base", base)):
            self.backend.write(self.buffer(name, 1, np.int32), np.ascontiguousarray(array, np.int32))

    def greedy_loop(
        self, step: Step, token: int, position: int, count: int
    ) -> Iterator[tuple[int, npt.NDArray[np.uint64]]] | None:
        """Decode ``count`` tokens after ``token``, fed back by the backend; None where it cannot.

        ``step`` has one row. Yields as ``GreedyProgram.greedy_loop`` does.
        """
        if not isinstance(step.program, GreedyProgram):
            return None
        if position + count > self.kv.slots:
            raise ValueError(f"{count} steps from position {position} do not fit {self.kv.slots} slots")
        self.load_rows(np.array([token], np.int32), np.array([position], np.int32))
        ids, pos = self.buffer("ids", 1, np.int32), self.buffer("pos", 1, np.int32)
        chosen = self.buffer("next", 1, np.int32, self.max_logit_rows)
        taps = len(step.taps)
        hashes = self.buffer("hash", self.max_rows, np.uint64, taps) if taps else None
        return step.program.greedy_loop(ids, pos, chosen, hashes, taps, count)

    def logits(self, rows: int) -> npt.NDArray[np.float32]:
        """f32[rows, V] of the last step."""
        buffer = self.buffer("logits", self.config.vocab_size, np.float32, self.max_logit_rows)
        return self.backend.read(buffer, (rows, self.config.vocab_size))

    def argmax(self, rows: int) -> npt.NDArray[np.int32]:
        """i32[rows]: the greedy choice for each logit row of the last step, -1 where one is not finite."""
        return self.backend.read(self.buffer("next", 1, np.int32, self.max_logit_rows), (rows,))

    def residual(self) -> npt.NDArray[np.float32]:
        """f32[H]: the residual stream as a step of one row without taps left it."""
        width, spread = self.config.hidden_size, self.backend.row_spread
        if not spread:
            return self.backend.read(self.buffer("x", width, np.float32), (width,))
        wide = spread_width(width, spread)
        row = self.backend.read(self.buffer("x_spread", wide, np.float32, 1), (wide,))
        elements = np.arange(width)
        found: npt.NDArray[np.float32] = row[elements + elements // SPREAD_LINE * spread]
        return found

    def hashes(self, step: Step, rows: int) -> npt.NDArray[np.uint64]:
        """u64[taps, rows] of the last step, which had ``rows`` rows."""
        buffer = self.buffer("hash", self.max_rows, np.uint64, len(step.taps))
        return self.backend.read(buffer, (len(step.taps), rows))

    def _build_step(self, rows: int, logit_rows: int, taps: TapLevel) -> Step:
        builder = StepBuilder(self, rows, logit_rows, taps)
        builder.build()
        return Step(builder.ops, builder.taps, self.backend.compile(builder.ops))
