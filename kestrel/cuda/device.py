"""The CUDA backend: ops become kernel launches on one GPU."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kestrel.backend import Buffer
from kestrel.config import ModelConfig
from kestrel.cuda import compile as nvrtc
from kestrel.cuda.copies import Copy
from kestrel.cuda.environment import load_cupy, open_device
from kestrel.cuda.feedback import GreedyLoop
from kestrel.cuda.graph import Replays
from kestrel.cuda.memory import CudaBuffer, Memory, Progress
from kestrel.cuda.sources import KernelSources, kernel_sources
from kestrel.errors import BackendError
from kestrel.launch import (
    PROGRAMMATIC,
    ROW_SPREAD,
    Launch,
    MergeBy,
    Plan,
    Tuning,
    attention_work_bytes,
    check_head_dim,
    head_groups,
    launches,
    merge_by,
    plan,
)
from kestrel.ops import Op

Mode = Literal["fast", "bitexact", "l2exact"]
MAX_CLUSTER = 8  # blocks of a cluster that every GPU with clusters runs
GRAPH_ROWS = 8  # programs of up to this many rows repeat, so they are worth recording


@dataclass(frozen=True)
class PreparedLaunch:
    """A kernel launch with its arguments in memory of its own: launching it allocates nothing."""

    launch: Launch
    function: Any  # driver.CUfunction
    arguments: Any  # the kernel's single parameter, a copy of its own
    parameters: Any  # (c_void_p * 1): its address
    address: int  # of ``parameters``
    early: Any  # driver.CUlaunchConfig that lets it begin while the launch before it runs, or None
    clustered: Any  # the same for a cluster that waits for the launch before it; None without clusters
    table: CudaBuffer | None  # the device's copy of ``launch.table``


class PreparedPlan:
    """A step ready to be queued: main launches on the backend's stream, side launches beside them.

    Events order the two: one before each side launch (its input is there), one after it (its input may go).
    """

    def __init__(self, backend: CudaBackend, plan: Plan, last: Sequence[Launch] = ()) -> None:
        """``last`` launches follow when all others are done."""
        self._backend = backend
        self.main = backend.prepare([*plan.main, *last])
        self._side = [(backend.prepare([side.launch]), side.after, side.before) for side in plan.side]
        self._events = [(backend.event(), backend.event()) for _ in self._side]

    def __len__(self) -> int:
        return len(self.main) + len(self._side)

    def queue(self) -> None:
        """Queue every launch; the device must be current."""
        backend, position = self._backend, 0
        main, side = backend.stream, backend.side_stream
        # At each position: wait for what must be done, start what may, wait for what must be done at once.
        turns: list[tuple[int, int, int]] = []
        for i, (_, after, before) in enumerate(self._side):
            turns += [(after, 1, i), (before, 0 if before > after else 2, i)]
        alone = True  # the next main launch has more to wait for than the main launch before it
        for at, turn, i in sorted(turns):
            backend.launch(self.main[position:at], alone=alone)
            alone = alone and at == position
            position = at
            ready, done = self._events[i]
            if turn == 1:
                ready.record(main)
                side.wait_event(ready)
                backend.launch(self._side[i][0], side=True)
                done.record(side)
            else:
                main.wait_event(done)
                alone = True
        backend.launch(self.main[position:], alone=alone)


def _shares_split(kernel: str) -> bool:
    """Whether a kernel runs beside others of a decode step.

    A multiprocessor changes its split of L1 and shared memory only when it is empty, so such kernels need the
    same one. The head and the kernels of prompts would miss their L1.
    """
    name = kernel.removesuffix("_fast")
    return name in PROGRAMMATIC or name.startswith("k_l2_hash")


class Kernels:
    """The loaded modules of one device, and their functions by name."""

    def __init__(
        self, cupy: Any, architecture: str, *, fast: bool, carveout: int, sources: KernelSources | None = None
    ) -> None:
        """``carveout``: percent of a multiprocessor's L1 that all kernels ask for as shared memory;
        ``sources``: other text than the installation's.
        """
        from cuda.bindings import driver

        self._driver = driver
        self._carveout = carveout
        self._copy = Copy()
        self._released = weakref.finalize(self, self._copy.release)
        self._modules: dict[str, Any] = {}
        self._functions: dict[str, tuple[Any, Any]] = {}
        sources = sources or kernel_sources()
        wanted = nvrtc.units(sources, exact=True, fast=fast)
        for unit, path in nvrtc.cubin_paths(wanted, architecture, sources).items():
            module = cupy.RawModule(path=self._copy.path(path))
            for name in nvrtc.kernels_in(path.read_bytes()):
                if name.endswith("_fast") == unit.fast:
                    self._modules[name] = module

    @property
    def names(self) -> list[str]:
        return sorted(self._modules)

    def release(self) -> None:
        """Let another backend have this copy of the kernels: none of them runs by now, or will."""
        self._released()

    def function(self, name: str, shared_bytes: int) -> Any:
        """The driver's handle of a kernel, allowed to take ``shared_bytes`` of dynamic shared memory."""
        if name not in self._functions:
            if name not in self._modules:
                raise BackendError(f"there is no kernel {name}; known are {', '.join(self.names)}")
            kernel = self._modules[name].get_function(name)
            if _shares_split(name):
                kernel.preferred_shared_memory_carveout = self._carveout
            self._functions[name] = (kernel, self._driver.CUfunction(kernel.kernel.ptr))
        kernel, handle = self._functions[name]
        if shared_bytes > kernel.max_dynamic_shared_size_bytes:
            try:
                kernel.max_dynamic_shared_size_bytes = shared_bytes
            except Exception as error:
                raise BackendError(
                    f"kernel {name} needs {shared_bytes} bytes of shared memory in a block, more than this "
                    f"GPU has ({error})"
                ) from error
        return handle


