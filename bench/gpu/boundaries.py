"""What lies between dependent stages on this GPU: ``python -m bench.gpu.boundaries``.

Prints microseconds a step (median over replays of a graph): chains of launches, plain and programmatic,
within one launch barriers over the grid, numbers of the step for each block or each word, and barriers over
clusters; reading 14 MB of cold weights, and the weights of eight experts out of many by bulk copies; and how
many clusters run at a time.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np

from bench.gpu.context import markdown_table
from bench.gpu.device_code import DeviceCode

STEPS = 200
WEIGHT_SETS = 24  # of 14 MB: several times the L2
LAYERS, EXPERTS, EXPERT_BYTES = 48, 128, 2_654_208  # three q4local matrices of 768 x 2048


class BoundaryArgs(ctypes.Structure):
    """Mirror of boundaries.cu."""

    _fields_ = [
        ("rows", ctypes.c_uint64),
        ("counter", ctypes.c_uint64),
        ("weights", ctypes.c_uint64),
        ("sink", ctypes.c_uint64),
        ("steps", ctypes.c_int32),
        ("turn", ctypes.c_int32),
        ("early", ctypes.c_int32),
        ("ahead", ctypes.c_int32),
    ]


class ExpertReadArgs(ctypes.Structure):
    """Mirror of boundaries.cu."""

    _fields_ = [
        ("chain", BoundaryArgs),
        ("experts", ctypes.c_uint64),
        ("ids", ctypes.c_uint64),
        ("expert_bytes", ctypes.c_int64),
        ("pieces", ctypes.c_int32),
        ("piece", ctypes.c_int32),
    ]


class Chain:
    """Launches recorded as a graph and timed."""

    def __init__(self, code: DeviceCode) -> None:
        from cuda.bindings import driver

        self.code, self.cupy, self.driver = code, code.cupy, driver
        self.stream = self.cupy.cuda.Stream(non_blocking=True)
        self.rows = self.cupy.zeros(4 * 2048, np.float32)
        self.counter = self.cupy.zeros(1, np.uint32)
        self.sink = self.cupy.zeros(1, np.uint32)
        bytes_of_set = 16 * 132 * 256 * 26
        self.set_bytes = bytes_of_set
        self.weights = self.cupy.random.randint(0, 1 << 30, WEIGHT_SETS * bytes_of_set // 4, np.int32)
        self.keep: list[Any] = []

    def launch(self, kernel: str, blocks: int, programmatic: bool, threads: int = 256, **values: int) -> None:
        """A launch of a kernel of BoundaryArgs, which read their weights from set number ``set``."""
        weights = self.weights.data.ptr + values.pop("set", 0) * self.set_bytes
        self._launch(kernel, blocks, threads, self._boundary(weights=weights, **values), programmatic)

    def read_experts(self, ids: int, experts: int, pieces: int, piece: int, *, turn: int, ahead: int) -> None:
        """A launch of k_expert_read: i32[8] at ``ids``, the experts' bytes at ``experts``."""
        args = ExpertReadArgs(
            chain=self._boundary(turn=turn, ahead=ahead),
            experts=experts,
            ids=ids,
            expert_bytes=EXPERT_BYTES,
            pieces=pieces,
            piece=piece,
        )
        self._launch("k_expert_read", 128, 256, args, True, shared=pieces * piece)

    def clusters(self, blocks: int, shared: int) -> int:
        """How many clusters of so many blocks of 256 threads run at a time."""
        driver, config = self.driver, self._config(blocks, 256, shared)
        cluster = driver.CUlaunchAttribute()
        cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = blocks, 1, 1
        config.attrs, config.numAttrs = [cluster], 1
        function = self._function("k_expert_read", shared)
        allowed = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        (error,) = driver.cuFuncSetAttribute(function, allowed, 1)
        self._check("cuFuncSetAttribute", error)
        error, count = driver.cuOccupancyMaxActiveClusters(function, config)
        self._check("cuOccupancyMaxActiveClusters", error)
        return int(count)

    def _boundary(self, **values: int) -> BoundaryArgs:
        return BoundaryArgs(
            rows=self.rows.data.ptr, counter=self.counter.data.ptr, sink=self.sink.data.ptr, **values
        )

    def _function(self, kernel: str, shared: int = 0) -> Any:
        found = self.code._module.get_function(kernel)
        if shared > found.max_dynamic_shared_size_bytes:
            found.max_dynamic_shared_size_bytes = shared
        return self.driver.CUfunction(found.kernel.ptr)

    def _config(self, blocks: int, threads: int, shared: int) -> Any:
        config = self.driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared
        config.hStream = self.driver.CUstream(self.stream.ptr)
        return config

    def _launch(
        self, kernel: str, blocks: int, threads: int, args: Any, programmatic: bool, shared: int = 0
    ) -> None:
        driver, config = self.driver, self._config(blocks, threads, shared)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        self.keep += [args, parameters]
        if programmatic:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        (error,) = driver.cuLaunchKernelEx(
            config, self._function(kernel, shared), ctypes.addressof(parameters), 0
        )
        self._check(kernel, error)

    def _check(self, what: str, error: Any) -> None:
        if error != self.driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{what}: {error}")

    def time(self, queue: Any, steps: int, repeats: int = 15) -> float:
        """Median microseconds a step of what ``queue`` launches."""
        cupy = self.cupy
        self.stream.begin_capture()
        try:
            queue()
        finally:
            graph = self.stream.end_capture()
        events = [cupy.cuda.Event() for _ in range(repeats + 1)]
        for _ in range(3):
            self.counter.fill(0)
            cupy.cuda.get_current_stream().synchronize()
            graph.launch(self.stream)
            self.stream.synchronize()
        times = []
        for a, b in itertools.pairwise(events):
            with self.stream:
                self.counter.fill(0)
                a.record(self.stream)
                graph.launch(self.stream)
                b.record(self.stream)
            self.stream.synchronize()
            times.append(1e3 * cupy.cuda.get_elapsed_time(a, b))
        self.keep.clear()
        return float(np.median(times)) / steps


