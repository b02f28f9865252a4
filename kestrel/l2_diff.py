"""Comparing two L2 dumps: the first key that differs in data-flow order, and what that means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kestrel.errors import KestrelError
from kestrel.l2_dump import Dump
from kestrel.l2_fields import BY_NAME, FIELDS, Key, input_keys

_CACHE = ("k", "ks", "v", "vs")  # fields of the KV cache, which later positions read


@dataclass
class Tally:
    """Keys of one field or one layer."""

    compared: int = 0
    differ: int = 0
    origins: int = 0  # differ although every input was equal
    first: str | None = None  # first that differs

    def count(self, name: str, in_both: bool, inputs_equal: bool) -> None:
        """Count a key that differs or is missing; the first one comes first."""
        self.differ += in_both
        self.origins += inputs_equal
        self.first = self.first or name

    def as_json(self) -> dict[str, Any]:
        return vars(self)


@dataclass
class Input:
    """Something the first difference was computed from."""

    name: str  # a key, or "token id at position 5"
    equal: bool | None  # None: not in the dumps

    def __str__(self) -> str:
        state = {True: "equal", False: "different", None: "not in the dumps"}[self.equal]
        return f"{self.name} ({state})"


@dataclass
class Difference:
    """The first key that differs."""

    key: Key
    hash_a: int | None  # None: the key is missing there
    hash_b: int | None
    inputs: list[Input]

    @property
    def inputs_equal(self) -> bool | None:
        states = [item.equal for item in self.inputs]
        if False in states:
            return False
        return None if not states or None in states else True

    def as_json(self) -> dict[str, Any]:
        return {
            "key": str(self.key),
            "position": self.key.position,
            "layer": self.key.layer,
            "field": self.key.field,
            "operation": BY_NAME[self.key.field].operation,
            "hash_a": _hex(self.hash_a),
            "hash_b": _hex(self.hash_b),
            "inputs_equal": self.inputs_equal,
            "inputs": [vars(item) for item in self.inputs],
        }


@dataclass
class Comparison:
    """What two dumps have and have not in common. ``equal`` decides the exit code."""

    a: Dump
    b: Dump
    compared: int
    differ: int
    only_a: list[str]  # keys missing in b, in data-flow order
    only_b: list[str]
    uneven_level: bool  # one dump is of the extended level: its further fields are not counted as missing
    first: Difference | None
    fields: dict[str, Tally]
    layers: dict[str, Tally]
    first_other_token: int | None  # position of the first token id that differs

    @property
    def equal(self) -> bool:
        return self.differ == 0 and not self.only_a and not self.only_b

    def as_json(self) -> dict[str, Any]:
        return {
            "a": str(self.a.path),
            "b": str(self.b.path),
            "equal": self.equal,
            "compared": self.compared,
            "differ": self.differ,
            "only_a": self.only_a,
            "only_b": self.only_b,
            "uneven_level": self.uneven_level,
            "first_other_token": self.first_other_token,
            "first": None if self.first is None else self.first.as_json(),
            "fields": {name: tally.as_json() for name, tally in self.fields.items()},
            "layers": {name: tally.as_json() for name, tally in self.layers.items()},
        }


def _hex(value: int | None) -> str | None:
    return None if value is None else f"{value:016x}"


def check_comparable(a: Dump, b: Dump) -> None:
    """Raise KestrelError by name when the dumps are of different contracts or weights, or share no key."""
    names = {"contract": "numerics contracts", "weights": "models"}
    for field, what in names.items():
        ours, theirs = a.header.get(field), b.header.get(field)
        if ours is not None and theirs is not None and ours != theirs:
            if field == "weights":
                ours, theirs = (
                    f"{d.header.get('model', '?')} (weights {d.header['weights']})" for d in (a, b)
                )
            raise KestrelError(
                f"dumps of different {what} are not compared: {a.path}: {ours}; {b.path}: {theirs}"
            )
    if not a.hashes.keys() & b.hashes.keys():
        raise KestrelError(f"{a.path} and {b.path} have no key in common: nothing to compare")


def compare(a: Dump, b: Dump) -> Comparison:
    """Compare key by key. Raises KestrelError as ``check_comparable`` does."""
    check_comparable(a, b)
    return _Comparer(a, b).run()


class _Comparer:
    def __init__(self, a: Dump, b: Dump) -> None:
        self.a, self.b = a, b
        levels = {dump.header.get("level") for dump in (a, b)}
        self.uneven = len(levels) == 2 and None not in levels
        self.common = a.hashes.keys() & b.hashes.keys()
        self.keys = a.keys if a.keys.keys() == b.keys.keys() else a.keys | b.keys
        self.layers = 1 + max((key.layer for key in self.keys.values() if key.layer is not None), default=-1)
        self.first_position = min(key.position for key in self.keys.values())
        self.other_cache: dict[int, int] = {}  # layer -> first position with a cache row that differs
        self.lost_cache: dict[int, int] = {}  # layer -> first position with a cache row not in both dumps

    def run(self) -> Comparison:
        a, b = self.a.hashes, self.b.hashes
        only_a, only_b = self._missing(a, b), self._missing(b, a)
        parts = [self.keys[name] for name in self.common]
        fields = {name: Tally(count) for name, count in Counter(key.field for key in parts).items()}
        layers = {
            _layer(number): Tally(count) for number, count in Counter(key.layer for key in parts).items()
        }
        first: Difference | None = None
        other = [name for name in self.common if a[name] != b[name]]
        for name in self._in_order([*other, *only_a, *only_b]):
            key = self.keys[name]
            in_both = name in self.common
            if key.layer is not None and key.field in _CACHE:
                cache = self.other_cache if in_both else self.lost_cache
                cache.setdefault(key.layer, key.position)
            inputs = self._inputs(key)
            for tally in (
                fields.setdefault(key.field, Tally()),
                layers.setdefault(_layer(key.layer), Tally()),
            ):
                tally.count(name, in_both, all(item.equal for item in inputs))
            if first is None:
                first = Difference(key, a.get(name), b.get(name), inputs)
        ordered = {field.name: fields[field.name] for field in FIELDS if field.name in fields}
        return Comparison(
            a=self.a,
            b=self.b,
            compared=len(self.common),
            differ=len(other),
            only_a=only_a,
            only_b=only_b,
            uneven_level=self.uneven,
            first=first,
            fields=ordered,
            layers=dict(sorted(layers.items(), key=lambda item: (item[0] == "after", len(item[0]), item[0]))),
            first_other_token=_first_other_token(self.a, self.b),
        )

    def _in_order(self, names: Iterable[str]) -> list[str]:
        return sorted(names, key=lambda name: self.keys[name].order)

    def _missing(self, here: dict[str, int], there: dict[str, int]) -> list[str]:
        """Keys of ``here`` that ``there`` should have and has not."""
        missing = (name for name in here if name not in there)
        return self._in_order(
            n for n in missing if not (self.uneven and BY_NAME[self.keys[n].field].extended)
        )

    def _inputs(self, key: Key) -> list[Input]:
        a, b = self.a.hashes, self.b.hashes
        names = dict.fromkeys(
            map(str, input_keys(key, self.layers, self.common))
        )  # without repeats, in order
        inputs = [Input(name, a[name] == b[name]) for name in names]
        if key.field == "attn" and key.layer is not None and key.position > 0:
            equal: bool | None = self.other_cache.get(key.layer, key.position) >= key.position
            lost = self.first_position > 0 or self.lost_cache.get(key.layer, key.position) < key.position
            if equal and lost:
                equal = None
            inputs.append(Input(f"cache rows of positions 0..{key.position - 1}", equal))
        if not inputs:  # computed from the embedding
            ours, theirs = self.a.tokens or [], self.b.tokens or []
            known = key.position < min(len(ours), len(theirs))
            equal = ours[key.position] == theirs[key.position] if known else None
            inputs = [Input(f"token id at position {key.position}", equal)]
        return inputs


def _layer(number: int | None) -> str:
    return "after" if number is None else str(number)


def _first_other_token(a: Dump, b: Dump) -> int | None:
    both = zip(a.tokens or [], b.tokens or [], strict=False)
    return next((position for position, (ours, theirs) in enumerate(both) if ours != theirs), None)


# -- text ----------------------------------------------------------------------------------------------------


def report(result: Comparison) -> str:
    """The comparison for a reader."""
    a, b = result.a, result.b
    lines = [f"a: {a.path}{_origin(a)}", f"b: {b.path}{_origin(b)}"]
    if result.uneven_level:
        lines.append("the levels differ: fields that only the extended level has are left out")
    if result.equal:
        return "\n".join([*lines, f"equal: all {result.compared} keys"])
    lines.append(f"different: {result.differ} of {result.compared} keys")
    for name, keys in (("b", result.only_a), ("a", result.only_b)):
        if keys:
            shown = ", ".join(keys[:5]) + (", ..." if len(keys) > 5 else "")
            lines.append(f"missing in {name}: {len(keys)} keys: {shown}")
    if result.first is not None:
        lines += _describe(result.first)
    if result.first_other_token is not None:
        position = result.first_other_token
        prompt = len((a.command or {}).get("prompt_ids", []))
        kind = "prompt" if position < prompt else "generated"
        lines.append(f"first other token: position {position} ({kind})")
    lines += ["", *_table("field", result.fields), "", *_table("layer", result.layers)]
    return "\n".join(lines)


def _origin(dump: Dump) -> str:
    names = ("model", "backend", "isa", "threads", "device", "mode", "level")
    facts = [f"{name} {dump.header[name]}" for name in names if name in dump.header]
    return f" ({', '.join(facts)})" if facts else " (no header)"


def _describe(first: Difference) -> list[str]:
    key = first.key
    field = BY_NAME[key.field]
    where = f"position {key.position}, " + (
        "after the last layer" if key.layer is None else f"layer {key.layer}"
    )
    hashes = " ".join(
        f"{side} {_hex(value) or 'missing'}" for side, value in (("a", first.hash_a), ("b", first.hash_b))
    )
    verdict = {
        True: "its inputs were equal: this operation made the difference",
        False: "its inputs were already different",
        None: "whether its inputs were equal cannot be told from these dumps",
    }[first.inputs_equal]
    return [
        f"first difference: {key}: {hashes}",
        f"  {where}: {field.operation}; {field.contents}",
        f"  {verdict}: {', '.join(map(str, first.inputs))}",
    ]


def _table(title: str, tallies: dict[str, Tally]) -> list[str]:
    """Counts; a layer or field without differences is left out when others have some."""
    rows = [(name, t) for name, t in tallies.items() if t.differ or t.first]
    lines = [f"{title:10} {'differ':>8} {'of':>8} {'origins':>8}  first"]
    lines += [f"{name:10} {t.differ:8} {t.compared:8} {t.origins:8}  {t.first}" for name, t in rows]
    return lines
