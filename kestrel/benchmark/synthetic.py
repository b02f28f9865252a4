"""Seeded synthetic contents: weights of a shape and KV rows, the same bytes on every device.

An array is made of a stream of pseudo-random bytes, each looked up in a table of 256 values. The bytes are a
hash of their place in the stream, so any part can be made alone, in any order, by a CPU or by a GPU
(``kestrel.benchmark.cuda``). Weights made so have the sizes and statistics of a model's, and no meaning.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kestrel.config import ModelConfig
from kestrel.errors import KestrelError
from kestrel.ops import WType
from kestrel.weights import QuantTensor, TensorSpec, Weights, stored_wtype, tensor_specs

VERSION = 1  # of the bytes that a seed and a name give

# The mixing function is the finaliser of SplitMix64 over a counter. kestrel.benchmark.cuda repeats it.
COUNTER, MIX1, MIX2 = 0xD1342543DE82EF95, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_CHUNK = 1 << 16  # words made at once: they stay in the cache

_Q4_RMS = math.sqrt(float(np.mean((np.arange(16) - 8.0) ** 2)))
_Q8_RMS = math.sqrt(float(np.mean(np.arange(-127.0, 128.0) ** 2)))
_SPREAD_RMS = math.sqrt(1 + 0.5**2 / 12)  # of uniform 0.75 .. 1.25


@dataclass(frozen=True)
class Recipe:
    """Element ``e`` of an array is ``table[byte e of the stream]``."""

    seed: int  # u64
    table: npt.NDArray[Any]  # [256]

    @staticmethod
    def named(seed: int, name: str, table: npt.NDArray[Any]) -> Recipe:
        """A stream of its own for each name."""
        digest = hashlib.sha256(f"{VERSION}:{seed}:{name}".encode()).digest()
        return Recipe(int.from_bytes(digest[:8], "little"), table)


class Pending(np.ndarray[Any, np.dtype[Any]]):
    """An array of the right shape and dtype that takes no memory; ``recipe`` says what it should hold."""

    recipe: Recipe

    @staticmethod
    def of(shape: tuple[int, ...], recipe: Recipe) -> Pending:
        array = np.broadcast_to(np.zeros((), recipe.table.dtype), shape).view(Pending)
        array.recipe = recipe
        return array


def words(seed: int, first: int, count: int) -> npt.NDArray[np.uint64]:
    """u64[count]: the words ``first`` and on of a stream; eight bytes each, the lowest first."""
    z = np.arange(first + 1, first + 1 + count, dtype=np.uint64)
    z *= np.uint64(COUNTER)
    z += np.uint64(seed)
    z ^= z >> np.uint64(30)
    z *= np.uint64(MIX1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(MIX2)
    z ^= z >> np.uint64(31)
    return z


def fill(out: npt.NDArray[Any], recipe: Recipe, first: int = 0, threads: int | None = None) -> None:
    """Write elements ``first`` and on of the recipe's array into ``out`` (contiguous)."""
    flat = out.reshape(-1)
    assert flat.base is not None or flat is out, "out must be contiguous"
    identity = recipe.table.dtype == np.uint8 and bool(np.array_equal(recipe.table, np.arange(256)))

    def part(begin: int) -> None:
        target = flat[begin : begin + 8 * _CHUNK]
        start, skip = divmod(first + begin, 8)
        made = words(recipe.seed, start, -(-(skip + target.size) // 8)).view(np.uint8)
        indices = made[skip : skip + target.size]
        if identity:
            target[...] = indices
        else:
            np.take(recipe.table, indices, out=target, mode="clip")

    begins = range(0, flat.size, 8 * _CHUNK)
    if len(begins) < 4:
        for begin in begins:
            part(begin)
        return
    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
        list(pool.map(part, begins))


# -- tables ------------------------------------------------------------------------------------------------


def _normal(std: float) -> npt.NDArray[np.float32]:
    """256 equally likely values of a normal distribution."""
    normal = NormalDist(0.0, std)
    return np.array([normal.inv_cdf((i + 0.5) / 256) for i in range(256)], np.float32)


def _uniform(low: float, high: float, count: int = 256) -> npt.NDArray[np.float64]:
    return low + (high - low) * (np.arange(count) + 0.5) / count


def _scales(size: float) -> npt.NDArray[np.uint16]:
    """f16 bits of either sign, so that codes of any mean give values of mean 0."""
    positive = size * _uniform(0.75, 1.25, 128)
    return np.concatenate([positive, -positive]).astype(np.float16).view(np.uint16)


_BITS = np.arange(256, dtype=np.uint8)
_INT8 = np.maximum(np.arange(256) - 128, -127).astype(np.int8)


# -- weights -----------------------------------------------------------------------------------------------


def pending_weights(config: ModelConfig, wtype: WType, head_wtype: WType, seed: int = 0) -> Weights:
    """The weights of a synthetic model as recipes; a device makes them when they are uploaded.

    Every matrix keeps the size of its input, so that activations stay near 1; the router and the attention
    scores spread by about 1.5 and the logits by 2: routing and softmax are neither flat nor one-hot.
    """
    weights: Weights = {}
    for spec in tensor_specs(config):
        stored = stored_wtype(spec, wtype, head_wtype)
        gain = _gain(spec, config)

        def made(
            part: str, shape: tuple[int, ...], table: npt.NDArray[Any], name: str = spec.name
        ) -> Pending:
            return Pending.of(shape, Recipe.named(seed, f"{name}.{part}", table))

        if stored is None:
            weights[spec.name] = made("norm", spec.shape, np.float32(gain) * (1 + _normal(0.1)))
            continue
        std = gain / math.sqrt(spec.k)
        scale = None
        if stored == WType.bf16:
            table = _normal(std).astype(ml_dtypes.bfloat16).view(np.uint16)
            codes = made("codes", spec.shape, table)
        else:
            groups = (*spec.shape[:-1], spec.k // 32)
            q4 = stored == WType.q4local
            codes = made("codes", (*groups, 16 if q4 else 32), _BITS if q4 else _INT8)
            scale = made("scale", groups, _scales(std / (_Q4_RMS if q4 else _Q8_RMS) / _SPREAD_RMS))
        experts = spec.shape[0] if len(spec.shape) == 3 else None
        weights[spec.name] = QuantTensor(stored, codes, scale, experts, spec.shape[-2], spec.k)
    return weights


def _gain(spec: TensorSpec, config: ModelConfig) -> float:
    """Deviation of a matrix's output for an input of size 1, or the mean of a norm."""
    last = spec.name.rpartition(".")[2]
    if spec.name == "embed" and not config.tie_word_embeddings:
        return math.sqrt(config.hidden_size)  # rows of size 1
    if spec.role == "table":
        return 2.0
    return 1.5 if last in ("router", "q", "q_norm") else 1.0


def map_pending(weights: Weights, function: Callable[[str, Pending], npt.NDArray[Any]]) -> Weights:
    """The same weights with every recipe replaced by what ``function(name, recipe)`` makes of it."""
    result: Weights = {}
    for name, tensor in weights.items():
        if not isinstance(tensor, QuantTensor):
            result[name] = function(name, tensor) if isinstance(tensor, Pending) else tensor
            continue
        codes, scale = tensor.codes, tensor.scale
        if isinstance(codes, Pending):
            codes = function(f"{name}.codes", codes)
        if isinstance(scale, Pending):
            scale = function(f"{name}.scale", scale)
        result[name] = QuantTensor(tensor.wtype, codes, scale, tensor.experts, tensor.n, tensor.k)
    return result


def host_weights(weights: Weights, file: Path | None = None, threads: int | None = None) -> Weights:
    """Make all recipes in host memory: shared pages of the size that a mapped model file has, or ``file``.

    Raises KestrelError with the numbers when the memory does not suffice.
    """
    size = sum(tensor.nbytes + 192 for tensor in weights.values())  # each array begins at a multiple of 64
    if file is None:
        available = _available_bytes()
        if available is not None and size > available:
            raise KestrelError(
                f"synthetic weights of {size / 1e9:.1f} GB do not fit: {available / 1e9:.1f} GB of memory "
                "are available; take a smaller --shape, or end other programs"
            )
        memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    else:
        file.write_bytes(b"")
        os.truncate(file, size)
        memory = np.memmap(file, np.uint8, "r+").view(np.ndarray)
    places = _places(memory)

    def make(name: str, array: Pending) -> npt.NDArray[Any]:
        target = places(array)
        fill(target, array.recipe, threads=threads)
        return target

    return map_pending(weights, make)


def _places(memory: npt.NDArray[np.uint8]) -> Callable[[Pending], npt.NDArray[Any]]:
    end = 0

    def place(array: Pending) -> npt.NDArray[Any]:
        nonlocal end
        begin = -(-end // 64) * 64
        end = begin + array.nbytes
        return memory[begin:end].view(array.dtype).reshape(array.shape)

    return place


def _available_bytes() -> int | None:
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


# -- KV rows and tokens ------------------------------------------------------------------------------------


def kv_recipes(config: ModelConfig, layer: int, seed: int = 0) -> Iterator[tuple[str, int, Recipe]]:
    """(array of LayerKV, elements of a position, recipe): heads of size 0.5 to 1.5, codes -127 .. 127."""
    scales = (_uniform(0.5, 1.5) / _Q8_RMS).astype(np.float32)
    for name in ("kq", "vq"):
        yield name, config.kv_size, Recipe.named(seed, f"kv.{layer}.{name}", _INT8)
    for name in ("ks", "vs"):
        yield name, config.num_kv_heads, Recipe.named(seed, f"kv.{layer}.{name}", scales)


def tokens(config: ModelConfig, count: int, seed: int = 0, name: str = "prompt") -> npt.NDArray[np.int32]:
    """i32[count]: seeded token ids."""
    recipe = Recipe.named(seed, f"tokens.{name}", _BITS)
    return (words(recipe.seed, 0, count) % np.uint64(config.vocab_size)).astype(np.int32)
