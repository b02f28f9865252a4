"""Small random models: as Hugging Face folders, and as ready weights that need no file.

The weights are scaled so that activations stay near 1, attention is neither flat nor one-hot, and the logits
spread by a few units, as in trained models: a mistake then moves logits visibly,
and routing is not degenerate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kestrel.config import Family, ModelConfig, MoeConfig, RopeConfig
from kestrel.ops import WType
from kestrel.weights import QuantTensor, Weights

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
DTYPES: dict[str, tuple[Any, str]] = {
    "bf16": (ml_dtypes.bfloat16, "bfloat16"),
    "f16": (np.float16, "float16"),
    "f32": (np.float32, "float32"),
}
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# Arguments of write_hf_model and tiny_config for shapes that break careless code: 11, 13 and 18 groups of 32,
# odd head counts, GQA ratios 1, 2, 4, 5, 7, 8 and 16, head_dim 32 to 256, vocabularies of no round size.
AWKWARD: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama-11-groups": (
        "llama",
        {"hidden": 352, "heads": 11, "kv_heads": 1, "head_dim": 64, "ffn": 416, "vocab": 331},
    ),
    "llama-gqa5": (
        "llama",
        {"hidden": 160, "heads": 5, "kv_heads": 1, "head_dim": 64, "vocab": 301, "tie": True},
    ),
    # Widths that are no multiple of 32, or of 8: those matrices stay bf16 beside quantised ones.
    "llama-width-100": (
        "llama",
        {"hidden": 100, "heads": 5, "kv_heads": 5, "head_dim": 32, "ffn": 150, "vocab": 271},
    ),
    "llama-no-gqa-hd80": (
        "llama",
        {"hidden": 96, "heads": 3, "kv_heads": 3, "head_dim": 80, "ffn": 224, "vocab": 299},
    ),
    "llama-gqa16-hd32": (
        "llama",
        {"hidden": 64, "heads": 16, "kv_heads": 1, "head_dim": 32, "ffn": 96, "vocab": 320},
    ),
    "qwen3-13-groups-gqa7": (
        "qwen3",
        {"hidden": 416, "heads": 7, "kv_heads": 1, "head_dim": 96, "ffn": 352, "vocab": 307},
    ),
    "qwen3-18-groups-gqa2": (
        "qwen3",
        {"hidden": 576, "heads": 6, "kv_heads": 3, "head_dim": 128, "ffn": 608, "vocab": 513},
    ),
    "qwen3-hd256-gqa4": (
        "qwen3",
        {"hidden": 128, "heads": 4, "kv_heads": 1, "head_dim": 256, "ffn": 352, "vocab": 300},
    ),
    "moe-11-groups-gqa8": (
        "qwen3_moe",
        {
            "hidden": 352,
            "heads": 8,
            "kv_heads": 1,
            "head_dim": 32,
            "experts": 5,
            "top_k": 3,
            "moe_ffn": 96,
            "vocab": 333,
        },
    ),
    "moe-mixed-dense": (
        "qwen3_moe",
        {
            "hidden": 96,
            "layers": 3,
            "heads": 6,
            "kv_heads": 2,
            "head_dim": 64,
            "experts": 7,
            "top_k": 7,
            "moe_ffn": 32,
            "dense_layers": (1,),
        },
    ),
    "moe-top1": (
        "qwen3_moe",
        {"hidden": 64, "heads": 5, "kv_heads": 5, "head_dim": 32, "experts": 16, "top_k": 1, "moe_ffn": 160},
    ),
}


# -- as a Hugging Face folder --------------------------------------------------------------------------------


def write_hf_model(
    folder: Path | str,
    family: Family = "qwen3",
    *,
    seed: int = 0,
    hidden: int = 96,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    ffn: int = 160,
    experts: int = 8,
    top_k: int = 2,
    moe_ffn: int = 64,
    dense_layers: Sequence[int] = (),
    norm_topk_prob: bool = True,
    vocab: int = 384,
    tie: bool = False,
    lm_head: Literal["by_tie", "copy", "different", "absent"] = "by_tie",
    shards: int = 1,
    dtype: Literal["bf16", "f16", "f32"] = "bf16",
    config_style: Literal[4, 5] = 5,
    experts_layout: Literal["each", "stacked"] = "each",
    theta: float = 10000.0,
    rope: Mapping[str, Any] | None = None,
    max_position: int = 4096,
    omit: Sequence[str] = (),
    edit: Mapping[str, npt.NDArray[np.float32] | None] | None = None,
    **config_overrides: Any,
) -> Path:
    """Write a random model as transformers saves it; returns ``folder``.

    ``rope`` holds the scaling fields (``{"rope_type": "yarn", "factor": 4.0, ...}``); ``config_style`` says
    where transformers 4 and 5 put them, and how they name the dtype and the number of experts. ``lm_head``
    overrides what the tie flag implies: ``copy`` and ``different`` store a head although tied, ``absent``
    stores none although untied. ``omit`` drops keys of config.json, ``config_overrides`` set them, ``edit``
    replaces tensors by name (f32 values, stored in ``dtype``; None removes one). Equal arguments write equal
    bytes.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = random_hf_tensors(
        family,
        seed=seed,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        experts=experts,
        top_k=top_k,
        moe_ffn=moe_ffn,
        dense_layers=dense_layers,
        vocab=vocab,
        tie=tie,
    )
    _place_head(tensors, tie, lm_head, seed)
    if experts_layout == "stacked":
        _stack_experts(tensors, layers, experts)
    for name, value in (edit or {}).items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = np.asarray(value, np.float32)

    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": ffn,
        "max_position_embeddings": max_position,
        "model_type": family,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tie,
        "use_cache": True,
        "vocab_size": vocab,
    }
    if family == "llama":
        config.update(mlp_bias=False, pretraining_tp=1)
    else:
        config.update(use_sliding_window=False, sliding_window=None)
    if family == "qwen3_moe":
        config.update(
            decoder_sparse_step=1,
            mlp_only_layers=list(dense_layers),
            moe_intermediate_size=moe_ffn,
            norm_topk_prob=norm_topk_prob,
            num_experts_per_tok=top_k,
            output_router_logits=False,
            router_aux_loss_coef=0.001,
        )
        config["num_local_experts" if config_style == 5 else "num_experts"] = experts
    if config_style == 5:
        config["dtype"] = DTYPES[dtype][1]
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta, **(rope or {})}
        config["transformers_version"] = "5.17.0"
    else:
        config["torch_dtype"] = DTYPES[dtype][1]
        config["rope_theta"] = theta
        config["rope_scaling"] = dict(rope) if rope else None
        config["transformers_version"] = "4.51.0"
    config.update(config_overrides)
    for key in omit:
        del config[key]

    _write_json(folder / "config.json", config)
    _write_shards(folder, {name: t.astype(DTYPES[dtype][0]) for name, t in tensors.items()}, shards)
    write_tokenizer(folder, vocab)
    return folder


