"""Memory, errors and lifetime of the CUDA backend."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from kestrel.cuda import device
from kestrel.cuda.device import CudaBackend
from kestrel.cuda.graph import Graph
from kestrel.cuda.memory import STAGING_BYTES
from kestrel.cuda.sources import KernelSources, kernel_sources
from kestrel.engine import Engine
from kestrel.errors import BackendError, NonFiniteError
from kestrel.launch import Launch
from kestrel.ops import WType
from kestrel.sampling import SamplingParams
from tests.support.dumps import difference, generate
from tests.support.models import random_weights, tiny_config


def engine(backend: CudaBackend, seed: int = 0, context: int = 64) -> Engine:
    config = tiny_config("qwen3_moe")
    return Engine(config, random_weights(config, WType.q4local, seed=seed), backend, context=context)


@pytest.mark.parametrize("size", [1, 7, 1 << 16, (1 << 16) + 1, STAGING_BYTES, 3 * STAGING_BYTES + 12345])
def test_upload_and_read_back(size: int, gpu: CudaBackend) -> None:
    array = np.frombuffer(np.random.default_rng(size).bytes(size), np.uint8)
    assert np.array_equal(gpu.read(gpu.upload(array)), array)


def test_upload_reports_progress() -> None:
    seen: list[int] = []
    backend = CudaBackend(0, progress=seen.append)
    backend.upload(np.zeros(2 * STAGING_BYTES + 5, np.uint8))
    assert sum(seen) == 2 * STAGING_BYTES + 5
    assert len(seen) == 3
    backend.close()


def test_write_checks_type_and_size(gpu: CudaBackend) -> None:
    buffer = gpu.zeros((4,), np.float32)
    with pytest.raises(TypeError, match="float32"):
        gpu.write(buffer, np.zeros(4, np.int32))
    with pytest.raises(ValueError, match="20 bytes into a buffer of 16"):
        gpu.write(buffer, np.zeros(5, np.float32))
    with pytest.raises(ValueError, match="20 bytes from a buffer of 16"):
        gpu.read(buffer, (5,))


def test_memory_check_has_the_numbers(gpu: CudaBackend) -> None:
    with pytest.raises(BackendError, match=r"weights 9000\.00 GB.*free .* of .*smaller context"):
        gpu.check_memory({"weights": 9 * 10**12})


def test_context_that_does_not_fit_is_refused_before_anything_is_allocated() -> None:
    backend = CudaBackend(0)
    config = tiny_config("qwen3", head_dim=256, max_position=1 << 40)
    weights = random_weights(config, WType.q4local)
    with pytest.raises(
        BackendError, match=r"not enough memory on cuda:0.*KV cache of 4294967296 positions [\d.]+ GB.*free"
    ):
        Engine(config, weights, backend, context=1 << 32)
    assert backend.used_bytes == 0
    backend.close()


def test_out_of_memory_is_reported_and_memory_comes_back() -> None:
    backend = CudaBackend(0)
    before = backend.used_bytes
    held = []

    def fill() -> None:
        while True:
            held.append(backend.empty((1 << 33,), np.uint8))

    with pytest.raises(BackendError, match=r"not enough memory on cuda:0.*this model holds"):
        fill()
    assert backend.used_bytes > before
    held.clear()
    assert backend.used_bytes == before
    tokens, _ = generate(engine(backend), [1, 2, 3], 4)
    assert len(tokens) == 4
    backend.close()


def test_close_frees_everything() -> None:
    backend = CudaBackend(0)
    kept = backend.zeros((1 << 30,), np.uint8)
    backend.close()
    assert backend.used_bytes == 0
    backend.close()
    with pytest.raises(BackendError, match="closed"):
        backend.read(kept, (4,))


def test_index_out_of_range() -> None:
    with pytest.raises(BackendError, match="no GPU cuda:99"):
        CudaBackend(99)


def test_two_models_side_by_side(gpu: CudaBackend) -> None:
    alone = [generate(engine(gpu, seed), [5, 6, 7], 6) for seed in (1, 2)]
    first, second = engine(CudaBackend(0), 1), engine(CudaBackend(0), 2)
    greedy = SamplingParams(max_tokens=6, temperature=0.0)
    for _ in range(50):  # what they shared would be in the wrong hands once in a while
        streams = [e.generate([5, 6, 7], greedy) for e in (first, second)]
        mixed = list(zip(*streams, strict=True))  # turn by turn
        assert [t for t, _ in mixed] == alone[0][0]
        assert [t for _, t in mixed] == alone[1][0]
    for e in (first, second):
        e.prompt_model.backend.close()  # type: ignore[attr-defined]


def test_cancelled_generation_leaves_a_clean_engine(gpu: CudaBackend) -> None:
    expected, dump = generate(engine(gpu), [5, 6, 7], 8)
    again = engine(gpu)
    stream = again.generate([9, 8], SamplingParams(max_tokens=30, temperature=0.0))
    next(stream), next(stream)
    stream.close()
    tokens, second = generate(again, [5, 6, 7], 8)
    assert tokens == expected
    assert difference(second, dump).count == 0


def test_non_finite_weight_is_named(gpu: CudaBackend) -> None:
    config = tiny_config("qwen3")
    weights = random_weights(config, WType.q4local)
    scale = weights["layers.1.o"].scale  # type: ignore[union-attr]
    scale[3, 0] = 0x7E00
    broken = Engine(config, weights, gpu, context=32)
    with pytest.raises(NonFiniteError, match=r"l1\.o|layer 1"):
        list(broken.generate([1, 2, 3], SamplingParams(max_tokens=4, temperature=0.0)))
    assert len(generate(engine(gpu), [1, 2], 3)[0]) == 3


def test_a_second_process_uses_the_same_gpu(gpu: CudaBackend) -> None:
    code = "from tests.gpu.test_device_gpu import *\nprint(generate(engine(CudaBackend(0)), [5, 6, 7], 6)[0])"
    expected = generate(engine(gpu), [5, 6, 7], 6)[0]
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == str(expected), result.stderr


# out = 2 out + thread, by way of shared memory: a launch that did not wait for the one before shows.
DOUBLE = b"""
#include "port.cuh"
struct DoubleArgs { int *out; };
KERNEL void k_double(const DoubleArgs a) {
    DYNAMIC_SHARED(shared);
    int *const given = (int *)shared, *const out = a.out + blockIdx.x * blockDim.x;
    const int i = threadIdx.x, n = blockDim.x;
    given[n - 1 - i] = n - 1 - i;
    __syncthreads();
    wait_for_previous();
    start_next();
    out[i] = 2 * out[i] + given[i];
}
"""


class DoubleArgs(ctypes.Structure):
    _fields_ = [("out", ctypes.c_uint64)]


def nine_times(backend: CudaBackend, launch: Launch) -> None:
    """Three in a row on the backend's stream, on the one beside it, and as a graph."""
    with backend.current():
        prepared = backend.prepare([launch] * 3)
        backend.launch(prepared)
        backend.stream.synchronize()
        backend.launch(prepared, side=True)
        backend.side_stream.synchronize()
        graph = Graph.record(backend.stream, lambda: backend.launch(prepared))
        graph.launch()
        backend.synchronize()


