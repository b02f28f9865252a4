"""A checked view of a safetensors file: its header against its bytes, and reading without mapping.

The safetensors package stops at the first fault and maps the whole file; converting needs every fault at once
and resident memory that does not grow with the file.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kestrel.errors import ModelError

MAX_HEADER = 100_000_000  # bytes; the limit of the format's own library

_BITS = {  # of one element
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "BOOL": 8, "U8": 8,
    "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64,
    "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

FLOAT_DTYPES: dict[str, npt.DTypeLike] = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}


@dataclass(frozen=True)
class TensorEntry:
    name: str
    dtype: str  # as the format names it: "BF16"
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class SafetensorsHeader:
    path: Path
    size: int  # bytes of the file
    data_begin: int
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]


class HeaderError(Exception):
    """The header cannot be used; ``faults`` lists why."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


def read_header(path: Path) -> SafetensorsHeader:
    """Read and check the header. Raises ``HeaderError`` with every fault: nothing of such a file is used."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            if len(start) < 8:
                raise HeaderError([f"not a safetensors file: only {size} bytes long"])
            (length,) = struct.unpack("<Q", start)
            if length > min(MAX_HEADER, size - 8):
                raise HeaderError([_wrong_start(start + file.read(120), length, size)])
            text = file.read(length)
    except OSError as error:
        raise HeaderError([f"cannot be read: {error.strerror}"]) from None
    raw, faults = _parse_json(text)
    if raw is None:
        raise HeaderError(faults)
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        faults.append("__metadata__ must map names to strings")
        metadata = {}
    data_begin = 8 + length
    tensors = {}
    for name, entry in raw.items():
        tensor = _check_entry(name, entry, data_begin, size, faults)
        if tensor is not None:
            tensors[name] = tensor
    if not faults:
        _check_layout(list(tensors.values()), data_begin, size, faults)
    if faults:
        raise HeaderError(faults)
    return SafetensorsHeader(path, size, data_begin, tensors, metadata)


def _wrong_start(start: bytes, length: int, size: int) -> str:
    if start.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file itself: fetch it with `git lfs pull`"
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return "not a safetensors file but a pickled PyTorch checkpoint: save it as safetensors first"
    if start.startswith(b"GGUF"):
        return "not a safetensors file but GGUF: name it as the source by itself"
    if length > MAX_HEADER:
        return f"not a safetensors file, or damaged: header length {length} exceeds {MAX_HEADER} bytes"
    return f"truncated or damaged: header length {length} in a file of {size} bytes"


def _parse_json(text: bytes) -> tuple[dict[str, Any] | None, list[str]]:
    repeated: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                repeated.append(f"header names {key!r} twice")
            result[key] = value
        return result

    try:
        raw = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        return None, [f"not a safetensors file: its header is not JSON ({error})"]
    if not isinstance(raw, dict):
        return None, ["not a safetensors file: its header is not a JSON object"]
    return raw, repeated


def _check_entry(name: str, entry: Any, data_begin: int, size: int, faults: list[str]) -> TensorEntry | None:
    def naturals(value: object) -> bool:
        return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**62 for v in value)

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        faults.append(f"{name}: header entry must have exactly dtype, shape and data_offsets")
        return None
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        faults.append(f"{name}: unknown dtype {dtype!r}")
        return None
    if not naturals(shape):
        faults.append(f"{name}: malformed shape {shape!r}")
        return None
    if not naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        faults.append(f"{name}: malformed data_offsets {offsets!r}")
        return None
    begin, end = data_begin + offsets[0], data_begin + offsets[1]
    before = len(faults)
    if end > size:
        faults.append(f"{name}: ends at byte {end} of a file of {size} bytes (truncated?)")
    expected = math.prod(shape) * _BITS[dtype] // 8
    if end - begin != expected:
        faults.append(f"{name}: {dtype} {shape} needs {expected} bytes, its offsets span {end - begin}")
    return TensorEntry(name, dtype, tuple(shape), begin, end) if len(faults) == before else None


def _check_layout(tensors: list[TensorEntry], data_begin: int, size: int, faults: list[str]) -> None:
    """Tensors must follow one another without overlap or gap, to the end of the file."""
    at, previous = data_begin, "the header"
    for tensor in sorted(tensors, key=lambda t: (t.begin, t.end)):
        if tensor.begin < at:
            faults.append(f"{tensor.name}: overlaps {previous}")
        elif tensor.begin > at:
            faults.append(f"{tensor.name}: {tensor.begin - at} bytes that belong to no tensor lie before it")
        at, previous = max(at, tensor.end), tensor.name
    if at != size:
        faults.append(f"{size - at} bytes that belong to no tensor lie after {previous}")


def read_rows(file: BinaryIO, entry: TensorEntry, begin: int, end: int) -> npt.NDArray[Any]:
    """Rows ``begin`` to ``end`` of the tensor seen as [rows, last axis], from an open file; safe in threads.

    The dtype must be one of ``FLOAT_DTYPES``.
    """
    columns = entry.shape[-1]
    result: npt.NDArray[Any] = np.empty((end - begin, columns), FLOAT_DTYPES[entry.dtype])
    read_exactly(file, entry.begin + begin * columns * result.itemsize, result)
    return result


def read_exactly(file: BinaryIO, offset: int, array: npt.NDArray[Any]) -> None:
    """Fill ``array`` from ``offset``. Raises ``ModelError`` when the file has become shorter meanwhile."""
    view = array.view(np.uint8).data.cast("B")
    while view:
        count = os.preadv(file.fileno(), [view], offset)
        if not count:
            raise ModelError(str(file.name), ["became shorter while it was read"])
        view, offset = view[count:], offset + count
