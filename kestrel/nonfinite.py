"""Finding the operation that made the first NaN or infinity: contract section 10."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel.model import Model
from kestrel.ops import Op

# What each op writes: argument that points at it, rows, row length and distance between rows (elements).
# Ops that only write integers from finite input (quantize_a8, argmax, l2_hash) are absent.
_OUTPUTS: dict[str, Any] = {
    "embed": lambda a: [("x", a.M, a.w.k, a.w.k)],
    "rms_norm": lambda a: [("out", a.M, a.d, a.d)],
    "matmul": lambda a: [("y", a.M, _width(a), _width(a))],
    "qk_norm": lambda a: [("x", a.M, a.heads * a.hd, a.ld)],
    "rope": lambda a: [("x", a.M, a.heads * a.hd, a.ld)],
    "attention": lambda a: [("out", a.M, a.nh * a.hd, a.nh * a.hd)],
    "swiglu": lambda a: [("h", a.R, a.F, a.F)],
    "router_topk": lambda a: [("weights", a.M, a.T, a.T)],
    "moe_matmul": lambda a: [("y", a.M * a.T, _width(a), _width(a))],
    "moe_combine": lambda a: [("out", a.M, a.H, a.H)],
}


def _width(args: Any) -> int:
    return sum(args.w[i].n for i in range(args.n_w))


@dataclass(frozen=True)
class NonFinite:
    """The first value that is not finite, positions first, then data-flow order."""

    position: int
    layer: int | None  # None before layer 0 and after the last
    op: str  # name of the contract: "matmul"
    label: str  # which of them: "l5.gate_up"
    section: str  # of docs/numerics.md
    element: int  # of the op's output row
    value: float

    @property
    def message(self) -> str:
        layer = "" if self.layer is None else f"layer {self.layer}, "
        return (
            f"first at position {self.position}, {layer}operation {self.op} ({self.label}, contract section "
            f"{self.section}): element {self.element} is {self.value}, its input was finite. "
            "A damaged weight is the usual cause: `kestrel inspect --verify MODEL` checks every one"
        )


def find_non_finite(model: Model, tokens: list[int]) -> NonFinite | None:
    """Run ``tokens`` from an empty cache op by op; ``None`` when every value is finite.

    The answer does not depend on how the tokens are cut into steps: a row depends on rows before it only.
    """
    for start in range(0, len(tokens), model.max_rows):
        part = tokens[start : start + model.max_rows]
        positions = np.arange(start, start + len(part), dtype=np.int32)
        model.load_rows(np.array(part, np.int32), positions)
        last = start + len(part) == len(tokens)
        step = model.step(len(part), int(last))
        first: dict[int, NonFinite] = {}
        for index, op in enumerate(step.ops):
            step.program.run(index, index + 1)
            _scan(model, op, start, len(part), first)
        if first:
            return first[min(first)]
    return None


def _scan(model: Model, op: Op, start: int, rows: int, first: dict[int, NonFinite]) -> None:
    """Note, for each position that was finite so far, what ``op`` broke."""
    for values in _output_rows(model, op):
        # Rows of one token stay together: chosen experts, or the last rows only (final norm and logits).
        per_token = max(1, len(values) // rows)
        offset = rows - len(values) if len(values) < rows else 0
        for row in np.flatnonzero(~np.isfinite(values).all(axis=1)):
            position = start + offset + int(row) // per_token
            if position in first:
                continue
            element = int(np.flatnonzero(~np.isfinite(values[row]))[0])
            layer, _, rest = op.label.partition(".")
            number = int(layer[1:]) if rest and layer[1:].isdigit() else None
            first[position] = NonFinite(
                position, number, op.name, op.label, op.spec.section, element, float(values[row, element])
            )


def _output_rows(model: Model, op: Op) -> list[npt.NDArray[np.float32]]:
    """f32[rows, width] for each output of ``op``."""
    args: Any = op.args
    if op.name == "add":
        width = model.config.hidden_size
        return [_read(model, args.out, args.n // width, width, width)]
    if op.name == "kv_append":
        layer = model.kv.layers[int(op.label.partition(".")[0][1:])]
        # Slots of this step: base is 0 and positions are consecutive when tokens are searched.
        slots = model.backend.read(model.buffer("pos", 1, np.int32), (args.M,))
        scales = [model.backend.read(buffer)[slots] for buffer in (layer.ks, layer.vs)]
        return [np.concatenate(scales, axis=1)]
    if op.name not in _OUTPUTS:
        return []
    return [_read(model, getattr(args, name), *shape) for name, *shape in _OUTPUTS[op.name](args)]


def _read(model: Model, pointer: int, rows: int, width: int, stride: int) -> npt.NDArray[np.float32]:
    """Rows of ``width`` values, ``stride`` apart, at an address inside one of the model's activations."""
    for buffer in model.activations():
        offset = pointer - buffer.ptr
        if 0 <= offset < int(np.prod(buffer.shape)) * buffer.dtype.itemsize:
            flat = model.backend.read(buffer, (offset // 4 + (rows - 1) * stride + width,))[offset // 4 :]
            return np.stack([flat[i * stride : i * stride + width] for i in range(rows)])
    raise LookupError(f"no activation at address {pointer:#x}")
