"""The stages around one matrix product, in every form, against its ops on the CPU, bit for bit."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("kestrel._simt", reason="the shim is built by `make native`")

from kestrel import _native
from kestrel.launch import (
    HEAD_FORMS,
    MATMUL_ADD_FORMS,
    NORM_MATMUL_FORMS,
    Launch,
    Tuning,
    plan,
    split_row_bytes,
)
from kestrel.ops import OPS, Op, Weight, WType
from kestrel.simt import run_launch
from kestrel.stages import matmul
from tests.kernels.harness import Guarded, quantised, tensor, values
from tests.support.bits import assert_bits_equal

Q4, Q8, BF16 = WType.q4local, WType.q8local, WType.bf16
# Grids of one, three and many blocks, small blocks among them.
TUNINGS = (Tuning(sms=1, head_blocks=1), Tuning(sms=3, head_blocks=1), Tuning(), Tuning(sms=5, stage_warps=2))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


class Steps:
    """Ops of one row over shared memory: arrays by name, matrices by number."""

    def __init__(self, arrays: dict[str, npt.NDArray[Any]], weights: Sequence[Any]) -> None:
        self.arrays = arrays
        self.weights = list(weights)
        self.ops: list[tuple[str, dict[str, Any]]] = []
        self.shift = 0  # elements from an aligned place to a matrix's scales

    def add(self, op: str, **given: Any) -> None:
        """A string names an array, anything else is a number; a matmul takes all matrices."""
        self.ops.append((op, given))

    def bind(self) -> tuple[list[Op], dict[str, Guarded]]:
        memory = {name: Guarded(array) for name, array in self.arrays.items()}
        bound = []
        for i, weight in enumerate(self.weights):
            codes = memory[f"codes{i}"] = Guarded(weight.codes)
            scales = np.zeros(8, np.uint16) if weight.scale is None else weight.scale.ravel()
            scale = memory[f"scale{i}"] = Guarded(np.concatenate([np.zeros(self.shift, np.uint16), scales]))
            pointer = 0 if weight.scale is None else scale.ptr + 2 * self.shift
            bound.append(Weight(codes.ptr, pointer, int(weight.wtype), weight.n, weight.k, 0))
        ops = []
        for name, given in self.ops:
            args = OPS[name].args()
            for key, value in given.items():
                setattr(args, key, memory[value].ptr if isinstance(value, str) else value)
            if name == "matmul":
                args.n_w = len(bound)
                for i, weight in enumerate(bound):
                    args.w[i] = weight
            ops.append(Op(OPS[name], args, name))
        return ops, memory

    def launches(self, tuning: Tuning) -> list[Launch]:
        return plan(self.bind()[0], "l2exact", replace(tuning, apart=0)).main

    def on_cpu(self) -> dict[str, npt.NDArray[Any]]:
        ops, memory = self.bind()
        _native.Program([(op.name, bytes(op.args)) for op in ops], 1, "scalar").run()
        return {name: guarded.array for name, guarded in memory.items()}

    def check(
        self,
        kernel: str,
        tuning: Tuning,
        expected: dict[str, npt.NDArray[Any]],
        seed: int = 0,
        hidden: str = "",
        gates: bool = True,
    ) -> None:
        """``hidden``: an array between the ops that the stage leaves alone."""
        ops, memory = self.bind()
        launches = plan(ops, "l2exact", replace(tuning, apart=0)).main  # no more memory than kernels need
        assert [launch.kernel for launch in launches] == [kernel]
        for launch in launches:
            run_launch(launch, seed, gates=gates)
        for name, guarded in memory.items():
            guarded.check(f"{kernel}: {name}")
            if name == hidden:
                expected = {**expected, name: self.arrays[name]}
            assert_bits_equal(guarded.array, expected[name], f"{kernel}: {name}", any_nan=True)


def f32(count: int) -> npt.NDArray[np.float32]:
    return np.full(count, -12345.0, np.float32)


def outputs_of_a8(k: int) -> dict[str, npt.NDArray[Any]]:
    return {"q": np.full(k, 99, np.int8), "d": f32(k // 32), "gsum": np.full(k // 32, 9999, np.int32)}


def add_norm(steps: Steps, k: int, *, a8: bool = True) -> dict[str, str]:
    """rms_norm and a8 into ``steps``; the inputs of the matmul behind them."""
    steps.add("rms_norm", x="x", w="w", out="nrm", M=1, d=k, eps=1e-6)
    if not a8:
        return {"x": "nrm"}
    steps.add("quantize_a8", x="nrm", q="q", d="d", gsum="gsum", M=1, K=k)
    return {"x": "nrm", "xq": "q", "xd": "d", "gsum": "gsum"}


def norm_matmul(rng: np.random.Generator, kinds: Sequence[WType], sizes: Sequence[int], k: int) -> Steps:
    arrays = {
        "x": values(rng, k),
        "w": values(rng, k),
        "nrm": f32(k),
        "y": f32(sum(sizes)),
        **outputs_of_a8(k),
    }
    steps = Steps(arrays, [tensor(rng, kind, n, k) for kind, n in zip(kinds, sizes, strict=True)])
    steps.add("matmul", y="y", M=1, **add_norm(steps, k))
    return steps


def matmul_add(
    rng: np.random.Generator, kinds: Sequence[WType], sizes: Sequence[int], k: int, out: str = "sum"
) -> Steps:
    n = sum(sizes)
    arrays = {"x": values(rng, n), "y": f32(n), "sum": f32(n), "input": values(rng, k)}
    a8 = any(kind != BF16 for kind in kinds)
    if a8:
        arrays |= {name: array[0] for name, array in quantised(rng, 1, k).items()}
    steps = Steps(arrays, [tensor(rng, kind, n, k) for kind, n in zip(kinds, sizes, strict=True)])
    inputs = {"x": "input", **({"xq": "xq", "xd": "xd", "gsum": "gsum"} if a8 else {})}
    steps.add("matmul", y="y", M=1, **inputs)
    steps.add("add", x="x", y="y", out=out, n=n)
    return steps


def head(rng: np.random.Generator, kind: WType, vocab: int, k: int, *, a8: bool | None = None) -> Steps:
    arrays = {"x": values(rng, k), "w": values(rng, k), "nrm": f32(k), "y": f32(vocab), **outputs_of_a8(k)}
    steps = Steps({**arrays, "ids": np.full(1, -9, np.int32)}, [tensor(rng, kind, vocab, k)])
    steps.add("matmul", y="y", M=1, **add_norm(steps, k, a8=kind != BF16 if a8 is None else a8))
    steps.add("argmax", logits="y", ids="ids", M=1, V=vocab)
    return steps


MAKERS = {
    "k_norm_matmul": (norm_matmul, NORM_MATMUL_FORMS),
    "k_matmul_add": (matmul_add, MATMUL_ADD_FORMS),
}
STAGE_FORMS = [(stage, form) for stage, (_, forms) in MAKERS.items() for form in forms]


def kinds_of(form: str) -> tuple[WType, ...]:
    """The formats that a form takes."""
    return {"q4": (Q4,), "q8": (Q8,), "bf16": (BF16,), "any": (Q4, Q8, BF16)}[form.split("_")[0]]


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes every stage take one form, whatever its shape."""

    def choose(form: str) -> None:
        monkeypatch.setattr(matmul, "form_of", lambda mm, forms, warps, weights: form)
        if form not in ("q4", "q8"):
            monkeypatch.setattr(matmul, "weights_of", lambda mm: "any")

    return choose


