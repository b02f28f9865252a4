"""The GPU side of ``kestrel bench`` on host memory: the shim runs the kernels, g++ the code that fills."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the GPU side imports cuda-bindings")

from kestrel import bench
from kestrel.benchmark import cuda
from kestrel.benchmark.cuda import BenchBackend, SharedWeights
from kestrel.benchmark.runner import Runner
from kestrel.benchmark.synthetic import Recipe, fill, host_weights, pending_weights
from kestrel.config import ModelConfig
from kestrel.cpu import CpuBackend
from kestrel.cuda.device import CudaBackend
from kestrel.cuda.memory import CudaBuffer
from kestrel.launch import Tuning, attention_work_bytes
from kestrel.ops import WType
from kestrel.simt import SimtProgram, aligned_empty


def bytes_at(address: int, count: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))


class HostMemory:
    """What BenchBackend uses of Memory; transfers are copies."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.uploads: list[int] = []

    def upload(self, array: Any, target: int) -> None:
        self.uploads.append(array.nbytes)
        bytes_at(target, array.nbytes)[...] = array.reshape(-1).view(np.uint8)

    def download(self, source: int, array: Any) -> None:
        array.reshape(-1).view(np.uint8)[...] = bytes_at(source, array.nbytes)

    def check(self, parts: Mapping[str, int]) -> None:
        self.checked = dict(parts)

    def fill_zero(self, buffer: CudaBuffer) -> None:
        bytes_at(buffer.ptr, buffer.nbytes)[...] = 0


class HostBench(BenchBackend):
    """A BenchBackend whose device memory is host memory."""

    library: ctypes.CDLL
    seed = 0

    def __init__(
        self,
        index: int = 0,
        mode: Any = "l2exact",
        graph: bool = True,
        *,
        shared: SharedWeights | None = None,
    ) -> None:
        self.name, self.mode, self.graph = f"cuda:{index}", mode, graph
        self.tuning = Tuning()
        self._memory: Any = HostMemory()
        self._buffers: Any = []
        self.stream: Any = nullcontext()
        self.shared = SharedWeights() if shared is None else shared
        self._fill_module = SimpleNamespace(get_function=self._function)
        self.device: Any = SimpleNamespace(
            index=index,
            name="a shim",
            architecture="sm_0",
            multiprocessors=1,
            cupy="0",
            nvrtc="0",
            driver=13000,
        )
        self._cupy: Any = SimpleNamespace(
            cuda=SimpleNamespace(runtime=SimpleNamespace(deviceGetPCIBusId=lambda index: f"0:{index}"))
        )

    def _function(self, name: str) -> Callable[..., None]:
        def launch(grid: tuple[int], block: tuple[int], arguments: Sequence[Any]) -> None:
            out, count, first, seed, table = (int(a) for a in arguments)
            self.library[name](
                ctypes.c_void_p(out),
                ctypes.c_longlong(count),
                ctypes.c_longlong(first),
                ctypes.c_ulonglong(seed),
                ctypes.c_void_p(table),
            )

        return launch

    def empty(self, shape: Sequence[int], dtype: Any) -> CudaBuffer:
        array = aligned_empty(shape, dtype)
        array.view(np.uint8).fill(0xFF)
        buffer = CudaBuffer(SimpleNamespace(ptr=array.ctypes.data, array=array), shape, dtype)
        self._memory.used_bytes += buffer.nbytes
        self._buffers.append(buffer)
        return buffer

    def synchronize(self, what: Any = None) -> None:
        pass

    @contextmanager
    def current(self) -> Any:
        yield

    def attention_work_bytes(self, rows: int, heads: int, head_dim: int, context: int) -> int:
        return attention_work_bytes(rows, heads, head_dim, context)

    def compile(self, ops: Any) -> Any:
        return SimtProgram(self, ops)  # type: ignore[arg-type]

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.memory = None