def expert_rows(chain: Chain) -> list[list[str]]:
    """Eight experts of each of 48 layers, by bulk copies; side by side they lie within 1 GB."""
    cupy = chain.cupy
    experts = cupy.empty(LAYERS * EXPERTS * EXPERT_BYTES // 4, np.uint32)
    step = 1 << 28
    for begin in range(0, experts.size, step):
        end = min(begin + step, experts.size)
        experts[begin:end] = cupy.arange(begin, end, dtype=np.uint32) * np.uint32(2654435761)
    rng = np.random.default_rng(1)
    chosen = {
        "of 128": [layer * EXPERTS + rng.choice(EXPERTS, 8, replace=False) for layer in range(LAYERS)],
        "side by side": [8 * layer + np.arange(8) for layer in range(LAYERS)],
    }
    rows = []
    for pieces, megabytes in ((8, 14), (12, 21)):
        for name, ids in chosen.items():
            device_ids = cupy.asarray(np.stack(ids).astype(np.int32))
            for ahead in (0, 1):

                def read(ids: Any = device_ids, pieces: int = pieces, ahead: int = ahead) -> None:
                    for layer in range(LAYERS):
                        at = ids.data.ptr + 32 * layer
                        chain.read_experts(at, experts.data.ptr, pieces, 13824, turn=layer % 2, ahead=ahead)

                what = f"{megabytes} MB of eight experts {name} by bulk copies, "
                what += f"asked for {'before' if ahead else 'after'} the wait"
                rows.append([what, f"{chain.time(read, LAYERS):.2f}"])
    return rows


def main() -> None:
    chain = Chain(DeviceCode("boundaries.cu"))
    rows = []

    def row(what: str, queue: Any, steps: int = STEPS) -> None:
        rows.append([what, f"{chain.time(queue, steps):.2f}"])

    for blocks in (132, 264):
        for early, programmatic, name in (
            (0, False, "plain"),
            (0, True, "start after wait"),
            (1, True, "start first"),
        ):

            def exchange(blocks: int = blocks, early: int = early, pdl: bool = programmatic) -> None:
                for i in range(STEPS):
                    chain.launch("k_chain", blocks, pdl, turn=i % 2, early=early)

            row(f"launches of {blocks} blocks, {name}, 8 KB exchanged", exchange)

        def empty(blocks: int = blocks) -> None:
            for _ in range(STEPS):
                chain.launch("k_empty", blocks, True)

        row(f"launches of {blocks} blocks, programmatic, empty", empty)
        for kernel in ("k_persistent", "k_persistent_flags", "k_persistent_tagged", "k_persistent_empty"):

            def persistent(blocks: int = blocks, kernel: str = kernel) -> None:
                chain.launch(kernel, blocks, False, steps=STEPS)

            row(f"one launch of {blocks} blocks, {kernel}", persistent)
    row("clusters of 8, barrier", lambda: chain.launch("k_cluster_empty", 128, False, steps=STEPS))
    for ahead in (0, 1):

        def read(ahead: int = ahead) -> None:
            for i in range(WEIGHT_SETS):
                chain.launch("k_read", 132, True, turn=i % 2, ahead=ahead, set=i)

        row(f"14 MB cold, asked for {'before' if ahead else 'after'} the wait", read, WEIGHT_SETS)

        def warm(ahead: int = ahead) -> None:
            for i in range(WEIGHT_SETS):
                chain.launch("k_read", 132, True, turn=i % 2, ahead=ahead, set=i % 2)

        row(f"14 MB in L2, asked for {'before' if ahead else 'after'} the wait", warm, WEIGHT_SETS)
    rows += expert_rows(chain)
    print(markdown_table(["what", "us a step"], rows))
    for blocks in (8, 16):
        print(f"clusters of {blocks} blocks with 160 KB each at a time: {chain.clusters(blocks, 160 << 10)}")


if __name__ == "__main__":
    main()
