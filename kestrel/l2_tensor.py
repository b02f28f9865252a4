"""The tensor behind a key of an L2 dump: run again from the recorded command, on both sides, and compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel.errors import KestrelError
from kestrel.l2_dump import Dump
from kestrel.l2_fields import Key

SHOWN = 8  # elements listed by a report

# What a re-run needs of a dump's command.
_COMMAND: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "prompt_device": (str,),
    "decode_device": (str,),
    "mode": (str,),
    "isa": (str, type(None)),
    "threads": (int, type(None)),
    "graph": (bool,),
    "chunk": (int,),
    "ctx_size": (int,),
    "prompt_ids": (list,),
}


@dataclass
class Side:
    """One side's tensor."""

    dump: Dump
    value: npt.NDArray[Any]
    hash: int
    file: Path | None = None

    def recorded(self, key: Key) -> int | None:
        return self.dump.hashes.get(str(key))


@dataclass
class TensorComparison:
    """Two tensors of one key, compared as bits."""

    key: Key
    a: Side
    b: Side

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        """Elements whose bits differ."""
        return np.flatnonzero(_bits(self.a.value) != _bits(self.b.value))

    def as_json(self) -> dict[str, Any]:
        indices = self.indices
        ulps = ulp_distance(self.a.value, self.b.value)[indices]
        return {
            "key": str(self.key),
            "elements": len(self.a.value),
            "differ": len(indices),
            "largest_ulp": int(ulps.max(initial=0)),
            "reproduced_a": self.a.hash == self.a.recorded(self.key),
            "reproduced_b": self.b.hash == self.b.recorded(self.key),
            "file_a": str(self.a.file),
            "file_b": str(self.b.file),
            "first": [
                {
                    "index": int(i),
                    "a": self.a.value[i].item(),
                    "b": self.b.value[i].item(),
                    "bits_a": _hex_bits(self.a.value[i]),
                    "bits_b": _hex_bits(self.b.value[i]),
                    "ulp": int(ulp),
                }
                for i, ulp in zip(indices[:SHOWN], ulps, strict=False)
            ],
        }


def compare_tensors(
    a: Dump, b: Dump, key: Key, folder: Path, models: tuple[str | None, str | None]
) -> TensorComparison:
    """Run both sides again and save ``KEY.a.npy`` and ``KEY.b.npy`` in ``folder``.

    ``models`` replace the recorded model folders (None keeps them). Raises KestrelError when a dump has no
    command, its model is not there or has other weights.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KestrelError(f"--out {folder}: cannot be made: {error.strerror}") from None
    sides = []
    for dump, model, name in ((a, models[0], "a"), (b, models[1], "b")):
        side = rerun(dump, key, model)
        side.file = folder / f"{key}.{name}.npy"
        np.save(side.file, side.value)
        sides.append(side)
    if sides[0].value.shape != sides[1].value.shape or sides[0].value.dtype != sides[1].value.dtype:
        raise KestrelError(f"{key}: the two sides have different shapes: {a.path}, {b.path}")
    return TensorComparison(key, *sides)


def rerun(dump: Dump, key: Key, model: str | None = None) -> Side:
    """The tensor of ``key`` from a new run of the dump's command."""
    from kestrel.checkpoints.manifest import read_manifest
    from kestrel.llm import LLM

    command = dump.command
    if command is None:
        raise KestrelError(f"{dump.path} has no command line in its header: it cannot be run again")
    for name, kinds in _COMMAND.items():
        if type(command.get(name)) not in kinds:
            raise KestrelError(
                f"{dump.path}: command.{name} is not what kestrel writes: it cannot be run again"
            )
    folder = Path(model or command["model"])
    if not folder.exists():
        side = "--model-a or --model-b"
        raise KestrelError(f"{dump.path}: its model folder {folder} does not exist: name it with {side}")
    fingerprint = read_manifest(folder).fingerprint
    if fingerprint != dump.header.get("weights"):
        raise KestrelError(
            f"{dump.path} was made with weights {dump.header.get('weights')}, {folder} has {fingerprint}"
        )
    prompt = command["prompt_ids"]
    tokens = [*prompt, *(dump.generated or [])]
    with LLM(
        folder,
        prompt_device=command["prompt_device"],
        decode_device=command["decode_device"],
        mode=command["mode"],
        threads=command["threads"],
        isa=command["isa"],
        graph=command["graph"],
        chunk=command["chunk"],
        ctx_size=command["ctx_size"],
    ) as llm:
        value, digest = llm.engine.tensor(tokens, len(prompt), key.position, key.layer, key.field)
    return Side(dump, value, digest)


def _bits(value: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return value.view(f"u{value.dtype.itemsize}")


def _hex_bits(value: Any) -> str:
    return f"{int(_bits(np.atleast_1d(value))[0]):0{2 * value.dtype.itemsize}x}"


def ulp_distance(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Steps from one value to the other: representable numbers of f32 (-0 and +0 are one), or units.

    The distance to a NaN counts from its bit pattern.
    """
    distance: npt.NDArray[np.int64] = np.abs(_ordered(a) - _ordered(b))
    return distance


def _ordered(value: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    if value.dtype != np.float32:
        return value.astype(np.int64)
    bits = value.view(np.int32).astype(np.int64)
    ordered: npt.NDArray[np.int64] = np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return ordered


def report(result: TensorComparison) -> str:
    """The comparison for a reader."""
    facts = result.as_json()
    lines = [f"{result.key}: {facts['differ']} of {facts['elements']} elements differ"]
    lines[0] += f", by at most {facts['largest_ulp']} ULP" if facts["differ"] else ""
    for name, side in (("a", result.a), ("b", result.b)):
        recorded = side.recorded(result.key)
        note = "as recorded" if side.hash == recorded else f"NOT as recorded: {recorded or 0:016x}"
        lines.append(f"  {name}: {side.file}, hash {side.hash:016x}, {note}")
    if facts["first"]:
        lines.append(f"  {'element':>8}  {'a':>15} {'bits':>8}  {'b':>15} {'bits':>8}  ULP")
        lines += [
            f"  {e['index']:8}  {e['a']:15.9g} {e['bits_a']:>8}  {e['b']:15.9g} {e['bits_b']:>8}  {e['ulp']}"
            for e in facts["first"]
        ]
    return "\n".join(lines)
