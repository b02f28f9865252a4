"""Whole models: the dump of the GPU against the CPU's, graph against eager, mixtures, modes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.gpu.context import Context, markdown_table
from kestrel.backends import MODES
from kestrel.config import ModelConfig
from kestrel.cpu import CpuBackend
from kestrel.cuda.device import CudaBackend
from kestrel.engine import Engine
from kestrel.ops import WType
from kestrel.taps import TapLevel
from kestrel.weights import Weights, load_model_folder
from tests.support.dumps import Recorder, difference, generate
from tests.support.models import random_weights, tiny_config

PROMPTS = (1, 255, 256, 257, 1500)
GENERATED = 64


class Loaded(NamedTuple):
    """A model ready to bind to a backend."""

    name: str
    config: ModelConfig
    weights: Weights


def qwen3_0_6b(layers: int = 28) -> Loaded:
    """Random weights in the shape of Qwen3-0.6B: the dense Qwen3 of these checks."""
    config = tiny_config(
        "qwen3",
        hidden=1024,
        layers=layers,
        heads=16,
        kv_heads=8,
        head_dim=128,
        ffn=3072,
        vocab=151936,
        tie=True,
    )
    return Loaded("Qwen3-0.6B shape, random", config, random_weights(config, WType.q4local, WType.q8local))


def load(folder: Path) -> Loaded:
    """A converted model."""
    config, weights = load_model_folder(folder)
    return Loaded(folder.name, config, weights)


def available(context: Context) -> Iterator[Loaded | str]:
    """The models to check; a string says which one is missing."""
    found = sorted(p.parent for p in context.models.glob("*/kestrel.json")) if context.models.is_dir() else []
    for wanted in ("smollm2", "tiny-qwen3-moe"):
        matching = [folder for folder in found if wanted in folder.name.lower()]
        if not matching:
            yield f"no model like {wanted} in {context.models}"
        for folder in matching:
            yield load(folder)
    yield qwen3_0_6b(4 if context.quick else 28)


def prompt(length: int, vocab: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(length).integers(0, vocab, length)]


def cpu_against_gpu(context: Context) -> dict[str, Any]:
    """CPU and GPU dumps of prompts of 1, 255, 256, 257, 1500 tokens and 64 generated: every key equal."""
    gpu, cpu = CudaBackend(0, "l2exact"), CpuBackend()
    failures, rows = [], []
    for model in available(context):
        if isinstance(model, str):
            failures.append(model)
            continue
        engines = [Engine(model.config, model.weights, b, context=1600) for b in (cpu, gpu)]
        for length in PROMPTS[::2] if context.quick else PROMPTS:
            ids = prompt(length, model.config.vocab_size)
            runs, seconds = [], []
            for engine in engines:
                begin = time.perf_counter()
                runs.append(generate(engine, ids, GENERATED))
                seconds.append(round(time.perf_counter() - begin, 2))
            (cpu_tokens, cpu_dump), (gpu_tokens, gpu_dump) = runs
            found = difference(gpu_dump, cpu_dump)
            rows.append([model.name, length, found.total, found.count, cpu_tokens == gpu_tokens, *seconds])
            print("   ", *rows[-1], flush=True)
            if found.count or cpu_tokens != gpu_tokens:
                failures.append(
                    f"{model.name}, prompt {length}: {found}; same text: {cpu_tokens == gpu_tokens}"
                )
        del engines
    gpu.close()
    head = ["model", "prompt", "keys", "differ", "same text", "CPU s", "GPU s"]
    print(markdown_table(head, rows), flush=True)
    keys = sum(row[2] for row in rows)
    return {
        "failures": failures,
        "summary": f"{keys} keys, {sum(row[3] for row in rows)} differ",
        "rows": rows,
    }


def graph_against_eager(context: Context) -> dict[str, Any]:
    """One captured graph across positions 255/256/257 and 1023/1024/1025, against eager launches."""
    model = qwen3_0_6b(4)
    recorded, eager = CudaBackend(0, graph=True), CudaBackend(0, graph=False)
    failures, total = [], 0
    for slots in (1100, 1400):  # another cache, other addresses
        engines = [Engine(model.config, model.weights, b, context=slots) for b in (recorded, eager)]
        for length in (250, 1018):
            ids = prompt(length, model.config.vocab_size)
            (tokens, dump), (expected, reference) = (generate(e, ids, 12) for e in engines)
            found = difference(dump, reference)
            total += found.total
            if found.count or tokens != expected:
                failures.append(f"prompt {length}, {slots} slots: {found}")
        if not engines[0].decode_model.step(1, 1, "standard").program.recorded:
            failures.append("the decode step was not recorded")
    for backend in (recorded, eager):
        backend.close()
    return {"failures": failures, "summary": f"{total} keys compared"}


def mixtures(context: Context) -> dict[str, Any]:
    """Prompt on one backend, decode on the other, both ways: the bits of either alone."""
    model = qwen3_0_6b(4)
    gpu, cpu = CudaBackend(0), CpuBackend()
    ids = prompt(300, model.config.vocab_size)
    expected = generate(Engine(model.config, model.weights, cpu, context=400), ids, 32)
    failures = []
    for name, first, second in (("prompt CPU, decode GPU", cpu, gpu), ("prompt GPU, decode CPU", gpu, cpu)):
        mixed = generate(Engine(model.config, model.weights, first, second, context=400), ids, 32)
        found = difference(mixed[1], expected[1])
        print(f"    {name}: {found}", flush=True)
        if found.count or mixed[0] != expected[0]:
            failures.append(f"{name}: {found}")
    gpu.close()
    return {"failures": failures, "summary": f"2 mixtures, {len(expected[1].keys)} keys each"}


def decode_milliseconds(engine: Engine, depth: int, steps: int, taps: TapLevel = "off") -> list[float]:
    """Wall milliseconds between greedy tokens from position ``depth`` on, as the engine decodes them."""
    model = engine.decode_model
    step = model.step(1, 1, taps)
    times = []
    warm = 8
    loop = model.greedy_loop(step, 1, depth, steps + warm)
    if loop is not None:
        begin = time.perf_counter()
        for _token, _hashes in loop:
            now = time.perf_counter()
            times.append(1e3 * (now - begin))
            begin = now
        return times[warm:]
    token = np.array([1], np.int32)
    for position in range(depth, depth + steps + 3):
        begin = time.perf_counter()
        model.load_rows(token, np.array([position], np.int32))
        step.program.run()
        token = np.maximum(model.argmax(1), 0)
        times.append(1e3 * (time.perf_counter() - begin))
    return times[3:]


def agreement(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """Tokens until the text differs."""
    same = [a == b for a, b in zip(tokens, expected, strict=True)]
    return same.index(False) if False in same else len(same)


def modes(context: Context) -> dict[str, Any]:
    """Each mode: first key that differs from the CPU, tokens until the text does, ms/token at 1024."""
    chosen = [m for m in available(context) if not isinstance(m, str) and "smollm2" not in m.name.lower()]
    cpu = CpuBackend()
    failures, rows = [], []
    for model in chosen:
        ids = prompt(64, model.config.vocab_size)
        expected, reference = generate(Engine(model.config, model.weights, cpu, context=256), ids, 128)
        for mode in MODES:
            backend = CudaBackend(0, mode)
            engine = Engine(model.config, model.weights, backend, context=1200)
            tokens, dump = generate(engine, ids, 128)
            found = first_difference(dump, reference)
            times = decode_milliseconds(engine, 1024, 60)
            rows.append(
                [model.name, mode, found or "none", agreement(tokens, expected), f"{np.median(times):.3f}"]
            )
            print("   ", *rows[-1], flush=True)
            if mode == "l2exact" and (found or tokens != expected):
                failures.append(f"{model.name}: l2exact differs from the CPU at {found}")
            backend.close()
    head = ["model", "mode", "first different key", "equal tokens of 128", "ms/token at 1024"]
    print(markdown_table(head, rows), flush=True)
    return {"failures": failures, "summary": f"{len(rows)} rows", "head": head, "rows": rows}


def first_difference(a: Recorder, b: Recorder) -> str | None:
    return difference(a, b).first