@pytest.mark.parametrize("early", [False, True])
def test_a_launch_waits_for_the_one_before(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "PROGRAMMATIC", frozenset({"k_double"} if early else ()))
    backend = CudaBackend(0, sources=KernelSources({"planted.cu": DOUBLE}, kernel_sources().headers))
    threads, shared = 128, 64 << 10  # more than a block may take without asking
    out = backend.zeros((32, threads), np.int32)
    launch = Launch("k_double", (32, 1, 1), (threads, 1, 1), shared, DoubleArgs(out.ptr))
    nine_times(backend, launch)
    expected = np.tile((2**9 - 1) * np.arange(threads), (32, 1))
    np.testing.assert_array_equal(backend.read(out), expected)
    message = r"refused kernel k_double with grid \(1, 65536, 1\)"
    with backend.current(), pytest.raises(BackendError, match=message):
        backend.launch(backend.prepare([replace(launch, grid=(1, 65536, 1))]))
    backend.close()


# out[block][thread] += 1000 * (block `cluster - 1 - rank` of the cluster) + thread, by way of shared memory.
CLUSTER = b"""
#include "port.cuh"
struct ClusterArgs { int *out; };
KERNEL void k_cluster(const ClusterArgs a) {
    DYNAMIC_SHARED(shared);
    float *const thread = (float *)shared;
    int *const block = (int *)(thread + blockDim.x);
    const int i = threadIdx.x, other = cluster_size() - 1 - cluster_rank();
    cluster_sync();
    wait_for_previous();
    start_next();
    cluster_store(thread + i, other, (float)i);
    cluster_store(block + i, other, (int)(1000u * blockIdx.x));
    cluster_arrive();
    cluster_wait();
    a.out[blockIdx.x * blockDim.x + i] += block[i] + (int)thread[i];
}
"""


class ClusterArgs(ctypes.Structure):
    _fields_ = [("out", ctypes.c_uint64)]


