"""Small tokenizers of every kind that can be streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kestrel.text.stream_decoder import CHAR_OF_BYTE
from kestrel.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def tokenizer_json(
    vocabulary: list[str],
    decoder: dict[str, Any] | None,
    *,
    special: list[str] | None = None,
    added: list[str] | None = None,
    merges: list[list[str]] | None = None,
    **parts: Any,
) -> dict[str, Any]:
    """A tokenizer.json: ``special`` and ``added`` tokens follow the vocabulary."""
    extra = [(text, True) for text in special or []] + [(text, False) for text in added or []]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": len(vocabulary) + i, "content": text, **FLAGS, "special": is_special}
            for i, (text, is_special) in enumerate(extra)
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(vocabulary)},
            "merges": merges or [],
        },
        **parts,
    }


def make(tokenizer: dict[str, Any], **files: dict[str, Any]) -> Tokenizer:
    """``files`` by stem: ``tokenizer_config={...}``."""
    named = {f"{stem}.json": json.dumps(value).encode() for stem, value in files.items()}
    return Tokenizer.from_files({"tokenizer.json": json.dumps(tokenizer).encode(), **named}, where="test")


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
LLAMA = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


def _spell(text: str) -> str:
    return "".join(CHAR_OF_BYTE[byte] for byte in text.encode("utf-8"))


def byte_level() -> Tokenizer:
    """All bytes, parts of characters, whole words; added tokens inside and outside the byte alphabet."""
    pieces = ["😀", "你好", " world", "é", "\ufffd", "a\n", "  "]
    parts = [_spell("😀")[:2], _spell("😀")[2:], _spell("你")[1:], _spell("好")[:1] + "x"]
    vocabulary = list(
        dict.fromkeys([*(CHAR_OF_BYTE[byte] for byte in range(256)), *map(_spell, pieces), *parts])
    )
    return make(
        tokenizer_json(
            vocabulary,
            BYTE_LEVEL,
            special=["<|end|>", "<s>"],
            added=["<tool call>", "é", "日本", "Ġ"],
            pre_tokenizer=BYTE_LEVEL,
        )
    )


def byte_fallback(decoder: dict[str, Any] | None = None) -> Tokenizer:
    """Llama's kind: byte tokens, a space sign, tokens that look like byte tokens and are none."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["▁", "▁▁", "▁a", "a", "你", "😀", "b▁c", "<0xZZ>", "<0x1>", "<0x+1>", "<0xé>", "\ufffd", " "]
    vocabulary = [*bytes_, *pieces]
    return make(tokenizer_json(vocabulary, decoder or LLAMA, special=["<s>", "</s>"], added=["<tool>", "▁x"]))


def metaspace(scheme: str = "always") -> Tokenizer:
    decoder = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True}
    return make(tokenizer_json(["▁", "▁a", "a", "b▁c", "▁▁", "é", "😀"], decoder, special=["<s>"]))


def plain() -> Tokenizer:
    """No decoder: tokens with spaces between them."""
    return make(tokenizer_json(["a", "b", "你", ""], None, special=["<s>"]))


def strip_each() -> Tokenizer:
    """Strip before Fuse works on each token."""
    decoder = {
        "type": "Sequence",
        "decoders": [
            {"type": "Strip", "content": "_", "start": 2, "stop": 0},
            {"type": "ByteFallback"},
            {"type": "Sequence", "decoders": [{"type": "Fuse"}]},
            {"type": "Strip", "content": " ", "start": 3, "stop": 0},
            {"type": "Replace", "pattern": {"String": "|"}, "content": "--"},
        ],
    }
    pieces = ["_", "__", "___a", " ", "  ", "b", "|", "<0xE4>", "<0xBD>", "<0xA0>", "<0x20>", "_ a"]
    return make(tokenizer_json(pieces, decoder, special=["<s>"]))


KINDS = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "metaspace": metaspace,
    "metaspace never": lambda: metaspace("never"),
    "plain": plain,
    "strip each": strip_each,
}


def golden(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((GOLDEN / name).read_text(encoding="utf-8"))
    return value
