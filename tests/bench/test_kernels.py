"""What the GPU benches compute without a GPU: bytes of every launch, tables, timelines."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench import kernels, profile_decode
from bench.kernels import Row, launch_bytes, table
from bench.profile_decode import Span, chrome_trace, summary
from kestrel.benchmark.shapes import SHAPES, kv_bytes_per_token, weight_bytes_per_token
from kestrel.benchmark.synthetic import pending_weights
from kestrel.config import ModelConfig
from kestrel.launch import Plan, launches, plan, taps_of
from kestrel.model import Model
from kestrel.ops import WType
from kestrel.weights import Weights
from tests.support.unmade import Unmade


def step(
    config: ModelConfig, weights: Weights, taps: Any = "off", position: int = 0
) -> tuple[list[Any], Plan]:
    model = Model(config, weights, Unmade(), slots=64, max_rows=1)
    ops = model.step(1, 1, taps).ops
    return ops, plan(ops, position=position)


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen3-0.6b", "qwen3-30b-a3b"])
@pytest.mark.parametrize(("joined", "depth"), [(True, 63), (True, 700), (True, 5000), (False, 63)])
def test_the_launches_of_a_step_read_what_a_token_reads(name: str, joined: bool, depth: int) -> None:
    """The sum over the step's launches against the count from the model's shape."""
    config = replace(SHAPES[name], num_layers=3)
    weights = pending_weights(config, WType.q4local, WType.q8local)
    ops, planned = step(config, weights, position=depth)
    found = planned.main if joined else [launch for op in ops for launch in launches(op)]
    total = sum(launch_bytes(launch, depth) for launch in found)
    expected = weight_bytes_per_token(config, weights) + kv_bytes_per_token(config, depth, 1)
    expected += 4 * config.vocab_size  # argmax
    head_norms = 2 * 4 * config.head_dim * config.num_layers if config.qk_norm else 0
    row = WType.q8local.bytes_per_row(config.hidden_size)
    assert total == expected - head_norms + row


def test_hashes_count_what_they_read(small_config: ModelConfig, small_weights: Weights) -> None:
    ops, planned = step(small_config, small_weights, "standard")
    hashes = [op for op in ops if op.name == "l2_hash"]
    found = [launch for launch in planned.main if launch.kernel.startswith("k_l2_hash")]
    assert sum(launch_bytes(launch, 0) for launch in found) == sum(op.args.bytes for op in hashes)
    assert sum(len(taps_of(launch)) for launch in found) == len(hashes) == 24


def test_the_table_begins_with_what_costs_most() -> None:
    common: dict[str, Any] = {
        "mode": "fast",
        "depth": 0,
        "grid": (4, 1, 1),
        "threads": 128,
        "gb_per_second": 100.0,
        "share_of_copy": 0.5,
        "registers": 32,
        "local_bytes": 0,
        "shared_bytes": 0,
        "blocks_per_sm": 8,
        "occupancy": 0.5,
    }
    rows = [
        Row(kernel="k_small", launches=1, us=5.0, bytes=1000, **common),
        Row(kernel="k_many", launches=48, us=1.0, bytes=100000, **common),
    ]
    lines = table(rows).splitlines()
    assert "k_many" in lines[2]
    assert "| 100.0 | 100 | 50 % | 32 |" in lines[2]
    assert lines[2].endswith("| 48.0 |")


SPANS = [Span("k_a", (1, 1, 1), 2.0, 4000), Span("k_b", (9, 1, 1), 6.0, 0), Span("k_a", (1, 1, 1), 4.0, 8000)]


def test_the_profile_adds_up() -> None:
    rows = summary(SPANS)
    assert [row[0] for row in rows] == ["k_a", "k_b"] or [row[0] for row in rows] == ["k_b", "k_a"]
    by_name = {row[0]: row for row in rows}
    assert by_name["k_a"][1:] == ["2", "3.00", "2.00 .. 4.00", "6.0", "50.0 %", "2"]


def test_the_timeline_is_a_chrome_trace() -> None:
    trace = json.loads(json.dumps(chrome_trace(SPANS, "step")))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(s["name"], s["ts"], s["dur"]) for s in spans] == [
        ("k_a", 0.0, 2.0),
        ("k_b", 2.0, 6.0),
        ("k_a", 8.0, 4.0),
    ]
    assert spans[0]["args"]["grid"] == [1, 1, 1]


class FakeEvent:
    clock = 0.0

    def record(self, stream: Any) -> None:
        FakeEvent.clock += 0.001
        self.at = FakeEvent.clock


def test_each_launch_lies_between_its_own_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of launches, events and copies, on a stand-in for CuPy."""
    log: list[str] = []

    class Runtime:
        @staticmethod
        def memcpyAsync(*_: Any) -> None:
            log.append("copy")

    class Cuda:
        Event = FakeEvent
        runtime = Runtime

        @staticmethod
        def get_elapsed_time(a: FakeEvent, b: FakeEvent) -> float:
            return b.at - a.at

    class Backend:
        _cupy = type("Cupy", (), {"cuda": Cuda})
        stream = type("Stream", (), {"synchronize": lambda self: log.append("wait"), "ptr": 0})()

        def zeros(self, *_: Any) -> Any:
            return type("Buffer", (), {"ptr": 0})

        def current(self) -> Any:
            from contextlib import nullcontext

            return nullcontext()

        def launch(self, items: Any) -> None:
            FakeEvent.clock += items[0]
            log.append(str(items[0]))

    found = profile_decode.time_launches(Backend(), [0.5, 0.25], steps=3)
    np.testing.assert_allclose(found, np.tile([501.0, 251.0], (3, 1)))
    tail = "".join(log).rsplit("copy", 1)[1]
    assert tail == "0.50.25wait"


@pytest.mark.parametrize("module", [kernels, profile_decode])
def test_wrong_usage_and_a_missing_gpu_are_said(module: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        module.main(["--mode", "exact"])
    assert "unknown mode 'exact'" in capsys.readouterr().err
    pytest.importorskip("cuda.bindings", reason="the message about CuPy comes after cuda-bindings")
    if module.main(["--shape", "smollm2-135m"]) == 1:
        assert "error: " in capsys.readouterr().err
