"""The experiment at full size: a model of the shape of Qwen3-30B-A3B with seeded random weights.

The weights are made on the device and copied to the host for the CPU side, so both hold the same bytes. They
are random, not a trained model: figures of speed and of equal bits mean something, the text does not.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.gpu.context import Context, markdown_table
from bench.gpu.device_code import DeviceCode
from bench.gpu.models import decode_milliseconds, prompt
from bench.gpu.profile import kernel_table
from kestrel import _native
from kestrel.benchmark.shapes import SHAPES, weight_bytes_per_token
from kestrel.config import ModelConfig
from kestrel.cpu import CpuBackend
from kestrel.cuda.device import CudaBackend
from kestrel.cuda.memory import CudaBuffer
from kestrel.cuda.sources import KernelSources
from kestrel.engine import Engine
from kestrel.launch import Tuning
from kestrel.ops import WType
from kestrel.weights import QuantTensor, Weights
from tests.support.dumps import difference, generate
from tests.support.models import random_tensor

PROMPT, DUMPED, GENERATED = 32, 4, 64
DEPTHS = (0, 1024, 4096, 16384, 32768)


SHAPE = "qwen3-30b-a3b"


def synthetic_config(layers: int | None = None, shape: str = SHAPE) -> ModelConfig:
    """The exact shape; ``layers`` may be fewer for a quick run."""
    config = SHAPES[shape]
    return config if layers is None else replace(config, num_layers=layers)


class DeviceWeights(CudaBackend):
    """A backend that has some host arrays on the device already, so that binding them copies nothing."""

    def __init__(
        self,
        mode: Any = "l2exact",
        graph: bool = True,
        tuning: Tuning | None = None,
        sources: KernelSources | None = None,
    ) -> None:
        super().__init__(0, mode, graph, tuning=tuning, sources=sources)
        self.present: dict[int, CudaBuffer] = {}

    def upload(self, array: npt.NDArray[Any]) -> CudaBuffer:
        return self.present.get(id(array)) or super().upload(array)


class Maker:
    """Random tensors on the device, with their host copies."""

    def __init__(self, backend: DeviceWeights) -> None:
        self.backend = backend
        self.code = DeviceCode("fill.cu")
        self.seed = 0
        self.rng = np.random.default_rng(7)

    def _made(
        self, shape: tuple[int, ...], dtype: Any, kernel: str, word: int, *more: Any
    ) -> npt.NDArray[Any]:
        buffer = self.backend.empty(shape, dtype)
        self.seed += 1
        count = np.int64(-(-buffer.nbytes // word))
        with self.backend.stream:
            self.code.launch(kernel, np.uint64(buffer.ptr), count, np.uint64(self.seed), *more)
        host = self.backend.read(buffer)
        self.backend.present[id(host)] = buffer
        return host

    def matrix(
        self, n: int, k: int, gain: float = 1.0, wtype: WType = WType.q4local, experts: int | None = None
    ) -> Any:
        """Values of deviation ``gain / sqrt(k)``."""
        if wtype == WType.bf16:
            return random_tensor(self.rng, wtype, n, k, std=gain / np.sqrt(k))
        lead = (n,) if experts is None else (experts, n)
        groups = k // 32
        if wtype == WType.q4local:
            shape, dtype, levels = (*lead, groups, 16), np.uint8, np.arange(16) - 8.0
        else:
            shape, dtype, levels = (*lead, groups, 32), np.int8, np.arange(-128.0, 128.0)
        size = gain / np.sqrt(k) / np.sqrt(np.mean(levels**2)) / np.sqrt(1 + 0.5**2 / 12)
        codes = self._made(shape, dtype, "k_fill_bits", 8)
        scale = self._made((*lead, groups), np.uint16, "k_fill_scales", 2, np.float32(size))
        return QuantTensor(wtype, codes, scale, experts, n, k)

    def norm(self, n: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        return (gain * (1 + 0.1 * self.rng.standard_normal(n))).astype(np.float32)


def make_weights(config: ModelConfig, backend: DeviceWeights) -> Weights:
    """All tensors; the gains keep activations near 1 and the router undecided enough to use many experts."""
    make, c = Maker(backend), config
    w: Weights = {"embed": make.matrix(c.vocab_size, c.hidden_size, np.sqrt(c.hidden_size), WType.q8local)}
    for layer in range(c.num_layers):
        p = f"layers.{layer}."
        w[p + "attn_norm"], w[p + "ffn_norm"] = make.norm(c.hidden_size), make.norm(c.hidden_size)
        if c.qk_norm:
            w[p + "q_norm"], w[p + "k_norm"] = make.norm(c.head_dim, 1.5), make.norm(c.head_dim)
        w[p + "q"] = make.matrix(c.q_size, c.hidden_size, 1.5)
        w[p + "k"], w[p + "v"] = (make.matrix(c.kv_size, c.hidden_size) for _ in range(2))
        w[p + "o"] = make.matrix(c.hidden_size, c.q_size)
        experts, width = None, c.intermediate_size
        if c.moe is not None and c.is_moe_layer(layer):
            experts, width = c.moe.num_experts, c.moe.intermediate_size
            w[p + "router"] = make.matrix(experts, c.hidden_size, 1.5, WType.bf16)
            p += "experts."
        for name in ("gate", "up"):
            w[p + name] = make.matrix(width, c.hidden_size, experts=experts)
        w[p + "down"] = make.matrix(c.hidden_size, width, experts=experts)
    w["norm"] = make.norm(c.hidden_size)
    if not c.tie_word_embeddings:
        w["head"] = make.matrix(c.vocab_size, c.hidden_size, 2.0, WType.q8local)
    return w


def digest(*arrays: npt.NDArray[Any]) -> str:
    """A short hash of the bytes of arrays, to compare runs by."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