@pytest.mark.parametrize(("stage", "form"), STAGE_FORMS)
def test_row_counts_around_what_a_warp_takes(
    rng: np.random.Generator, stage: str, form: str, chosen: Any
) -> None:
    chosen(form)
    rows = 4 if form == "q4" else matmul.loads_and_rows(form)[1]
    for kind in kinds_of(form):
        for n in sorted({1, max(rows - 1, 1), rows, rows + 1, 8 * rows, 16 * rows + 1, 50}):
            steps = MAKERS[stage][0](rng, [kind], [n], 512 if form == "q4" else 352)
            expected = steps.on_cpu()
            for tuning in (Tuning(sms=1), Tuning()):
                steps.check(f"{stage}_{form}", tuning, expected, seed=n)


@pytest.mark.parametrize(("stage", "form"), STAGE_FORMS)
def test_lengths(rng: np.random.Generator, stage: str, form: str, chosen: Any) -> None:
    # One to 140 groups: slots without steps, a last step that is not full, one piece of a row and several.
    chosen(form)
    whole = (256, 512, 768, 1024, 1280, 2048, 2304, 2560, 4096, 4864)
    for k in whole if form == "q4" else (32, 64, 256, 288, 416, 1024, 1120, 2048, 2080, 2560, 4480):
        for kind in kinds_of(form):
            steps = MAKERS[stage][0](rng, [kind], [11], k)
            steps.check(f"{stage}_{form}", Tuning(sms=1, stage_warps=2), steps.on_cpu(), seed=k)


