"""Which of its plans a program queues, by position, and when it records: on a backend without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("kestrel._simt", reason="the shim is built by `make native`")

from kestrel.cuda.device import CudaProgram
from kestrel.launch import CHUNK, Launch, Plan, Tuning
from kestrel.model import Model
from kestrel.ops import WType
from tests.support.models import random_weights, tiny_config
from tests.support.unmade import Unmade

ONE, CLUSTER, FEW, MANY = "one", "cluster", "few", "many"


class Stream:
    """Records what is queued between begin_capture and end_capture."""

    def __init__(self, log: list[tuple[str, str]]) -> None:
        self.log = log
        self.captured: list[str] | None = None

    def queue(self, what: str) -> None:
        if self.captured is None:
            self.log.append(("eager", what))
        else:
            self.captured.append(what)

    def begin_capture(self) -> None:
        assert self.captured is None
        self.captured = []

    def end_capture(self) -> Any:
        (what,), self.captured = self.captured or [], None
        return SimpleNamespace(
            upload=lambda stream: None, launch=lambda stream: stream.log.append(("graph", what))
        )


class FakeBackend:
    """What CudaProgram and GreedyLoop need of a CudaBackend; ``log`` is what was queued, and how."""

    mode = "l2exact"
    tuning = Tuning(cluster_chunks=2, merge_chunks=3)
    position = 0
    closed = False

    def __init__(self, graph: bool = True) -> None:
        self.graph = graph
        self.log: list[tuple[str, str]] = []
        self.prepared: list[str] = []
        self.stream = Stream(self.log)

    def current(self) -> Any:
        return nullcontext()

    def prepare_plan(self, plan: Plan, last: Sequence[Launch] = ()) -> Any:
        main = [*plan.main, *last]
        names = {launch.kernel for launch in main}
        assert len(names & {"k_attn_cluster", "k_attn_stage", "k_attn_decode_online"}) == 1
        what = MANY if "k_attn_merge" in names else CLUSTER if "k_attn_cluster" in names else FEW
        if what == FEW and ONE not in self.prepared:
            what = ONE  # the same launches
        self.prepared.append(what)
        return SimpleNamespace(
            main=main, queue=lambda: self.stream.queue(what), __len__=lambda: len(main), what=what
        )

    def zeros(self, shape: Any, dtype: Any) -> Any:
        return SimpleNamespace(ptr=1 << 12)

    def pinned(self, shape: Any, dtype: Any) -> Any:
        return SimpleNamespace(ptr=1 << 12), np.full(shape, 7, dtype)

    def event(self) -> Any:
        return SimpleNamespace(record=lambda stream: None)

    def write(self, buffer: Any, array: Any) -> None:
        pass

    def wait(self, target: Any, what: Callable[[], str]) -> None:
        pass

    def synchronize(self, what: Callable[[], str] = str) -> None:
        pass


def program_of(backend: FakeBackend, rows: int = 1) -> CudaProgram:
    config = tiny_config("qwen3", layers=1)
    model = Model(config, random_weights(config, WType.q4local), Unmade(), slots=5 * CHUNK, max_rows=rows)
    return CudaProgram(backend, model.step(rows, 1).ops)  # type: ignore[arg-type]


def test_steps_one_by_one() -> None:
    backend = FakeBackend()
    program = program_of(backend)
    assert backend.prepared == [ONE]
    assert not program.recorded
    positions = (0, CHUNK - 1, CHUNK, 2 * CHUNK - 1, 2 * CHUNK, 3 * CHUNK - 1, 3 * CHUNK, 4 * CHUNK)
    for position in (*positions, 5, CHUNK + 5, 2 * CHUNK + 5, 3 * CHUNK + 5):
        backend.position = position
        program.run()
    assert backend.prepared == [ONE, CLUSTER, FEW, MANY], "each once"
    assert backend.log == [
        *[(how, what) for what in (ONE, CLUSTER, FEW, MANY) for how in ("eager", "graph")],
        *[("graph", what) for what in (ONE, CLUSTER, FEW, MANY)],
    ]
    assert program.recorded
    assert program.whole.what == MANY  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("border", "before", "after"), [(1, ONE, CLUSTER), (2, CLUSTER, FEW), (3, FEW, MANY)]
)
def test_a_text_that_comes_to_more_chunks(border: int, before: str, after: str) -> None:
    """The loop queues steps ahead of what was read: each by its own position."""
    backend = FakeBackend()
    program = program_of(backend)
    buffer: Any = SimpleNamespace(ptr=1 << 12)
    backend.position = border * CHUNK - 3
    for turn in range(2):
        backend.log.clear()
        backend.prepared = backend.prepared if turn else [] if before == ONE else [ONE]
        tokens = [token for token, _ in program.greedy_loop(buffer, buffer, buffer, None, 0, 6)]
        assert tokens == [7] * 6
        first = "graph" if turn else "eager"
        left = [(first, before), ("graph", before), ("graph", before)]
        assert backend.log == [*left, (first, after), ("graph", after), ("graph", after)]
    assert backend.prepared[-2:] == [before, after], "two of its loop"
    assert program.recorded


def test_without_a_graph() -> None:
    backend = FakeBackend(graph=False)
    program = program_of(backend)
    for position in (0, 1, CHUNK, 3 * CHUNK):
        backend.position = position
        program.run()
    assert backend.log == [("eager", ONE), ("eager", ONE), ("eager", CLUSTER), ("eager", MANY)]
    assert not program.recorded


def test_several_rows_have_one_plan() -> None:
    backend = FakeBackend()
    program = program_of(backend, rows=3)
    for position in (0, CHUNK, 3 * CHUNK):
        backend.position = position
        program.run()
    assert backend.prepared == [ONE]
    assert backend.log == [("eager", ONE), ("graph", ONE), ("graph", ONE)]
