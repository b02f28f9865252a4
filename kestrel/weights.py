"""Canonical weights: what the model reads, whatever file they came from."""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kestrel.checkpoints.manifest import MANIFEST_FILE, WEIGHTS_FILE, Manifest, read_manifest
from kestrel.checkpoints.safetensors_file import HeaderError, SafetensorsHeader, read_header
from kestrel.config import ModelConfig
from kestrel.errors import ModelError
from kestrel.ops import WType

GROUP = 32  # weights that share a scale, contract section 1


@dataclass(frozen=True)
class QuantTensor:
    """A matrix ``[N, K]``, or a stack ``[E, N, K]``, in one of the formats of contract section 1.

    ``codes`` is u16[..., N, K] (bf16 bits), u8[..., N, G, 16] (q4local) or i8[..., N, G, 32] (q8local);
    ``scale`` is u16[..., N, G] (f16 bits), ``None`` for bf16. Arrays of a loaded model are views of the
    mapped file.
    """

    wtype: WType
    codes: npt.NDArray[Any]
    scale: npt.NDArray[np.uint16] | None
    experts: int | None  # E of a stack
    n: int
    k: int

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + (self.scale.nbytes if self.scale is not None else 0)


# Names of a model's tensors. Norm weights are f32 arrays, the rest QuantTensors.
#   embed  norm  head (absent when tied)
#   layers.{i}.attn_norm  q  k  v  q_norm  k_norm  o  ffn_norm
#   layers.{i}.gate  up  down                    dense FFN
#   layers.{i}.router  experts.gate  experts.up  experts.down      MoE FFN (stacks)
# A model file holds a norm under its name and a matrix as "{name}.codes" and "{name}.scale".
Weights = dict[str, "QuantTensor | npt.NDArray[np.float32]"]

