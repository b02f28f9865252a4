"""Safetensors files taken apart and put together again, whatever state they are in."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kestrel.checkpoints.quantize import dequantize
from kestrel.errors import ModelError
from kestrel.ops import WType
from kestrel.weights import QuantTensor, Weights, load_model_folder

Header = dict[str, Any]


def read_safetensors(path: Path) -> tuple[Header, bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_safetensors(path: Path, header: Header | bytes, data: bytes, length: int | None = None) -> None:
    """``length`` overrides the length that the file states for its header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def edit_header(path: Path, edit: Callable[[Header], None]) -> None:
    header, data = read_safetensors(path)
    edit(header)
    write_safetensors(path, header, data)


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON object; ``...`` removes one."""
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not ...}))


def faults_of(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[str]:
    with pytest.raises(ModelError) as caught:
        function(*arguments, **keywords)
    return caught.value.faults


def values_of(folder: Path) -> dict[str, np.ndarray]:
    """Canonical name -> f32 values of a converted folder."""
    _, weights = load_model_folder(folder)
    return {name: dequantize(t) if isinstance(t, QuantTensor) else t for name, t in weights.items()}


def assert_equal_bits(a: np.ndarray, b: np.ndarray, what: str = "") -> None:
    assert a.shape == b.shape, what
    assert (np.ascontiguousarray(a).view(np.uint8) == np.ascontiguousarray(b).view(np.uint8)).all(), what


def assert_equal_weights(a: Weights, b: Weights) -> None:
    assert a.keys() == b.keys()
    for name, x in a.items():
        y = b[name]
        if isinstance(x, QuantTensor):
            assert isinstance(y, QuantTensor)
            assert (x.wtype, x.experts, x.n, x.k) == (y.wtype, y.experts, y.n, y.k), name
            assert_equal_bits(x.codes, y.codes, name)
            if x.wtype != WType.bf16:
                assert x.scale is not None
                assert y.scale is not None
                assert_equal_bits(x.scale, y.scale, name)
        else:
            assert isinstance(y, np.ndarray)
            assert_equal_bits(x, y, name)
