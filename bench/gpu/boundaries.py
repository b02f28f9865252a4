"""What lies between dependent stages on this GPU: ``python -m bench.gpu.boundaries``.

Prints microseconds a step (median over replays of a graph): chains of launches, plain and programmatic,
barriers over the grid and over clusters within one launch, and reading 14 MB of cold weights.
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


class Chain:
    """Launches recorded as a graph and timed."""

    def __init__(self, code: DeviceCode) -> None:
        from cuda.bindings import driver

        self.code, self.cupy, self.driver = code, code.cupy, driver
        self.stream = self.cupy.cuda.Stream(non_blocking=True)
        self.rows = self.cupy.zeros(2 * 2048, np.float32)
        self.counter = self.cupy.zeros(1, np.uint32)
        self.sink = self.cupy.zeros(1, np.uint32)
        bytes_of_set = 16 * 132 * 256 * 26
        self.set_bytes = bytes_of_set
        self.weights = self.cupy.random.randint(0, 1 << 30, WEIGHT_SETS * bytes_of_set // 4, np.int32)
        self.keep: list[Any] = []

    def launch(self, kernel: str, blocks: int, programmatic: bool, threads: int = 256, **values: int) -> None:
        driver = self.driver
        args = BoundaryArgs(
            rows=self.rows.data.ptr,
            counter=self.counter.data.ptr,
            weights=self.weights.data.ptr + values.pop("set", 0) * self.set_bytes,
            sink=self.sink.data.ptr,
            **values,
        )
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        self.keep += [args, parameters]
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.hStream = driver.CUstream(self.stream.ptr)
        if programmatic:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        function = driver.CUfunction(self.code._module.get_function(kernel).kernel.ptr)
        (error,) = driver.cuLaunchKernelEx(config, function, ctypes.addressof(parameters), 0)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{kernel}: {error}")

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
        for kernel in ("k_persistent", "k_persistent_empty"):

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
    print(markdown_table(["what", "us a step"], rows))


if __name__ == "__main__":
    main()
