"""Records of measurements: one flat JSON object a cell, with llama-bench's keys where they mean the same."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from kestrel.benchmark.matrix import Cell

Record = dict[str, Any]

# What decides the bits of an exact run: records that agree in these must agree in output_hash, on any device.
BITS_KEY = ("contract", "weights", "seed", "fill_version", "n_prompt", "n_gen", "n_depth")
# What times are compared within.
SPEED_KEY = (
    "model_filename",
    "weights",
    "cpu_info",
    "gpu_info",
    "backends",
    "n_threads",
    "isa",
    "mode",
    "graph",
    "taps",
    "n_ubatch",
    "n_prompt",
    "n_gen",
    "n_depth",
    "seed",
    "fill_version",
)


def key_of(record: Mapping[str, Any], fields: Sequence[str]) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in fields)


def summarise(cell: Cell) -> Record:
    """The statistics of one cell.

    ``ms_per_token`` is a repeat's time over its tokens; median, 5th and 95th percentile (linear between order
    statistics) are over the repeats. ``avg_*`` and ``stddev_*`` are llama-bench's: mean, sample deviation.
    """
    ns = [round(1e9 * s) for s in cell.seconds]
    rates = [cell.count / s for s in cell.seconds]
    ms = [1e3 * s / cell.count for s in cell.seconds]
    low, middle, high = (float(np.percentile(ms, p)) for p in (5, 50, 95))
    return {
        "test": cell.label,
        "n_prompt": cell.n_prompt,
        "n_gen": cell.n_gen,
        "n_depth": cell.n_depth,
        "mode": cell.variant.mode,
        "graph": cell.variant.graph,
        "taps": cell.variant.taps,
        "test_time": datetime.fromtimestamp(cell.test_time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "avg_ns": round(statistics.fmean(ns)),
        "stddev_ns": round(_deviation(ns)),
        "avg_ts": statistics.fmean(rates),
        "stddev_ts": _deviation(rates),
        "samples_ns": ns,
        "samples_ts": rates,
        "ms_per_token_median": middle,
        "ms_per_token_p5": low,
        "ms_per_token_p95": high,
        "ts_median": 1e3 / middle,
        "distinct_tokens": len(set(cell.chosen)),
        "output_hash": cell.output_hash,
    }


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def add_traffic(record: Record, bytes_per_token: float | None, bandwidth: float, kind: str) -> None:
    """GB/s of a decode record, and its share of the measured bandwidth (bytes per second)."""
    record["bandwidth_kind"] = kind
    record["bandwidth_gb_per_second"] = bandwidth / 1e9
    rate = None if bytes_per_token is None else bytes_per_token * record["ts_median"]
    record["bytes_per_token"] = bytes_per_token
    record["gb_per_second"] = None if rate is None else rate / 1e9
    record["share_of_bandwidth"] = None if rate is None else rate / bandwidth


def changed_bits(new: Sequence[Record], old: Sequence[Record]) -> list[str]:
    """What differs between records that promise equal bits; one line each."""
    known: dict[tuple[Any, ...], Record] = {}
    for record in old:
        if record.get("bits_promised"):
            known[key_of(record, BITS_KEY)] = record
    found = []
    for record in new:
        before = known.get(key_of(record, BITS_KEY)) if record.get("bits_promised") else None
        if before is not None and before["output_hash"] != record["output_hash"]:
            found.append(
                f"{record['model_filename']} {record['test']} on {record['device']}: output hash "
                f"{record['output_hash']}, before {before['output_hash']} on {before['device']} "
                f"({before['test_time']}, commit {before.get('build_commit')})"
            )
    return found
