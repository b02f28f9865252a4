"""moe_matmul: each (row, slot) pair has the bits of its expert's matrix times its row, in any grouping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kestrel.ops import WType
from kestrel.weights import QuantTensor
from tests.ops.matmul_reference import Form, Input, all_forms, empty_y, expected, random_input
from tests.support.bits import assert_bits_equal
from tests.support.models import random_tensor
from tests.support.run_op import run_op

FORMS = all_forms()
Ids = npt.NDArray[np.int32]


def expert(w: QuantTensor, index: int) -> QuantTensor:
    scale = None if w.scale is None else w.scale[index]
    return replace(w, codes=w.codes[index], scale=scale, experts=None)


def run(weights: Sequence[QuantTensor], ids: Ids, data: Input, per_slot: bool, form: Form) -> Any:
    M, T = ids.shape
    y = empty_y((M, T, sum(w.n for w in weights)))
    with form.chosen():
        run_op(
            "moe_matmul",
            form.threads,
            form.isa,
            w=list(weights),
            ids=ids,
            y=y,
            n_w=len(weights),
            M=M,
            T=T,
            E=weights[0].experts,
            per_slot=int(per_slot),
            **data.arrays,
        )
    return y


def want(weights: Sequence[QuantTensor], ids: Ids, data: Input, per_slot: bool) -> Any:
    M, T = ids.shape
    y = np.empty((M, T, sum(w.n for w in weights)), np.float32)
    for e in np.unique(ids):
        row, slot = np.nonzero(ids == e)
        picked = data.take(row * T + slot if per_slot else row)
        y[row, slot] = expected([expert(w, int(e)) for w in weights], picked)
    return y


def check(weights: Sequence[QuantTensor], ids: Ids, data: Input, per_slot: bool, what: str = "") -> None:
    wanted = want(weights, ids, data, per_slot)
    for form in FORMS:
        assert_bits_equal(run(weights, ids, data, per_slot, form), wanted, f"{what} {form}", any_nan=True)


def random_ids(rng: np.random.Generator, M: int, E: int, T: int) -> Ids:
    return np.stack([rng.permutation(E)[:T] for _ in range(M)]).astype(np.int32)


@pytest.mark.parametrize("M", [1, 2, 3, 8, 33, 257])
@pytest.mark.parametrize("wtype", list(WType))
@pytest.mark.parametrize("per_slot", [False, True])
def test_every_form(wtype: WType, M: int, per_slot: bool) -> None:
    rng = np.random.default_rng(M)
    E, T, k = 7, 3, 352
    weights = [random_tensor(rng, wtype, 19, k, experts=E), random_tensor(rng, wtype, 40, k, experts=E)]
    ids = random_ids(rng, M, E, T)
    data = random_input(rng, M * T if per_slot else M, k)
    check(weights if not per_slot else weights[:1], ids, data, per_slot)


@pytest.mark.parametrize(("E", "T"), [(1, 1), (5, 1), (5, 5), (128, 8)])
def test_numbers_of_experts(E: int, T: int) -> None:
    rng = np.random.default_rng(E)
    w = random_tensor(rng, WType.q4local, 24, 96, experts=E)
    for M in (1, 20):
        check([w], random_ids(rng, M, E, T), random_input(rng, M, 96), False, f"M={M}")


@pytest.mark.parametrize("M", [1, 6, 40])
def test_all_rows_choose_the_same_experts(M: int) -> None:
    """One expert has every row, the rest none."""
    rng = np.random.default_rng(M)
    w = random_tensor(rng, WType.q4local, 33, 288, experts=9)
    ids = np.tile(np.array([8, 0], np.int32), (M, 1))
    check([w], ids, random_input(rng, M, 288), False)
    check([w], ids, random_input(rng, 2 * M, 288), True)


def test_an_expert_named_twice_in_a_row() -> None:
    """The router never does, the op does not depend on it."""
    rng = np.random.default_rng(0)
    w = random_tensor(rng, WType.q8local, 10, 64, experts=3)
    ids = np.array([[1, 1, 1], [2, 0, 2]], np.int32)
    check([w], ids, random_input(rng, 2, 64), False)


def test_mixed_formats() -> None:
    rng = np.random.default_rng(0)
    weights = [random_tensor(rng, t, 17, 64, experts=4) for t in (WType.q4local, WType.bf16)]
    for M in (1, 9):
        check(weights, random_ids(rng, M, 4, 2), random_input(rng, M, 64), False)


def test_rows_are_computed_alone() -> None:
    """Each row of a batch has the bits of a batch of that row."""
    rng = np.random.default_rng(4)
    w = random_tensor(rng, WType.q4local, 48, 416, experts=6)
    ids, data = random_ids(rng, 30, 6, 2), random_input(rng, 30, 416)
    for form in FORMS:
        together = run([w], ids, data, False, form)
        for row in (0, 14, 29):
            alone = run([w], ids[row : row + 1], data.take(slice(row, row + 1)), False, form)
            assert_bits_equal(together[row : row + 1], alone, f"row {row}, {form}")


def test_wrong_expert_is_noticed() -> None:
    rng = np.random.default_rng(0)
    w = random_tensor(rng, WType.q4local, 8, 64, experts=4)
    data = random_input(rng, 3, 64)
    ids = random_ids(rng, 3, 4, 2)
    with pytest.raises(AssertionError, match="differ"):
        assert_bits_equal(run([w], ids[:, ::-1].copy(), data, False, FORMS[0]), want([w], ids, data, False))
