"""The real Qwen vocabulary: ids equal tiktoken's, text streams exactly."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kestrel.text.tokenizer import Tokenizer
from tests.support.difficult_text import ALL_STRINGS, STRINGS
from tests.support.qwen_vocab import ADDED_TOKENS, PATTERN, qwen_files, qwen_merges, qwen_ranks
from tests.text.test_stream_decoder import check_stream

# Ids that Qwen's own tokenizer gives, so that the test says something where tiktoken is absent too.
KNOWN = {
    "Hello, world!": [9707, 11, 1879, 0],
    "你好，世界！": [108386, 3837, 99489, 6313],
    "<|im_start|>user\n": [151644, 872, 198],
    "2024": [17, 15, 17, 19],
}


@pytest.fixture(scope="module")
def qwen() -> Tokenizer:
    return Tokenizer.from_files(qwen_files(), where="qwen")


def test_size_and_ends(qwen: Tokenizer) -> None:
    assert len(qwen_ranks()) == 151643
    assert qwen.vocab_size == 151669
    assert qwen.eos_ids == (151645, 151643)
    assert qwen.bos_id is None


def test_known_ids(qwen: Tokenizer) -> None:
    for text, ids in KNOWN.items():
        assert qwen.encode(text, add_special_tokens=True) == ids


def test_round_trip_and_streaming(qwen: Tokenizer) -> None:
    for text in ALL_STRINGS:
        ids = qwen.encode(text, add_special_tokens=False)
        assert qwen.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)
        for end in range(len(ids) + 1):  # max_tokens inside a character
            check_stream(qwen, ids[:end], skip=True)


def test_equal_to_tiktoken(qwen: Tokenizer) -> None:
    tiktoken = pytest.importorskip("tiktoken", reason="compares with tiktoken, which is not installed")
    ranks = qwen_ranks()
    special = {content: len(ranks) + i for i, (content, _) in enumerate(ADDED_TOKENS)}
    reference = tiktoken.Encoding("qwen", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
    pairs = [a + b for a, b in zip(STRINGS, reversed(STRINGS), strict=True)]
    for text in [*ALL_STRINGS, *pairs, "".join(STRINGS)]:
        ids = qwen.encode(text, add_special_tokens=False)
        assert ids == reference.encode(unicodedata.normalize("NFC", text), allowed_special="all"), text
        assert qwen.decode(ids, skip_special_tokens=False) == reference.decode(ids)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(0, 151_700), max_size=24), skip=st.booleans())
def test_random_ids(qwen: Tokenizer, ids: list[int], skip: bool) -> None:
    check_stream(qwen, ids, skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text(qwen: Tokenizer, text: str) -> None:
    ids = qwen.encode(text, add_special_tokens=False)
    assert qwen.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)
    check_stream(qwen, ids, skip=False)


def test_merges_rebuild_the_vocabulary() -> None:
    """Each merge makes a token of its own from two tokens of lower rank."""
    ranks = qwen_ranks()
    merges = qwen_merges()
    assert len(merges) == 151643 - 256
    made = [left + right for left, right in merges]
    assert [ranks[token] for token in made] == sorted(rank for token, rank in ranks.items() if len(token) > 1)
    assert all(max(ranks[left], ranks[right]) < ranks[left + right] for left, right in merges)
