"""One model on one backend, timed: prompts, decoding from any depth, and a hash of what came out.

A depth is reached without running its tokens: the KV rows before it are filled with seeded codes and scales
(``kestrel.benchmark.synthetic``), the same on every device.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel.backend import Backend
from kestrel.benchmark.synthetic import VERSION, Recipe, fill, kv_recipes, tokens
from kestrel.config import ModelConfig
from kestrel.contract import CONTRACT
from kestrel.cpu import CpuBuffer
from kestrel.engine import memory_parts
from kestrel.errors import KestrelError, NonFiniteError
from kestrel.model import Model
from kestrel.taps import TapLevel
from kestrel.weights import Weights


class BitsDifferError(KestrelError):
    """Two runs that promise equal bits gave different ones; commands exit with 3."""


class Runner:
    """``context`` positions, prompts in steps of ``chunk`` rows. Raises BackendError when memory is short."""

    def __init__(
        self, config: ModelConfig, weights: Weights, backend: Backend, *, context: int, chunk: int, seed: int
    ) -> None:
        self.config = config
        self.backend = backend
        self.chunk = min(chunk, context)
        self.seed = seed
        backend.check_memory(memory_parts(config, weights, context, self.chunk))
        self.model = Model(config, weights, backend, slots=context, max_rows=self.chunk, max_logit_rows=1)
        self._recipes = [list(kv_recipes(config, layer, seed)) for layer in range(config.num_layers)]
        self._filled: list[tuple[int, int]] = []  # ranges of positions that hold the recipes' rows, in order

    # -- KV contents -----------------------------------------------------------------------------------------

    def fill_depth(self, depth: int) -> None:
        """Make positions 0 to ``depth - 1`` hold the seeded rows, writing only those that do not."""
        at = 0
        for begin, end in [*self._filled, (depth, depth)]:
            if at < min(begin, depth):
                self._fill(at, min(begin, depth))
            at = max(at, end)
        kept = [(begin, end) for begin, end in self._filled if begin > depth]
        within = [end for begin, end in self._filled if begin <= depth]
        self._filled = [(0, max([depth, *within])), *kept]

    def _written(self, begin: int, end: int) -> None:
        """Positions ``begin`` to ``end - 1`` no longer hold the seeded rows."""
        kept = []
        for first, last in self._filled:
            kept += [(a, b) for a, b in ((first, min(last, begin)), (max(first, end), last)) if a < b]
        self._filled = kept

    def _fill(self, begin: int, end: int) -> None:
        for layer, recipes in zip(self.model.kv.layers, self._recipes, strict=True):
            for name, width, recipe in recipes:
                self._fill_buffer(getattr(layer, name), recipe, begin * width, (end - begin) * width)

    def _fill_buffer(self, buffer: Any, recipe: Recipe, first: int, count: int) -> None:
        if isinstance(buffer, CpuBuffer):
            fill(buffer.array.reshape(-1)[first : first + count], recipe, first)
        else:
            self.backend.fill(buffer, recipe, first, count)  # type: ignore[attr-defined]

    def kv_rows(self, begin: int, end: int) -> list[npt.NDArray[Any]]:
        """The rows of positions ``begin`` to ``end - 1``, layer by layer: kq, ks, vq, vs."""
        found = []
        for layer in self.model.kv.layers:
            for name in ("kq", "ks", "vq", "vs"):
                buffer = getattr(layer, name)
                if isinstance(buffer, CpuBuffer):
                    found.append(buffer.array[begin:end])
                else:
                    found.append(self.backend.read_rows(buffer, begin, end))  # type: ignore[attr-defined]
        return found

    # -- timed runs ------------------------------------------------------------------------------------------

    def prompt(self, count: int, depth: int) -> tuple[float, list[int]]:
        """Seconds of a prompt of ``count`` seeded tokens behind ``depth`` filled positions, and the token
        chosen after it.
        """
        model = self.model
        ids = tokens(self.config, count, self.seed)
        steps = []
        for start in range(0, count, self.chunk):
            rows = min(self.chunk, count - start)
            steps.append((start, model.step(rows, int(start + rows == count))))
        self.fill_depth(depth)
        self._written(depth, depth + count)
        begin = time.perf_counter()
        for start, step in steps:
            rows = min(self.chunk, count - start)
            positions = np.arange(depth + start, depth + start + rows, dtype=np.int32)
            model.load_rows(ids[start : start + rows], positions)
            step.program.run()
        chosen = int(model.argmax(1)[0])
        seconds = time.perf_counter() - begin
        self._check(chosen, depth + count - 1)
        return seconds, [chosen]

    def generate(self, count: int, depth: int, taps: TapLevel = "off") -> tuple[float, list[int]]:
        """Seconds of ``count`` greedy tokens from position ``depth`` on, each one's choice the next one's
        input, and the tokens. With ``taps`` every key of every token is hashed and read.

        The token is fed back on the device where the backend can; there, steps are queued ahead.
        """
        model = self.model
        token = int(tokens(self.config, 1, self.seed, "first")[0])
        step = model.step(1, 1, taps)
        self.fill_depth(depth)
        self._written(depth, depth + count)
        chosen: list[int] = []
        begin = time.perf_counter()
        loop = model.greedy_loop(step, token, depth, count)
        if loop is not None:
            chosen += [int(each) for each, _ in loop]
        else:
            for position in range(depth, depth + count):
                model.load_rows(np.array([token], np.int32), np.array([position], np.int32))
                step.program.run()
                if taps != "off":
                    model.hashes(step, 1)
                token = int(model.argmax(1)[0])
                chosen.append(token)
                if token < 0:
                    break
        seconds = time.perf_counter() - begin
        self._check(chosen[-1], depth + len(chosen) - 1)
        return seconds, chosen

    @staticmethod
    def _check(token: int, position: int) -> None:
        if token < 0:
            raise NonFiniteError(f"the logits after position {position} are not finite", position)

    # -- what came out ---------------------------------------------------------------------------------------

    def output_hash(self, chosen: list[int], depth: int, count: int) -> str:
        """16 hex digits over the tokens chosen, the final logits, and the KV rows of all positions run.

        A KV row depends on every operation of the layers and positions before it; the last layer's FFN and
        the head show in logits and tokens. The seeded rows before ``depth`` enter through attention.
        """
        logits = self.model.logits(1).view(np.uint32)
        magnitude = logits & np.uint32(0x7FFFFFFF)
        logits = np.where(magnitude > np.uint32(0x7F800000), np.uint32(0x7FC00000), logits)
        digest = hashlib.sha256(f"contract {CONTRACT}, fill {VERSION}, seed {self.seed}\n".encode())
        digest.update(np.array(chosen, np.int32).tobytes() + logits.tobytes())
        for rows in self.kv_rows(depth, depth + count):
            digest.update(np.ascontiguousarray(rows).data)
        return digest.hexdigest()[:16]
