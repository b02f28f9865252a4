"""A whole model in float64, from a config.json dictionary and tensors under their Hugging Face names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.oracle import reference as ref
from tests.oracle.reference import F64

_STORED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def read_safetensors(path: Path) -> dict[str, F64]:
    """Every tensor of one file as float64: an 8-byte length, a JSON header, then the raw arrays."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        stored = np.frombuffer(raw[8 + length + begin : 8 + length + end], _STORED[entry["dtype"]])
        values = ref.bf16_to_f64(stored) if entry["dtype"] == "BF16" else stored.astype(np.float64)
        tensors[name] = values.reshape(entry["shape"])
    return tensors


@dataclass
class Oracle:
    """``config`` is a config.json in the style of transformers 4 or 5.

    ``int8_inputs`` passes the input of every quantised matrix through int8 groups of 32; ``int8_attention``
    passes Q, K and V through int8 rows and the weights of V through 15 bits: what the contract's quantisation
    means, without its float32 rounding. The router reads unquantised inputs.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, F64]
    int8_inputs: bool = False
    int8_attention: bool = False
    length: int = 0  # of the sequences of the last forward
    trace: dict[str, F64] = field(default_factory=dict)  # of the last forward, by tap name

    @classmethod
    def from_folder(cls, folder: Path, **options: bool) -> Oracle:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors: dict[str, F64] = {}
        for path in sorted(folder.glob("*.safetensors")):
            tensors.update(read_safetensors(path))
        return cls(config, tensors, **options)

    def forward(self, ids: npt.ArrayLike) -> F64:
        """Logits [..., T, V] of token ids [T], or [B, T] for B sequences, each from an empty context."""
        c = self.config
        ids = np.asarray(ids)
        self.length = ids.shape[-1]
        x = self.tensors["model.embed_tokens.weight"][ids.reshape(-1)]
        for layer in range(c["num_hidden_layers"]):
            x = x + self._attention(layer, x)
            x = x + self._ffn(layer, x)
            self.trace[f"l{layer}_x"] = x
        x = ref.rms_norm(x, self.tensors["model.norm.weight"], c["rms_norm_eps"])
        tied = c.get("tie_word_embeddings", False)
        return self._linear(x, "model.embed_tokens" if tied else "lm_head").reshape(*ids.shape, -1)

    def _linear(self, x: F64, name: str) -> F64:
        return self._product(x, self.tensors[name + ".weight"])

    def _product(self, x: F64, w: F64) -> F64:
        if self.int8_inputs and x.shape[-1] % 32 == 0:
            x = ref.through_int8(x.reshape(*x.shape[:-1], -1, 32)).reshape(x.shape)
        return x @ w.T

    def _attention(self, layer: int, x: F64) -> F64:
        c, p = self.config, f"model.layers.{layer}."
        nh, nkv = c["num_attention_heads"], c["num_key_value_heads"]
        hd = c.get("head_dim") or c["hidden_size"] // nh
        rows, T = x.shape[0], self.length
        x = ref.rms_norm(x, self.tensors[p + "input_layernorm.weight"], c["rms_norm_eps"])
        q = self._linear(x, p + "self_attn.q_proj").reshape(rows, nh, hd)
        k = self._linear(x, p + "self_attn.k_proj").reshape(rows, nkv, hd)
        v = self._linear(x, p + "self_attn.v_proj").reshape(rows, nkv, hd)
        q, k = self._qk_norm(p, q, "q_norm"), self._qk_norm(p, k, "k_norm")
        scaling = c.get("rope_parameters") or c.get("rope_scaling") or {}
        theta = scaling.get("rope_theta") or c.get("rope_theta") or 10000.0
        frequencies, factor = ref.rope_frequencies(hd, theta, scaling, c["max_position_embeddings"])
        positions = np.arange(rows) % T * 1.0
        q, k = ref.rope(q, positions, frequencies, factor), ref.rope(k, positions, frequencies, factor)
        if self.int8_attention:
            v_step = ref.int8_step(v)
            q, k, v = ref.through_int8(q), ref.through_int8(k), ref.through_int8(v)
        parts = [slice(begin, begin + T) for begin in range(0, rows, T)]
        out = np.concatenate(
            [
                ref.attention(q[part], k[part], v[part], v_step[part] if self.int8_attention else None)
                for part in parts
            ]
        )
        return self._linear(out.reshape(rows, nh * hd), p + "self_attn.o_proj")

    def _qk_norm(self, p: str, x: F64, name: str) -> F64:
        if self.config["model_type"] == "llama":
            return x
        return ref.rms_norm(x, self.tensors[f"{p}self_attn.{name}.weight"], self.config["rms_norm_eps"])

    def _ffn(self, layer: int, x: F64) -> F64:
        c, p = self.config, f"model.layers.{layer}."
        x = ref.rms_norm(x, self.tensors[p + "post_attention_layernorm.weight"], c["rms_norm_eps"])
        if p + "mlp.gate.weight" not in self.tensors:
            h = ref.swiglu(self._linear(x, p + "mlp.gate_proj"), self._linear(x, p + "mlp.up_proj"))
            return self._linear(h, p + "mlp.down_proj")
        router = x @ self.tensors[p + "mlp.gate.weight"].T
        # transformers takes an absent norm_topk_prob as false.
        ids, weights = ref.route(router, c["num_experts_per_tok"], c.get("norm_topk_prob", False))
        self.trace[f"l{layer}_rids"], self.trace[f"l{layer}_rlogits"] = ids.astype(np.float64), router
        out = np.zeros_like(x)
        for expert in np.unique(ids):
            token, rank = np.nonzero(ids == expert)
            gate, up, down = self._expert(p, int(expert))
            h = ref.swiglu(self._product(x[token], gate), self._product(x[token], up))
            out[token] += weights[token, rank, None] * self._product(h, down)
        return out

    def _expert(self, p: str, expert: int) -> tuple[F64, F64, F64]:
        stacked = self.tensors.get(p + "mlp.experts.gate_up_proj")
        if stacked is not None:
            gate, up = np.split(stacked[expert], 2)
            return gate, up, self.tensors[p + "mlp.experts.down_proj"][expert]
        prefix = f"{p}mlp.experts.{expert}."
        gate, up, down = (self.tensors[f"{prefix}{part}_proj.weight"] for part in ("gate", "up", "down"))
        return gate, up, down
