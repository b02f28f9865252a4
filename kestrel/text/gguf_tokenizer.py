"""Tokenizer files from the metadata of a GGUF file.

Two kinds of GGUF vocabulary are read: ``gpt2``, byte-level BPE with its merges and a named pre-tokenizer, and
``llama``, SentencePiece BPE with scores and byte fallback, whose merges follow from the scores. The results
are tokenizer.json, tokenizer_config.json and generation_config.json as a Hugging Face folder has them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from kestrel.errors import ModelError

if TYPE_CHECKING:
    import gguf

Json = dict[str, Any]


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``, as the GGUF specification numbers it."""

    normal = 1
    unknown = 2
    control = 3
    user_defined = 4
    unused = 5
    byte = 6


def tokenizer_files_from_gguf(reader: gguf.GGUFReader) -> dict[str, bytes]:
    """The files by name; ``ModelError`` lists every fault of the metadata and names what is not supported."""
    return _Builder(reader).files()


# -- pre-tokenizers ----------------------------------------------------------------------------------

# One pattern each, in the syntax of tokenizer.json (Oniguruma). "Split isolated" cuts at every match.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AFTER_NUMBER = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_AFTER_NUMBER}"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_AFTER_NUMBER}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Pre:
    """How the text is cut before BPE, and what else goes with that name."""

    def __init__(
        self, *patterns: str, nfc: bool = False, ignore_merges: bool = False, add_bos: bool = False
    ) -> None:
        self.patterns = patterns
        self.nfc = nfc  # the model's own tokenizer normalises; the GGUF metadata does not say so
        self.ignore_merges = ignore_merges  # a whole piece that is a token needs no merges
        self.add_bos = add_bos  # unless the metadata decides


