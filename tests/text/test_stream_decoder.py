"""Streaming text equals the whole decode, for every kind of decoder and every sequence of ids."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel.errors import ModelError, UsageError
from kestrel.text.tokenizer import StreamDecoder, Tokenizer
from tests.support.text_models import (
    BYTE_LEVEL,
    KINDS,
    LLAMA,
    byte_fallback,
    byte_level,
    make,
    tokenizer_json,
)

TOKENIZERS = functools.cache(lambda kind: KINDS[kind]())


def check_stream(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    """The joined pieces equal the whole decode, and at every token what was given out stays true."""
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    decoder = StreamDecoder(tokenizer, skip_special_tokens=skip)
    given_out = ""
    for token_id in ids:
        given_out += decoder.push(token_id)
        assert whole.startswith(given_out)
    assert given_out + decoder.finish() == whole


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_ids(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=24))  # some ids have no token
    check_stream(tokenizer, ids, data.draw(st.booleans()))


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=24))
def test_random_bytes(data: bytes) -> None:
    """One token a byte: the replacement characters of broken UTF-8 are those of the whole decode."""
    for kind in ("byte level", "byte fallback"):
        tokenizer = TOKENIZERS(kind)
        check_stream(tokenizer, list(data), skip=True)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=12), cut=st.integers(0, 40))
def test_text_cut_anywhere(text: str, cut: int) -> None:
    """The bytes of a text, ended after any token: finish() gives what the whole decode gives."""
    for kind in ("byte level", "byte fallback"):
        tokenizer = TOKENIZERS(kind)
        check_stream(tokenizer, list(text.encode("utf-8"))[:cut], skip=True)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=12))
def test_byte_level_gives_characters_as_soon_as_they_are_complete(text: str) -> None:
    decoder = StreamDecoder(TOKENIZERS("byte level"))
    for character in text:
        *before, last = character.encode("utf-8")
        assert [decoder.push(byte) for byte in before] == [""] * len(before)
        assert decoder.push(last) == character
    assert decoder.finish() == ""


def test_emoji_split_over_tokens() -> None:
    tokenizer = TOKENIZERS("byte level")
    ids = [tokenizer.token_to_id(part) for part in ("ðŁ", "ĺĢ")]
    assert None not in ids
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(i) for i in ids if i is not None] == ["", "😀"]


def test_half_a_character_at_the_end() -> None:
    """The two libraries' own rules: one U+FFFD for the part of a character, or one for each byte."""
    for kind, expected in (("byte level", "a\ufffd"), ("byte fallback", "a\ufffd\ufffd\ufffd")):
        tokenizer = TOKENIZERS(kind)
        a = tokenizer.token_to_id("a")
        assert a is not None
        ids = [a, *"😀".encode()[:3]]
        decoder = tokenizer.stream()
        assert "".join(map(decoder.push, ids)) == "a"
        assert decoder.finish() == expected[1:]
        assert tokenizer.decode(ids) == expected


def test_a_run_of_byte_tokens_waits_for_its_end() -> None:
    """One bad byte turns the whole run into U+FFFD, so nothing of a run may be given out before."""
    tokenizer = TOKENIZERS("byte fallback")
    decoder = tokenizer.stream()
    run = [*"你".encode(), 0xFF]
    assert [decoder.push(i) for i in run] == [""] * 4
    assert decoder.finish() == "\ufffd" * 4 == tokenizer.decode(run)


def test_special_tokens_between_the_bytes_of_a_character() -> None:
    tokenizer = TOKENIZERS("byte level")
    end = tokenizer.token_to_id("<|end|>")
    assert end is not None
    first, *rest = "é".encode()
    ids = [first, end, *rest]
    assert tokenizer.decode(ids) == "é"
    check_stream(tokenizer, ids, skip=True)
    check_stream(tokenizer, ids, skip=False)


def test_nothing_is_decoded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is proportional to the tokens: one look-up for each, and never a whole decode."""
    tokenizer = byte_level()
    calls: list[int] = []
    look_up = tokenizer.id_to_token
    monkeypatch.setattr(tokenizer, "decode", None)
    monkeypatch.setattr(tokenizer, "id_to_token", lambda i: (calls.append(i), look_up(i))[1])
    decoder = tokenizer.stream()
    ids = list("你好😀".encode() * 200) + [0xE4] * 200
    lengths = [len(decoder.push(i)) for i in ids]
    assert calls == ids
    assert max(lengths) <= 2


def test_push_after_finish_is_refused() -> None:
    decoder = byte_level().stream()
    decoder.finish()
    with pytest.raises(UsageError, match=r"push\(\) after finish\(\)"):
        decoder.push(0)


def test_an_id_that_is_no_id_is_refused() -> None:
    with pytest.raises(UsageError, match="token ids"):
        byte_level().stream().push(-1)


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
        {"type": "Strip", "content": " ", "start": 0, "stop": 1},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]},
        {"type": "Sequence", "decoders": [BYTE_LEVEL, BYTE_LEVEL]},
        {
            "type": "Sequence",
            "decoders": [{"type": "Fuse"}, {"type": "Replace", "pattern": {"String": "ab"}, "content": ""}],
        },
    ],
)
def test_decoders_without_an_incremental_form_are_refused_by_name(decoder: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: decoder .* cannot be streamed"):
        make(tokenizer_json(["a"], decoder))


def test_llama_without_the_leading_space() -> None:
    """add_space_prefix false: no Strip, the first space stays."""
    decoder = {**LLAMA, "decoders": LLAMA["decoders"][:3]}
    tokenizer = byte_fallback(decoder)
    space = tokenizer.token_to_id("▁a")
    assert space is not None
    assert tokenizer.decode([space]) == " a"
    check_stream(tokenizer, [space, space], skip=True)
