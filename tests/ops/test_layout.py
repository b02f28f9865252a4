"""The argument structs of kestrel/ops.py against the layout the compiler gave kernels/op_args.h."""

from __future__ import annotations

import ctypes

import pytest

from kestrel import _native
from kestrel.ops import OPS, Weight

STRUCTS = {**{name: spec.args for name, spec in OPS.items()}, "Weight": Weight}


def test_same_ops_on_both_sides() -> None:
    assert set(_native.op_table()) == set(STRUCTS)


@pytest.mark.parametrize("name", STRUCTS)
def test_layout(name: str) -> None:
    struct, layout = STRUCTS[name], _native.op_table()[name]
    members = {}
    for field in struct._fields_:
        descriptor = getattr(struct, field[0])
        members[field[0]] = (descriptor.offset, descriptor.size)
    assert members == layout["members"]
    assert ctypes.sizeof(struct) == layout["size"]


@pytest.mark.parametrize("name", STRUCTS)
def test_no_padding(name: str) -> None:
    """Members fill the struct without a gap, so that every compiler agrees."""
    end = 0
    for offset, size in _native.op_table()[name]["members"].values():
        assert offset == end
        end = offset + size
    assert end == _native.op_table()[name]["size"]
