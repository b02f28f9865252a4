"""Each op on the GPU against the reference at the shapes of supported models, at many row counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.gpu.context import Context
from kestrel import _native
from kestrel.cpu import CpuBackend
from kestrel.cuda.device import CudaBackend
from kestrel.engine import Engine
from kestrel.launch import Tuning
from kestrel.ops import WType
from tests.support import op_cases as make
from tests.support.bits import assert_bits_equal
from tests.support.dumps import difference, generate
from tests.support.models import AWKWARD, random_weights, tiny_config
from tests.support.op_cases import BATCH_ROWS, LONG_ROWS, Case, run_case

Q4, Q8, BF16 = WType.q4local, WType.q8local, WType.bf16


@dataclass(frozen=True)
class Shape:
    """A supported model, as far as the ops see it."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    experts: int = 0
    top_k: int = 0

    @property
    def qkv(self) -> list[int]:
        return [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]


SHAPES = (
    Shape("SmolLM2-135M", 576, 9, 3, 64, 1536, 49152),
    Shape("tiny-qwen3-moe", 384, 8, 2, 64, 128, 8192, 16, 4),
    Shape("Qwen3-0.6B", 1024, 16, 8, 128, 3072, 151936),
    Shape("Qwen3-4B", 2560, 32, 8, 128, 9728, 151936),
    Shape("Qwen3-30B-A3B", 2048, 32, 4, 128, 768, 151936, 128, 8),
    Shape("Llama-3.2-1B", 2048, 32, 8, 64, 8192, 128256),
)


def model_cases(shape: Shape) -> Iterator[Case]:
    """The products, attention, router and head of one model, a few rows each."""
    s = shape
    for M in (1, 2, 7, 8, 33):
        yield make.matmul(s.qkv, s.hidden, M, [Q4] * 3)
        yield make.matmul([s.hidden], s.heads * s.head_dim, M, [Q4])
    yield make.matmul(s.qkv, s.hidden, 3, [Q8] * 3)
    yield make.matmul([s.hidden], s.heads * s.head_dim, 3, [BF16])
    for M in (1, 5):
        yield make.matmul([s.vocab], s.hidden, M, [Q8])
        yield make.argmax(M, s.vocab)
    yield make.embed(s.vocab, s.hidden, 17, Q8)
    if s.experts:
        for M in (1, 8, 33):
            yield make.matmul([s.experts], s.hidden, M, [BF16])
            yield make.router_topk(M, s.experts, s.top_k, True)
            yield make.router_topk(M, s.experts, s.top_k, False, ties=True)
            yield make.moe_matmul([s.ffn, s.ffn], s.hidden, M, s.experts, s.top_k, Q4)
            yield make.moe_matmul([s.hidden], s.ffn, M, s.experts, s.top_k, Q4, per_slot=True)
            yield make.moe_combine(M, s.top_k, s.hidden)
    else:
        for M in (1, 8):
            yield make.matmul([s.ffn, s.ffn], s.hidden, M, [Q4, Q4])
            yield make.matmul([s.hidden], s.ffn, M, [Q4])
            yield make.swiglu(M, s.ffn)
    for last in (0, 255, 256, 1500, 4095):
        yield make.attention(s.heads, s.kv_heads, s.head_dim, [last])
    yield make.attention(s.heads, s.kv_heads, s.head_dim, list(range(250, 262)))
    yield make.attention(s.heads, s.kv_heads, s.head_dim, [2000], spread=60.0)


def row_cases(quick: bool) -> Iterator[Case]:
    """Row-wise ops at the row counts that broke batched kernels elsewhere."""
    for T in LONG_ROWS[:: 4 if quick else 1]:
        yield make.rms_norm(2048, T)
        yield make.quantize_a8(2048, T)
        yield make.qk_norm(9, 128, T, pad=128)
        yield make.rope(9, 128, T, pad=128)
        yield make.kv_append(4, 128, T)
        yield make.swiglu(T, 768)
        yield make.add(T * 2048)
        yield make.embed(1000, 576, T, Q4)
        yield make.router_topk(T, 128, 8, True)
        yield make.moe_combine(T, 8, 384)
        yield make.argmax(T, 1024)
        yield make.l2_hash(T, 1024, stride=4096, is_f32=True)
    for M in BATCH_ROWS[:: 3 if quick else 1]:
        yield make.matmul([288, 96, 96], 576, M, [Q4] * 3)
        yield make.matmul([130], 352, M, [Q8])
        yield make.matmul([128], 416, M, [BF16])
        yield make.moe_matmul([96, 96], 352, M, 16, 4, Q4)
        yield make.moe_matmul([352], 96, M, 16, 4, Q4, per_slot=True)
        yield make.attention(8, 2, 64, [(37 * m) % 700 for m in range(M)])


