"""The order of sums in 32 lanes (contract sections 0, 3, 4), said once more: one number after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kestrel.ops import WType
from kestrel.weights import QuantTensor
from tests.ops.forms import check_forms, normal
from tests.support.f32 import F32, fma
from tests.support.models import random_tensor

ZERO = np.float32(0)
EPS = np.float32(1e-6)


def tree_of_8(a: Sequence[Any]) -> Any:
    return ((a[0] + a[4]) + (a[1] + a[5])) + ((a[2] + a[6]) + (a[3] + a[7]))


def tree_of_32(a: Sequence[Any]) -> Any:
    return tree_of_8([(a[k] + a[k + 16]) + (a[k + 8] + a[k + 24]) for k in range(8)])


def in_lanes(terms: Sequence[Any]) -> Any:
    lanes = [ZERO] * 32
    for j, term in enumerate(terms):
        lanes[j % 32] = lanes[j % 32] + term
    return tree_of_32(lanes)


def in_one_chain(terms: Sequence[Any]) -> Any:
    total = ZERO
    for term in terms:
        total = total + term
    return total


def block_terms(x: F32) -> list[Any]:
    squares = [v * v for v in x]
    whole = len(x) // 8 * 8
    return [tree_of_8(squares[j : j + 8]) for j in range(0, whole, 8)] + squares[whole:]


def element_terms(x: F32) -> list[Any]:
    return [v * v for v in x]


def norm(x: F32, w: F32, terms: Sequence[Any], total: Callable[[Sequence[Any]], Any]) -> F32:
    r = np.float32(1) / np.sqrt(total(terms) / np.float32(len(x)) + EPS)
    return (x * r) * w


def tells_apart(orders: Sequence[tuple[F32, F32]]) -> bool:
    return any((one.view(np.uint32) != other.view(np.uint32)).any() for one, other in orders)


@pytest.mark.parametrize("d", [1, 7, 8, 9, 31, 63, 100, 255, 256, 257, 263, 1001, 2048, 2560, 5120])
def test_rms_norm(d: int) -> None:
    M = 20
    x, w = normal((M, d), d), normal(d, 1)
    expected = np.stack([norm(row, w, block_terms(row), in_lanes) for row in x])
    check_forms("rms_norm", {"out": expected}, x=x, w=w, M=M, d=d, eps=float(EPS))
    chains = np.stack([norm(row, w, block_terms(row), in_one_chain) for row in x])
    assert d < 1000 or tells_apart([(expected, chains)]), "these rows do not tell lanes from a chain"


@pytest.mark.parametrize("hd", [16, 32, 48, 64, 80, 128, 256])
def test_qk_norm(hd: int) -> None:
    x, w = normal((1, 12 * hd), hd), normal(hd, 1)
    heads = x.reshape(12, hd)
    expected = np.stack([norm(head, w, element_terms(head), in_lanes) for head in heads])
    values = {"M": 1, "heads": 12, "hd": hd, "ld": 12 * hd, "eps": float(EPS)}
    check_forms("qk_norm", {"x": expected.reshape(1, -1)}, x=x, w=w, **values)
    chains = np.stack([norm(head, w, element_terms(head), in_one_chain) for head in heads])
    assert hd < 128 or tells_apart([(expected, chains)]), "these heads do not tell lanes from a chain"


def dot(w: F32, x: F32, lanes: int) -> Any:
    acc = [ZERO] * lanes
    for k in range(len(x)):
        acc[k % lanes] = fma(w[k], x[k], acc[k % lanes])[()]
    return tree_of_32(acc) if lanes == 32 else tree_of_8(acc)


def bf16_values(w: QuantTensor) -> F32:
    return (w.codes.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("k", [1, 7, 8, 9, 31, 32, 33, 63, 64, 100, 2048])
@pytest.mark.parametrize("M", [1, 2, 3, 4, 5])
def test_bf16_rows(k: int, M: int) -> None:
    n = 3 if k > 100 else 9
    w = random_tensor(np.random.default_rng(k), WType.bf16, n, k)
    x = normal((M, k), M)
    values = bf16_values(w)

    def product(lanes: int) -> F32:
        return np.array([[dot(row, m, lanes) for row in values] for m in x], np.float32)

    expected = product(32)
    check_forms("matmul", {"y": expected}, w=[w], n_w=1, M=M, x=x, xq=None, xd=None, gsum=None)
    assert k < 64 or tells_apart([(expected, product(8))]), "these rows do not tell 32 lanes from 8"