@pytest.mark.parametrize("stage", MAKERS)
@pytest.mark.parametrize(
    "kinds", [(Q4, Q4, Q4), (Q4, BF16, Q8), (BF16, Q8), (Q8, Q4, BF16), (BF16, BF16, Q4)]
)
def test_matrices_of_several_kinds(rng: np.random.Generator, stage: str, kinds: tuple[WType, ...]) -> None:
    for k in (96, 768, 1056, 2112):
        steps = MAKERS[stage][0](rng, kinds, [37, 3, 14][: len(kinds)], k)
        expected = steps.on_cpu()
        for seed, tuning in enumerate(TUNINGS):
            kernel = steps.launches(tuning)[0].kernel
            assert kernel.startswith(stage)
            steps.check(kernel, tuning, expected, seed)


@pytest.mark.parametrize("k", [9728, 12288])
@pytest.mark.parametrize("kind", list(WType))
def test_long_rows(rng: np.random.Generator, k: int, kind: WType) -> None:
    for maker in (norm_matmul, matmul_add):
        steps = maker(rng, [kind], [7], k)
        expected = steps.on_cpu()
        for tuning in (Tuning(sms=1), Tuning(sms=1, stage_warps=1)):
            steps.check(steps.launches(tuning)[0].kernel, tuning, expected)


def test_an_input_too_long_for_shared_memory(rng: np.random.Generator) -> None:
    for kind, k in ((Q4, 2048), (BF16, 1024)):
        steps = matmul_add(rng, [kind], [9], k)
        for limit, shared in ((3000, 0), (6000, 1), (200_000, 2)):
            tuning = Tuning(shared_limit=limit)
            launch = steps.launches(tuning)[0]
            assert bool(launch.shared) == (shared > 0)
            assert (launch.kernel == "k_matmul_add_q4") == (kind == Q4 and shared == 2)
            steps.check(launch.kernel, tuning, steps.on_cpu())
    # A norm that does not fit goes op by op.
    names = [
        launch.kernel for launch in norm_matmul(rng, [Q4], [9], 2048).launches(Tuning(shared_limit=4000))
    ]
    assert names == ["k_rms_norm_cpu", "k_quantize_a8", "k_matmul"]


def test_special_values(rng: np.random.Generator) -> None:
    """NaN and infinity travel, a lane without groups keeps its +0, and a row may be all zeros."""
    for maker in (norm_matmul, matmul_add):
        for kind, k in ((Q4, 512), (Q4, 352), (Q8, 352), (BF16, 352)):
            steps = maker(rng, [kind], [40], k)
            source = steps.arrays["x" if maker is norm_matmul else "input"]
            for special in (np.nan, np.inf, 3e38, 1e25, 0.0, 1e-18, 1e-45, -0.0):
                source[5] = special
                if special in (0.0, -0.0):
                    source[:] = special
                steps.check(steps.launches(Tuning())[0].kernel, Tuning(), steps.on_cpu())