def padding_ignored(gpu: CudaBackend) -> str | None:
    """Case row 5: rows beyond M may hold anything; results of the M rows do not change."""
    case = make.matmul([96], 352, 100, [Q4])
    padded = {
        name: np.concatenate([a, np.full((12, *a.shape[1:]), np.nan if a.dtype.kind == "f" else 77, a.dtype)])
        for name, a in case.inputs.items()
    }
    other = Case(case.op, case.label, padded, case.scalars, case.outputs, weights=case.weights)
    a, b = run_case(case, gpu)["y"], run_case(other, gpu)["y"]
    return None if np.array_equal(a.view(np.uint32), b.view(np.uint32)) else "padding changes matmul"


def isa_levels(context: Context) -> dict[str, Any]:
    """The reference at every ISA level of this CPU, 1 thread and all: bits equal scalar on one thread."""
    levels = _native.isa_available()
    backends = {
        f"{isa}, {threads} threads": CpuBackend(threads, isa)
        for isa in levels
        for threads in sorted({1, _native.default_threads()})
        if (isa, threads) != ("scalar", 1)
    }
    scalar = CpuBackend(1, "scalar")
    failures, count = [], 0
    shapes = [c for s in (SHAPES[0], SHAPES[1]) for c in model_cases(s) if c.scalars.get("M", 1) <= 8]
    for case in [*make.small_cases(), *shapes]:
        expected = run_case(case, scalar)
        for name, backend in backends.items():
            count += 1
            try:
                for member, array in run_case(case, backend).items():
                    assert_bits_equal(array, expected[member], f"{case} {member}", any_nan=case.any_nan)
            except AssertionError as error:
                failures.append(f"{name}: {error}")
    for family, shape in [*AWKWARD.values(), ("llama", {}), ("qwen3", {}), ("qwen3_moe", {})]:
        config = tiny_config(family, **shape)
        weights = random_weights(config, Q4)
        ids = [int(t) for t in np.random.default_rng(3).integers(0, config.vocab_size, 70)]
        expected_dump = generate(Engine(config, weights, scalar, context=96), ids, 5, "extended")[1]
        for name, backend in backends.items():
            count += 1
            found = difference(
                generate(Engine(config, weights, backend, context=96), ids, 5, "extended")[1], expected_dump
            )
            if found.count:
                failures.append(f"{name}: {family} {shape}: {found}")
    return {"failures": failures, "summary": f"{', '.join(levels)}: {count} comparisons", "levels": levels}


GEOMETRIES = (
    Tuning(sms=1, elementwise_threads=32, norm_threads=32, qk_norm_heads=1, a8_warps=1, matmul_warps=1),
    Tuning(sms=17, elementwise_threads=1024, norm_threads=1024, qk_norm_heads=7, a8_warps=8, matmul_warps=8),
    Tuning(
        matmul_row_tile=1, rope_blocks=1, rope_threads=32, kv_warps=1, router_threads=32, argmax_threads=32
    ),
    Tuning(matmul_row_tile=2, attention_heads=1, attention_slots=1, attention_threads=64, hash_threads=32),
    Tuning(
        matmul_row_tile=4,
        attention_heads=3,
        attention_slots=5,
        attention_threads=512,
        hash_long_bytes=1 << 30,
    ),
    Tuning(
        programmatic=0,
        matmul_max_blocks=3,
        attention_slots=32,
        router_threads=1024,
        kv_warps=16,
        hash_threads=128,
    ),
)


def geometries(context: Context) -> dict[str, Any]:
    """Launch parameters varied: no bit moves, in any op."""
    cpu = CpuBackend()
    cases = list(make.small_cases())
    expected = [run_case(case, cpu) for case in cases]
    failures = []
    for number, tuning in enumerate(GEOMETRIES):
        gpu = CudaBackend(0, "l2exact", tuning=tuning)
        for case, arrays in zip(cases, expected, strict=True):
            try:
                actual = run_case(case, gpu)
                for name, array in arrays.items():
                    assert_bits_equal(actual[name], array, f"{case} {name}", any_nan=case.any_nan)
            except Exception as error:
                failures.append(f"geometry {number}: {case}: {error}")
        gpu.close()
    return {"failures": failures, "summary": f"{len(GEOMETRIES)} geometries x {len(cases)} cases"}


def every_op(context: Context) -> dict[str, Any]:
    """Every op at model shapes, awkward shapes and long row counts: GPU bits equal CPU bits."""
    gpu, cpu = CudaBackend(0, "l2exact"), CpuBackend()
    failures, counts = [], dict[str, int]()

    def cases() -> Iterator[Case]:
        for shape in SHAPES[:2] + SHAPES[4:5] if context.quick else SHAPES:
            yield from model_cases(shape)
        yield from row_cases(context.quick)
        yield from make.small_cases()

    for case in cases():
        counts[case.op] = counts.get(case.op, 0) + 1
        try:
            actual, expected = run_case(case, gpu), run_case(case, cpu)
            for name, array in expected.items():
                assert_bits_equal(actual[name], array, f"{case} {name}", any_nan=case.any_nan)
        except Exception as error:
            failures.append(f"{case}: {error}")
            if len(failures) > 50:
                break
    wrong = padding_ignored(gpu)
    if wrong:
        failures.append(wrong)
    gpu.close()
    summary = f"{sum(counts.values())} cases, {len(failures)} differ"
    return {"failures": failures, "summary": summary, "cases": counts}
