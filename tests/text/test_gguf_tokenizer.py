"""Tokenizers made from GGUF metadata give the ids that llama.cpp gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from kestrel.errors import ModelError
from kestrel.text.gguf_tokenizer import PRE_TOKENIZERS, merges_from_scores
from kestrel.text.stream_decoder import CHAR_OF_BYTE
from kestrel.text.tokenizer import Tokenizer, tokenizer_files_from_gguf
from tests.support.demo_model import demo_gguf
from tests.support.difficult_text import ALL_STRINGS
from tests.support.gguf_files import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, write_tokenizer
from tests.support.qwen_vocab import qwen_tokenizer_json
from tests.support.text_models import golden, make
from tests.text.test_stream_decoder import check_stream

BYTES = [CHAR_OF_BYTE[byte] for byte in range(256)]


def load(path: Path) -> Tokenizer:
    return Tokenizer.from_files(tokenizer_files_from_gguf(gguf.GGUFReader(path)), where=str(path))


def files(path: Path) -> dict[str, Any]:
    made = tokenizer_files_from_gguf(gguf.GGUFReader(path))
    return {name: json.loads(content) for name, content in made.items()}


def byte_level(folder: Path, **changes: Any) -> Path:
    """Bytes, a few merges, and tokens of every type."""
    tokens = [*BYTES, "he", "hel", "12", "ĠĠ", "<s>", "</s>", "<tool>", "[PAD0]", "<unk>"]
    types = [NORMAL] * 260 + [CONTROL, CONTROL, USER_DEFINED, UNUSED, UNKNOWN]
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "types": types,
        "merges": ["h e", "he l", "1 2", "Ġ Ġ"],
        "ids": {"bos": 260, "eos": 261},
        **changes,
    }
    return write_tokenizer(folder / "model.gguf", **fields)


def sentence_piece(folder: Path, **changes: Any) -> Path:
    vocabulary = golden("tokenizer_sentencepiece.json")
    fields = {
        "model": "llama",
        "tokens": vocabulary["pieces"],
        "scores": vocabulary["scores"],
        "types": vocabulary["types"],
        "ids": {"bos": 1, "eos": 2, "unknown": 0},
        **changes,
    }
    return write_tokenizer(folder / "model.gguf", **fields)


# -- against llama.cpp -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return load(demo_gguf())


def test_the_demo_model_has_the_ids_of_llama_cpp(demo: Tokenizer) -> None:
    tokenizer = demo
    expected = golden("tokenizer_smollm2.json")
    for text, ids in zip(expected["strings"], expected["ids"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=True) == ids, text
    for text in ALL_STRINGS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        check_stream(tokenizer, ids, skip=True)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (2,), 49152)


def test_the_demo_models_own_template(demo: Tokenizer) -> None:
    prompt = demo.apply_chat_template([{"role": "user", "content": "Hi"}])
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    turns = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt == turns


def test_sentence_piece_has_the_ids_of_llama_cpp(tmp_path: Path) -> None:
    tokenizer = load(sentence_piece(tmp_path))
    expected = golden("tokenizer_sentencepiece.json")
    for text, ids in zip(expected["strings"], expected["ids"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
    for text in ALL_STRINGS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if "<|" not in text:  # every piece after a special token gets a space in front
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
        check_stream(tokenizer, ids, skip=True)


# -- tokens ----------------------------------------------------------------------------------------


def test_token_types(tmp_path: Path) -> None:
    tokenizer = load(byte_level(tmp_path))
    assert tokenizer.special_tokens == {"<s>", "</s>", "<unk>"}
    ids = tokenizer.encode("hel<tool></s>[PAD0]", add_special_tokens=False)
    assert ids[:3] == [257, 262, 261]
    assert 263 not in ids
    assert tokenizer.decode([257, 262, 261]) == "hel<tool>"
    assert tokenizer.id_to_token(263) is None  # fills a gap: never met in a text, never printed
    assert tokenizer.decode([263, 256]) == "he"


@pytest.mark.parametrize(
    ("pre", "flags", "expected"),
    [
        ("gpt-2", {}, [256]),
        ("gpt-2", {"add_bos_token": True}, [260, 256]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [260, 256, 261]),
        ("gpt-2", {"add_bos_token": False, "add_eos_token": True}, [256, 261]),
        ("llama-bpe", {}, [260, 256]),
        ("llama-bpe", {"add_bos_token": False}, [256]),
    ],
)
def test_tokens_around_a_text(tmp_path: Path, pre: str, flags: dict[str, bool], expected: list[int]) -> None:
    tokenizer = load(byte_level(tmp_path, pre=pre, flags=flags))
    assert tokenizer.encode("he", add_special_tokens=True) == expected
    assert tokenizer.encode("he", add_special_tokens=False) == [256]
    assert tokenizer.decode(expected) == "he"


@pytest.mark.parametrize(
    ("flags", "text", "expected"),
    [
        ({}, "a", [1, "▁a"]),
        ({"add_bos_token": False}, "a", ["▁a"]),
        ({"add_space_prefix": False}, "a", [1, "a"]),
        ({"add_space_prefix": False, "add_eos_token": True}, "a", [1, "a", 2]),
    ],
)
def test_sentence_piece_around_a_text(
    tmp_path: Path, flags: dict[str, bool], text: str, expected: list[int | str]
) -> None:
    tokenizer = load(sentence_piece(tmp_path, flags=flags))
    ids = [tokenizer.token_to_id(item) if isinstance(item, str) else item for item in expected]
    assert tokenizer.encode(text, add_special_tokens=True) == ids
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=True)) == text


def test_ids_that_end_a_text_and_templates(tmp_path: Path) -> None:
    path = byte_level(
        tmp_path,
        ids={"bos": 260, "eos": 261, "eot": 262, "eom": 261, "padding": 263, "unknown": 264},
        templates={"default": "D{{ eos_token }}", "tool_use": "T"},
    )
    made = files(path)
    assert made["generation_config.json"] == {"bos_token_id": 260, "eos_token_id": [261, 262]}
    assert made["tokenizer_config.json"]["pad_token"] == "[PAD0]"
    tokenizer = load(path)
    assert tokenizer.eos_ids == (261, 262)
    turns = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(turns) == "D</s>"
    assert tokenizer.apply_chat_template(turns, tools=[]) == "T"


def test_a_model_without_bos_and_template(tmp_path: Path) -> None:
    made = files(byte_level(tmp_path, ids={"eos": 261}))
    assert made["tokenizer_config.json"]["bos_token"] is None
    assert "chat_template" not in made["tokenizer_config.json"]
    assert load(byte_level(tmp_path, ids={"eos": 261})).bos_id is None


# -- pre-tokenizers --------------------------------------------------------------------------------

DIGITS = {  # the pieces of "12345 a's" before BPE
    "default": ["123", "45", " a", "'", "s"],
    "gpt-2": ["12345", " a", "'s"],
    "smollm": ["1", "2", "3", "4", "5", " a", "'s"],
    "qwen2": ["1", "2", "3", "4", "5", " a", "'s"],
    "llama-bpe": ["123", "45", " a", "'s"],
    "tekken": ["1", "2", "3", "4", "5", " a", "'s"],
}


@pytest.mark.parametrize("pre", DIGITS)
def test_pre_tokenizers_cut_numbers(tmp_path: Path, pre: str) -> None:
    backend = load(byte_level(tmp_path, pre=pre))._backend
    pieces = backend.pre_tokenizer.pre_tokenize_str("12345 a's")
    assert [piece.replace("Ġ", " ") for piece, _ in pieces] == DIGITS[pre]


@pytest.mark.parametrize("pre", [name for name in golden("tokenizer_pre.json") if name in PRE_TOKENIZERS])
def test_pre_tokenizers_have_the_ids_of_llama_cpp(pre: str, tmp_path: Path) -> None:
    """The parts of tokenizer.json that a pre-tokenizer decides, on a vocabulary where they show."""
    whole = json.loads(qwen_tokenizer_json())
    small = files(byte_level(tmp_path, pre=pre))["tokenizer.json"]
    changed = {**whole, "pre_tokenizer": small["pre_tokenizer"], "normalizer": small["normalizer"]}
    tokenizer = make(
        {**changed, "model": {**whole["model"], "ignore_merges": small["model"]["ignore_merges"]}}
    )
    expected = golden("tokenizer_pre.json")
    for text, ids in zip(expected["strings"], expected[pre], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text


def test_names_with_one_pre_tokenizer() -> None:
    def same(*names: str) -> bool:
        return len({tuple(vars(PRE_TOKENIZERS[name]).items()) for name in names}) == 1

    assert same("gpt-2", "phi-2")
    assert same("smollm", "starcoder", "refact")
    assert same("llama-bpe", "llama3", "llama-v3")
    assert same("deepseek-r1-qwen", "megrez")
    assert PRE_TOKENIZERS["megrez"].patterns == PRE_TOKENIZERS["qwen2"].patterns


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_loses_no_text(tmp_path: Path, pre: str) -> None:
    tokenizer = load(byte_level(tmp_path, pre=pre))
    for text in ALL_STRINGS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if pre == "qwen2" or "<|" in text:  # NFC changes letters; the control tokens here are others
            continue
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_qwen_normalises_as_its_own_tokenizer_does(tmp_path: Path) -> None:
    tokenizer = load(byte_level(tmp_path, pre="qwen2"))
    composed, decomposed = "\u00e9", "e\u0301"
    assert tokenizer.encode(decomposed, False) == tokenizer.encode(composed, False)
    other = load(byte_level(tmp_path, pre="deepseek-r1-qwen"))
    assert other.encode(decomposed, False) != other.encode(composed, False)


def test_a_whole_piece_needs_no_merges(tmp_path: Path) -> None:
    """llama-bpe takes a piece that is a token at once, even when no merges lead to it."""
    changes = {"tokens": [*BYTES, "xyz"], "types": [NORMAL] * 257, "merges": ["x y"], "ids": {"bos": 0}}
    changes["tokens"].append("xy")
    changes["types"].append(NORMAL)
    whole = load(byte_level(tmp_path, pre="llama-bpe", **changes))
    assert whole.encode("xyz", False) == [256]
    merged = load(byte_level(tmp_path, pre="smaug-bpe", **changes))
    assert merged.encode("xyz", False) == [257, ord("z")]


# -- merges from scores ----------------------------------------------------------------------------


def test_merges_from_scores() -> None:
    pieces = [("a", -9.0), ("b", -9.0), ("ab", -2.0), ("ba", -1.0), ("aba", -3.0), ("zz", 0.0)]
    assert merges_from_scores(pieces) == [["b", "a"], ["a", "b"], ["ab", "a"], ["a", "ba"]]


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"model": None}, r"tokenizer\.ggml\.model is missing"),
        ({"model": "bert"}, r"tokenizer\.ggml\.model 'bert' is not supported \(supported: gpt2, llama\)"),
        ({"tokens": None, "types": None}, r"tokenizer\.ggml\.tokens is missing or empty"),
        ({"pre": None}, r"tokenizer\.ggml\.pre is missing"),
        ({"pre": "kimi-k2"}, r"tokenizer\.ggml\.pre 'kimi-k2' is not supported \(supported: .*qwen2.*\)"),
        ({"merges": None}, r"tokenizer\.ggml\.merges is missing or empty"),
        ({"merges": ["h e", "x q"]}, r"merges\[1\] 'x q': 'xq' is not a token"),
        ({"merges": ["he"]}, r"merges\[0\] 'he': '' is not a token"),
        ({"types": [NORMAL] * 3}, r"token_type has 3 entries for 265 tokens"),
        ({"types": [NORMAL] * 264 + [9]}, r"token_type holds unknown types: 9"),
        ({"ids": {"eos": 9999}}, r"eos_token_id 9999 is not a token: there are 265"),
        (
            {"ids": {}, "flags": {"add_bos_token": True}},
            r"bos token is added to every text, but .* is missing",
        ),
        ({"tokens": [*BYTES, "a", *BYTES[:8]]}, r"holds 9 tokens more than once: 'Ā', 'ā', "),
        (
            {"tokens": [*BYTES, b"\xff\xfe", *(f"t{i}" for i in range(8))]},
            r"tokens: 1 entries are not UTF-8 \(256\)",
        ),
        ({"extra": {"tokenizer.ggml.add_bos_token": "yes"}}, r"add_bos_token must be bool, not str"),
    ],
)
def test_faults(tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(ModelError, match=fault):
        files(byte_level(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"scores": None}, r"tokenizer\.ggml\.scores is missing"),
        ({"scores": [0.0] * 640}, r"scores are all equal"),
        ({"scores": [1.0] * 5}, r"scores has 5 entries for 640 tokens"),
        ({"flags": {"remove_extra_whitespaces": True}}, r"remove_extra_whitespaces is not supported"),
    ],
)
def test_sentence_piece_faults(tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(ModelError, match=fault):
        files(sentence_piece(tmp_path, **changes))


def test_missing_byte_tokens(tmp_path: Path) -> None:
    vocabulary = golden("tokenizer_sentencepiece.json")
    pieces = [piece.replace("<0x4", "<byte4") for piece in vocabulary["pieces"]]
    with pytest.raises(ModelError, match="16 of the 256 byte tokens are missing, the first is <0x40>"):
        files(sentence_piece(tmp_path, tokens=pieces))
    assert BYTE in vocabulary["types"]