def random_hf_tensors(
    family: Family,
    *,
    seed: int,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    experts: int,
    top_k: int,
    moe_ffn: int,
    dense_layers: Sequence[int],
    vocab: int,
    tie: bool,
) -> dict[str, npt.NDArray[np.float32]]:
    """f32 tensors under the names transformers gives them, experts one by one."""
    rng = np.random.default_rng(seed)

    def matrix(n: int, k: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        return (rng.standard_normal((n, k)) * (gain / np.sqrt(k))).astype(np.float32)

    def norm(n: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        return (gain * (1 + 0.1 * rng.standard_normal(n))).astype(np.float32)

    # A tied matrix is embedding and head at once: rows of length 2 give logits that spread by 2.
    embed_gain = 2.0 if tie else np.sqrt(hidden)
    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden, embed_gain)}
    for layer in range(layers):
        p = f"model.layers.{layer}."
        tensors[p + "input_layernorm.weight"] = norm(hidden)
        tensors[p + "self_attn.q_proj.weight"] = matrix(heads * head_dim, hidden, 1.5)
        tensors[p + "self_attn.k_proj.weight"] = matrix(kv_heads * head_dim, hidden)
        tensors[p + "self_attn.v_proj.weight"] = matrix(kv_heads * head_dim, hidden)
        tensors[p + "self_attn.o_proj.weight"] = matrix(hidden, heads * head_dim)
        if family != "llama":
            tensors[p + "self_attn.q_norm.weight"] = norm(head_dim, 1.5)
            tensors[p + "self_attn.k_norm.weight"] = norm(head_dim)
        tensors[p + "post_attention_layernorm.weight"] = norm(hidden)
        if family == "qwen3_moe" and layer not in dense_layers:
            tensors[p + "mlp.gate.weight"] = matrix(experts, hidden, 1.5)
            mlps = [(f"{p}mlp.experts.{e}.", moe_ffn) for e in range(experts)]
        else:
            mlps = [(p + "mlp.", ffn)]
        for mlp, width in mlps:
            tensors[mlp + "gate_proj.weight"] = matrix(width, hidden)
            tensors[mlp + "up_proj.weight"] = matrix(width, hidden)
            tensors[mlp + "down_proj.weight"] = matrix(hidden, width)
    tensors["model.norm.weight"] = norm(hidden)
    if not tie:
        tensors["lm_head.weight"] = matrix(vocab, hidden, 2.0)
    return tensors


