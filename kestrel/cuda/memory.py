"""Memory of one GPU: buffers from a pool of their own, uploads through pinned staging, clear errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel.errors import BackendError

STAGING_BYTES = 32 << 20  # of each of the two pinned buffers
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2  # cudaMemcpyKind
Progress = Callable[[int], None]  # called with the bytes uploaded since the last call


class CudaBuffer:
    """Device memory as a backend buffer; freed with its last reference, or by the backend's close()."""

    def __init__(self, memory: Any, shape: Sequence[int], dtype: npt.DTypeLike) -> None:
        self.memory = memory  # a cupy.cuda.MemoryPointer
        self._ptr = int(memory.ptr)
        self._shape = tuple(int(n) for n in shape)
        self._dtype = np.dtype(dtype)

    @property
    def ptr(self) -> int:
        return self._ptr

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    @property
    def nbytes(self) -> int:
        return int(np.prod(self._shape, dtype=np.int64)) * self._dtype.itemsize


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def memory_message(device: str, parts: Mapping[str, int], free: int, total: int) -> str:
    """What is needed, what there is, and what to do."""
    listed = ", ".join(f"{name} {_size(count)}" for name, count in parts.items())
    return (
        f"not enough memory on {device}: {listed}; together {_size(sum(parts.values()))}, "
        f"free {_size(free)} of {_size(total)}. Take a smaller context (-c), end other programs on this GPU "
        "(nvidia-smi lists them), or a smaller model"
    )


class Memory:
    """Allocation and copies on one device and stream; the caller has made the device current."""

    def __init__(self, cupy: Any, device: str, stream: Any, progress: Progress | None) -> None:
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._device = device
        self._stream = stream
        self._progress = progress
        self._pool = cupy.cuda.MemoryPool()
        self._staging: list[tuple[Any, npt.NDArray[np.uint8], Any]] = []
        self._live = 0  # bytes handed out and not yet freed, for messages

    def info(self) -> tuple[int, int]:
        """Free and total bytes of the device; blocks this pool holds unused count as free."""
        free, total = self._runtime.memGetInfo()
        return int(free) + int(self._pool.free_bytes()), int(total)

    @property
    def used_bytes(self) -> int:
        """Bytes in buffers that are alive."""
        return int(self._pool.used_bytes())

    def check(self, parts: Mapping[str, int]) -> None:
        """BackendError with the numbers when ``parts`` (name -> bytes) cannot fit together."""
        free, total = self.info()
        if sum(parts.values()) > free:
            raise BackendError(memory_message(self._device, parts, free, total))

    def allocate(self, shape: Sequence[int], dtype: npt.DTypeLike) -> CudaBuffer:
        """Uninitialised memory; when the device is full, unused blocks are given back and tried once more."""
        size = max(1, int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize)
        try:
            return CudaBuffer(self._pool.malloc(size), shape, dtype)
        except self._cupy.cuda.memory.OutOfMemoryError as error:
            self._pool.free_all_blocks()
            free, total = self.info()
            parts = {"one buffer of": size}
            message = memory_message(self._device, parts, free, total)
            raise BackendError(f"{message} (this model holds {_size(self.used_bytes)} so far)") from error

    def fill_zero(self, buffer: CudaBuffer) -> None:
        self._runtime.memsetAsync(buffer.ptr, 0, buffer.nbytes, self._stream.ptr)

    def release(self) -> None:
        """Give unused blocks back to the device."""
        self._staging.clear()
        self._pool.free_all_blocks()

    # -- copies ----------------------------------------------------------------------------------------------

    def upload(self, array: npt.NDArray[Any], target: int) -> None:
        """Copy a contiguous host array to device address ``target``; returns when the array may be reused.

        Large arrays go through two pinned buffers, so that reading a mapped file overlaps with the transfer.
        """
        flat = array.reshape(-1).view(np.uint8)
        if flat.size <= 1 << 16:
            self._copy(target, int(flat.ctypes.data), flat.size, HOST_TO_DEVICE)
            self._stream.synchronize()
            self._report(flat.size)
            return
        if not self._staging:
            self._staging = [self._pinned() for _ in range(2)]
        for number, begin in enumerate(range(0, flat.size, STAGING_BYTES)):
            memory, view, done = self._staging[number % 2]
            part = flat[begin : begin + STAGING_BYTES]
            done.synchronize()  # the transfer that used this buffer last
            view[: part.size] = part
            self._copy(target + begin, int(memory.ptr), part.size, HOST_TO_DEVICE)
            done.record(self._stream)
            self._report(part.size)
        for _, _, done in self._staging:
            done.synchronize()

    def download(self, source: int, array: npt.NDArray[Any]) -> None:
        """Copy device bytes at ``source`` into a contiguous host array, after the work queued before."""
        self._copy(int(array.ctypes.data), source, array.nbytes, DEVICE_TO_HOST)
        self._stream.synchronize()

    def _copy(self, target: int, source: int, size: int, kind: int) -> None:
        if size:
            self._runtime.memcpyAsync(target, source, size, kind, self._stream.ptr)

    def _pinned(self) -> tuple[Any, npt.NDArray[np.uint8], Any]:
        memory = self._cupy.cuda.alloc_pinned_memory(STAGING_BYTES)
        view = np.frombuffer(memory, np.uint8, STAGING_BYTES)
        event = self._cupy.cuda.Event(block=False, disable_timing=True)
        event.record(self._stream)
        return memory, view, event

    def _report(self, size: int) -> None:
        if self._progress is not None:
            self._progress(size)
