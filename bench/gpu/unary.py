"""Functions of one number, and quotients, on the GPU against the CPU; the table of the first source."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.gpu.context import Context, threaded
from bench.gpu.device_code import DeviceCode
from kestrel import ucrt

BLOCK = 1 << 24  # inputs compared at a time
RECIPROCALS = (0x0D800000, 0x5F800000 + 1)  # bits of 2^-100 to 2^64
ROOTS = (0x17800000, 0x7F800000)  # 2^-80 to the largest number
TRIG_LIMIT = int(np.float32(131072.0).view(np.uint32))  # cosf and sinf up to |x| = 131072

Function = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]


def _cpu_bits(function: Function, first: int, count: int, workers: int) -> npt.NDArray[np.uint32]:
    pieces = np.array_split(np.arange(first, first + count, dtype=np.int64).astype(np.uint32), workers)
    return np.concatenate(threaded(lambda p: function(p.view(np.float32)).view(np.uint32), pieces, workers))


def _inverse(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.float32(1) / x


def all_inputs(context: Context) -> dict[str, Any]:
    """expf over all 2^32 inputs, cosf and sinf over |x| <= 131072: GPU bits equal CPU bits."""
    whole = [(0, 1 << 32)]
    trig = [(0, TRIG_LIMIT + 1), (1 << 31, (1 << 31) + TRIG_LIMIT + 1), (0x7F7FFFF0, 0x7F800010)]
    return _compared(
        context,
        {
            0: ("expf_ucrt", ucrt.expf, whole),
            1: ("cosf_ucrt", ucrt.cosf, trig),
            2: ("sinf_ucrt", ucrt.sinf, trig),
            3: ("cos_or_sin_ucrt, cosine", ucrt.cosf, trig),
            4: ("cos_or_sin_ucrt, sine", ucrt.sinf, trig),
        },
    )


def _silu(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x / (np.float32(1) + ucrt.expf(-x)), np.float32)


def quotients(context: Context) -> dict[str, Any]:
    """Quotients and roots without branches: GPU bits equal those of the CPU's divisions and roots.

    ``reciprocal`` and ``root`` of all numbers that they are for, ``silu_form`` of all numbers, and many pairs
    of numbers for the quotient of an attention result.
    """
    found = _compared(
        context,
        {
            5: ("reciprocal", _inverse, [RECIPROCALS]),
            6: ("root", np.sqrt, [ROOTS]),
            7: ("silu_form", _silu, [(0, 1 << 32)]),
        },
    )
    code = DeviceCode("sweep.cu")
    rng = np.random.default_rng(20261201)
    for name, make in {"any": _any_pairs, "nearly halfway": _halfway_pairs}.items():
        counts = code.cupy.array([0, 0xFFFFFFFF, 0], code.cupy.uint32)
        rounds = 4 if context.quick else 32
        for _ in range(rounds):
            a, b = make(rng, BLOCK)
            with np.errstate(all="ignore"):
                expected = (a / b).view(np.uint32)
            sent = [code.cupy.asarray(v) for v in (a, b, expected)]
            code.launch("k_sweep_quotients", *sent[:2], np.uint32(BLOCK), sent[2], counts)
        different, lowest, others = (int(v) for v in counts.get())
        checked = {"inputs": rounds * BLOCK - others, "different": different, "left to a division": others}
        found["functions"][f"quotient, {name}"] = checked
        line = f"quotient, {name}: {different} of {checked['inputs']} differ"
        print(f"   {line}", flush=True)
        found["summary"] += f", {line}"
        if different:
            found["failures"].append(f"{line}, the first of its round {lowest}")
        if checked["inputs"] < rounds * BLOCK // 4:
            found["failures"].append(f"quotient, {name}: {others} of {rounds * BLOCK} pairs were left out")
    return found


def _any_pairs(rng: np.random.Generator, n: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Any bits over 1 to 2^64, by their bits: infinities, NaN, zeros and subnormal numbers among them."""
    a = rng.integers(0, 1 << 32, n, dtype=np.uint32)
    a[: n // 64] &= 0x80000000
    b = rng.integers(0x3F800000, 0x5F800001, n, dtype=np.uint32)
    b[: n // 16] = 0x3F800000
    return a.view(np.float32), b.view(np.float32)


def _halfway_pairs(
    rng: np.random.Generator, n: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Numbers whose quotient lies as near as can be to the middle between two floats."""
    b = rng.integers(0x3F800000, 0x49800000, n, dtype=np.uint32).view(np.float32)
    middle = 1 + (2 * rng.integers(0, 1 << 23, n) + 1) / 2.0**24
    return (middle * b).astype(np.float32), b


def _compared(
    context: Context, plan: Mapping[int, tuple[str, Function, list[tuple[int, int]]]]
) -> dict[str, Any]:
    """Functions by their number in ``sweep.cu``, each over ranges of bits."""
    code = DeviceCode("sweep.cu")
    cupy, workers = code.cupy, len(os.sched_getaffinity(0))
    failures, checked = [], {}
    for which, (name, function, ranges) in plan.items():
        counts = cupy.array([0, 0xFFFFFFFF], cupy.uint32)
        total = 0
        for begin, end in ranges:
            step = BLOCK * 16 if context.quick else BLOCK
            for first in range(begin, end, step):
                n = min(BLOCK, end - first)
                expected = cupy.asarray(_cpu_bits(function, first, n, workers))
                code.launch("k_sweep", np.int32(which), np.uint32(first), np.uint32(n), expected, counts)
                total += n
        different, lowest = (int(v) for v in counts.get())
        checked[name] = {"inputs": total, "different": different}
        print(f"   {name}: {total} inputs, {different} differ", flush=True)
        if different:
            failures.append(f"{name}: {different} of {total} inputs differ, lowest bits {lowest:#010x}")
    summary = ", ".join(f"{n}: {c['different']} of {c['inputs']} differ" for n, c in checked.items())
    return {"failures": failures, "summary": summary, "functions": checked}


def seed_table(context: Context) -> dict[str, Any]:
    """How often CUDA's own functions differ, on 400,002 samples of [-100, 0]."""
    code = DeviceCode("sweep.cu")
    rng = np.random.default_rng(20250101)
    n = 400_002
    x = (-100.0 * rng.random(n)).astype(np.float32)
    x[x == 0] = -1.0
    y = code.cupy.empty((5, n), code.cupy.float32)
    code.launch("k_seed_table", code.cupy.asarray(x), np.int32(n), y)
    own, double, ours, rsqrt, root = y.get().view(np.uint32)
    table = {
        "samples": n,
        "CUDA expf": int((own != ours).sum()),
        "(float)exp((double)x)": int((double != ours).sum()),
        "rsqrtf against 1/sqrtf": int((rsqrt != root).sum()),
        "expf_ucrt against the CPU": int((ours != ucrt.expf(x).view(np.uint32)).sum()),
    }
    failures = []
    bounds = {
        "CUDA expf": (0.2, 0.4),
        "(float)exp((double)x)": (1e-5, 2e-4),
        "rsqrtf against 1/sqrtf": (0.2, 0.5),
    }
    for name, (low, high) in bounds.items():
        share = table[name] / n
        print(f"   {name}: {table[name]} differ, {100 * share:.4f} %", flush=True)
        if not low < share < high:
            failures.append(f"{name}: {100 * share:.4f} % is not what was published")
    if table["expf_ucrt against the CPU"]:
        failures.append("expf_ucrt differs from the CPU")
    summary = ", ".join(f"{name} {100 * table[name] / n:.4f} %" for name in bounds)
    return {"failures": failures, "summary": summary, "table": table}
