"""The shape of a model, frozen, and its JSON form in a kestrel folder."""

from __future__ import annotations

import types
import typing
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kestrel.errors import shown

Family = Literal["llama", "qwen3", "qwen3_moe"]

MAX_SIZE = 2**31 - 1  # of any dimension: kernels and positions count in 32 bits
MAX_LAYERS = MAX_EXPERTS = 1024  # several times the largest published; bounds the work on a damaged file
_ROPE_LIMIT = 1e9  # of factors, and of their inverse: beyond it a frequency is no longer a number


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding, contract section 5; ``kestrel.rope`` turns it into frequencies."""

    theta: float = 10000.0
    type: Literal["default", "linear", "yarn", "llama3"] = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    # yarn
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def reach(self, max_position: int) -> int:
        """Positions the model can use: yarn stretches its original context, whatever the config's limit."""
        if self.type != "yarn" or self.original_max_position is None:
            return max_position
        # In this order a factor that is not finite (refused later, by name) gives a number too.
        return int(max(max_position, min(MAX_SIZE, self.original_max_position * self.factor)))


@dataclass(frozen=True)
class MoeConfig:
    num_experts: int
    top_k: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool
    dense_layers: tuple[int, ...] = ()  # layers that keep a dense FFN


@dataclass(frozen=True)
class ModelConfig:
    """A frozen description; every backend and tool works from this alone."""

    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of the dense FFN
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qk_norm: bool
    moe: MoeConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.moe.dense_layers

    def to_json_values(self) -> dict[str, Any]:
        """What ``json`` can write; ``from_json`` gives an equal config back."""
        values = asdict(self)
        values["eos_token_ids"] = list(self.eos_token_ids)
        if self.moe is not None:
            values["moe"]["dense_layers"] = list(self.moe.dense_layers)
        return values

    @staticmethod
    def from_json(raw: object) -> tuple[ModelConfig | None, list[str]]:
        """The config, or the list of every fault: unknown or missing keys, wrong types, impossible values."""
        faults: list[str] = []
        config = _dataclass_from_json(ModelConfig, raw, "config", faults)
        if config is not None:
            faults += config.faults()
        return (None, faults) if faults else (config, [])

    def faults(self) -> list[str]:
        """What makes this shape impossible, or one that kestrel does not run; empty when it is sound."""
        faults = [
            f"{name} must be 1 to {most}, not {shown(getattr(self, name))}"
            for name, most in (
                ("vocab_size", MAX_SIZE),
                ("hidden_size", MAX_SIZE),
                ("num_layers", MAX_LAYERS),
                ("num_heads", MAX_SIZE),
                ("num_kv_heads", MAX_SIZE),
                ("head_dim", MAX_SIZE),
                ("max_position", MAX_SIZE),
            )
            if not 1 <= getattr(self, name) <= most
        ]
        if faults:
            return faults
        if self.num_heads % self.num_kv_heads:
            faults.append(f"{self.num_heads} query heads do not divide among {self.num_kv_heads} KV heads")
        if self.head_dim % 2 or self.head_dim > 256:
            faults.append(f"head_dim {self.head_dim} is not supported: it must be even and at most 256")
        if not 0.0 < self.rms_norm_eps < 1.0:
            faults.append(f"rms_norm_eps must lie between 0 and 1, not {self.rms_norm_eps}")
        has_dense = self.moe is None or bool(self.moe.dense_layers)
        if not (1 if has_dense else 0) <= self.intermediate_size <= MAX_SIZE:
            faults.append(f"intermediate_size must be 1 to {MAX_SIZE}, not {shown(self.intermediate_size)}")
        faults += self._moe_faults() + self._rope_faults()
        ids = [("bos_token_id", self.bos_token_id), *(("eos_token_id", i) for i in self.eos_token_ids)]
        faults += [
            f"{name} {shown(token)} is outside the vocabulary of {self.vocab_size}"
            for name, token in ids
            if token is not None and not 0 <= token < self.vocab_size
        ]
        return faults

    def _moe_faults(self) -> list[str]:
        if (self.moe is not None) != (self.family == "qwen3_moe"):
            return [f"family {self.family} {'has no' if self.moe else 'needs'} experts"]
        if self.moe is None:
            return []
        faults = []
        if not 1 <= self.moe.top_k <= self.moe.num_experts <= MAX_EXPERTS:
            chosen, experts = shown(self.moe.top_k), shown(self.moe.num_experts)
            faults.append(f"cannot choose {chosen} of {experts} experts (at most {MAX_EXPERTS})")
        if not 1 <= self.moe.intermediate_size <= MAX_SIZE:
            size = shown(self.moe.intermediate_size)
            faults.append(f"experts' intermediate size must be 1 to {MAX_SIZE}, not {size}")
        if any(not 0 <= layer < self.num_layers for layer in self.moe.dense_layers):
            faults.append(f"dense layers {list(self.moe.dense_layers)} exceed the {self.num_layers} layers")
        return faults

    def _rope_faults(self) -> list[str]:
        rope, faults = self.rope, []
        if not 1.0 < rope.theta < float("inf"):
            faults.append(f"rope theta must be above 1 and finite, not {rope.theta}")
        scales: list[tuple[str, float | None]] = [("rope factor", rope.factor)]
        if rope.type == "yarn":
            scales += [
                ("yarn attention_factor", rope.attention_factor),
                ("yarn beta_fast", rope.beta_fast),
                ("yarn beta_slow", rope.beta_slow),
            ]
            faults += [
                f"yarn {name} must be 0 to {_ROPE_LIMIT:g}, not {value}"
                for name, value in (("mscale", rope.mscale), ("mscale_all_dim", rope.mscale_all_dim))
                if value is not None and not 0.0 <= value <= _ROPE_LIMIT
            ]
        if rope.type == "llama3":
            scales += [
                ("llama3 low_freq_factor", rope.low_freq_factor),
                ("llama3 high_freq_factor", rope.high_freq_factor),
            ]
        faults += [
            f"{name} must be {1 / _ROPE_LIMIT:g} to {_ROPE_LIMIT:g}, not {value}"
            for name, value in scales
            if value is not None and not 1 / _ROPE_LIMIT <= value <= _ROPE_LIMIT
        ]
        original = rope.original_max_position
        if original is not None and not 1 <= original <= MAX_SIZE:
            faults.append(f"rope original_max_position must be 1 to {MAX_SIZE}, not {shown(original)}")
        if rope.type == "yarn" and not rope.beta_slow <= rope.beta_fast:
            faults.append(f"yarn beta_fast {rope.beta_fast} must not be below beta_slow {rope.beta_slow}")
        if rope.type == "llama3" and not rope.low_freq_factor < rope.high_freq_factor:
            faults.append(
                f"llama3 high_freq_factor {rope.high_freq_factor} must exceed "
                f"low_freq_factor {rope.low_freq_factor}"
            )
        return faults


