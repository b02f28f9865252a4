"""A GGUF file of the llama, qwen3 or qwen3moe architecture, checked, as a source for the converter.

Metadata and tensor list come from the ``gguf`` package; tensor data are read by position, so that resident
memory does not grow with the file. Q4_0 and Q8_0 blocks are taken apart without loss; the package dequantises
the rest.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kestrel.checkpoints.hf_config import token_ids
from kestrel.checkpoints.hf_folder import name_list
from kestrel.checkpoints.safetensors_file import read_exactly
from kestrel.checkpoints.source_model import F32, Checkpoint, Findings, Packed, SourceTensor, StoredTensor
from kestrel.config import Family, ModelConfig, MoeConfig, RopeConfig
from kestrel.errors import KestrelError, ModelError
from kestrel.ops import WType
from kestrel.rope import inv_freq
from kestrel.weights import TensorSpec, tensor_specs

if TYPE_CHECKING:
    from gguf import GGUFReader

_VERSIONS = (2, 3)
_FAMILIES: dict[str, Family] = {"llama": "llama", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}

# Canonical names and GGUF's, without "blk.N." and ".weight".
TOP_NAMES = {"embed": "token_embd", "norm": "output_norm", "head": "output"}
LAYER_NAMES = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "o": "attn_output",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "router": "ffn_gate_inp",
    "experts.gate": "ffn_gate_exps",
    "experts.up": "ffn_up_exps",
    "experts.down": "ffn_down_exps",
}
_ROPE_FREQS = "rope_freqs.weight"

# Keys below "{arch}." that kestrel does not compute, with the values that switch them off.
_OFF: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scale_linear": (1.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "use_parallel_residual": (False,),
}
_HARMLESS = ("rope.scaling.finetuned", "tensor_data_layout")
# Groups of keys that describe the file or its text; the tokenizer reads its own.
_OTHER_GROUPS = ("GGUF.", "general.", "tokenizer.", "quantize.", "split.")

# How llama.cpp's converter derives rope_freqs.weight: Llama 3.1 and later have these three values in common.
_LLAMA3 = RopeConfig(type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)


def open_gguf(path: Path, findings: Findings | None = None) -> Checkpoint:
    """Open and check a GGUF file. Raises ``ModelError`` that lists every fault.

    ``findings`` receives what could be read, also of a file that is refused.
    """
    findings = findings or Findings()
    findings.format = "gguf"
    reader = _reader(path)
    faults: list[str] = []
    metadata = _Metadata(reader, faults)
    tensors = {tensor.name: _Tensor.of(tensor) for tensor in reader.tensors}
    _check_extents(tensors, path.stat().st_size, faults)
    findings.stored = [StoredTensor(t.name, t.type.name, t.shape, t.nbytes) for t in tensors.values()]
    side_files = _side_files(reader, faults)
    findings.config = config = _config(metadata, tensors, side_files, faults)
    sources: list[SourceTensor] = []
    file = path.open("rb", buffering=0)
    try:
        if config is not None:
            if _ROPE_FREQS in tensors:
                config = _with_rope_freqs(config, file, tensors[_ROPE_FREQS], faults)
            sources = _match(config, tensors, file, metadata.architecture == "llama", faults)
        if faults or config is None:
            raise ModelError(str(path), faults)
    except BaseException:
        file.close()
        raise
    notes = []
    if "tokenizer.json" not in side_files:
        notes.append("the file has no tokenizer: the model will take token ids only")
    if metadata.foreign:
        notes.append(f"not read, as they belong to other tools: {', '.join(metadata.foreign)}")
    return Checkpoint(str(path), "gguf", config, sources, [path], side_files, notes, file.close)


def _reader(path: Path) -> GGUFReader:
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        raise ModelError(str(path), [f"cannot be read: {error.strerror}"]) from None
    if len(start) < 8 or start[:4] != b"GGUF":
        raise ModelError(str(path), ["is not a GGUF file (wrong magic)"])
    (version,) = struct.unpack("<I", start[4:])
    if version not in _VERSIONS:
        swapped = " (big-endian files are not supported)" if version & 0xFFFF == 0 else ""
        raise ModelError(str(path), [f"has GGUF version {version}{swapped}; supported: 2 and 3"])
    try:
        import gguf
    except ImportError:
        raise KestrelError("GGUF files need the gguf package: pip install 'kestrel-exact[gguf]'") from None
    try:
        return gguf.GGUFReader(path)
    # The package checks little: what a damaged file makes of its reading shows as any of these.
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise ModelError(str(path), [f"is truncated or damaged: {error}"]) from None


@dataclass(frozen=True)
class _Tensor:
    name: str
    type: Any  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]  # [..., K]
    offset: int  # bytes from the start of the file
    nbytes: int

    @staticmethod
    def of(tensor: Any) -> _Tensor:
        shape = tuple(int(n) for n in reversed(tensor.shape.tolist()))
        return _Tensor(tensor.name, tensor.tensor_type, shape, int(tensor.data_offset), int(tensor.n_bytes))


class _Metadata:
    """Typed reading of the key-value section; keys of the architecture that nobody reads are faults."""

    def __init__(self, reader: GGUFReader, faults: list[str]) -> None:
        self._fields = reader.fields
        self._faults = faults
        self._read: set[str] = set()
        self.incomplete = False  # a value of the shape is missing or malformed
        self.foreign: list[str] = []  # keys that llama.cpp does not read either
        self.architecture = self._string("general.architecture")
        if self.architecture not in _FAMILIES:
            faults.append(
                f"architecture {self.architecture!r} is not supported; supported: {', '.join(_FAMILIES)}"
            )
        kind = self._contents("general.type")
        if kind not in (None, "model"):
            self.incomplete = True
            faults.append(f"general.type is {kind!r}, not 'model'")
        if self._contents("split.count") not in (None, 0, 1):
            self.incomplete = True
            faults.append("is one part of a split model: join the parts with `llama-gguf-split --merge`")

    def _contents(self, key: str) -> Any:
        field = self._fields.get(key)
        if field is None:
            return None
        try:
            return field.contents()
        except (ValueError, IndexError, TypeError) as error:
            self._faults.append(f"{key} cannot be read: {error}")
            return None

    def _string(self, key: str) -> str:
        value = self._contents(key)
        if not isinstance(value, str):
            self._faults.append(
                f"{key} is missing" if value is None else f"{key} must be a string, not {value!r}"
            )
            return ""
        return value

    def get(self, key: str, kinds: tuple[type, ...], default: Any, *, required: bool = False) -> Any:
        """The value of ``{arch}.{key}``; of a list, one value per layer, the value they all have."""
        self._read.add(key)
        value = self._contents(f"{self.architecture}.{key}")
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if value is None:
            if required:
                self._faults.append(f"{self.architecture}.{key} is missing")
                self.incomplete = True
            return default
        if type(value) not in kinds:
            names = " or ".join(kind.__name__ for kind in kinds)
            self._faults.append(f"{self.architecture}.{key} must be {names}, not {value!r}")
            self.incomplete = True
            return default
        return value

    def integer(self, key: str, default: int = 1, *, required: bool = False) -> int:
        return int(self.get(key, (int,), default, required=required))

    def number(self, key: str, default: float, *, required: bool = False) -> float:
        """A float as the decimal number that was meant: f32 1e-6 is 1e-6, not 9.99999997e-07."""
        return float(str(np.float32(self.get(key, (int, float), default, required=required))))

    def tokenizer_id(self, key: str) -> int | None:
        value = self._contents(f"tokenizer.ggml.{key}")
        return value if type(value) is int else None

    def check_rest(self) -> None:
        prefix = f"{self.architecture}."
        for key in self._fields:
            if key.startswith(_OTHER_GROUPS):
                continue
            if not key.startswith(prefix):
                self.foreign.append(key)
                continue
            name = key.removeprefix(prefix)
            if name in self._read or name in _HARMLESS:
                continue
            value = self._contents(key)
            if name in _OFF:
                if value not in _OFF[name]:
                    self._faults.append(f"{key} = {value!r} is not supported")
            else:
                shown = repr(value)
                self._faults.append(f"unknown key {key} = {shown[:60]}: it may change the mathematics")


def _check_extents(tensors: dict[str, _Tensor], size: int, faults: list[str]) -> None:
    at, previous = 0, ""
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset < at:
            faults.append(f"{tensor.name}: overlaps {previous}")
        if tensor.offset + tensor.nbytes > size:
            faults.append(
                f"{tensor.name}: ends at byte {tensor.offset + tensor.nbytes} of a file of {size} bytes"
            )
        at, previous = max(at, tensor.offset + tensor.nbytes), tensor.name


def _side_files(reader: GGUFReader, faults: list[str]) -> dict[str, bytes]:
    from kestrel.text.gguf_tokenizer import tokenizer_files_from_gguf

    if "tokenizer.ggml.model" not in reader.fields:
        return {}
    try:
        return tokenizer_files_from_gguf(reader)
    except ModelError as error:
        faults += [f"tokenizer: {fault}" for fault in error.faults]
        return {}


# -- config ------------------------------------------------------------------------------------------------


def _config(
    m: _Metadata, tensors: dict[str, _Tensor], side_files: dict[str, bytes], faults: list[str]
) -> ModelConfig | None:
    family = _FAMILIES.get(m.architecture)
    if family is None:
        return None
    hidden = m.integer("embedding_length", required=True)
    heads = m.integer("attention.head_count", required=True)
    head_dim = m.integer("attention.key_length", max(1, hidden // max(1, heads)))
    for key in ("attention.value_length", "rope.dimension_count"):
        other = m.integer(key, head_dim)
        if other != head_dim:
            faults.append(
                f"{m.architecture}.{key} {other} differs from the head size {head_dim}: not supported"
            )
    embedding = tensors.get("token_embd.weight")
    vocab = embedding.shape[0] if embedding is not None and len(embedding.shape) == 2 else 1
    named_vocab = m.integer("vocab_size", vocab)
    if named_vocab != vocab:
        faults.append(f"{m.architecture}.vocab_size is {named_vocab}, but token_embd.weight has {vocab} rows")
    experts = m.integer("expert_count", 0)
    moe = None
    if family == "qwen3_moe":
        # llama.cpp always normalises the chosen experts' weights of this architecture.
        moe = MoeConfig(
            num_experts=m.integer("expert_count", required=True),
            top_k=m.integer("expert_used_count", required=True),
            intermediate_size=m.integer("expert_feed_forward_length", required=True),
            norm_topk_prob=True,
        )
    elif experts or m.integer("expert_used_count", 0):
        faults.append(
            f"{m.architecture}.expert_count {experts}: experts are not supported in this architecture"
        )
    max_position = m.integer("context_length", required=True)
    rope = _rope(m, max_position, faults)
    generation = json.loads(side_files.get("generation_config.json", b"{}"))
    eos = m.tokenizer_id("eos_token_id")
    eos_ids = [*([] if eos is None else [eos]), *(token_ids(generation.get("eos_token_id")) or ())]
    config = ModelConfig(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=m.integer("block_count", required=True),
        num_heads=heads,
        num_kv_heads=m.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=m.integer("feed_forward_length", 0 if moe else 1, required=moe is None),
        rms_norm_eps=m.number("attention.layer_norm_rms_epsilon", 1e-6, required=True),
        max_position=rope.reach(max_position),
        rope=rope,
        tie_word_embeddings="output.weight" not in tensors,
        qk_norm=family != "llama",
        moe=moe,
        bos_token_id=m.tokenizer_id("bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(eos_ids)),
    )
    m.check_rest()
    if m.incomplete:
        return None
    impossible = config.faults()
    faults += impossible
    return None if impossible else config


def _rope(m: _Metadata, max_position: int, faults: list[str]) -> RopeConfig:
    theta = m.number("rope.freq_base", 10000.0)
    kind = m.get("rope.scaling.type", (str,), "none")
    factor = m.number("rope.scaling.factor", 1.0)
    original = m.integer("rope.scaling.original_context_length", max_position)
    beta_fast, beta_slow = (
        m.number(f"rope.scaling.yarn_beta_{end}", at) for end, at in (("fast", 32.0), ("slow", 1.0))
    )
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, type="linear", factor=factor)
    if kind == "yarn":
        return RopeConfig(
            theta=theta,
            type="yarn",
            factor=factor,
            original_max_position=original,
            beta_fast=beta_fast,
            beta_slow=beta_slow,
        )
    faults.append(
        f"{m.architecture}.rope.scaling.type {kind!r} is not supported; supported: none, linear, yarn"
    )
    return RopeConfig(theta=theta)


def _with_rope_freqs(config: ModelConfig, file: BinaryIO, tensor: _Tensor, faults: list[str]) -> ModelConfig:
    """The config with llama3 scaling, when that is what the divisors of ``rope_freqs.weight`` amount to."""
    half = config.head_dim // 2
    if tensor.shape != (half,) or tensor.type.name != "F32":
        faults.append(f"{_ROPE_FREQS}: {tensor.type.name} {list(tensor.shape)}, expected F32 [{half}]")
        return config
    divisors = np.empty(half, np.float32)
    read_exactly(file, tensor.offset, divisors)
    if config.rope.type != "default":
        faults.append(f"{_ROPE_FREQS}: not supported together with rope scaling {config.rope.type!r}")
        return config
    if (divisors == 1).all():
        return config
    rope = replace(_LLAMA3, theta=config.rope.theta, factor=float(divisors.max()))
    scaled = replace(config, rope=rope)
    expected = inv_freq(config).astype(np.float64) / inv_freq(scaled).astype(np.float64)
    # The file's divisors went through f32 arithmetic; another rule differs by far more.
    if not np.allclose(divisors, expected, rtol=1e-4, atol=0):
        faults.append(
            f"{_ROPE_FREQS}: its divisors are not those of llama3 scaling, and no other rule is supported"
        )
        return config
    return scaled


# -- tensors -----------------------------------------------------------------------------------------------


def _match(
    config: ModelConfig, tensors: dict[str, _Tensor], file: BinaryIO, permuted: bool, faults: list[str]
) -> list[SourceTensor]:
    sources, missing, used = [], [], {_ROPE_FREQS}
    for spec in tensor_specs(config):
        name = _source_name(spec)
        used.add(name)
        tensor = tensors.get(name)
        if tensor is None:
            missing.append(name)
            continue
        if tensor.shape != spec.shape:
            faults.append(f"{name}: shape {list(tensor.shape)}, expected {list(spec.shape)}")
            continue
        fault = _type_fault(spec, tensor)
        if fault:
            faults.append(f"{name}: {fault}")
            continue
        leaf = spec.name.rsplit(".", 1)[-1]
        head_dim = config.head_dim if permuted and leaf in ("q", "k") else None
        sources.append(_source(spec, tensor, file, head_dim))
    faults += name_list("missing", missing)
    faults += name_list("not part of such a model", [name for name in tensors if name not in used])
    return sources


def _source_name(spec: TensorSpec) -> str:
    if spec.name in TOP_NAMES:
        return TOP_NAMES[spec.name] + ".weight"
    _, layer, leaf = spec.name.split(".", 2)
    return f"blk.{layer}.{LAYER_NAMES[leaf]}.weight"


_PLAIN: dict[str, npt.DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def _type_fault(spec: TensorSpec, tensor: _Tensor) -> str | None:
    if tensor.type.name in _PLAIN:
        return None
    if spec.role == "norm":
        return f"type {tensor.type.name}, expected {', '.join(_PLAIN)}"
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[tensor.type]
    if spec.k % block:
        return f"{spec.k} columns do not divide into {tensor.type.name} blocks of {block}"
    try:
        gguf.quants.dequantize(np.zeros((1, size), np.uint8), tensor.type)
    except NotImplementedError:
        return f"type {tensor.type.name} cannot be dequantised by the gguf package"
    return None


def _source(spec: TensorSpec, tensor: _Tensor, file: BinaryIO, head_dim: int | None) -> SourceTensor:
    row_bytes = tensor.nbytes // spec.rows if spec.role != "norm" else tensor.nbytes
    read_raw: RawRows = partial(_rows, file, tensor.offset, row_bytes)
    if head_dim is not None:
        read_raw = partial(_head_rows, read_raw, head_dim)
    stored = tensor.type.name
    if stored in _PLAIN:
        return SourceTensor(spec, tensor.name, stored, partial(_read_plain, read_raw, _PLAIN[stored]))
    packed = {"Q4_0": (WType.q4local, _read_q4_0), "Q8_0": (WType.q8local, _read_q8_0)}.get(stored)
    read = partial(_read_dequantised, read_raw, tensor.type)
    if packed is None:
        return SourceTensor(spec, tensor.name, stored, read, blocks=True)
    return SourceTensor(spec, tensor.name, stored, read, True, packed[0], partial(packed[1], read_raw))


RawRows = Callable[[int, int], npt.NDArray[np.uint8]]


def _rows(file: BinaryIO, offset: int, row_bytes: int, begin: int, end: int) -> npt.NDArray[np.uint8]:
    raw = np.empty((end - begin, row_bytes), np.uint8)
    read_exactly(file, offset + begin * row_bytes, raw)
    return raw


def _head_rows(read_raw: RawRows, head_dim: int, begin: int, end: int) -> npt.NDArray[np.uint8]:
    """Rows of a query or key matrix in half-split order.

    llama.cpp's converter interleaves them: its rows 2i and 2i + 1 of a head are rows i and i + hd/2 here.
    """
    first, last = begin // head_dim, -(-end // head_dim)
    raw = read_raw(first * head_dim, last * head_dim)
    row_bytes = raw.shape[1]
    heads = raw.reshape(last - first, head_dim // 2, 2, row_bytes).swapaxes(1, 2).reshape(-1, row_bytes)
    return heads[begin - first * head_dim : end - first * head_dim]


def _read_plain(read_raw: RawRows, dtype: npt.DTypeLike, begin: int, end: int) -> F32:
    return np.ascontiguousarray(read_raw(begin, end)).view(dtype).astype(np.float32)


def _read_dequantised(read_raw: RawRows, type_: Any, begin: int, end: int) -> F32:
    import gguf

    with np.errstate(invalid="ignore", over="ignore"):  # weights that are not finite are found by the caller
        values: F32 = gguf.quants.dequantize(read_raw(begin, end), type_)
    return values


def _read_q4_0(read_raw: RawRows, begin: int, end: int) -> Packed:
    """Blocks of f16 scale and 16 code bytes, whose nibbles are in q4local's order."""
    return _split_blocks(read_raw(begin, end), 16, np.uint8)


def _read_q8_0(read_raw: RawRows, begin: int, end: int) -> Packed:
    """Blocks of f16 scale and 32 int8 codes."""
    return _split_blocks(read_raw(begin, end), 32, np.int8)


def _split_blocks(raw: npt.NDArray[np.uint8], code_bytes: int, dtype: npt.DTypeLike) -> Packed:
    blocks = raw.reshape(raw.shape[0], -1, 2 + code_bytes)
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.uint16)[..., 0]
    return np.ascontiguousarray(blocks[..., 2:]).view(dtype), scale
