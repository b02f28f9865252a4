"""Runs one op of the registry on numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel.backend import Backend
from kestrel.ops import OPS, Op, Weight
from kestrel.weights import QuantTensor


def run_op(backend: Backend, name: str, **values: Any) -> dict[str, npt.NDArray[Any]]:
    """Run op ``name`` and return every array argument as it is afterwards.

    Arrays are copied first; a ``QuantTensor``, or a list of them, fills the weights; numbers are passed on.
    """
    spec = OPS[name]
    args = spec.args()
    known = {field[0] for field in spec.args._fields_}
    buffers = {}
    keep = []  # what the structs point at
    for key, value in values.items():
        if key not in known:
            raise TypeError(f"op {name} has no argument {key!r}")
        if isinstance(value, np.ndarray):
            buffers[key] = backend.upload(np.ascontiguousarray(value).copy())
            setattr(args, key, buffers[key].ptr)
        elif isinstance(value, QuantTensor):
            args.w, held = _weight(backend, value)
            keep.append(held)
        elif isinstance(value, list):
            args.n_w = len(value)
            for i, tensor in enumerate(value):
                args.w[i], held = _weight(backend, tensor)
                keep.append(held)
        else:
            setattr(args, key, value)
    backend.compile([Op(spec, args, name)]).run()
    return {key: backend.read(buffer) for key, buffer in buffers.items()}


def _weight(backend: Backend, tensor: QuantTensor) -> tuple[Any, Any]:
    codes = backend.upload(tensor.codes)
    scale = backend.upload(tensor.scale) if tensor.scale is not None else None
    pointer = scale.ptr if scale is not None else 0
    return Weight(codes.ptr, pointer, int(tensor.wtype), tensor.n, tensor.k, 0), (codes, scale)


def a8(backend: Backend, x: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[Any]]:
    """The a8 form of x [M, K], under the names the matrix ops take it by."""
    M, K = x.shape
    result = run_op(
        backend,
        "quantize_a8",
        x=x,
        q=np.zeros((M, K), np.int8),
        d=np.zeros((M, K // 32), np.float32),
        gsum=np.zeros((M, K // 32), np.int32),
        M=M,
        K=K,
    )
    return {"xq": result["q"], "xd": result["d"], "gsum": result["gsum"]}
