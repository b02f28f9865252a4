"""Rows that lie spread in memory: the same bits as side by side, and nothing is written or read between."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("kestrel._simt", reason="the shim is built by `make native`")

from kestrel import _native
from kestrel.backend import Buffer
from kestrel.launch import ROW_SPREAD, Tuning, plan
from kestrel.model import Model
from kestrel.ops import OPS, SPREAD_LINE, WType, spread_width
from kestrel.simt import SimtBackend
from tests.kernels.harness import Case, tensor, values
from tests.support.bits import assert_bits_equal
from tests.support.forward import make_model, run_rows
from tests.support.models import random_weights, tiny_config

BETWEEN = np.float32(-12345.0)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


def places(width: int, spread: int) -> npt.NDArray[np.int64]:
    """Where the elements of a spread row lie."""
    i = np.arange(width)
    return i + i // SPREAD_LINE * spread


def spread_out(row: npt.NDArray[np.float32], spread: int, between: Any = BETWEEN) -> npt.NDArray[np.float32]:
    found = np.full(spread_width(row.size, spread), between, np.float32)
    found[places(row.size, spread)] = row
    return found


# -- one op ------------------------------------------------------------------------------------------------

SPREADS = (4, ROW_SPREAD, 96)


def test_width() -> None:
    assert [spread_width(width, 32) for width in (1, 32, 33, 64)] == [33, 64, 97, 128]
    assert spread_width(1000, 0) == 1000


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("wtype", list(WType))
@pytest.mark.parametrize("k", [32, 352, 1120])
def test_embed(rng: np.random.Generator, wtype: WType, k: int, spread: int) -> None:
    arrays = {"ids": np.array([7], np.int32), "x": np.full(k, BETWEEN, np.float32)}
    weights = [tensor(rng, wtype, 9, k)]
    expected = Case("embed", arrays, weights, M=1).on_cpu()["x"]
    arrays["x"] = np.full(spread_width(k, spread), BETWEEN, np.float32)
    actual = Case("embed", arrays, weights, M=1, spread=spread).on_kernels(seed=k)["x"]
    assert_bits_equal(actual, spread_out(expected, spread), "x")


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("d", [1, 7, 8, 31, 33, 64, 416, 1001, 2048, 5120, 10016])
def test_rms_norm(rng: np.random.Generator, d: int, spread: int) -> None:
    x, numbers = values(rng, d, special=0.02), {"M": 1, "d": d, "eps": 1e-6}
    arrays = {"x": x, "w": values(rng, d), "out": np.full(d, BETWEEN, np.float32)}
    expected = Case("rms_norm", arrays, **numbers).on_cpu()["out"]
    arrays["x"] = spread_out(x, spread, np.nan)
    for threads in (Tuning().norm_threads, 32, 512):
        case = Case("rms_norm", arrays, **numbers, spread=spread)
        actual = case.on_kernels(Tuning(norm_threads=threads), seed=d)
        assert_bits_equal(actual["out"], expected, "out")
        assert_bits_equal(actual["x"], arrays["x"], "x")


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("n", [1, 32, 255, 257, 5000])
@pytest.mark.parametrize("in_place", [False, True])
def test_add(rng: np.random.Generator, n: int, spread: int, in_place: bool) -> None:
    x, y = (values(rng, n, special=0.1, non_finite=0.02) for _ in range(2))
    expected = Case("add", {"x": x, "y": y, "out": x}, n=n).on_cpu()["out"]
    out = np.full(spread_width(n, spread), BETWEEN, np.float32)
    case = Case("add", {"x": spread_out(x, spread), "y": y, "out": out}, n=n, spread=spread)
    if in_place:
        del case.arrays["out"]
        op, memory = case.bind()
        op.args.out = op.args.x
        case.bind = lambda: (op, memory)  # type: ignore[method-assign]
    actual = case.on_kernels(seed=n)["x" if in_place else "out"]
    assert_bits_equal(actual, spread_out(expected, spread), "out", any_nan=True)


@pytest.mark.parametrize("name", ["embed", "rms_norm", "add"])
def test_the_cpu_refuses_them(name: str) -> None:
    args = OPS[name].args()
    _native.Program([(name, bytes(args))], 1, "scalar")
    args.spread = ROW_SPREAD
    with pytest.raises(ValueError, match=rf"op 1 \({name}\): a row of the CPU is not spread"):
        _native.Program([("add", bytes(OPS["add"].args())), (name, bytes(args))], 1, "scalar")


# -- whole steps -------------------------------------------------------------------------------------------

SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"hidden": 96, "ffn": 64}),
    ("qwen3", {"hidden": 256, "ffn": 416}),
    ("qwen3", {"hidden": 1280, "ffn": 512, "heads": 2, "kv_heads": 1, "head_dim": 128}),
    ("qwen3_moe", {"hidden": 512, "experts": 32, "top_k": 8, "moe_ffn": 192}),
    ("qwen3_moe", {"hidden": 160, "experts": 7, "top_k": 3, "moe_ffn": 224}),
    ("qwen3_moe", {"hidden": 160, "experts": 7, "top_k": 3, "moe_ffn": 192}),  # gate and up by any form
    ("qwen3_moe", {"hidden": 256, "experts": 8, "top_k": 4, "moe_ffn": 64, "dense_layers": (0,)}),
]
TUNINGS: list[Tuning] = [
    Tuning(),
    Tuning(sms=3),
    Tuning(down_cluster=1, stage_warps=4, norm_threads=32),
    Tuning(shared_limit=20_000),  # fewer stages
    Tuning(shared_limit=3_000),  # op by op
]


def buffer_of_x(model: Model) -> Buffer:
    (buffer,) = (buffer for name, buffer in model._buffers.items() if name.startswith("x_spread"))
    return buffer


def row_of_x(model: Model) -> npt.NDArray[np.float32]:
    return model.backend.read(buffer_of_x(model)).reshape(-1)


@pytest.mark.parametrize("wtype", list(WType))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps_of_one_row(shape: tuple[str, dict[str, Any]], wtype: WType) -> None:
    config = tiny_config(shape[0], **{"layers": 2, "vocab": 64, **shape[1]})
    weights = random_weights(config, wtype, WType.bf16 if wtype == WType.bf16 else WType.q8local)

    def logits(model: Model, count: int) -> list[bytes]:
        return [run_rows(model, [at + 1], [at]).logits.tobytes() for at in range(count)]

    expected = logits(make_model(config, weights, slots=8, max_rows=1), 3)
    for seed, tuning in enumerate(TUNINGS):
        model = make_model(
            config, weights, backend=SimtBackend(tuning=tuning, seed=seed), slots=8, max_rows=1
        )
        step = model.step(1, 1)
        rows = [op.args.spread for op in step.ops if op.name in ("embed", "rms_norm", "add")]
        assert set(rows) == {ROW_SPREAD}
        assert row_of_x(model).size == spread_width(config.hidden_size, ROW_SPREAD)
        model.backend.write(buffer_of_x(model), np.full(buffer_of_x(model).shape, np.nan, np.float32))
        count = 1 if seed else 3
        assert logits(model, count) == expected[:count], tuning
        x = row_of_x(model)
        between = np.ones(x.size, bool)
        between[places(config.hidden_size, ROW_SPREAD)] = False
        assert np.isnan(x[between]).all(), "between nothing is written"
        assert not np.isnan(x[~between]).any()


@pytest.mark.parametrize(("rows", "taps"), [(1, "standard"), (1, "extended"), (2, "off")])
def test_rows_of_a_dump_and_of_several_are_not_spread(rows: int, taps: Any) -> None:
    config = tiny_config("qwen3_moe")
    model = make_model(config, backend=SimtBackend(), slots=8)
    ops = model.step(rows, rows, taps).ops
    assert not any(op.args.spread for op in ops if op.name in ("embed", "rms_norm", "add"))
    assert not any(name.startswith("x_spread") for name in model._buffers)


def test_steps_of_other_rows_between() -> None:
    """A prompt's rows, a dump's and a spread one, in turns."""
    config = tiny_config("qwen3_moe")
    weights = random_weights(config, WType.q4local)
    found = []
    for backend in (None, SimtBackend(seed=1)):
        model = make_model(config, weights, backend=backend, slots=16)
        runs = [
            run_rows(model, np.arange(begin + 1, begin + 1 + rows), np.arange(begin, begin + rows), taps=taps)
            for begin, rows, taps in [
                (0, 3, "off"),
                (3, 1, "off"),
                (4, 1, "extended"),
                (5, 1, "off"),
                (6, 2, "off"),
            ]
        ]
        found.append([(run.logits.tobytes(), run.keys) for run in runs])
    assert found[0] == found[1]


@pytest.mark.parametrize("taps", ["off", "extended"])
def test_h_of_experts_lies_spread_in_the_place_of_gate_and_up(taps: Any) -> None:
    """Where k_moe_gate_up writes it; another kernel leaves it side by side, for the same k_moe_down."""
    for hidden, kernel in ((256, "k_moe_gate_up"), (160, "k_moe_gate_up_any")):
        shape = {"layers": 1, "vocab": 64, "hidden": hidden, "experts": 8, "top_k": 3, "moe_ffn": 64}
        config = tiny_config("qwen3_moe", **shape)
        model = make_model(config, backend=SimtBackend(), slots=8, max_rows=1)
        ops = model.step(1, 1, taps).ops
        (swiglu,) = (op.args for op in ops if op.name == "swiglu")
        by_name: dict[str, Any] = {launch.kernel: launch.args for launch in plan(ops).main}
        up, down = by_name[kernel], by_name["k_moe_down"]
        spread = kernel == "k_moe_gate_up"
        assert up.swiglu.h == down.mm.x == (swiglu.gu if spread else swiglu.h)
        assert down.spread == (32 if spread else 0)
        buffers = {buffer.ptr: buffer for buffer in model._buffers.values()}
        model.backend.write(buffers[swiglu.gu], np.full(buffers[swiglu.gu].shape, np.nan, np.float32))
        run_rows(model, [1], [0], taps=taps)
        place = model.backend.read(buffers[swiglu.gu]).reshape(-1)
        lines = place.reshape(-1, 2, 32)  # h, and what lies behind
        assert place.size == 2 * 3 * 64
        assert np.isnan(lines[:, 1]).all()
        assert (np.isnan(lines[:, 0]) != spread).all()