def weights_digest(weights: Weights) -> str:
    """Of the first bytes of every tensor."""
    parts = [t.codes.reshape(-1)[:4096] if isinstance(t, QuantTensor) else t for t in weights.values()]
    scales = [
        t.scale.reshape(-1)[:4096]
        for t in weights.values()
        if isinstance(t, QuantTensor) and t.scale is not None
    ]
    return digest(*parts, *scales)


def expert_spread(engine: Engine, start: int, tokens: int) -> dict[str, Any]:
    """Which experts the layers chose for random tokens after the text, and the range of activations."""
    model, config = engine.decode_model, engine.config
    assert config.moe is not None
    step = model.step(1, 1)
    routers = [i for i, op in enumerate(step.ops) if op.name == "router_topk"]
    counts = np.zeros((len(routers), config.moe.num_experts), np.int64)
    top_k = config.moe.top_k
    tokens_run = np.random.default_rng(11).integers(0, config.vocab_size, tokens).astype(np.int32)
    ids_buffer = model.buffer("rids", top_k, np.int32)
    for number in range(tokens):
        model.load_rows(tokens_run[number : number + 1], np.array([start + number], np.int32))
        begin = 0
        for layer, index in enumerate(routers):
            step.program.run(begin, index + 1)
            begin = index + 1
            np.add.at(counts[layer], model.backend.read(ids_buffer, (top_k,)), 1)
        step.program.run(begin, None)
    used = (counts > 0).sum(axis=1)
    share = counts.sum(axis=0) / counts.sum()
    x = model.residual()
    logits = model.logits(1)[0]
    return {
        "tokens": tokens,
        "experts_used_per_layer": [int(used.min()), float(np.median(used)), int(used.max())],
        "largest_share_of_one_expert": float(share.max()),
        "smallest_share_of_one_expert": float(share.min()),
        "residual_rms": float(np.sqrt(np.mean(x**2))),
        "logits_rms": float(np.sqrt(np.mean(logits**2))),
        "logits_max": float(logits.max()),
        "digest": digest(counts, x, logits),
    }


