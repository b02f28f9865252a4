"""Greedy decoding through a program that feeds its own tokens back as the GPU does, with a stand-in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kestrel.cpu import CpuBackend, CpuBuffer
from kestrel.engine import Engine
from kestrel.errors import NonFiniteError
from kestrel.ops import Op, WType
from kestrel.sampling import SamplingParams
from tests.support.dumps import difference, generate
from tests.support.models import random_weights, tiny_config

AHEAD = 3


class LoopProgram:
    """Runs ahead of what was read, as a queue of GPU steps does."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.steps = 0

    def run(self, begin: int = 0, end: int | None = None) -> None:
        self.program.run(begin, end)

    def greedy_loop(
        self,
        ids: CpuBuffer,
        pos: CpuBuffer,
        chosen: CpuBuffer,
        hashes: CpuBuffer | None,
        taps: int,
        count: int,
    ) -> Iterator[tuple[int, Any]]:
        done: deque[tuple[int, Any]] = deque()
        queued = 0
        for read in range(count):
            while queued < min(count, read + AHEAD):
                self.program.run()
                self.steps += 1
                token = int(chosen.array.reshape(-1)[0])
                row = hashes.array.reshape(-1)[:taps].copy() if hashes is not None else np.empty(0, np.uint64)
                done.append((token, row))
                if token >= 0:
                    ids.array.reshape(-1)[0] = token
                    pos.array.reshape(-1)[0] += 1
                queued += 1
            yield done[0]
            if done.popleft()[0] < 0:
                return


class LoopBackend(CpuBackend):
    def compile(self, ops: Sequence[Op]) -> Any:
        return LoopProgram(super().compile(ops))


def engines(context: int = 40) -> tuple[Engine, Engine]:
    config = tiny_config("qwen3_moe")
    weights = random_weights(config, WType.q4local)
    return tuple(Engine(config, weights, b, context=context) for b in (LoopBackend(1), CpuBackend(1)))  # type: ignore[return-value]


@pytest.mark.parametrize("level", ["off", "standard"])
@pytest.mark.parametrize("count", [1, 2, 12, 35])
def test_same_tokens_and_hashes(level: str, count: int) -> None:
    looping, plain = engines()
    actual, expected = (generate(e, [3, 1, 4, 1, 5], count, level) for e in (looping, plain))  # type: ignore[arg-type]
    assert actual[0] == expected[0]
    assert difference(actual[1], expected[1]).count == 0
    steps = looping.decode_model.step(1, 1, level).program.steps  # type: ignore[attr-defined,arg-type]
    assert steps == count - 1  # never past the limit


def test_stopping_early_leaves_a_clean_cache() -> None:
    looping, plain = engines()
    stream = looping.generate([3, 1, 4], SamplingParams(max_tokens=30))
    first = [next(stream) for _ in range(3)]
    stream.close()
    longer = [3, 1, 4, *first, 7, 8]
    # The rows that ran ahead are not taken for rows of the new prompt.
    reused = list(looping.generate(longer, SamplingParams(max_tokens=8), reuse=True))
    assert reused == list(plain.generate(longer, SamplingParams(max_tokens=8)))


def test_sampling_does_not_loop() -> None:
    looping, plain = engines()
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=3)
    assert list(looping.generate([3, 1], params)) == list(plain.generate([3, 1], params))
    assert looping.decode_model.step(1, 1).program.steps == 0  # type: ignore[attr-defined]


def test_non_finite_is_raised_at_its_position() -> None:
    tokens, _ = generate(engines()[1], [3, 1, 4], 6, "off")
    config = tiny_config("qwen3_moe")
    weights = random_weights(config, WType.q4local)
    scale = weights["embed"].scale  # type: ignore[union-attr]
    scale[tokens[3], 0] = 0x7E00
    messages = []
    for backend in (LoopBackend(1), CpuBackend(1)):
        engine = Engine(config, weights, backend, context=40)
        stream = engine.generate([3, 1, 4], SamplingParams(max_tokens=12))
        with pytest.raises(NonFiniteError) as caught:
            list(stream)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