def launch_config(launch: Launch, *, early: bool) -> Any:
    """The driver's configuration of a launch but for its stream; ``early``: a programmatic dependent one."""
    from cuda.bindings import driver

    kinds, attributes = driver.CUlaunchAttributeID, []
    if early:
        attribute = driver.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if launch.cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = launch.cluster, 1, 1
        attributes.append(attribute)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
    config.sharedMemBytes = launch.shared
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


class CudaProgram:
    """The launches of a list of ops. A whole run of a small program is recorded as one graph and replayed.

    There are plans for few and for many positions before (``merge_by``), made when first wanted. They give
    the same bits.
    """

    def __init__(self, backend: CudaBackend, ops: Sequence[Op]) -> None:
        self._backend = backend
        self._ops = list(ops)
        self._single: dict[int, list[PreparedLaunch]] = {}  # of op number, made when a part is run
        rows = next((int(op.args.M) for op in ops if op.name == "embed"), 0)

        groups = head_groups(ops)

        # Not methods: a program that held itself would keep its memory until the next collection.
        def way(position: int) -> MergeBy:
            return merge_by(position, backend.tuning, groups) if rows == 1 else MergeBy.last_block

        def planned(position: int, ops: Sequence[Op] = self._ops) -> Plan:
            return plan(ops, backend.mode, backend.tuning, position)

        self._way, self._plan = way, planned
        self._runs = Replays(
            backend,
            lambda position: backend.prepare_plan(planned(position)),
            way,
            record=backend.graph and 1 <= rows <= GRAPH_ROWS,
        )
        self._runs.at(backend.position)  # what cannot be planned or loaded is an error now
        self._loop: GreedyLoop | None = None

    @property
    def whole(self) -> PreparedPlan:
        """The launches of a whole run at the backend's position."""
        with self._backend.current():
            return self._runs.at(self._backend.position).whole

    @property
    def launches(self) -> int:
        """Kernel launches of a whole run."""
        return len(self.whole)

    @property
    def recorded(self) -> bool:
        """Whether whole runs replay a graph by now."""
        return self._runs.recorded or (self._loop is not None and self._loop.recorded)

    def run(self, begin: int = 0, end: int | None = None) -> None:
        """Run ops ``begin`` to ``end`` and wait for them."""
        backend = self._backend
        end = len(self._ops) if end is None else end
        if not 0 <= begin <= end <= len(self._ops):
            raise IndexError(f"ops {begin} to {end} of a program of {len(self._ops)}")
        with backend.current():
            if begin == 0 and end == len(self._ops):
                self.queue()
            else:
                for number in range(begin, end):
                    if number not in self._single:
                        op = self._ops[number]
                        self._single[number] = backend.prepare(launches(op, backend.mode, backend.tuning))
                    backend.launch(self._single[number])
            backend.synchronize(lambda: f"{self._ops[begin].label} to {self._ops[end - 1].label}")

    def greedy_loop(
        self, ids: Buffer, pos: Buffer, chosen: Buffer, hashes: Buffer | None, taps: int, count: int
    ) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
        """Run ``count`` one-row steps, each on the token the one before chose: see GreedyLoop.run."""
        if self._loop is None:
            self._loop = GreedyLoop(self._backend, self._plan, self._way, ids, pos, chosen, hashes, taps)
        return self._loop.run(self._backend.position, count)

    def queue(self) -> None:
        """Queue a whole run; the device must be current."""
        self._runs.at(self._backend.position).queue()