@pytest.fixture(autouse=True)
def host(device_fill: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    HostBench.library = device_fill
    monkeypatch.setattr(cuda, "BenchBackend", HostBench)
    monkeypatch.setattr(cuda, "copy_bandwidth", lambda backend: 1e12)


def test_ranges_are_made_in_place() -> None:
    backend = HostBench()
    recipe = Recipe.named(1, "x", np.linspace(-1, 1, 256).astype(np.float32))
    buffer = backend.zeros((10, 7), np.float32)
    backend.fill(buffer, recipe, 21, 28)
    expected = np.zeros(70, np.float32)
    fill(expected[21:49], recipe, 21)
    assert backend.read(buffer).tobytes() == expected.tobytes()
    assert backend.read_rows(buffer, 3, 7).tobytes() == expected[21:49].tobytes()


def test_weights_are_bound_once(small_config: ModelConfig) -> None:
    pending = pending_weights(small_config, WType.q4local, WType.q8local)
    size = sum(tensor.nbytes for tensor in pending.values())
    shared = SharedWeights()
    first, second = HostBench(shared=shared), HostBench(mode="fast", shared=shared)
    options = {"context": 64, "chunk": 8, "seed": 0}
    one = Runner(small_config, pending, first, **options)
    two = Runner(small_config, pending, second, **options)
    assert shared.nbytes == size
    assert first._memory.checked["weights"] == size
    assert second._memory.checked["weights"] == 0
    assert first.device_bytes == first.used_bytes > size
    assert second.used_bytes < size < second.device_bytes
    for name in ("embed", "layers.1.experts.down"):
        assert one.model._matrix(name).codes.ptr == two.model._matrix(name).codes.ptr
    reference = Runner(small_config, host_weights(pending), CpuBackend(1), **options)
    hashes = set()
    for runner in (reference, one):
        _, chosen = runner.generate(3, 30)
        hashes.add(runner.output_hash(chosen, 30, 3))
    assert len(hashes) == 1


def test_real_arrays_are_bound_by_address_and_small_ones_copied() -> None:
    shared = SharedWeights()
    first, second = HostBench(shared=shared), HostBench(shared=shared)
    large, small = np.arange(1 << 16, dtype=np.uint8), np.arange(100, dtype=np.uint8)
    assert first.upload(large).ptr == second.upload(large).ptr
    assert first.upload(small).ptr != second.upload(small).ptr
    assert first.upload(large.copy()).ptr != first.upload(large).ptr
    assert second._memory.uploads == [100]
    assert first.read(first.upload(large)).tobytes() == large.tobytes()


def test_the_command_and_the_cpus_hash(
    small_shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All variants through the kernels' source, compared with the CPU reference's hashes."""
    monkeypatch.setattr(CudaBackend, "used_bytes", property(lambda self: self._memory.used_bytes))
    file = tmp_path / "gpu.json"
    tests = ["--shape", small_shape, "-p", "3", "-n", "2", "-d", "0,5", "-r", "1", "-q"]
    modes = ["--cuda", "--mode", "l2exact,fast", "--eager", "--dump"]
    assert bench.main([*tests, *modes, "-o", str(file)]) == 0
    output = capsys.readouterr().out
    assert "l2exact, eager" in output
    assert "fast, full dump" in output
    assert "(free)" in output
    records = json.loads(file.read_text())
    assert len(records) == 2 * (2 + 6)
    assert {r["bits_promised"] for r in records if r["mode"] == "l2exact"} == {True}
    assert {r["bits_promised"] for r in records if r["mode"] == "fast"} == {False}
    assert {(r["backends"], r["device"], r["bandwidth_kind"]) for r in records} == {
        ("CUDA", "cuda:0", "device copy")
    }
    assert bench.main([*tests, "-t", "1", "--compare", str(file)]) == 0
    for record in records:
        record["output_hash"] = "f" * 16
    file.write_text(json.dumps(records))
    assert bench.main([*tests, "-t", "1", "--compare", str(file)]) == 3