class Args:
    """Matrices of a launch that nobody runs."""

    def __init__(self, kind: WType, k: int, *sizes: int) -> None:
        self.n_w = len(sizes)
        self.w = [Weight(0, 0, int(kind), n, k, 0) for n in sizes]


def test_form_of_a_shape() -> None:
    """Rows of a warp are chosen so that the turns come out even."""
    for args, form in (
        (Args(Q4, 2080, 4096), "any_u4r2"),
        (Args(Q8, 2048, 1024), "any_u4r2"),
        (Args(BF16, 4096, 1024), "any_u2r4"),
    ):
        assert matmul.form_of(args, NORM_MATMUL_FORMS, 132 * 8, matmul.weights_of(args)) == form


def test_streams_of_a_shape() -> None:
    """A unit is one piece where there is room; elsewhere every warp has two pieces of a row or more."""
    for args, rows, streams, pieces, steps in (
        (Args(Q4, 2048, 4096, 512, 512), 4, 10, 1, 8),
        (Args(Q4, 2560, 4096, 1024, 1024), 4, 12, 1, 10),
        (Args(Q4, 4096, 4096, 1024, 1024), 4, 12, 2, 6),
        (Args(Q4, 4096, 2048), 2, 8, 1, 16),
        (Args(Q4, 4096, 4096), 2, 16, 1, 16),
        (Args(Q4, 9728, 2560), 2, 10, 2, 16),
        (Args(Q4, 12288, 4096), 2, 16, 2, 8),
    ):
        found = matmul.streams_of(args, rows, split_row_bytes(args.w[0].k), Tuning())
        assert found is not None
        blocks, shared, stream = found
        assert (blocks, stream.streams, stream.pieces, stream.steps) == (132, streams, pieces, steps)
        assert shared <= Tuning().ring_bytes + split_row_bytes(args.w[0].k)


def test_the_head_has_rings_of_its_own(rng: np.random.Generator) -> None:
    steps = head(rng, Q4, 75, 4864)

    def shared(**given: int) -> int:
        return steps.launches(Tuning(sms=1, **given))[0].shared

    assert shared(head_ring_bytes=20_000) < shared()
    assert shared(ring_bytes=20_000) == shared()


@pytest.mark.parametrize("maker", [norm_matmul, matmul_add, "head"])
def test_streams_of_any_shape(rng: np.random.Generator, maker: Any) -> None:
    """Few warps and many, rings of one piece and of all there are, pieces that do not come out even."""
    for k in (256, 768, 2304, 4864):
        steps = head(rng, Q4, 75, k) if maker == "head" else maker(rng, [Q4, Q4, Q4], [37, 3, 35], k)
        expected = steps.on_cpu()
        for seed, tuning in enumerate(
            (
                Tuning(sms=1, streams=1, ring_bytes=1, head_ring_bytes=1),
                Tuning(sms=2, streams=3, ring_bytes=20_000, head_ring_bytes=20_000),
                Tuning(sms=3, stage_blocks=2, streams=2, ring_bytes=9_000, head_ring_bytes=9_000),
                Tuning(sms=1, streams=16, stage_warps=1),
            )
        ):
            steps.check(steps.launches(tuning)[0].kernel, tuning, expected, seed)