# out[block][thread] += a total, made anew in each turn of what the blocks have sent: each thread a word to
# all blocks, and four to the next one, ordered by nothing but gates.
SENDS = b"""
#include "port.cuh"
struct SendArgs { int *out; int turns, reserved; };
KERNEL void k_sends(const SendArgs a) {
    DYNAMIC_SHARED(shared);
    __shared__ unsigned long long gates[2];
    const int i = threadIdx.x, n = blockDim.x, size = cluster_size(), rank = cluster_rank();
    float4 *const quads = (float4 *)shared;  // float4[2, n]
    int *const words = (int *)(quads + 2 * n);  // i32[2, size, n]
    if (warp_id() == 0)
        for (int gate = 0; gate < 2; gate++) cluster_open(gates + gate);
    cluster_begin();
    wait_for_previous();
    start_next();
    cluster_wait();
    int total = 0;
    for (int turn = 0; turn < a.turns; turn++) {
        const int side = turn % 2, value = total + (int)blockIdx.x + i;
        unsigned long long *const gate = gates + side;
        if (warp_id() == 1) cluster_expect(gate, (4 * size + 16) * n);
        for (int to = 0; to < size; to++) cluster_send(words + (side * size + rank) * n + i, to, value, gate);
        const float4 quad = make_float4((float)(value & 255), (float)rank, (float)turn, (float)i);
        cluster_send(quads + side * n + i, (rank + 1) % size, quad, gate);
        __syncthreads();
        cluster_receive(gate, turn / 2);
        const float4 got = quads[side * n + (i + 1) % n];
        total = (int)(got.x + 2.0f * got.y + 3.0f * got.z + 5.0f * got.w);
        for (int from = 0; from < size; from++)
            total += (from + 1) * words[(side * size + from) * n + (i + 1) % n] & 0xffff;
    }
    a.out[blockIdx.x * n + i] += total;
}
"""


class SendArgs(ctypes.Structure):
    _fields_ = [("out", ctypes.c_uint64), ("turns", ctypes.c_int32), ("reserved", ctypes.c_int32)]


def sent(cluster: int, threads: int, turns: int) -> npt.NDArray[np.int64]:
    """What k_sends adds to out, of 32 blocks."""
    block = np.arange(32).reshape(-1, cluster, 1)
    rank, i = np.arange(cluster)[:, None], np.arange(threads)
    total = np.zeros((32 // cluster, cluster, threads), np.int64)
    for turn in range(turns):
        value = total + block + i
        quad = (value & 255) + 2 * rank + 3 * turn + 5 * i
        words = ((rank + 1) * value & 0xFFFF).sum(1, keepdims=True)
        total = np.roll(np.roll(quad, 1, axis=1), -1, axis=2) + np.roll(words, -1, axis=2)
    return total.reshape(32, threads)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("turns", [1, 2, 9, 1000])
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
def test_blocks_of_a_cluster_send_values(
    cluster: int, turns: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "PROGRAMMATIC", frozenset({"k_sends"} if early else ()))
    backend = CudaBackend(0, sources=KernelSources({"planted.cu": SENDS}, kernel_sources().headers))
    if cluster > backend.tuning.max_cluster:
        backend.close()
        pytest.skip("this GPU has no clusters")
    threads = 128
    out = backend.zeros((32, threads), np.int32)
    args, shared = SendArgs(out.ptr, turns, 0), 2 * (16 + 4 * cluster) * threads
    nine_times(backend, Launch("k_sends", (32, 1, 1), (threads, 1, 1), shared, args, cluster))
    np.testing.assert_array_equal(backend.read(out), 9 * sent(cluster, threads, turns))
    backend.close()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("cluster", [1, 2, 4, 8, 16])
def test_blocks_of_a_cluster_exchange_values(
    cluster: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "PROGRAMMATIC", frozenset({"k_cluster"} if early else ()))
    backend = CudaBackend(0, sources=KernelSources({"planted.cu": CLUSTER}, kernel_sources().headers))
    most = backend.tuning.max_cluster
    assert most == (8 if backend.device.capability >= (9, 0) else 1)
    threads, shared = 128, 64 << 10  # more than a block may take without asking
    out = backend.zeros((32, threads), np.int32)
    launch = Launch("k_cluster", (32, 1, 1), (threads, 1, 1), shared, ClusterArgs(out.ptr), cluster)
    if cluster > most:
        with pytest.raises(BackendError, match=f"wants clusters of {cluster} .* clusters of {most} at most"):
            backend.prepare([launch])
        backend.close()
        return
    nine_times(backend, launch)
    block = np.arange(32).reshape(-1, cluster)[:, ::-1].reshape(32, 1)
    np.testing.assert_array_equal(backend.read(out), 9 * (1000 * block + np.arange(threads)))
    if cluster > 1:
        with backend.current(), pytest.raises(BackendError, match=f"refused .* clusters of {cluster}"):
            backend.launch(backend.prepare([replace(launch, grid=(cluster + 1, 1, 1))]))
    backend.close()


def test_a_tuning_gets_no_larger_clusters_than_the_gpu_has(gpu: CudaBackend) -> None:
    for wanted in (1, 2, 100):
        backend = CudaBackend(0, tuning=replace(gpu.tuning, max_cluster=wanted))
        assert backend.tuning.max_cluster == min(wanted, gpu.tuning.max_cluster)
        backend.close()
