"""What timing needs of a GPU: weights shared by the backends of several modes, contents made on the device,
and the bandwidth of a copy.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel.benchmark.synthetic import COUNTER, MIX1, MIX2, Pending, Recipe
from kestrel.cuda import compile as nvrtc
from kestrel.cuda.device import CudaBackend
from kestrel.cuda.memory import CudaBuffer, Progress
from kestrel.cuda.sources import KernelSources, kernel_sources
from kestrel.launch import Mode, Tuning

SHARED_FROM = 1 << 16  # bytes of an array from which it is shared; below, copies cost nothing
DEVICE_TO_DEVICE = 3  # cudaMemcpyKind

# kestrel.benchmark.synthetic.fill, with a thread for each word.
SOURCE = f"""
template <typename T>
static __device__ __forceinline__ void fill(
    T *out,            // [n]
    long long n, long long first,
    unsigned long long seed,
    const T *table)    // [256]
{{
    const long long begin = first / 8, words = (first + n + 7) / 8 - begin;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < words;
         i += (long long)gridDim.x * blockDim.x) {{
        unsigned long long z = seed + (unsigned long long)(begin + i + 1) * {COUNTER:#x}ull;
        z = (z ^ (z >> 30)) * {MIX1:#x}ull;
        z = (z ^ (z >> 27)) * {MIX2:#x}ull;
        z ^= z >> 31;
        for (int j = 0; j < 8; j++) {{
            const long long e = 8 * (begin + i) + j - first;
            if (e >= 0 && e < n) out[e] = table[(z >> (8 * j)) & 255];
        }}
    }}
}}
#define FILL(name, T) \\
    extern "C" __global__ void name( \\
        T *out, long long n, long long first, unsigned long long seed, const T *table) \\
    {{ fill<T>(out, n, first, seed, table); }}
FILL(k_fill_1, unsigned char)
FILL(k_fill_2, unsigned short)
FILL(k_fill_4, unsigned int)
"""


def fill_sources() -> KernelSources:
    return KernelSources({"synthetic.cu": SOURCE.encode()}, kernel_sources().headers)


@dataclass
class SharedWeights:
    """Arrays that are on the device already, by what they hold; the first backend owns their memory."""

    buffers: dict[Any, CudaBuffer] = field(default_factory=dict)
    arrays: list[Any] = field(default_factory=list)  # kept, so that an address stays theirs
    nbytes: int = 0


class BenchBackend(CudaBackend):
    """A CUDA backend that makes synthetic arrays in place and binds each large array once for all backends.

    The backend that uploaded an array must stay open as long as the others.
    """

    def __init__(
        self,
        device_index: int = 0,
        mode: Mode = "l2exact",
        graph: bool = True,
        progress: Progress | None = None,
        tuning: Tuning | None = None,
        *,
        shared: SharedWeights | None = None,
    ) -> None:
        super().__init__(device_index, mode, graph, progress, tuning)
        self.shared = SharedWeights() if shared is None else shared
        self._fill_module: Any = None

    @property
    def device_bytes(self) -> int:
        """Device bytes of all buffers that this backend's model uses."""
        return self.used_bytes + sum(b.nbytes for b in self.shared.buffers.values() if b not in self._buffers)

    @property
    def bus_id(self) -> str:
        """PCI address, by which nvidia-smi knows the device."""
        return str(self._cupy.cuda.runtime.deviceGetPCIBusId(self.device.index))

    def check_memory(self, parts: Mapping[str, int]) -> None:
        here = self.shared.nbytes
        if here:  # what is shared already lies there
            parts = {name: max(0, n - here) if name == "weights" else n for name, n in parts.items()}
        super().check_memory(parts)

    def upload(self, array: npt.NDArray[Any]) -> CudaBuffer:
        if array.nbytes < SHARED_FROM and not isinstance(array, Pending):
            return super().upload(array)
        key = self._key(array)
        if key not in self.shared.buffers:
            if isinstance(array, Pending):
                buffer = self.empty(array.shape, array.dtype)
                self.fill(buffer, array.recipe, 0, array.size)
            else:
                buffer = super().upload(array)
            self.shared.buffers[key] = buffer
            self.shared.arrays.append(array)
            self.shared.nbytes += array.nbytes
        return self.shared.buffers[key]

    @staticmethod
    def _key(array: npt.NDArray[Any]) -> Any:
        if isinstance(array, Pending):
            return array.recipe.seed, array.recipe.table.tobytes(), array.shape
        return int(array.ctypes.data), array.nbytes, array.dtype.str

    def fill(self, buffer: CudaBuffer, recipe: Recipe, first: int, count: int) -> None:
        """Write elements ``first`` to ``first + count - 1`` of the recipe's array to the same places of
        ``buffer``.
        """
        if count == 0:
            return
        table = super().upload(recipe.table)
        size = recipe.table.dtype.itemsize
        if self._fill_module is None:
            path = nvrtc.cubin_path(
                nvrtc.Unit("synthetic.cu", False), self.device.architecture, fill_sources()
            )
            with self.current():
                self._fill_module = self._cupy.RawModule(path=str(path))
        arguments = (
            np.uint64(buffer.ptr + first * size),
            np.int64(count),
            np.int64(first),
            np.uint64(recipe.seed),
            np.uint64(table.ptr),
        )
        with self.current(), self.stream:
            self._fill_module.get_function(f"k_fill_{size}")((2048,), (256,), arguments)
        self.synchronize(lambda: "making synthetic contents")

    def read_rows(self, buffer: CudaBuffer, begin: int, end: int) -> npt.NDArray[Any]:
        """A host copy of rows ``begin`` to ``end - 1`` of ``buffer``."""
        rows = np.empty((end - begin, *buffer.shape[1:]), buffer.dtype)
        with self.current():
            self._memory.download(buffer.ptr + begin * (buffer.nbytes // buffer.shape[0]), rows)
        return rows


def copy_bandwidth(backend: CudaBackend, nbytes: int = 1 << 30, repeats: int = 10) -> float:
    """Bytes per second of a device-to-device copy, read plus written: the median of ``repeats``.

    The copied bytes are random; zeros can be faster than data.
    """
    cupy = backend._cupy
    with backend.current():
        free = int(cupy.cuda.runtime.memGetInfo()[0])
    nbytes = min(nbytes, free // 4) & ~255
    source, target = (backend.empty((nbytes,), np.uint8) for _ in range(2))
    recipe = Recipe.named(0, "copy", np.arange(256, dtype=np.uint8))
    if isinstance(backend, BenchBackend):
        backend.fill(source, recipe, 0, nbytes)
    with backend.current():
        events = [cupy.cuda.Event() for _ in range(repeats + 3)]
        for event in events:
            event.record(backend.stream)
            cupy.cuda.runtime.memcpyAsync(
                target.ptr, source.ptr, nbytes, DEVICE_TO_DEVICE, backend.stream.ptr
            )
        backend.stream.synchronize()
        timed = itertools.pairwise(events[2:])  # the first two warm up
        seconds = [cupy.cuda.get_elapsed_time(a, b) / 1e3 for a, b in timed]
    return float(2 * nbytes / statistics.median(seconds))