@pytest.mark.parametrize("seed", [0, 1])
def test_streams_without_gates(rng: np.random.Generator, seed: int) -> None:
    """As below sm_90."""
    tuning = Tuning(sms=2, streams=3, ring_bytes=20_000, head_ring_bytes=20_000)
    more = {"seed": seed, "gates": False}
    for steps in (
        norm_matmul(rng, [Q4], [75], 768),
        matmul_add(rng, [Q4], [75], 768),
        head(rng, Q8, 75, 768),
    ):
        steps.check(steps.launches(tuning)[0].kernel, tuning, steps.on_cpu(), **more)  # type: ignore[arg-type]
    steps = norm_gate_up(rng, 224, 768)
    steps.check("k_norm_gate_up", tuning, steps.on_cpu(), hidden="y", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Q4, Q8])
def test_scales_that_no_copy_of_16_bytes_can_take(rng: np.random.Generator, kind: WType) -> None:
    """Scales may begin anywhere: rows are loaded then, not streamed."""
    for steps in (
        norm_matmul(rng, [kind], [75], 768),
        matmul_add(rng, [kind], [75], 768),
        head(rng, kind, 75, 768),
    ):
        (streamed,) = steps.launches(Tuning())
        steps.shift = 4
        (loaded,) = steps.launches(Tuning())
        if kind == Q4 or streamed.kernel.startswith("k_head"):
            assert streamed.kernel != loaded.kernel
        steps.check(loaded.kernel, Tuning(), steps.on_cpu())


# -- gate and up -----------------------------------------------------------------------------------


def norm_gate_up(rng: np.random.Generator, width: int, k: int) -> Steps:
    h = {f"h_{name}": array for name, array in outputs_of_a8(width).items()}
    arrays = {
        "x": values(rng, k),
        "w": values(rng, k),
        "nrm": f32(k),
        "y": f32(2 * width),
        "h": f32(width),
        **outputs_of_a8(k),
        **h,
    }
    steps = Steps(arrays, [tensor(rng, Q4, width, k) for _ in range(2)])
    steps.add("matmul", y="y", M=1, **add_norm(steps, k))
    steps.add("swiglu", gu="y", h="h", R=1, F=width)
    steps.add("quantize_a8", x="h", q="h_q", d="h_d", gsum="h_gsum", M=1, K=width)
    return steps


@pytest.mark.parametrize("k", [256, 768, 2560, 4352])
def test_gate_up(rng: np.random.Generator, k: int) -> None:
    """One turn and several, warps that share a unit unevenly, rows whole and in pieces; all memory."""
    steps = norm_gate_up(rng, 224, k)
    expected = steps.on_cpu()
    for seed, tuning in enumerate(
        (
            Tuning(),
            Tuning(sms=1, streams=1, ring_bytes=1),
            Tuning(sms=2, streams=3, ring_bytes=30_000),
            Tuning(sms=1, streams=5, stage_warps=1),
            Tuning(sms=2, stage_blocks=2, ring_bytes=50_000),
        )
    ):
        steps.check("k_norm_gate_up", tuning, expected, seed, hidden="y")


def test_gate_up_of_special_values(rng: np.random.Generator) -> None:
    steps = norm_gate_up(rng, 64, 512)
    for special in (np.nan, np.inf, 3e38, 1e25, 0.0, 1e-18, -0.0):
        steps.arrays["x"][5] = special
        steps.check("k_norm_gate_up", Tuning(), steps.on_cpu(), hidden="y")


def test_what_keeps_gate_up_apart(rng: np.random.Generator) -> None:
    for steps, limit in (
        (norm_gate_up(rng, 64, 352), 200_000),  # no whole steps
        (norm_gate_up(rng, 80, 512), 200_000),  # no whole groups of h
        (norm_gate_up(rng, 64, 512), 3_900),  # no room
    ):
        if any(given.get("K") == 80 for _, given in steps.ops):
            steps.ops.pop()
        kernels = [launch.kernel for launch in steps.launches(Tuning(shared_limit=limit))]
        assert kernels[0] in ("k_norm_a8", "k_rms_norm_cpu")
        assert "k_norm_gate_up" not in kernels