class CudaBackend:
    """Runs ops on GPU ``device_index`` in ``mode``; ``graph=False`` launches every kernel by itself.

    ``progress`` is called with the number of bytes after each piece of an upload. Raises BackendError when
    the GPU or a package is missing. ``close()`` frees the device memory at once; afterwards its buffers are
    void.
    """

    def __init__(
        self,
        device_index: int = 0,
        mode: Mode = "l2exact",
        graph: bool = True,
        progress: Progress | None = None,
        tuning: Tuning | None = None,
        sources: KernelSources | None = None,
    ) -> None:
        """``sources``: kernels to run instead of the installation's, for measurements."""
        self._cupy = load_cupy()
        self.device = open_device(device_index, self._cupy)
        from cuda.bindings import driver

        self._driver = driver
        self.name = f"cuda:{device_index}"
        self.mode: Mode = mode
        self.graph = graph
        self._max_cluster = MAX_CLUSTER if self.device.capability >= (9, 0) else 1
        limits = Tuning(
            sms=self.device.multiprocessors,
            shared_limit=self.device.shared_bytes_per_block,
            max_cluster=self._max_cluster,
        )
        self.tuning = limits
        if tuning is not None:
            self.tuning = replace(tuning, max_cluster=min(tuning.max_cluster, self._max_cluster))
        self._buffers: weakref.WeakSet[CudaBuffer] = weakref.WeakSet()
        with self._device():
            self.stream = self._cupy.cuda.Stream(non_blocking=True)
            self.side_stream = self._cupy.cuda.Stream(non_blocking=True)
            self._handles = driver.CUstream(self.stream.ptr), driver.CUstream(self.side_stream.ptr)
            self._memory = Memory(self._cupy, f"{self.name} ({self.device.name})", self.stream, progress)
            self._kernels = Kernels(
                self._cupy,
                self.device.architecture,
                fast=mode != "l2exact",
                carveout=self.tuning.shared_carveout,
                sources=sources,
            )

    def describe(self) -> dict[str, str]:
        d = self.device
        return {
            "backend": self.name,
            "device": d.name,
            "architecture": d.architecture,
            "mode": self.mode,
            "graph": "yes" if self.graph else "no",
            "driver": f"{d.driver // 1000}.{d.driver % 1000 // 10}",
            "cupy": d.cupy,
            "nvrtc": d.nvrtc,
        }

    # -- memory ----------------------------------------------------------------------------------------------

    def check_model(self, config: ModelConfig) -> None:
        check_head_dim(config.head_dim)

    def check_memory(self, parts: Mapping[str, int]) -> None:
        """BackendError with all numbers unless ``parts`` (what it is for -> bytes) fit together."""
        with self.current():
            self._memory.check(parts)

    @property
    def used_bytes(self) -> int:
        """Device bytes in this backend's buffers."""
        return self._memory.used_bytes

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> CudaBuffer:
        with self.current():
            buffer = self._memory.allocate(shape, dtype)
        self._buffers.add(buffer)
        return buffer

    def zeros(self, shape: Sequence[int], dtype: npt.DTypeLike) -> CudaBuffer:
        buffer = self.empty(shape, dtype)
        with self.current():
            self._memory.fill_zero(buffer)
        return buffer

    def upload(self, array: npt.NDArray[Any]) -> CudaBuffer:
        array = np.ascontiguousarray(array)
        buffer = self.empty(array.shape, array.dtype)
        with self.current():
            self._memory.upload(array, buffer.ptr)
        return buffer

    def write(self, buffer: Buffer, array: npt.NDArray[Any]) -> None:
        target = _own(buffer)
        if array.dtype != target.dtype:
            raise TypeError(f"buffer holds {target.dtype}, array is {array.dtype}")
        if array.nbytes > target.nbytes:
            raise ValueError(f"array of {array.nbytes} bytes into a buffer of {target.nbytes}")
        with self.current():
            self._memory.upload(np.ascontiguousarray(array), target.ptr)

    def read(self, buffer: Buffer, shape: Sequence[int] | None = None) -> npt.NDArray[Any]:
        source = _own(buffer)
        result = np.empty(source.shape if shape is None else tuple(shape), source.dtype)
        if result.nbytes > source.nbytes:
            raise ValueError(f"{result.nbytes} bytes from a buffer of {source.nbytes}")
        with self.current():
            self._memory.download(source.ptr, result)
        return result

    def at_position(self, position: int) -> None:
        """The next run goes no further than ``position``: its launches are chosen for that."""
        self.position = position

    def attention_work_bytes(self, rows: int, heads: int, head_dim: int, context: int) -> int:
        return attention_work_bytes(rows, heads, head_dim, context)

    def close(self) -> None:
        """Free all device memory of this backend, whoever still refers to its buffers."""
        if self._closed:
            return
        with self.current():
            self.stream.synchronize()
        self._closed = True
        for buffer in list(self._buffers):
            buffer.memory = None
        self._kernels.release()
        with self._device():
            self._memory.release()

    # -- running ---------------------------------------------------------------------------------------------

    row_spread = ROW_SPREAD

    def compile(self, ops: Sequence[Op]) -> CudaProgram:
        with self.current():
            return CudaProgram(self, ops)

    def prepare(self, planned: Sequence[Launch]) -> list[PreparedLaunch]:
        """Launches with their kernels looked up, their arguments and tables stored."""
        prepared = []
        for launch in planned:
            arguments: Any = type(launch.args).from_buffer_copy(launch.args)
            table = None
            if launch.table:
                content = np.frombuffer(launch.table, np.uint8)
                table = self.empty(content.shape, content.dtype)
                self.write(table, content)
                arguments.table = table.ptr
            parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
            function = self._kernels.function(launch.kernel, launch.shared)
            if launch.cluster > self._max_cluster:
                raise BackendError(
                    f"kernel {launch.kernel} wants clusters of {launch.cluster} blocks; "
                    f"{self.name} ({self.device.name}) has clusters of {self._max_cluster} at most"
                )
            can = self.tuning.programmatic and self.device.capability >= (9, 0)
            made = launch.kernel.removesuffix("_fast") in PROGRAMMATIC
            early = launch_config(launch, early=True) if can and made else None
            clustered = launch_config(launch, early=False) if launch.cluster > 1 else None
            address = ctypes.addressof(parameters)
            prepared.append(
                PreparedLaunch(launch, function, arguments, parameters, address, early, clustered, table)
            )
        return prepared

    def prepare_plan(self, plan: Plan, last: Sequence[Launch] = ()) -> PreparedPlan:
        """A plan with launches that follow it."""
        return PreparedPlan(self, plan, last)

    def launch(self, prepared: Sequence[PreparedLaunch], *, side: bool = False, alone: bool = True) -> None:
        """Queue launches on the backend's stream, or on the one beside it; the device must be current.

        Kernels made for it may begin before the one ahead of them has ended, but not the first one when
        ``alone``: it waits for everything queued before.
        """
        driver, stream = self._driver, self._handles[side]
        for number, item in enumerate(prepared):
            launch = item.launch
            config = item.early if number > 0 or not alone else None
            config = config or item.clustered
            if config is not None:
                config.hStream = stream
                (status,) = driver.cuLaunchKernelEx(config, item.function, item.address, 0)
            else:
                (status,) = driver.cuLaunchKernel(
                    item.function, *launch.grid, *launch.block, launch.shared, stream, item.address, 0
                )
            if int(status) != 0:
                raise BackendError(
                    f"{self.name} refused kernel {launch.kernel} with grid {launch.grid}, "
                    f"block {launch.block}, clusters of {launch.cluster}, {launch.shared} bytes of shared "
                    f"memory: {status.name}"
                )

    def pinned(self, shape: Sequence[int], dtype: npt.DTypeLike) -> tuple[Any, npt.NDArray[Any]]:
        """Host memory that kernels can write to, zeroed: the allocation, to be kept, and a view of it."""
        count = int(np.prod(shape, dtype=np.int64))
        size = max(1, count * np.dtype(dtype).itemsize)
        with self.current():
            memory = self._cupy.cuda.alloc_pinned_memory(size)
        view = np.frombuffer(memory, np.uint8, size)
        view[...] = 0
        return memory, view[: count * np.dtype(dtype).itemsize].view(dtype).reshape(tuple(shape))

    def event(self) -> Any:
        """A new event for ``wait``, to be recorded on ``stream``."""
        with self.current():
            return self._cupy.cuda.Event(block=False, disable_timing=True)

    def synchronize(self, what: Callable[[], str] = lambda: "the work queued before") -> None:
        """Wait for the stream; an error of the GPU is reported with ``what()`` it was doing."""
        self.wait(self.stream, what)

    def wait(self, target: Any, what: Callable[[], str]) -> None:
        """Wait for a stream or an event."""
        try:
            target.synchronize()
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            raise BackendError(
                f"{self.name} failed in {what()}: {error}. After this error the process cannot use the GPU "
                "any more: start it again, with --no-graph to see which operation fails"
            ) from error

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this backend's device current; BackendError after close()."""
        if self._closed:
            raise BackendError(f"this {self.name} backend was closed")
        with self._device():
            yield

    @contextmanager
    def _device(self) -> Iterator[None]:
        with self._cupy.cuda.Device(self.device.index):
            yield

    @property
    def closed(self) -> bool:
        return self._closed

    _closed = False
    position = 0  # of at_position


def _own(buffer: Buffer) -> CudaBuffer:
    if not isinstance(buffer, CudaBuffer):
        raise TypeError(f"expected a CUDA buffer, got {type(buffer).__name__}")
    return buffer
