"""router_topk, argmax and l2_hash in every form."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops import reference
from tests.ops.forms import ROWS, check_forms, normal, rng, sprinkle
from tests.support.run_op import run_op


@pytest.mark.parametrize(("E", "k"), [(1, 1), (4, 1), (8, 8), (16, 4), (60, 4), (128, 8), (130, 130)])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", ["normal", "ties", "special"])
def test_router_topk(E: int, k: int, norm: bool, kind: str) -> None:
    M = 12
    logits = normal((M, E), scale=2)
    if kind == "ties":
        logits = rng().choice(np.array([-1, -0.0, 0.0, 1], np.float32), (M, E))
    if kind == "special":
        logits = sprinkle(logits, share=0.2)
        logits[-1] = np.nan
    with np.errstate(all="ignore"):
        ids, weights = reference.router_topk(logits, k, norm)
    values = {"logits": logits, "M": M, "E": E, "T": k, "norm_topk_prob": int(norm)}
    check_forms("router_topk", {"ids": ids, "weights": weights}, **values)


def test_router_ties_go_to_the_lower_index() -> None:
    logits = np.array([[1, 2, -0.0, 2, 0.0, 2]], np.float32)
    ids, weights = np.empty((1, 5), np.int32), np.empty((1, 5), np.float32)
    run_op("router_topk", logits=logits, ids=ids, weights=weights, M=1, E=6, T=5, norm_topk_prob=1)
    assert ids.tolist() == [[1, 3, 5, 0, 2]]


@pytest.mark.parametrize("M", ROWS)
def test_router_rows(M: int) -> None:
    logits = normal((M, 16))
    ids, weights = reference.router_topk(logits, 4, False)
    values = {"logits": logits, "M": M, "E": 16, "T": 4, "norm_topk_prob": 0}
    check_forms("router_topk", {"ids": ids, "weights": weights}, **values)


@pytest.mark.parametrize("V", [1, 7, 64, 1000, 49152])
@pytest.mark.parametrize("M", [1, 5])
def test_argmax(V: int, M: int) -> None:
    logits = normal((M, V))
    logits[0, V // 3] = logits[0].max()  # a tie: the lower index wins
    check_forms("argmax", {"ids": reference.argmax(logits)}, logits=logits, M=M, V=V)


def test_argmax_ties_and_zeros() -> None:
    logits = np.full((4, 40), -1, np.float32)
    logits[0, [7, 9, 30]] = 5
    logits[1, 20], logits[1, 21] = -0.0, 0.0  # equal as floats
    logits[2, 20], logits[2, 21] = 0.0, -0.0
    logits[3] = np.float32(-1e-45)
    check_forms("argmax", {"ids": np.array([7, 20, 20, 0], np.int32)}, logits=logits, M=4, V=40)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 17, 999])
def test_argmax_refuses_what_is_not_finite(bad: float, where: int) -> None:
    logits = normal((3, 1000))
    logits[1, where] = bad
    expected = reference.argmax(logits)
    assert expected[1] == -1
    check_forms("argmax", {"ids": expected}, logits=logits, M=3, V=1000)


@pytest.mark.parametrize("nbytes", [1, 3, 4, 60, 1000, 4096])
@pytest.mark.parametrize("M", [1, 2, 3, 4, 5, 9, 40])
def test_l2_hash_of_bytes(nbytes: int, M: int) -> None:
    stride = nbytes + 5
    x = rng().integers(0, 256, (M, stride), np.uint8)
    expected = np.array([reference.fnv1a(x[m, :nbytes].tobytes()) for m in range(M)], np.uint64)
    values = {"x": x, "row0": None, "row1": None, "stride": stride, "M": M, "bytes": nbytes, "is_f32": 0}
    check_forms("l2_hash", {"out": expected}, **values)


@pytest.mark.parametrize("n", [1, 33, 576])
@pytest.mark.parametrize("M", [1, 4, 7])
def test_l2_hash_of_floats(n: int, M: int) -> None:
    """Every NaN hashes as 0x7fc00000; rows may be looked up by base and position."""
    x = sprinkle(normal((20, n)), share=0.3)
    x[:, 0].view(np.uint32)[:] = 0xFFC12345
    row0 = rng(1).integers(0, 8, M).astype(np.int32)
    row1 = rng(2).integers(0, 12, M).astype(np.int32)
    canonical = np.where(np.isnan(x), np.float32(np.nan), x)
    assert canonical[0, 0].view(np.uint32) == 0x7FC00000
    rows = canonical[row0 + row1]
    expected = np.array([reference.fnv1a(row.tobytes()) for row in rows], np.uint64)
    values = {"x": x, "row0": row0, "row1": row1, "stride": 4 * n, "M": M, "bytes": 4 * n, "is_f32": 1}
    check_forms("l2_hash", {"out": expected}, **values)


def test_l2_hash_known_values() -> None:
    """FNV-1a 64 with the contract's offset basis (1469598103934665603, not the one of the published FNV)."""
    assert reference.fnv1a(b"") == 1469598103934665603
    assert reference.fnv1a(b"a") == (1469598103934665603 ^ 97) * 1099511628211 % 2**64