def _place_head(tensors: dict[str, npt.NDArray[np.float32]], tie: bool, lm_head: str, seed: int) -> None:
    embed = tensors["model.embed_tokens.weight"]
    if lm_head == "copy":
        tensors["lm_head.weight"] = embed.copy()
    elif lm_head == "different" and tie:
        rng = np.random.default_rng(seed + 1)
        tensors["lm_head.weight"] = rng.standard_normal(embed.shape).astype(np.float32)
    elif lm_head == "absent":
        tensors.pop("lm_head.weight", None)


def _stack_experts(tensors: dict[str, npt.NDArray[np.float32]], layers: int, experts: int) -> None:
    """As the module of transformers 5 holds them: gate_up_proj [E, 2F, H] and down_proj [E, H, F]."""
    for layer in range(layers):
        p = f"model.layers.{layer}.mlp.experts."
        if f"{p}0.gate_proj.weight" not in tensors:
            continue  # a dense layer
        parts = {
            part: np.stack([tensors.pop(f"{p}{e}.{part}_proj.weight") for e in range(experts)])
            for part in ("gate", "up", "down")
        }
        tensors[p + "gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        tensors[p + "down_proj"] = parts["down"]


def _write_shards(folder: Path, tensors: Mapping[str, npt.NDArray[Any]], shards: int) -> None:
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata=metadata)
        return
    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata=metadata)
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.nbytes for t in tensors.values())
    _write_json(
        folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# -- tokenizer -----------------------------------------------------------------------------------------------

_TEXT = """\
The kestrel hovers over the field and watches the grass. A kernel that returns the same bits on every machine
can be compared as integers; a kernel that does not can only be compared with a tolerance. Rows are computed
alone, sums are short, and every long sum is made of integers. What is the capital of the country?
Tell me about the weather in spring. Who are you, and what can you do today?
def forward(x): return norm(x) + attention(x)  # one row at a time; 0 1 2 3 4 5 6 7 8 9
naïve café, 東京の天気, привет мир, 🦅🙂
"""

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""


@lru_cache(maxsize=8)
def _tokenizer_json(vocab: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(keepends=True), trainer)
    return str(tokenizer.to_str(pretty=True))


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A byte-level BPE tokenizer of at most ``vocab`` entries, with chat template and generation config.

    ``<|endoftext|>`` is 0, ``<|im_start|>`` 1 and ``<|im_end|>`` 2. All 256 bytes have a token, so ``vocab``
    must be at least 259.
    """
    smallest = 256 + len(SPECIAL_TOKENS)
    if vocab < smallest:
        raise ValueError(f"a byte-level vocabulary needs at least {smallest} entries, not {vocab}")
    (folder / "tokenizer.json").write_text(_tokenizer_json(vocab), encoding="utf-8")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "backend": "tokenizers",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "model_max_length": 4096,
            "pad_token": "<|endoftext|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write_json(
        folder / "generation_config.json",
        {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": [2, 0], "pad_token_id": 0},
    )


# -- without a file ------------------------------------------------------------------------------------------


def tiny_config(
    family: Family = "qwen3",
    *,
    hidden: int = 96,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    ffn: int = 160,
    experts: int = 8,
    top_k: int = 2,
    moe_ffn: int = 64,
    dense_layers: Sequence[int] = (),
    norm_topk_prob: bool = True,
    vocab: int = 384,
    tie: bool = False,
    rope: RopeConfig | None = None,
    **overrides: Any,
) -> ModelConfig:
    """The config of the model that ``write_hf_model`` writes for the same arguments."""
    moe = None
    if family == "qwen3_moe":
        moe = MoeConfig(experts, top_k, moe_ffn, norm_topk_prob, tuple(dense_layers))
    config = ModelConfig(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=ffn,
        rms_norm_eps=1e-6,
        max_position=4096,
        rope=rope or RopeConfig(),
        tie_word_embeddings=tie,
        qk_norm=family != "llama",
        moe=moe,
        bos_token_id=0,
        eos_token_ids=(2, 0),
    )
    return replace(config, **overrides)


def random_weights(
    config: ModelConfig, wtype: WType, head_wtype: WType | None = None, seed: int = 0
) -> Weights:
    """Random weights of ``config``, made in their final format: no file, no quantiser, quick for big shapes.

    The embedding takes ``head_wtype`` too (``wtype`` by default), the router is bf16. A matrix whose input
    length is no multiple of 32 is bf16, as the converter leaves it.
    """
    head_wtype = wtype if head_wtype is None else head_wtype
    rng = np.random.default_rng(seed)

    def norm(n: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        return (gain * (1 + 0.1 * rng.standard_normal(n))).astype(np.float32)

    def matrix(
        n: int, k: int, gain: float = 1.0, kind: WType = wtype, experts: int | None = None
    ) -> QuantTensor:
        return random_tensor(rng, kind, n, k, std=gain / np.sqrt(k), experts=experts)

    c = config
    embed_gain = 2.0 if c.tie_word_embeddings else np.sqrt(c.hidden_size)
    weights: Weights = {"embed": matrix(c.vocab_size, c.hidden_size, embed_gain, head_wtype)}
    for layer in range(c.num_layers):
        p = f"layers.{layer}."
        weights[p + "attn_norm"] = norm(c.hidden_size)
        weights[p + "q"] = matrix(c.q_size, c.hidden_size, 1.5)
        weights[p + "k"] = matrix(c.kv_size, c.hidden_size)
        weights[p + "v"] = matrix(c.kv_size, c.hidden_size)
        weights[p + "o"] = matrix(c.hidden_size, c.q_size)
        if c.qk_norm:
            weights[p + "q_norm"] = norm(c.head_dim, 1.5)
            weights[p + "k_norm"] = norm(c.head_dim)
        weights[p + "ffn_norm"] = norm(c.hidden_size)
        if c.is_moe_layer(layer):
            assert c.moe is not None
            count, width = c.moe.num_experts, c.moe.intermediate_size
            weights[p + "router"] = matrix(count, c.hidden_size, 1.5, WType.bf16)
            weights[p + "experts.gate"] = matrix(width, c.hidden_size, experts=count)
            weights[p + "experts.up"] = matrix(width, c.hidden_size, experts=count)
            weights[p + "experts.down"] = matrix(c.hidden_size, width, experts=count)
        else:
            weights[p + "gate"] = matrix(c.intermediate_size, c.hidden_size)
            weights[p + "up"] = matrix(c.intermediate_size, c.hidden_size)
            weights[p + "down"] = matrix(c.hidden_size, c.intermediate_size)
    weights["norm"] = norm(c.hidden_size)
    if not c.tie_word_embeddings:
        weights["head"] = matrix(c.vocab_size, c.hidden_size, 2.0, head_wtype)
    return weights


def random_tensor(
    rng: np.random.Generator, wtype: WType, n: int, k: int, *, std: float = 1.0, experts: int | None = None
) -> QuantTensor:
    """Uniform random codes under scales of random sign and size; the values have deviation ``std``."""
    if k % 32:
        wtype = WType.bf16
    lead = (n,) if experts is None else (experts, n)
    groups = k // 32
    if wtype == WType.bf16:
        # Sign and mantissa at random, exponent one of four: these magnitudes have root mean square 0.8794.
        bits = np.frombuffer(rng.bytes(2 * int(np.prod(lead)) * k), np.uint16).reshape(*lead, k)
        exponent = 127 + (bits >> 7 & 3).astype(np.uint16) - 3
        unit = (bits & 0x807F | exponent << 7).astype(np.uint16)
        scaled = unit.view(ml_dtypes.bfloat16).astype(np.float32) * np.float32(std / 0.8794)
        return QuantTensor(wtype, scaled.astype(ml_dtypes.bfloat16).view(np.uint16), None, experts, n, k)
    if wtype == WType.q4local:
        codes = np.frombuffer(rng.bytes(int(np.prod(lead)) * groups * 16), np.uint8).reshape(
            *lead, groups, 16
        )
        deviation = np.sqrt(np.mean((np.arange(16) - 8.0) ** 2))
    else:
        codes = np.frombuffer(rng.bytes(int(np.prod(lead)) * groups * 32), np.int8).reshape(*lead, groups, 32)
        deviation = np.sqrt(np.mean(np.arange(-128.0, 128.0) ** 2))
    spread = rng.uniform(0.75, 1.25, (*lead, groups)) * rng.choice([-1.0, 1.0], (*lead, groups))
    scale = (spread * (std / deviation / np.sqrt(1 + 0.5**2 / 12))).astype(np.float16).view(np.uint16)
    return QuantTensor(wtype, codes, scale, experts, n, k)
