"""Runs one op of the native reference on numpy arrays."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from kestrel import _native
from kestrel.ops import OPS, Pointer, Weight


def weight_struct(tensor: Any) -> ctypes.Structure:
    """The ``Weight`` of a QuantTensor (or anything with its attributes); the arrays must outlive it."""
    scale = 0 if tensor.scale is None else tensor.scale.ctypes.data
    return Weight(tensor.codes.ctypes.data, scale, int(tensor.wtype), tensor.n, tensor.k, 0)


def op_args(name: str, **values: Any) -> ctypes.Structure:
    """The argument struct of op ``name``: arrays become pointers (``None`` is null), QuantTensors weights.

    Every member must be given except ``reserved`` and ``spread`` (none on the CPU), so that a test cannot
    forget one.
    """
    args = OPS[name].args()
    types = dict(args._fields_)
    missing = set(types) - set(values) - {"reserved", "spread"}
    unknown = set(values) - set(types)
    if missing or unknown:
        raise TypeError(f"op {name}: missing {sorted(missing)}, unknown {sorted(unknown)}")
    for key, value in values.items():
        if types[key] is Pointer:
            if value is not None and not value.flags.c_contiguous:
                raise ValueError(f"op {name}: {key} is not contiguous")
            setattr(args, key, 0 if value is None else value.ctypes.data)
        elif isinstance(value, (list, tuple)):
            member = getattr(args, key)
            for i, tensor in enumerate(value):
                member[i] = weight_struct(tensor)
        elif types[key] is Weight:
            setattr(args, key, weight_struct(value))
        else:
            setattr(args, key, value)
    return args


def run_op(name: str, threads: int = 1, isa: str | None = None, **values: Any) -> None:
    """Run op ``name`` once into the output arrays given; ``isa=None`` is the best level this CPU has."""
    args = op_args(name, **values)
    isa = isa or _native.isa_available()[-1]
    _native.Program([(name, bytes(args))], threads, isa).run()


def empty(shape: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """An output array whose contents no op produces by accident: all bytes 0xa5."""
    array = np.empty(shape, dtype)
    array.view(np.uint8).reshape(-1)[:] = 0xA5
    return array