def _dataclass_from_json(cls: Any, raw: object, where: str, faults: list[str]) -> Any:
    if not isinstance(raw, dict):
        faults.append(f"{where} must be an object, not {type(raw).__name__}")
        return None
    before = len(faults)
    hints = get_type_hints(cls)
    faults += [f"{where} has an unknown key {key!r}" for key in raw if key not in hints]
    values = {}
    for field in fields(cls):
        if field.name not in raw:
            faults.append(f"{where}.{field.name} is missing")
        else:
            values[field.name] = _from_json(
                hints[field.name], raw[field.name], f"{where}.{field.name}", faults
            )
    return cls(**values) if len(faults) == before else None


def _from_json(hint: Any, value: object, where: str, faults: list[str]) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        hint = next(option for option in get_args(hint) if option is not type(None))
    if is_dataclass(hint):
        return _dataclass_from_json(hint, value, where, faults)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            faults.append(f"{where} is {shown(value)}, not one of {', '.join(map(str, get_args(hint)))}")
        return value
    if get_origin(hint) is tuple:
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            faults.append(f"{where} must be a list of integers, not {shown(value)}")
            return ()
        return tuple(value)
    if hint is float and type(value) is int and abs(value) <= 2**53:
        return float(value)
    if type(value) is not hint:
        faults.append(f"{where} must be {typing.cast(type, hint).__name__}, not {shown(value)}")
    return value