def fill_cache(engine: Engine, backend: DeviceWeights) -> None:
    """Random KV rows at every slot, so that depth can be timed without running all positions before it."""
    code, seed = DeviceCode("fill.cu"), 1000
    with backend.stream:
        for layer in engine.decode_model.kv.layers:
            for codes in (layer.kq, layer.vq):
                seed += 1
                count = np.int64(int(np.prod(codes.shape)) // 8)
                code.launch("k_fill_bits", np.uint64(codes.ptr), count, np.uint64(seed))
            for scales in (layer.ks, layer.vs):
                seed += 1
                count = np.int64(int(np.prod(scales.shape)))
                code.launch("k_fill_f32", np.uint64(scales.ptr), count, np.uint64(seed), np.float32(0.01))
    backend.synchronize()


def depth_table(config: ModelConfig, weights: Weights, present: dict[int, CudaBuffer]) -> list[list[Any]]:
    """Median ms/token at several depths, exact and fast, in one run; the first row names the columns."""
    table: list[list[Any]] = [["depth", "l2exact", "fast", "l2exact / fast"]]
    times: dict[str, list[float]] = {}
    for mode in ("l2exact", "fast"):
        backend = DeviceWeights(mode)
        backend.present = present
        engine = Engine(config, weights, backend, context=DEPTHS[-1] + 128)
        fill_cache(engine, backend)
        times[mode] = [float(np.median(decode_milliseconds(engine, depth, 60))) for depth in DEPTHS]
        backend.present = {}
        del engine
        backend.close()
    for depth, exact, fast in zip(DEPTHS, times["l2exact"], times["fast"], strict=True):
        table.append([depth, f"{exact:.3f}", f"{fast:.3f}", f"{exact / fast:.3f}"])
    return table


def prompt_rate(engine: Engine, length: int) -> float:
    """Prompt tokens a second, the better of two runs."""
    ids = prompt(length, engine.config.vocab_size)
    rates = []
    for _ in range(2):
        begin = time.perf_counter()
        generate(engine, ids, 1, "off")
        rates.append(length / (time.perf_counter() - begin))
    return round(max(rates), 1)


def experiment(context: Context) -> dict[str, Any]:
    """Synthetic Qwen3-30B-A3B: 530 keys a token, all equal; the text equal; the time of both sides."""
    config = synthetic_config(4 if context.quick else None)
    failures: list[str] = []
    begin = time.perf_counter()
    gpu = DeviceWeights()
    weights = make_weights(config, gpu)
    made = time.perf_counter() - begin
    size = sum(t.nbytes for t in weights.values())
    print(f"    {size / 1e9:.2f} GB of weights made in {made:.1f} s: {weights_digest(weights)}", flush=True)
    ids = prompt(PROMPT, config.vocab_size)
    engine = Engine(config, weights, gpu, context=2048)
    reference = Engine(config, weights, CpuBackend(), context=256)
    begin = time.perf_counter()
    tokens, dump = generate(engine, ids, GENERATED)
    gpu_seconds = time.perf_counter() - begin
    print(f"    GPU: {PROMPT}+{GENERATED} tokens with dump in {gpu_seconds:.2f} s", flush=True)
    begin = time.perf_counter()
    expected, cpu_dump = generate(reference, ids, GENERATED)
    cpu_seconds = time.perf_counter() - begin
    print(f"    CPU: the same in {cpu_seconds:.2f} s", flush=True)

    found = difference(dump, cpu_dump)
    positions = PROMPT + GENERATED - 1
    early = [k for k in cpu_dump.keys if int(k[1 : k.index("_")]) < PROMPT + DUMPED - 1]
    wrong_early = sum(dump.keys.get(k) != cpu_dump.keys[k] for k in early)
    keys_a_token = found.total / positions
    if found.count or tokens != expected:
        failures.append(f"{found}; same text: {tokens == expected}")
    if keys_a_token != 11 * config.num_layers + 2:
        failures.append(f"{keys_a_token} keys a token")
    spread = expert_spread(engine, positions, 64)
    again, on_cpu = (expert_spread(e, positions, 64) for e in (engine, reference))
    if spread != again or spread != on_cpu:
        failures.append(f"op by op: {spread['digest']}, again {again['digest']}, CPU {on_cpu['digest']}")
    print(f"    spread: {spread}", flush=True)
    prompt_rates = {n: prompt_rate(engine, n) for n in (128, 512, 1024)}
    print(f"    prompt tok/s: {prompt_rates}", flush=True)
    timings, head = time_modes(config, weights, gpu, engine)
    kernels = kernel_table(engine, 1024)
    print(markdown_table(kernels[0], kernels[1:]), flush=True)
    rows = [[name, *(f"{v:.3f}" for v in values)] for name, values in timings.items()]
    print(markdown_table(head, rows), flush=True)
    depths = depth_table(config, weights, gpu.present)
    print(markdown_table(depths[0], depths[1:]), flush=True)
    cpu_times = decode_milliseconds(reference, 100, 10)
    cpu = host_rates(reference, weights, float(np.median(cpu_times)))
    rate, weights_read, plain = cpu["tokens_per_second"], cpu["weights_gb_s"], cpu["plain_read_gb_s"]
    text = f"{rate:.1f} tok/s, {weights_read:.0f} GB/s of weights, a plain read {plain:.0f} GB/s"
    print(f"    CPU: {text} ({cpu['threads']} threads)", flush=True)
    gpu.close()
    return {
        "failures": failures,
        "summary": f"{found.total} keys, {found.count} differ; same text: {tokens == expected}; "
        f"l2exact graph {timings['l2exact graph'][0]:.3f} ms/token, CPU {np.median(cpu_times):.1f}",
        "weights_bytes": size,
        "weights_digest": weights_digest(weights),
        "tokens_digest": digest(np.array(tokens)),
        "keys_a_token": keys_a_token,
        "keys_first_positions": {"total": len(early), "different": wrong_early},
        "keys": {"total": found.total, "different": found.count, "first": found.first},
        "seconds_with_dump": {"gpu": gpu_seconds, "cpu": cpu_seconds},
        "cpu_ms_per_token": float(np.median(cpu_times)),
        "cpu": cpu,
        "spread": spread,
        "prompt_tokens_per_second": prompt_rates,
        "kernels_at_1024": kernels,
        "ms_per_token_by_depth": depths,
        "timings_ms": {"columns": head[1:], **timings},
    }


def host_rates(reference: Engine, weights: Weights, milliseconds: float) -> dict[str, Any]:
    """The CPU reference at ``milliseconds`` a token beside what its memory gives a plain read."""
    backend: Any = reference.decode_model.backend
    return {
        "threads": backend.threads,
        "tokens_per_second": 1e3 / milliseconds,
        "weights_gb_s": weight_bytes_per_token(reference.config, weights) / milliseconds / 1e6,
        "plain_read_gb_s": _native.read_bandwidth(1 << 30, backend.threads),
    }


def time_modes(
    config: ModelConfig, weights: Weights, gpu: DeviceWeights, exact: Engine
) -> tuple[dict[str, list[float]], list[str]]:
    """Median, 5th and 95th percentile of decode milliseconds at depth 1024."""
    result: dict[str, list[float]] = {}

    def add(name: str, times: list[float]) -> None:
        result[name] = [float(np.percentile(times, p)) for p in (50, 5, 95)]

    add("l2exact graph", decode_milliseconds(exact, 1024, 100))
    add("l2exact graph, full dump", decode_milliseconds(exact, 1024, 100, "standard"))
    for name, mode, graph in (
        ("l2exact eager", "l2exact", False),
        ("bitexact graph", "bitexact", True),
        ("fast graph", "fast", True),
    ):
        other = DeviceWeights(mode, graph)
        other.present = gpu.present
        engine = Engine(config, weights, other, context=2048)
        add(name, decode_milliseconds(engine, 1024, 100))
        other.present = {}
        del engine
        other.close()
    return result, ["at depth 1024", "ms/token", "p5", "p95"]