# -- the head --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", HEAD_FORMS)
def test_head(rng: np.random.Generator, form: str, chosen: Any) -> None:
    chosen(form)
    odd = ((1, 32), (7, 96), (333, 352), (70, 2048), (40, 4128))
    whole = ((1, 256), (333, 512), (70, 2048), (40, 4352))
    for kind in kinds_of(form):
        for vocab, k in whole if form in ("q4", "q8") else odd:
            steps = head(rng, kind, vocab, k)
            expected = steps.on_cpu()
            for seed, tuning in enumerate(TUNINGS):
                steps.check(f"k_head_{form}", tuning, expected, seed)


def test_a_bf16_head_that_is_quantised_for_nobody(rng: np.random.Generator) -> None:
    steps = head(rng, BF16, 40, 96, a8=True)
    steps.check("k_head_bf16_u2r4", Tuning(), steps.on_cpu())


@pytest.mark.parametrize("kind", list(WType))
def test_choice_among_equal_logits(rng: np.random.Generator, kind: WType) -> None:
    """Equal rows give equal logits: the lowest index wins, whichever warp and block found it."""
    for best in ([299], [0, 299], [3, 17], [150, 151, 290], [8, 9, 250]):
        steps = head(rng, kind, 300, 256)
        weight = steps.weights[0]
        codes = weight.codes.copy()
        reference = head_logits(steps)
        top = int(np.argmax(reference))
        scale = None if weight.scale is None else weight.scale.copy()
        # The rows of `best` become the best row, the best row one of the worst.
        winner, worst = codes[top].copy(), int(np.argmin(reference))
        winning_scale = None if scale is None else scale[top].copy()
        codes[top] = codes[worst]
        if scale is not None:
            scale[top] = scale[worst]
        for i in best:
            codes[i] = winner
            if scale is not None:
                scale[i] = winning_scale
        steps.weights[0] = type(weight)(weight.wtype, codes, scale, None, weight.n, weight.k)
        expected = steps.on_cpu()
        assert expected["ids"][0] == best[0]
        for seed, tuning in enumerate(TUNINGS):
            steps.check(steps.launches(tuning)[0].kernel, tuning, expected, seed)


def head_logits(steps: Steps) -> npt.NDArray[np.float32]:
    return np.asarray(steps.on_cpu()["y"])


@pytest.mark.parametrize("row", [0, 150, 299])
@pytest.mark.parametrize("scale", [0x7C00, 0xFC00, 0x7E00])
def test_a_logit_that_is_not_finite(rng: np.random.Generator, row: int, scale: int) -> None:
    steps = head(rng, Q8, 300, 64)
    weight = steps.weights[0]
    scales = weight.scale.copy()
    scales.view(np.uint16)[row, 1] = scale
    steps.weights[0] = type(weight)(weight.wtype, weight.codes, scales, None, weight.n, weight.k)
    expected = steps.on_cpu()
    assert expected["ids"][0] == -1
    for seed, tuning in enumerate(TUNINGS):
        steps.check(steps.launches(tuning)[0].kernel, tuning, expected, seed)


def test_head_counters_are_zero_behind_every_launch(rng: np.random.Generator) -> None:
    # The counter lives in the module: grids of different sizes in turn would see what one leaves.
    steps = head(rng, Q4, 90, 256)
    expected = steps.on_cpu()
    for blocks in (1, 2, 5, 3, 1, 4):
        steps.check("k_head_q4", Tuning(sms=blocks, head_blocks=1, stage_warps=1), expected)


def test_what_keeps_a_head_apart(rng: np.random.Generator) -> None:
    several = head(rng, Q4, 30, 64)
    assert [launch.kernel for launch in several.launches(Tuning(shared_limit=1300))][-1] == "k_argmax"
    odd = head(rng, BF16, 30, 40)
    odd.ops = [op for op in odd.ops if op[0] != "quantize_a8"]
    assert len(odd.launches(Tuning())) == 3
