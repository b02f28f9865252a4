"""A recorded step: the launches of one eager run as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kestrel.cuda.device import CudaBackend, PreparedPlan
    from kestrel.launch import MergeBy


class Graph:
    """Replays launches in their order on the stream they were recorded from.

    The recording holds addresses and arguments, not references: buffers must outlive it, which the program's
    owner sees to. Token id, position and slot are read from device memory, so a recording is right at every
    position that its plan is made for.
    """

    def __init__(self, graph: Any, stream: Any) -> None:
        self._graph = graph
        self._stream = stream

    @classmethod
    def record(cls, stream: Any, launch_all: Callable[[], None]) -> Graph:
        """Record what ``launch_all`` queues on ``stream`` (non-blocking); nothing runs yet.

        ``launch_all`` may not allocate or wait. When it fails, the stream leaves recording and the error goes
        on.
        """
        stream.begin_capture()
        try:
            launch_all()
        except BaseException:
            stream.end_capture()
            raise
        graph = stream.end_capture()
        graph.upload(stream)
        return cls(graph, stream)

    def launch(self) -> None:
        """Queue one replay."""
        self._graph.launch(self._stream)


class Replay:
    """Queues one plan again and again: first launch by launch, which loads the kernels, then as a graph."""

    def __init__(self, backend: CudaBackend, whole: PreparedPlan, *, record: bool) -> None:
        self._backend = backend
        self.whole = whole
        self._record = record
        self._graph: Graph | None = None
        self._ran_eagerly = False

    @property
    def recorded(self) -> bool:
        """Whether runs replay a graph by now."""
        return self._graph is not None

    def queue(self) -> None:
        """Queue a whole run; the device must be current."""
        if self._graph is None and self._record and self._ran_eagerly:
            self._graph = Graph.record(self._backend.stream, self.whole.queue)
        if self._graph is not None:
            self._graph.launch()
        else:
            self.whole.queue()
            self._ran_eagerly = True


class Replays:
    """The runs of a program: a ``Replay`` for each way to run a step at some positions, made when wanted."""

    def __init__(
        self,
        backend: CudaBackend,
        prepare: Callable[[int], PreparedPlan],
        way: Callable[[int], MergeBy],
        *,
        record: bool,
    ) -> None:
        """``prepare`` makes the plan for a position, one and the same for those of one ``way``."""
        self._backend = backend
        self._prepare, self._way = prepare, way
        self._record = record
        self._made: dict[MergeBy, Replay] = {}

    @property
    def recorded(self) -> bool:
        """Whether any run replays a graph by now."""
        return any(replay.recorded for replay in self._made.values())

    def at(self, position: int) -> Replay:
        """The run at ``position``; the device must be current."""
        way = self._way(position)
        if way not in self._made:
            self._made[way] = Replay(self._backend, self._prepare(position), record=self._record)
        return self._made[way]
