"""A Hugging Face ``config.json``, by transformers 4 or 5, as a ``ModelConfig``.

Nothing is ignored in silence: a key is read, or known to leave the mathematics alone, or holds the value that
switches its feature off, or the model is refused with the key's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from kestrel.config import MAX_LAYERS, MAX_SIZE, Family, ModelConfig, MoeConfig, RopeConfig
from kestrel.errors import ModelError, shown


@dataclass(frozen=True)
class _Architecture:
    family: Family
    model_type: str
    head_dim: int | None  # taken when config.json has none; None: hidden_size / num_attention_heads
    num_kv_heads: int | None  # likewise; None: num_attention_heads
    max_position: int
    bos: int | None
    eos: int | None
    window: Literal["absent", "switched", "always"]  # switched: only with use_sliding_window


# Defaults are those of the transformers classes.
_ARCHITECTURES = {
    "LlamaForCausalLM": _Architecture("llama", "llama", None, None, 2048, 1, 2, "absent"),
    # Without its window a Mistral computes what a Llama computes.
    "MistralForCausalLM": _Architecture("llama", "mistral", None, 8, 131072, 1, 2, "always"),
    "Qwen3ForCausalLM": _Architecture("qwen3", "qwen3", 128, 32, 32768, None, None, "switched"),
    "Qwen3MoeForCausalLM": _Architecture("qwen3_moe", "qwen3_moe", None, 4, 32768, None, None, "switched"),
}

# Not read, because the mathematics does not depend on them: training, storage, generation defaults (those
# that matter come from generation_config.json), bookkeeping of libraries.
_HARMLESS = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "bad_words_ids",
        "begin_suppress_tokens",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "model_type",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "output_scores",
        "pad_token_id",
        "prefix",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "resid_pdrop",
        "return_dict",
        "return_dict_in_generate",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    ]
)

# Features that kestrel does not compute, with the values that switch them off.
_OFF: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "attn_bias": (False, None),
    "mlp_bias": (False, None),
    "qkv_bias": (False, None),
    "bias": (False, None),
    "hidden_act": ("silu", "swish", None),
    "hidden_activation": ("silu", "swish", None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, 1.0, None),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
    "logit_scale": (1, 1.0, None),
    "logits_scaling": (1, 1.0, None),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "residual_multiplier": (1, 1.0, None),
    "embedding_multiplier": (1, 1.0, None),
    "auto_map": ({}, None),
    "is_encoder_decoder": (False, None),
    "is_decoder": (False, True, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "compression_config": (None,),
    "n_group": (1, None),
    "topk_group": (1, None),
    "n_shared_experts": (0, None),
    "shared_expert_intermediate_size": (0, None),
    "routed_scaling_factor": (1, 1.0, None),
}

_ROPE_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "yarn": frozenset(
        [
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ]
    ),
    "llama3": frozenset(
        ["factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"]
    ),
}


def parse_hf_config(
    raw: dict[str, Any], where: str, *, q_rows: int | None = None, kv_rows: int | None = None
) -> ModelConfig:
    """The ``ModelConfig`` of a config.json.

    ``q_rows`` and ``kv_rows`` are the output sizes of the checkpoint's first q_proj and k_proj, where known:
    they decide ``head_dim`` and ``num_key_value_heads`` when the config does not name them.

    Raises ``ModelError`` with every key that is missing, malformed or not supported.
    """
    config, faults = read_hf_config(raw, q_rows=q_rows, kv_rows=kv_rows)
    if config is None or faults:
        raise ModelError(where, faults)
    return config


def read_hf_config(
    raw: dict[str, Any], *, q_rows: int | None = None, kv_rows: int | None = None
) -> tuple[ModelConfig | None, list[str]]:
    """As ``parse_hf_config``, with the faults beside the config.

    A config with faults is one whose shape is sound, so that tensors can be checked against it, but that asks
    for something kestrel does not compute; without a sound shape it is ``None``.
    """
    parser = _Parser(raw)
    config = parser.parse(q_rows, kv_rows)
    if config is None or parser.incomplete:
        return None, parser.faults
    impossible = config.faults()
    return (None if impossible else config), parser.faults + impossible


class _Parser:
    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw
        self.read: set[str] = set()
        self.faults: list[str] = []
        self.incomplete = False  # a value of the shape is missing or malformed

    # -- typed reading -------------------------------------------------------------------------------------

    def _get(
        self, key: str, default: Any, check: Callable[[Any], bool], kind: str, required: bool = False
    ) -> Any:
        self.read.add(key)
        value = self.raw.get(key)
        if value is None:
            if required:
                self.faults.append(f"{key} is missing")
                self.incomplete = True
            return default
        if not check(value):
            self.faults.append(f"{key} must be {kind}, not {shown(value)}")
            self.incomplete = True
            return default
        return value

    def _int(self, key: str, default: int | None = None, *, required: bool = False) -> int:
        value = self._get(
            key,
            default,
            lambda v: type(v) is int and 1 <= v <= MAX_SIZE,
            "an integer of at least 1",
            required,
        )
        return 1 if value is None else value  # 1 stands in where a fault was noted

    def _float(self, key: str, default: float) -> float:
        return float(self._get(key, default, _is_number, "a number"))

    def _bool(self, key: str, default: bool) -> bool:
        return bool(self._get(key, default, lambda v: type(v) is bool, "true or false"))

    # -- the config ----------------------------------------------------------------------------------------

    def parse(self, q_rows: int | None, kv_rows: int | None) -> ModelConfig | None:
        architecture = self._architecture()
        if architecture is None:
            return None
        hidden, layers = (
            self._int("hidden_size", required=True),
            self._int("num_hidden_layers", required=True),
        )
        heads = self._int("num_attention_heads", required=True)
        head_dim = self._head_dim(architecture, hidden, heads, q_rows)
        max_position = self._int("max_position_embeddings", architecture.max_position)
        self._check_window(architecture, layers)
        rope = self._rope(max_position)
        moe = self._moe(layers) if architecture.family == "qwen3_moe" else None
        needs_dense = moe is None or bool(moe.dense_layers)
        config = ModelConfig(
            family=architecture.family,
            vocab_size=self._int("vocab_size", required=True),
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=self._kv_heads(architecture, heads, head_dim, kv_rows),
            head_dim=head_dim,
            intermediate_size=self._int("intermediate_size", required=needs_dense),
            rms_norm_eps=self._float("rms_norm_eps", 1e-6),
            max_position=rope.reach(max_position),
            rope=rope,
            tie_word_embeddings=self._bool("tie_word_embeddings", False),
            qk_norm=architecture.family != "llama",
            moe=moe,
            bos_token_id=self._bos(architecture),
            eos_token_ids=self._eos(architecture),
        )
        self._check_rest()
        return config

    def _architecture(self) -> _Architecture | None:
        names = self.raw.get("architectures")
        model_type = self.raw.get("model_type")
        supported = ", ".join(_ARCHITECTURES)
        if names is None:
            for architecture in _ARCHITECTURES.values():
                if architecture.model_type == model_type:
                    return architecture
            self.faults.append(
                f"model_type {shown(model_type)} is not supported (no architectures given); "
                f"supported: {supported}"
            )
            return None
        if not isinstance(names, list) or len(names) != 1 or names[0] not in [*_ARCHITECTURES]:
            listed = (
                ", ".join(n if isinstance(n, str) else shown(n) for n in names)
                if isinstance(names, list)
                else shown(names)
            )
            self.faults.append(
                f"architecture {listed or 'list, empty,'} is not supported; supported: {supported}"
            )
            return None
        found = _ARCHITECTURES[names[0]]
        if model_type is not None and model_type != found.model_type:
            self.faults.append(f"model_type {shown(model_type)} contradicts architecture {names[0]}")
        return found

    def _head_dim(self, architecture: _Architecture, hidden: int, heads: int, q_rows: int | None) -> int:
        if self.raw.get("head_dim") is not None:
            return self._int("head_dim")
        self.read.add("head_dim")
        if q_rows is not None and q_rows % heads == 0:
            return q_rows // heads
        if architecture.head_dim is not None:
            return architecture.head_dim
        if hidden % heads and not self.faults:
            self.faults.append(f"head_dim is absent and hidden_size {hidden} is no multiple of {heads} heads")
            self.incomplete = True
        return max(1, hidden // heads)

    def _kv_heads(self, architecture: _Architecture, heads: int, head_dim: int, kv_rows: int | None) -> int:
        if "num_key_value_heads" in self.raw:
            return self._int("num_key_value_heads", heads)  # null means one per query head
        if kv_rows is not None and kv_rows % head_dim == 0:
            return kv_rows // head_dim
        return architecture.num_kv_heads or heads

    def _check_window(self, architecture: _Architecture, layers: int) -> None:
        """Refuse a model that any layer of which attends through a sliding window."""
        self.read |= {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
        types = self.raw.get("layer_types")
        window = self.raw.get("sliding_window", 4096 if architecture.window == "always" else None)
        switched_on = self.raw.get("use_sliding_window", architecture.window != "switched")
        first = self.raw.get("max_window_layers", 28) if architecture.family == "qwen3" else 0
        if types is not None:
            if not isinstance(types, list) or len(types) != layers:
                self.faults.append(f"layer_types must be a list of {layers} names, not {shown(types)}")
                return
            other = sorted({str(t) for t in types} - {"full_attention"})
            if other:
                self.faults.append(
                    f"layer_types {', '.join(other)} not supported: every layer must be full_attention"
                )
            return
        if architecture.window == "absent" and "use_sliding_window" not in self.raw:
            switched_on = window is not None
        if switched_on and window is not None and not (type(first) is int and first >= layers):
            given = "" if "sliding_window" in self.raw else " (the default of an absent key)"
            self.faults.append(
                f"sliding_window {shown(window)}{given} is in use: windowed attention is not supported"
            )

    def _moe(self, layers: int) -> MoeConfig:
        # One number under two names: transformers 5 writes num_local_experts.
        self.read |= {"num_experts", "num_local_experts"}
        names = [name for name in ("num_experts", "num_local_experts") if self.raw.get(name) is not None]
        if len(names) == 2 and self.raw["num_experts"] != self.raw["num_local_experts"]:
            self.faults.append(
                f"num_experts {shown(self.raw['num_experts'])} contradicts "
                f"num_local_experts {shown(self.raw['num_local_experts'])}"
            )
        experts = self._int(names[0] if names else "num_experts", required=True)
        step = self._int("decoder_sparse_step", 1)
        only_dense = self._get(
            "mlp_only_layers",
            [],
            lambda v: isinstance(v, list) and all(type(i) is int and 0 <= i < layers for i in v),
            f"a list of layers 0 to {layers - 1}",
        )
        dense = tuple(i for i in range(min(layers, MAX_LAYERS)) if i in only_dense or (i + 1) % step)
        return MoeConfig(
            num_experts=experts,
            top_k=self._int("num_experts_per_tok", required=True),
            intermediate_size=self._int("moe_intermediate_size", required=True),
            norm_topk_prob=self._bool("norm_topk_prob", False),
            dense_layers=dense,
        )

    def _bos(self, architecture: _Architecture) -> int | None:
        self.read.add("bos_token_id")
        value = self.raw.get("bos_token_id", architecture.bos)
        if value is not None and type(value) is not int:
            self.faults.append(f"bos_token_id must be an integer, not {shown(value)}")
            return None
        return value

    def _eos(self, architecture: _Architecture) -> tuple[int, ...]:
        self.read.add("eos_token_id")
        ids = token_ids(self.raw.get("eos_token_id", architecture.eos))
        if ids is None:
            self.faults.append(
                f"eos_token_id must be an integer or a list, not {shown(self.raw['eos_token_id'])}"
            )
        return ids or ()

    # -- RoPE ----------------------------------------------------------------------------------------------

    def _rope(self, max_position: int) -> RopeConfig:
        self.read |= {"rope_scaling", "rope_parameters", "rope_theta", "original_max_position_embeddings"}
        given = {}
        for key in ("rope_parameters", "rope_scaling"):
            value = self.raw.get(key)
            if value is not None and not isinstance(value, dict):
                self.faults.append(f"{key} must be an object, not {shown(value)}")
            elif value:
                given[key] = {k: v for k, v in value.items() if v is not None}
        if len(given) == 2 and _rope_items(given["rope_parameters"]) != _rope_items(given["rope_scaling"]):
            self.faults.append("rope_parameters and rope_scaling contradict each other")
        rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
        where = "rope_parameters" if given.get("rope_parameters") else "rope_scaling"

        theta = self._rope_number(rope, where, "rope_theta", None)
        top_theta = self.raw.get("rope_theta")
        if top_theta is not None and not _is_number(top_theta):
            self.faults.append(f"rope_theta must be a number, not {shown(top_theta)}")
        elif top_theta is not None and theta is not None and float(top_theta) != theta:
            self.faults.append(f"rope_theta {shown(top_theta)} contradicts {where}.rope_theta {theta!r}")
        elif theta is None:
            theta = None if top_theta is None else float(top_theta)
        theta = 10000.0 if theta is None else theta

        kind = rope.get("rope_type", rope.get("type", "default"))
        if "type" in rope and rope["type"] != kind:
            self.faults.append(f"{where}.type {shown(rope['type'])} contradicts rope_type {shown(kind)}")
        if kind not in [*_ROPE_KEYS]:
            self.faults.append(
                f"rope type {shown(kind)} is not supported; supported: {', '.join(_ROPE_KEYS)}"
            )
            return RopeConfig(theta=theta)
        known = _ROPE_KEYS[kind] | {"rope_type", "type", "rope_theta"}
        if rope.get("partial_rotary_factor") in (1, 1.0):
            known |= {"partial_rotary_factor"}
        for key in rope:
            if key not in known:
                self.faults.append(f"{where}.{key} is not supported with rope type {shown(kind)}")
        if kind == "default":
            return RopeConfig(theta=theta)
        return self._scaled_rope(kind, theta, rope, where, max_position)

    def _scaled_rope(
        self, kind: Any, theta: float, rope: dict[str, Any], where: str, max_position: int
    ) -> RopeConfig:
        original: int | None = None
        if kind in ("yarn", "llama3"):
            # A value beside the scaling object takes precedence, as in transformers.
            original = self.raw.get("original_max_position_embeddings")
            if original is None:
                original = rope.get("original_max_position_embeddings", max_position)
            if type(original) is not int or not 1 <= original <= MAX_SIZE:
                self.faults.append(
                    "original_max_position_embeddings must be an integer of at least 1, "
                    f"not {shown(original)}"
                )
                original = max_position
        factor = self._rope_number(rope, where, "factor", None)
        if factor is None and "factor" not in rope:
            if kind == "yarn" and original is not None and original < max_position:
                factor = max_position / original
            else:
                self.faults.append(f"{where}.factor is missing for rope type {shown(kind)}")
        default = RopeConfig()
        if kind == "llama3":
            for key in ("low_freq_factor", "high_freq_factor"):
                if key not in rope:
                    self.faults.append(f"{where}.{key} is missing for rope type 'llama3'")
        truncate = rope.get("truncate", True)
        if type(truncate) is not bool:
            self.faults.append(f"{where}.truncate must be true or false, not {shown(truncate)}")
            truncate = True

        def number(key: str, fallback: float) -> float:
            value = self._rope_number(rope, where, key, None)
            return fallback if value is None else value

        return RopeConfig(
            theta=theta,
            type=kind,
            factor=1.0 if factor is None else factor,
            original_max_position=original,
            attention_factor=self._rope_number(rope, where, "attention_factor", None),
            # Zero means the default, as in transformers.
            beta_fast=number("beta_fast", 0.0) or default.beta_fast,
            beta_slow=number("beta_slow", 0.0) or default.beta_slow,
            mscale=self._rope_number(rope, where, "mscale", None),
            mscale_all_dim=self._rope_number(rope, where, "mscale_all_dim", None),
            truncate=truncate,
            low_freq_factor=number("low_freq_factor", default.low_freq_factor),
            high_freq_factor=number("high_freq_factor", default.high_freq_factor),
        )

    def _rope_number(self, rope: dict[str, Any], where: str, key: str, default: float | None) -> float | None:
        value = rope.get(key)
        if value is None:
            return default
        if not _is_number(value):
            self.faults.append(f"{where}.{key} must be a number, not {shown(value)}")
            return default
        return float(value)

    # -- everything else -----------------------------------------------------------------------------------

    def _check_rest(self) -> None:
        for key, value in self.raw.items():
            if key in self.read or key in _HARMLESS:
                continue
            if key in _OFF:
                if not any(type(value) is type(off) and value == off for off in _OFF[key]):
                    self.faults.append(f"{key} = {shown(value)} is not supported")
            elif value not in (None, False, [], {}, ""):
                self.faults.append(f"unknown key {key} = {shown(value)}: it may change the mathematics")


def token_ids(value: object) -> tuple[int, ...] | None:
    """The ids of an ``eos_token_id`` value (null, an integer, a list), in order; ``None`` when malformed."""
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    if not all(type(v) is int for v in values):
        return None
    return tuple(dict.fromkeys(values))


def _is_number(value: object) -> bool:
    """A finite number; an integer beyond every float is none."""
    try:
        return type(value) in (int, float) and math.isfinite(float(value))  # type: ignore[arg-type]
    except OverflowError:
        return False


def _rope_items(rope: dict[str, Any]) -> dict[str, Any]:
    items = {key: value for key, value in rope.items() if key not in ("type", "rope_type")}
    return items | {"rope_type": rope.get("rope_type", rope.get("type", "default"))}