_DIGITS = _Pre(r"\p{N}", _GPT2)
_LLAMA3_PRE = _Pre(_LLAMA3, ignore_merges=True, add_bos=True)
PRE_TOKENIZERS = {
    "default": _Pre(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": _Pre(_GPT2),
    "phi-2": _Pre(_GPT2),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "qwen2": _Pre(_QWEN2, nfc=True),
    "deepseek-r1-qwen": _Pre(_QWEN2),
    "megrez": _Pre(_QWEN2),
    "llama3": _LLAMA3_PRE,
    "llama-v3": _LLAMA3_PRE,
    "llama-bpe": _LLAMA3_PRE,
    "smaug-bpe": _Pre(_LLAMA3),
    "tekken": _Pre(_TEKKEN, ignore_merges=True, add_bos=True),
}


# -- building ----------------------------------------------------------------------------------------


class _Builder:
    """Reads the metadata, collects faults, and writes the files."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self.reader = reader
        self.faults: list[str] = []

    def files(self) -> dict[str, bytes]:
        model = self._value("model", str)
        if model is None:
            self.faults.append("tokenizer.ggml.model is missing: the file has no tokenizer")
        elif model not in ("gpt2", "llama"):
            self.faults.append(f"tokenizer.ggml.model {model!r} is not supported (supported: gpt2, llama)")
        self._stop()
        self.tokens = self._tokens()
        self._stop()
        self.types = self._token_types()
        pre = self._pre() if model == "gpt2" else None
        tokenizer = self._byte_level(pre) if pre is not None else self._sentence_piece()
        tokenizer["added_tokens"] = self._added_tokens()
        self._stop()
        config, generation = self._special(tokenizer, pre, model == "llama")
        self._stop()
        return {
            "tokenizer.json": _dump(tokenizer),
            "tokenizer_config.json": _dump(config),
            "generation_config.json": _dump(generation),
        }

    def _stop(self) -> None:
        if self.faults:
            raise ModelError("GGUF tokenizer", self.faults)

    # -- metadata --------------------------------------------------------------------------------------

    def _field(self, key: str) -> Any:
        return self.reader.fields.get(key)

    def _value(self, key: str, kind: type) -> Any:
        """A scalar of ``tokenizer.ggml``, ``None`` when absent."""
        field = self._field(f"tokenizer.ggml.{key}")
        if field is None:
            return None
        value = field.contents()
        if not isinstance(value, kind):
            self.faults.append(f"tokenizer.ggml.{key} must be {kind.__name__}, not {type(value).__name__}")
            return None
        return value

    def _strings(self, key: str) -> list[str] | None:
        """A list of strings; quicker than ``contents()``, and it says which entry is not UTF-8."""
        field = self._field(f"tokenizer.ggml.{key}")
        if field is None:
            return None
        strings, broken = [], []
        for i, part in enumerate(field.data):
            try:
                strings.append(bytes(field.parts[part]).decode("utf-8"))
            except UnicodeDecodeError:
                broken.append(i)
        if broken:
            shown = ", ".join(map(str, broken[:5])) + (", ..." if len(broken) > 5 else "")
            self.faults.append(f"tokenizer.ggml.{key}: {len(broken)} entries are not UTF-8 ({shown})")
        return strings

    def _numbers(self, key: str) -> list[Any] | None:
        field = self._field(f"tokenizer.ggml.{key}")
        if field is None:
            return None
        numbers = [field.parts[part][0].item() for part in field.data]
        if len(numbers) != len(self.tokens):
            count = len(self.tokens)
            self.faults.append(f"tokenizer.ggml.{key} has {len(numbers)} entries for {count} tokens")
            return None
        return numbers

    def _tokens(self) -> list[str]:
        tokens = self._strings("tokens")
        if not tokens:
            self.faults.append("tokenizer.ggml.tokens is missing or empty")
            return []
        twice = [token for token, count in Counter(tokens).items() if count > 1]
        if twice:
            shown = ", ".join(map(repr, twice[:5])) + (", ..." if len(twice) > 5 else "")
            self.faults.append(f"tokenizer.ggml.tokens holds {len(twice)} tokens more than once: {shown}")
        return tokens

    def _token_types(self) -> list[int]:
        types = self._numbers("token_type") or [int(TokenType.normal)] * len(self.tokens)
        unknown = sorted(set(types) - {int(kind) for kind in TokenType})
        if unknown:
            self.faults.append(
                f"tokenizer.ggml.token_type holds unknown types: {', '.join(map(str, unknown))}"
            )
        return types

    def _pre(self) -> _Pre | None:
        pre = self._value("pre", str)
        known = ", ".join(sorted(PRE_TOKENIZERS))
        if pre is None:
            self.faults.append(f"tokenizer.ggml.pre is missing: convert the model again (supported: {known})")
        elif pre not in PRE_TOKENIZERS:
            self.faults.append(f"tokenizer.ggml.pre {pre!r} is not supported (supported: {known})")
        self._stop()
        return PRE_TOKENIZERS[pre]

    # -- tokenizer.json --------------------------------------------------------------------------------

    def _vocabulary(self) -> dict[str, int]:
        """Unused entries fill gaps in the ids; left out, they can neither be met in a text nor printed."""
        return {
            token: i
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind != TokenType.unused
        }

    def _added_tokens(self) -> list[Json]:
        """Control tokens are special, user-defined ones are not; both are found before a text is cut."""
        return [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != TokenType.user_defined,
            }
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (TokenType.control, TokenType.unknown, TokenType.user_defined)
        ]

    def _byte_level(self, pre: _Pre) -> Json:
        vocabulary = self._vocabulary()
        merges = []
        for i, merge in enumerate(self._strings("merges") or []):
            left, _, right = merge.partition(" ") if not merge.startswith(" ") else ("", "", "")
            missing = [piece for piece in (left, right, left + right) if piece not in vocabulary]
            if missing:
                self.faults.append(f"tokenizer.ggml.merges[{i}] {merge!r}: {missing[0]!r} is not a token")
            merges.append([left, right])
            if len(self.faults) > 10:
                break
        if not merges:
            self.faults.append("tokenizer.ggml.merges is missing or empty")
        splits = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in pre.patterns
        ]
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": {"type": "NFC"} if pre.nfc else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
            "post_processor": None,
            "decoder": {**byte_level, "add_prefix_space": True, "use_regex": True},
            "model": _bpe(vocabulary, merges, ignore_merges=pre.ignore_merges),
        }

    def _sentence_piece(self) -> Json:
        vocabulary = self._vocabulary()
        scores = self._numbers("scores")
        if scores is None:
            self.faults.append(
                "tokenizer.ggml.scores is missing: SentencePiece merges follow from the scores"
            )
            self._stop()
        assert scores is not None
        if len(set(scores)) == 1:
            self.faults.append("tokenizer.ggml.scores are all equal: no order of merges follows from them")
        absent = [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary]
        if absent:
            self.faults.append(f"{len(absent)} of the 256 byte tokens are missing, the first is {absent[0]}")
        if self._value("remove_extra_whitespaces", bool):
            self.faults.append("tokenizer.ggml.remove_extra_whitespaces is not supported")
        prefix = self._value("add_space_prefix", bool)
        prefix = True if prefix is None else prefix
        unknown = next(
            (t for t, kind in zip(self.tokens, self.types, strict=True) if kind == TokenType.unknown), None
        )
        escape = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        start = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
        unescape = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        normal = [
            (token, score)
            for token, score, kind in zip(self.tokens, scores, self.types, strict=True)
            if kind in (TokenType.normal, TokenType.user_defined)
        ]
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": {"type": "Sequence", "normalizers": [*start, escape]},
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": {
                "type": "Sequence",
                "decoders": [unescape, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
            },
            "model": _bpe(vocabulary, merges_from_scores(normal), unknown=unknown, byte_fallback=True),
        }

    # -- special tokens --------------------------------------------------------------------------------

    def _special(self, tokenizer: Json, pre: _Pre | None, sentence_piece: bool) -> tuple[Json, Json]:
        """Fills in the post-processor; returns tokenizer_config.json and generation_config.json."""
        ids = {name: self._id(name) for name in ("bos", "eos", "unknown", "padding", "eot", "eom")}
        if sentence_piece:  # SentencePiece's own numbers
            for name, default in (("bos", 1), ("eos", 2)):
                ids[name] = default if ids[name] is None else ids[name]
        bos = self._adds("bos", ids, sentence_piece or (pre is not None and pre.add_bos))
        eos = self._adds("eos", ids, False)
        if bos or eos:
            tokenizer["post_processor"] = _template(bos, eos)
        config: Json = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        for name, key in (
            ("bos", "bos_token"),
            ("eos", "eos_token"),
            ("unknown", "unk_token"),
            ("padding", "pad_token"),
        ):
            token_id = ids[name]
            config[key] = None if token_id is None else self.tokens[token_id]
        templates = self._templates()
        if templates:
            config["chat_template"] = templates
        ends = [ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None]
        generation = {"bos_token_id": ids["bos"], "eos_token_id": list(dict.fromkeys(ends))}
        return config, generation

    def _id(self, name: str) -> int | None:
        value: int | None = self._value(f"{name}_token_id", int)
        if value is not None and not 0 <= value < len(self.tokens):
            self.faults.append(
                f"tokenizer.ggml.{name}_token_id {value} is not a token: there are {len(self.tokens)}"
            )
            return None
        return value

    def _adds(self, name: str, ids: dict[str, int | None], default: bool) -> tuple[str, int] | None:
        """The token that every text gets at this end, or ``None``."""
        wanted = self._value(f"add_{name}_token", bool)
        token_id = ids[name]
        if not (default if wanted is None else wanted):
            return None
        if token_id is None or token_id >= len(self.tokens):
            self.faults.append(
                f"a {name} token is added to every text, but tokenizer.ggml.{name}_token_id is missing"
            )
            return None
        return self.tokens[token_id], token_id

    def _templates(self) -> str | list[Json]:
        """``tokenizer.chat_template`` and the named ones beside it (``tokenizer.chat_template.NAME``)."""
        prefix = "tokenizer.chat_template"
        named = {
            key[len(prefix) + 1 :] or "default": field.contents()
            for key, field in self.reader.fields.items()
            if key == prefix or key.startswith(prefix + ".")
        }
        if list(named) == ["default"]:
            return str(named["default"])
        return [{"name": name, "template": template} for name, template in named.items()]


def merges_from_scores(pieces: Sequence[tuple[str, float]]) -> list[list[str]]:
    """BPE merges that build the pieces in the order of their scores, highest first.

    SentencePiece merges the neighbours whose joined piece has the highest score. Every way to cut a piece
    into two pieces is therefore a merge with the rank of the whole piece; among the cuts of one piece the
    order is that of transformers' converter: the longer left part first.
    """
    known = {piece for piece, _ in pieces}
    merges = [
        (score, cut, piece)
        for piece, score in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
    merges.sort(key=lambda merge: (-merge[0], -merge[1]))
    return [[piece[:cut], piece[cut:]] for _, cut, piece in merges]


def _bpe(
    vocabulary: dict[str, int],
    merges: list[list[str]],
    *,
    unknown: str | None = None,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unknown is not None,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary,
        "merges": merges,
    }


def _template(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> Json:
    """A post-processor that puts BOS before a text and EOS after it."""

    def special(token: tuple[str, int], kind: int) -> Json:
        return {"SpecialToken": {"id": token[0], "type_id": kind}}

    def text(name: str, kind: int) -> list[Json]:
        parts: list[Json] = [{"Sequence": {"id": name, "type_id": kind}}]
        return [*([special(bos, kind)] if bos else []), *parts, *([special(eos, kind)] if eos else [])]

    return {
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": [*text("A", 0), *text("B", 1)],
        "special_tokens": {
            token: {"id": token, "ids": [token_id], "tokens": [token]}
            for token, token_id in filter(None, (bos, eos))
        },
    }


def _dump(value: Json) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode("utf-8")
