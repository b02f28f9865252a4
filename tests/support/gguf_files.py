"""Small GGUF files with a tokenizer and no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def write_tokenizer(
    path: Path,
    *,
    model: str | None,
    tokens: Sequence[str | bytes] | None,
    pre: str | None = None,
    merges: Sequence[str] | None = None,
    types: Sequence[int] | None = None,
    scores: Sequence[float] | None = None,
    ids: Mapping[str, int] | None = None,
    flags: Mapping[str, bool] | None = None,
    templates: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """A file with ``tokenizer.ggml`` metadata; whatever is ``None`` is left out.

    ``ids`` as ``{"bos": 1}``, ``flags`` as ``{"add_bos_token": True}``, ``templates`` by name.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    if tokens is not None:
        writer.add_vocab_size(len(tokens))
        writer.add_token_list(tokens)
    if model is not None:
        writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if merges is not None:
        writer.add_token_merges(merges)
    if types is not None:
        writer.add_token_types(types)
    if scores is not None:
        writer.add_token_scores(scores)
    for name, token_id in (ids or {}).items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
    for name, flag in (flags or {}).items():
        writer.add_bool(f"tokenizer.ggml.{name}", flag)
    for name, template in (templates or {}).items():
        writer.add_string("tokenizer.chat_template" + ("" if name == "default" else f".{name}"), template)
    for key, value in (extra or {}).items():
        writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
