"""Stop strings are found and cut exactly, however the text is cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel.errors import UsageError
from kestrel.text.tokenizer import StopMatcher


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first end of any stop string, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    out = ""
    for piece in pieces:
        out += matcher.push(piece)
        if matcher.matched is not None:
            return out, matcher.matched
    return out + matcher.finish(), None


def cut(text: str, at: list[int]) -> list[str]:
    places = [0, *sorted(place for place in at if place < len(text)), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


LETTERS = st.sampled_from("ab\n😀")


@settings(max_examples=500, deadline=None)
@given(
    text=st.text(LETTERS, max_size=20),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=4),
    at=st.lists(st.integers(0, 20), max_size=8),
)
def test_any_text_any_pieces(text: str, stops: list[str], at: list[int]) -> None:
    assert run(cut(text, at), stops) == reference(text, stops)


@pytest.mark.parametrize("stop", ["\n", "STOP", "</s>", "😀😀", "aab"])
def test_a_stop_string_at_every_offset_and_every_cut(stop: str) -> None:
    filler = "aabaSTa</\U0001f600x"
    for offset in range(len(filler) + 1):
        text = filler[:offset] + stop + filler[offset:]
        expected = reference(text, [stop])
        for place in range(len(text) + 1):
            assert run([text[:place], text[place:]], [stop]) == expected
        assert run(list(text), [stop]) == expected


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    matcher = StopMatcher(["END", "EXIT"])
    assert matcher.push("one E") == "one "
    assert matcher.push("N") == ""
    assert matcher.push("E") == "EN"
    assert matcher.push("XI") == ""
    assert matcher.push("!") == "EXI!"
    assert matcher.push("and EX") == "and "
    assert matcher.finish() == "EX"


def test_the_stop_string_that_ends_first_wins() -> None:
    assert run(["abcd"], ["abcd", "bc"]) == ("a", "bc")
    assert run(list("abcd"), ["abcd", "bc"]) == ("a", "bc")
    assert run(["xabc"], ["bc", "abc"]) == ("x", "abc")


def test_nothing_follows_a_match() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("a.b.c") == "a"
    assert matcher.matched == "."
    assert matcher.push("more") == ""
    assert matcher.finish() == ""


def test_no_stop_strings() -> None:
    assert run(["a", "", "b"], []) == ("ab", None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="must not be empty"):
        StopMatcher(["a", ""])
