"""Ops of the reference as functions: arrays in, arrays out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel.ops import OPS, Pointer
from tests.support import run_op as support


def run_op(name: str, **values: Any) -> dict[str, npt.NDArray[Any]]:
    """Run op ``name`` on copies of the arrays and return every array as it is afterwards.

    Pointers that are not given are null; a list of matrices sets ``n_w``.
    """
    arrays = {key: value.copy() for key, value in values.items() if isinstance(value, np.ndarray)}
    null = {key: None for key, kind in OPS[name].args._fields_ if kind is Pointer}
    lists = [value for value in values.values() if isinstance(value, list)]
    counts = {"n_w": len(lists[0])} if lists else {}
    support.run_op(name, threads=2, **{**null, **counts, **values, **arrays})
    return arrays


def a8(x: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[Any]]:
    """The a8 form of x [M, K], under the names the matrix ops take it by."""
    M, K = x.shape
    q, d = np.zeros((M, K), np.int8), np.zeros((M, K // 32), np.float32)
    result = run_op("quantize_a8", x=x, q=q, d=d, gsum=np.zeros((M, K // 32), np.int32), M=M, K=K)
    return {"xq": result["q"], "xd": result["d"], "gsum": result["gsum"]}
