"""The fields of L2 keys, in data-flow order: contract section 12. The one table of what each means."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Field:
    """One field of a key ``t{position}_l{layer}_{field}`` (``t{position}_{field}`` after the last layer)."""

    name: str
    extended: bool  # only in dumps of the extended level
    operation: str  # what produced it, in the contract's words
    contents: str  # what is hashed
    inputs: tuple[str, ...]  # fields it is computed from; "prev.x" is x of the layer before
    per_layer: bool = True


FIELDS: tuple[Field, ...] = (
    Field("nrm", False, "rms_norm before attention", "f32[hidden]", ("prev.x",)),
    Field("qraw", True, "matmul q", "f32[heads * head_dim]", ("nrm",)),
    Field("kraw", False, "matmul k", "f32[kv_heads * head_dim]", ("nrm",)),
    Field("vraw", True, "matmul v", "f32[kv_heads * head_dim]", ("nrm",)),
    Field("qnorm", True, "qk_norm of q", "f32[heads * head_dim]", ("qraw",)),
    Field("knorm", False, "qk_norm of k", "f32[kv_heads * head_dim]", ("kraw",)),
    Field("krope", True, "rope of k", "f32[kv_heads * head_dim]", ("knorm",)),
    Field("k", False, "kv_append of k", "i8[kv_heads * head_dim], the cache's codes", ("krope",)),
    Field("ks", False, "kv_append of k", "f32[kv_heads], the cache's scales", ("krope",)),
    Field("v", False, "kv_append of v", "i8[kv_heads * head_dim], the cache's codes", ("vraw",)),
    Field("vs", False, "kv_append of v", "f32[kv_heads], the cache's scales", ("vraw",)),
    Field("qrope", False, "rope of q", "f32[heads * head_dim]", ("qnorm",)),
    Field("attn", False, "attention", "f32[heads * head_dim]", ("qrope", "k", "ks", "v", "vs")),
    Field("ores", False, "matmul o, residual add", "f32[hidden]", ("attn", "prev.x")),
    Field("nrm2", True, "rms_norm before the FFN", "f32[hidden]", ("ores",)),
    Field("rlogits", True, "matmul router", "f32[experts]", ("nrm2",)),
    Field("rids", True, "router_topk", "i32[top_k], rank order", ("rlogits",)),
    Field("rweights", True, "router_topk", "f32[top_k], rank order", ("rlogits",)),
    Field(
        "ffn",
        True,
        "FFN: gate, up, swiglu, down, experts combined",
        "f32[hidden]",
        ("nrm2", "rids", "rweights"),
    ),
    Field("x", False, "FFN and residual add", "f32[hidden]", ("ores", "ffn")),
    Field("fnorm", False, "rms_norm after the last layer", "f32[hidden]", ("prev.x",), per_layer=False),
    Field("logits", False, "matmul head", "f32[vocabulary]", ("fnorm",), per_layer=False),
)

BY_NAME = {field.name: field for field in FIELDS}
_ORDER = {field.name: index for index, field in enumerate(FIELDS)}
_NUMBER = "(0|[1-9][0-9]{0,8})"  # one spelling of each number, so that equal keys are equal text
_KEY = re.compile(rf"t{_NUMBER}_(?:l{_NUMBER}_)?([a-z0-9]+)")
_AFTER_LAYERS = 1 << 30


class Key(NamedTuple):
    """A key of a dump, taken apart."""

    position: int
    layer: int | None  # None for fnorm and logits
    field: str

    def __str__(self) -> str:
        middle = "" if self.layer is None else f"l{self.layer}_"
        return f"t{self.position}_{middle}{self.field}"

    @property
    def order(self) -> tuple[int, int, int]:
        """Data-flow order: whatever a key depends on sorts before it."""
        layer = _AFTER_LAYERS if self.layer is None else self.layer
        return self.position, layer, _ORDER[self.field]


def parse_key(text: str) -> Key:
    """The parts of a key. Raises ValueError when it is none of the contract's."""
    match = _KEY.fullmatch(text)
    if match and match[3] in BY_NAME and BY_NAME[match[3]].per_layer == (match[2] is not None):
        return Key(int(match[1]), None if match[2] is None else int(match[2]), match[3])
    raise ValueError(f"{text!r} is no key of contract section 12 (t12_l3_attn, t12_logits)")


def input_keys(key: Key, layers: int, known: Container[str]) -> Iterator[Key]:
    """The nearest keys in ``known`` that ``key`` is computed from, at its own position.

    A field that is not in ``known`` (another level, or an operation the model does not have) is replaced by
    its own inputs. Nothing is yielded for the embedding: its input is the token id. Attention also reads the
    cache rows of all earlier positions, which come before it in data-flow order.
    """
    seen: set[Key] = set()  # many paths lead through a layer that has no known key
    stack = [key]
    while stack:
        current = stack.pop()
        if current != key and str(current) in known:
            yield current
            continue
        candidates = []
        for name in BY_NAME[current.field].inputs:
            if name == "prev.x":
                before = layers - 1 if current.layer is None else current.layer - 1
                candidate = Key(key.position, before, "x")
            else:
                candidate = Key(key.position, current.layer if BY_NAME[name].per_layer else None, name)
            if candidate not in seen and (candidate.layer is None or candidate.layer >= 0):
                seen.add(candidate)
                candidates.append(candidate)
        stack += reversed(candidates)


def markdown() -> str:
    """The table of ``docs/l2.md``."""
    lines = ["| field | level | operation | contents | computed from |", "|---|---|---|---|---|"]
    for f in FIELDS:
        level = "extended" if f.extended else "standard"
        inputs = ", ".join(
            f"`{i}`" if not i.startswith("prev.") else "`x` of the layer before" for i in f.inputs
        )
        lines.append(f"| `{f.name}` | {level} | {f.operation} | {f.contents} | {inputs} |")
    return "\n".join(lines) + "\n"