Role = Literal["norm", "matrix", "router", "table"]  # table: embedding and head


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a model must have."""

    name: str  # canonical
    shape: tuple[int, ...]  # [d] of a norm, [N, K], or [E, N, K]
    role: Role

    @property
    def rows(self) -> int:
        """Rows of K weights, over all experts."""
        return math.prod(self.shape[:-1])

    @property
    def k(self) -> int:
        return self.shape[-1]

    def stored_arrays(self, wtype: WType | None) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Array name -> (safetensors dtype, shape) of this tensor in a model file; ``None`` is f32."""
        if wtype is None:
            return {self.name: ("F32", self.shape)}
        if wtype == WType.bf16:
            return {f"{self.name}.codes": ("BF16", self.shape)}
        grouped = (*self.shape[:-1], self.k // GROUP)
        codes = ("U8", (*grouped, 16)) if wtype == WType.q4local else ("I8", (*grouped, 32))
        return {f"{self.name}.codes": codes, f"{self.name}.scale": ("F16", grouped)}


def tensor_specs(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a model of this shape, in data-flow order."""
    c = config
    yield TensorSpec("embed", (c.vocab_size, c.hidden_size), "table")
    for layer in range(c.num_layers):
        name = f"layers.{layer}."
        yield TensorSpec(name + "attn_norm", (c.hidden_size,), "norm")
        yield TensorSpec(name + "q", (c.q_size, c.hidden_size), "matrix")
        yield TensorSpec(name + "k", (c.kv_size, c.hidden_size), "matrix")
        yield TensorSpec(name + "v", (c.kv_size, c.hidden_size), "matrix")
        if c.qk_norm:
            yield TensorSpec(name + "q_norm", (c.head_dim,), "norm")
            yield TensorSpec(name + "k_norm", (c.head_dim,), "norm")
        yield TensorSpec(name + "o", (c.hidden_size, c.q_size), "matrix")
        yield TensorSpec(name + "ffn_norm", (c.hidden_size,), "norm")
        prefix, width = name, c.intermediate_size
        lead: tuple[int, ...] = ()
        if c.moe is not None and c.is_moe_layer(layer):
            yield TensorSpec(name + "router", (c.moe.num_experts, c.hidden_size), "router")
            prefix, lead, width = name + "experts.", (c.moe.num_experts,), c.moe.intermediate_size
        yield TensorSpec(prefix + "gate", (*lead, width, c.hidden_size), "matrix")
        yield TensorSpec(prefix + "up", (*lead, width, c.hidden_size), "matrix")
        yield TensorSpec(prefix + "down", (*lead, c.hidden_size, width), "matrix")
    yield TensorSpec("norm", (c.hidden_size,), "norm")
    if not c.tie_word_embeddings:
        yield TensorSpec("head", (c.vocab_size, c.hidden_size), "table")


def stored_wtype(spec: TensorSpec, wtype: WType, head_wtype: WType) -> WType | None:
    """The format of a tensor in a model converted with these flags; ``None`` is f32.

    The router is always bf16, and so is a matrix whose rows do not divide into groups of 32.
    """
    if spec.role == "norm":
        return None
    wanted = {"matrix": wtype, "table": head_wtype, "router": WType.bf16}[spec.role]
    return WType.bf16 if spec.k % GROUP else wanted


def load_model_folder(path: Path | str) -> tuple[ModelConfig, Weights]:
    """The config and weights of a kestrel folder, as read-only views of the mapped file.

    Reads the manifest and the header only; the weights come from disk when they are first used. A tied model
    has no ``head``. Raises ``ModelError`` listing every fault.
    """
    folder = Path(path)
    check_is_kestrel_folder(folder)
    manifest = read_manifest(folder)
    file = folder / WEIGHTS_FILE
    try:
        header = read_header(file)
    except HeaderError as error:
        raise ModelError(str(file), error.faults) from None
    faults = _contents_faults(manifest, header)
    if faults:
        raise ModelError(str(folder), faults)
    with file.open("rb") as handle:
        mapped = mmap.mmap(handle.fileno(), header.size, access=mmap.ACCESS_READ)
    weights: Weights = {}
    for spec in tensor_specs(manifest.config):
        weights[spec.name] = _map_tensor(spec, manifest.tensors[spec.name].wtype, header, mapped)
    return manifest.config, weights


def check_is_kestrel_folder(folder: Path) -> None:
    """Raise ``ModelError`` that says what to do when ``folder`` is something else."""
    where = str(folder)
    if re.search(r"\.partial-\d+$", folder.absolute().name):
        raise ModelError(where, ["is what an interrupted conversion left: delete it and convert again"])
    if folder.is_dir() and (folder / MANIFEST_FILE).is_file():
        return
    convert = f"convert it first: python -m kestrel.convert {folder} DST"
    if not folder.exists():
        raise ModelError(where, ["does not exist"])
    if folder.is_file():
        with folder.open("rb") as file:
            if file.read(4) == b"GGUF":
                raise ModelError(where, [f"is a GGUF file, not a kestrel folder: {convert}"])
        raise ModelError(where, ["is a file, not a kestrel folder"])
    if (folder / "config.json").is_file():
        raise ModelError(where, [f"is a Hugging Face folder, not a kestrel folder: {convert}"])
    gguf = sorted(folder.glob("*.gguf"))
    if gguf:
        raise ModelError(where, [f"holds {gguf[0].name}, not a kestrel model: convert that file first"])
    raise ModelError(
        where, [f"is not a kestrel folder: it has no {MANIFEST_FILE}; `kestrel convert SRC DST` makes one"]
    )


def _contents_faults(manifest: Manifest, header: SafetensorsHeader) -> list[str]:
    """Differences between what the config needs, what the manifest lists, and what the file holds."""
    faults = []
    arrays: dict[str, tuple[str, tuple[int, ...]]] = {}
    specs = {spec.name: spec for spec in tensor_specs(manifest.config)}
    for spec in specs.values():
        record = manifest.tensors.get(spec.name)
        if record is None:
            faults.append(f"{spec.name}: missing from {MANIFEST_FILE}")
            continue
        if record.shape != spec.shape:
            faults.append(
                f"{spec.name}: shape {list(record.shape)} in {MANIFEST_FILE}, not {list(spec.shape)}"
            )
        if record.wtype not in stored_wtypes(spec):
            faults.append(f"{spec.name}: cannot be stored as {record.wtype!r}")
            continue
        arrays |= spec.stored_arrays(_wtype(record.wtype))
    faults += [
        f"{name}: in {MANIFEST_FILE}, but not part of such a model"
        for name in manifest.tensors.keys() - specs
    ]
    for name, (dtype, shape) in arrays.items():
        entry = header.tensors.get(name)
        if entry is None:
            faults.append(f"{name}: missing from {WEIGHTS_FILE}")
        elif (entry.dtype, entry.shape) != (dtype, shape):
            faults.append(f"{name}: is {entry.dtype} {list(entry.shape)}, not {dtype} {list(shape)}")
        elif (entry.begin % 4 and dtype == "F32") or (entry.begin % 2 and dtype in ("F16", "BF16")):
            faults.append(f"{name}: its data is not aligned in {WEIGHTS_FILE}")
    faults += [
        f"{name}: in {WEIGHTS_FILE}, but not part of such a model" for name in header.tensors.keys() - arrays
    ]
    return faults


def stored_wtypes(spec: TensorSpec) -> tuple[str, ...]:
    """Names of the formats that a model file may hold this tensor in."""
    if spec.role == "norm":
        return ("f32",)
    if spec.role == "router" or spec.k % GROUP:
        return ("bf16",)
    return tuple(wtype.name for wtype in WType)


def _wtype(name: str) -> WType | None:
    return None if name == "f32" else WType[name]


_STORED_DTYPES = {"F32": np.float32, "F16": np.uint16, "BF16": np.uint16, "U8": np.uint8, "I8": np.int8}


def _map_tensor(
    spec: TensorSpec, wtype_name: str, header: SafetensorsHeader, mapped: mmap.mmap
) -> QuantTensor | npt.NDArray[np.float32]:
    wtype = _wtype(wtype_name)

    def view(name: str) -> npt.NDArray[Any]:
        entry = header.tensors[name]
        count = math.prod(entry.shape)
        return np.frombuffer(mapped, _STORED_DTYPES[entry.dtype], count, entry.begin).reshape(entry.shape)

    if wtype is None:
        return view(spec.name)
    scale = None if wtype == WType.bf16 else view(f"{spec.name}.scale")
    experts = spec.shape[0] if len(spec.shape) == 3 else None
    return QuantTensor(wtype, view(f"{spec.name}.codes"), scale, experts, spec.shape[-2], spec.k)
