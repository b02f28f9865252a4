"""config.json of transformers 4 and 5: read right, or refused by name with every fault in one error."""

from __future__ import annotations

from typing import Any

import pytest

from kestrel.checkpoints.hf_config import parse_hf_config
from kestrel.config import ModelConfig, MoeConfig, RopeConfig
from kestrel.errors import ModelError

DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 160,
    "max_position_embeddings": 4096,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 384,
}
MOE = {
    **{k: v for k, v in DENSE.items() if k != "max_window_layers"},
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
LLAMA = {
    **{k: v for k, v in DENSE.items() if "window" not in k},
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "mlp_bias": False,
    "pretraining_tp": 1,
}


def parse(
    base: dict[str, Any], *, q_rows: int | None = None, kv_rows: int | None = None, **changes: Any
) -> ModelConfig:
    """Parse ``base`` with changes; a change to ``...`` removes the key."""
    raw = {**base, **changes}
    raw = {key: value for key, value in raw.items() if value is not ...}
    return parse_hf_config(raw, "config.json", q_rows=q_rows, kv_rows=kv_rows)


def faults(base: dict[str, Any], **changes: Any) -> list[str]:
    with pytest.raises(ModelError) as caught:
        parse(base, **changes)
    return caught.value.faults


def only_fault(base: dict[str, Any], **changes: Any) -> str:
    (fault,) = faults(base, **changes)
    return fault


# -- what is read --------------------------------------------------------------------------------------------


def test_dense_model() -> None:
    assert parse(DENSE) == ModelConfig(
        family="qwen3",
        vocab_size=384,
        hidden_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=160,
        rms_norm_eps=1e-6,
        max_position=4096,
        rope=RopeConfig(theta=1e6),
        tie_word_embeddings=False,
        qk_norm=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_llama_has_no_qk_norm() -> None:
    config = parse(LLAMA)
    assert (config.family, config.qk_norm, config.moe) == ("llama", False, None)


def test_transformers_5_names_equal_those_of_4() -> None:
    five = {
        "rope_theta": ...,
        "rope_scaling": ...,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "num_experts": ...,
        "num_local_experts": 8,
        "torch_dtype": ...,
        "dtype": "bfloat16",
        "transformers_version": "5.17.0",
    }
    four = {"torch_dtype": "bfloat16", "rope_scaling": None, "transformers_version": "4.51.0"}
    assert parse(MOE, **five) == parse(MOE, **four)


def test_expert_counts_that_disagree() -> None:
    assert only_fault(MOE, num_local_experts=4) == "num_experts 8 contradicts num_local_experts 4"
    assert parse(MOE, num_local_experts=8).moe == parse(MOE).moe


@pytest.mark.parametrize(("value", "expected"), [(True, True), (False, False), (..., False), (None, False)])
def test_norm_topk_prob_absent_is_false(value: Any, expected: bool) -> None:
    moe = parse(MOE, norm_topk_prob=value).moe
    assert moe is not None
    assert moe.norm_topk_prob is expected


@pytest.mark.parametrize(
    ("step", "only_dense", "dense"),
    [
        (1, [], ()),
        (1, [0, 2], (0, 2)),
        (2, [], (0, 2)),
        (2, [1], (0, 1, 2)),
        (4, [], (0, 1, 2)),
        (..., ..., ()),
        (1, None, ()),
    ],
)
def test_dense_layers_of_a_moe(step: Any, only_dense: Any, dense: tuple[int, ...]) -> None:
    config = parse(MOE, decoder_sparse_step=step, mlp_only_layers=only_dense)
    assert config.moe == MoeConfig(8, 2, 64, True, dense)
    assert [config.is_moe_layer(i) for i in range(4)] == [i not in dense for i in range(4)]


@pytest.mark.parametrize(
    ("base", "q_rows", "expected"),
    [
        (LLAMA, None, 24),  # hidden / heads
        (LLAMA, 256, 64),  # the tensor decides
        (DENSE, None, 128),  # the class's default
        (DENSE, 4 * 24, 24),
        (MOE, None, 24),
    ],
)
@pytest.mark.parametrize("absent", [..., None])
def test_head_dim_absent(base: dict[str, Any], q_rows: int | None, expected: int, absent: Any) -> None:
    assert parse(base, head_dim=absent, q_rows=q_rows).head_dim == expected


def test_head_dim_absent_and_not_derivable() -> None:
    assert "no multiple of 5 heads" in faults(LLAMA, head_dim=..., num_attention_heads=5)[0]


def test_kv_heads_absent() -> None:
    assert parse(LLAMA, num_key_value_heads=...).num_kv_heads == 4
    assert parse(LLAMA, num_key_value_heads=None).num_kv_heads == 4
    assert parse(DENSE, num_key_value_heads=..., kv_rows=32).num_kv_heads == 1
    assert "4 query heads do not divide among 32" in only_fault(DENSE, num_key_value_heads=...)


@pytest.mark.parametrize(
    ("value", "expected"), [(2, (2,)), ([3, 2, 3], (3, 2)), (None, ()), ([], ()), (..., ())]
)
def test_eos_ids(value: Any, expected: tuple[int, ...]) -> None:
    assert parse(DENSE, eos_token_id=value).eos_token_ids == expected


def test_architecture_from_model_type_alone() -> None:
    assert parse(LLAMA, architectures=...).family == "llama"


def test_llama_defaults_of_absent_token_ids() -> None:
    config = parse(LLAMA, bos_token_id=..., eos_token_id=...)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


# -- RoPE ----------------------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize("style", [4, 5])
@pytest.mark.parametrize("name", ["rope_type", "type"])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (YARN, RopeConfig(1e6, "yarn", 4.0, 1024)),
        ({**YARN, "attention_factor": 0.5}, RopeConfig(1e6, "yarn", 4.0, 1024, attention_factor=0.5)),
        ({**YARN, "beta_fast": 16, "beta_slow": 2}, RopeConfig(1e6, "yarn", 4.0, 1024, None, 16.0, 2.0)),
        ({**YARN, "truncate": False}, RopeConfig(1e6, "yarn", 4.0, 1024, truncate=False)),
        (
            {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
            RopeConfig(1e6, "yarn", 4.0, 1024, mscale=1.0, mscale_all_dim=0.5),
        ),
        ({"rope_type": "yarn", "factor": 2}, RopeConfig(1e6, "yarn", 2.0, 4096)),
        ({"rope_type": "linear", "factor": 2}, RopeConfig(1e6, "linear", 2.0)),
        (
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
            RopeConfig(1e6, "llama3", 32.0, 1024, low_freq_factor=1.0, high_freq_factor=4.0),
        ),
        ({"rope_type": "default"}, RopeConfig(1e6)),
    ],
)
def test_scaled_rope(style: int, name: str, fields: dict[str, Any], expected: RopeConfig) -> None:
    fields = {name if key == "rope_type" else key: value for key, value in fields.items()}
    if style == 4:
        assert parse(DENSE, rope_scaling=fields).rope == expected
    else:
        assert parse(DENSE, rope_theta=..., rope_parameters={**fields, "rope_theta": 1e6}).rope == expected


def test_context_that_yarn_reaches() -> None:
    """As Qwen3's model card says to extend it: the scaling alone is added, the limit is left as it was."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert parse(DENSE, max_position_embeddings=40960, rope_scaling=scaling).max_position == 131072
    assert parse(DENSE, max_position_embeddings=200000, rope_scaling=scaling).max_position == 200000
    assert parse(DENSE, rope_scaling={"rope_type": "linear", "factor": 4.0}).max_position == 4096


def test_original_context_beside_the_scaling_object_wins() -> None:
    assert (
        parse(DENSE, rope_scaling=YARN, original_max_position_embeddings=512).rope.original_max_position
        == 512
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "mrope"}}, "rope type 'mrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, "contradicts rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {**YARN, "attn_factor": 0.8}}, "rope_scaling.attn_factor is not supported"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "rope_scaling.factor must be a number"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0.0}},
            "rope factor must be 1e-09 to 1e+09, not 0.0",
        ),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta 1000000.0 contradicts"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is not supported"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters.full_attention is not supported",
        ),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN}, "contradict each other"),
        ({"rope_theta": "10000"}, "rope_theta must be a number"),
        ({"rope_theta": 0.5}, "rope theta must be above 1"),
    ],
)
def test_rope_refused(changes: dict[str, Any], words: str) -> None:
    assert any(words in fault for fault in faults(DENSE, **changes))


# -- refused by name -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (DENSE, {"attention_bias": True}),
        (LLAMA, {"mlp_bias": True}),
        (DENSE, {"hidden_act": "gelu"}),
        (LLAMA, {"pretraining_tp": 2}),
        (LLAMA, {"partial_rotary_factor": 0.5}),
        (LLAMA, {"rope_interleaved": True}),
        (DENSE, {"final_logit_softcapping": 30.0}),
        (DENSE, {"attn_logit_softcapping": 50.0}),
        (DENSE, {"logit_scale": 0.0625}),
        (LLAMA, {"residual_multiplier": 0.22}),
        (LLAMA, {"embedding_multiplier": 12.0}),
        (LLAMA, {"attention_multiplier": 0.0078125}),
        (LLAMA, {"logits_scaling": 8.0}),
        (DENSE, {"query_pre_attn_scalar": 256}),
        (DENSE, {"quantization_config": {"quant_method": "fp8"}}),
        (MOE, {"shared_expert_intermediate_size": 512}),
        (MOE, {"n_group": 8}),
        (MOE, {"routed_scaling_factor": 2.5}),
        (DENSE, {"auto_map": {"AutoModel": "modeling.Custom"}}),
        (DENSE, {"some_new_trick": 7}),
        (DENSE, {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 1}),
        (LLAMA, {"sliding_window": 512}),
        (MOE, {"sliding_window": 512, "use_sliding_window": True}),
        (DENSE, {"layer_types": ["full_attention", "sliding_attention"]}),
    ],
)
def test_feature_that_changes_the_mathematics(base: dict[str, Any], changes: dict[str, Any]) -> None:
    name = next(iter(changes))
    assert name in only_fault(base, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_dropout": 0.1},
        {"initializer_range": 0.1},
        {"torch_dtype": "float16"},
        {"transformers_version": "4.40.0"},
        {"use_cache": False},
        {"pad_token_id": 0},
        {"some_new_trick": None},
        {"some_new_trick": False},
        {"hidden_act": "swish"},
        {"partial_rotary_factor": 1.0},
        {"sliding_window": 512},  # use_sliding_window is false
        {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 2},  # no layer uses it
        {"layer_types": ["full_attention", "full_attention"]},
        {"quantization_config": None},
        {"rope_scaling": {}},
    ],
)
def test_harmless(changes: dict[str, Any]) -> None:
    assert parse(DENSE, **changes) == parse(DENSE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["Gemma3ForCausalLM"]}, "architecture Gemma3ForCausalLM is not supported"),
        ({"architectures": []}, "is not supported"),
        ({"architectures": ..., "model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"architectures": ..., "model_type": ...}, "is not supported"),
        ({"model_type": "llama"}, "contradicts architecture Qwen3ForCausalLM"),
        ({"vocab_size": ...}, "vocab_size is missing"),
        ({"hidden_size": "96"}, "hidden_size must be an integer of at least 1, not '96'"),
        ({"hidden_size": True}, "hidden_size must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1"),
        ({"num_key_value_heads": 3}, "4 query heads do not divide among 3 KV heads"),
        ({"head_dim": 33}, "head_dim 33 is not supported"),
        ({"head_dim": 512}, "head_dim 512 is not supported"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must lie between 0 and 1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number"),
        ({"eos_token_id": "2"}, "eos_token_id must be an integer or a list"),
        ({"eos_token_id": 384}, "eos_token_id 384 is outside the vocabulary of 384"),
        ({"bos_token_id": [1]}, "bos_token_id must be an integer"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
    ],
)
def test_malformed(changes: dict[str, Any], words: str) -> None:
    assert any(words in fault for fault in faults(DENSE, **changes))


def test_moe_limits() -> None:
    assert "cannot choose 9 of 8 experts" in only_fault(MOE, num_experts_per_tok=9)
    assert "num_experts is missing" in faults(MOE, num_experts=...)[0]
    assert "mlp_only_layers must be a list of layers 0 to 3" in only_fault(MOE, mlp_only_layers=[4])


def test_mistral_only_without_its_window() -> None:
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    mistral = {k: v for k, v in mistral.items() if k not in ("mlp_bias", "pretraining_tp")}
    assert parse(mistral, sliding_window=None).family == "llama"
    assert "sliding_window 4096 is in use" in only_fault(mistral, sliding_window=4096)
    assert "default of an absent key" in only_fault(mistral)


def test_every_fault_in_one_error() -> None:
    found = faults(
        DENSE,
        hidden_size=...,
        attention_bias=True,
        some_new_trick=1,
        rope_scaling={"rope_type": "unknown"},
        eos_token_id="x",
        tie_word_embeddings=0,
    )
    for name in (
        "hidden_size",
        "attention_bias",
        "some_new_trick",
        "unknown",
        "eos_token_id",
        "tie_word_embeddings",
    ):
        assert any(name in fault for fault in found), name


def test_json_round_trip() -> None:
    for base in (DENSE, MOE, LLAMA):
        config = parse(base, rope_scaling=YARN)
        assert ModelConfig.from_json(config.to_json_values()) == (config, [])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"surprise": 1}, "unknown key 'surprise'"),
        ({"hidden_size": 1.5}, "config.hidden_size must be int"),
        ({"family": "gpt2"}, "config.family is 'gpt2', not one of"),
        ({"rope": {"theta": 1.0}}, "config.rope.type is missing"),
        ({"moe": 3}, "config.moe must be an object"),
        ({"num_kv_heads": 3}, "do not divide"),
        ({"eos_token_ids": [True]}, "list of integers"),
    ],
)
def test_json_faults(change: dict[str, Any], words: str) -> None:
    config, found = ModelConfig.from_json({**parse(DENSE).to_json_values(), **change})
    assert config is None
    assert any(words in fault for fault in found)
