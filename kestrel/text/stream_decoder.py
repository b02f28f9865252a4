"""Text from tokens, one token at a time, equal to decoding them all at once.

A tokenizer's decoder is a chain of steps over the list of tokens. Each step has an incremental form here
that keeps back what a later token may still change: the bytes of a character that is not complete, or a run
of byte tokens, which becomes text only if all of it is valid UTF-8. A token costs the work of its own text;
nothing is decoded twice.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kestrel.errors import UsageError

if TYPE_CHECKING:
    from kestrel.text.tokenizer import Tokenizer


class StreamDecoder:
    """Decodes a stream of token ids; the joined results equal ``tokenizer.decode(ids, skip_special_tokens)``.

    >>> decoder = StreamDecoder(tokenizer)
    >>> for token_id in ids:
    ...     print(decoder.push(token_id), end="")
    >>> print(decoder.finish())
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_tokens if skip_special_tokens else frozenset()
        self._steps = decoder_steps(tokenizer.decoder_config)
        self._finished = False

    def push(self, token_id: int) -> str:
        """The text that is certain after this token; often empty inside a character."""
        if self._finished:
            raise UsageError("push() after finish(): make a new StreamDecoder for a new text")
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token in self._skip:  # ids that no token has are skipped, as decode skips them
            return ""
        return self._through([token], 0)

    def finish(self) -> str:
        """The text held back, as the whole decode ends: half a character becomes U+FFFD."""
        self._finished = True
        text = ""
        for i, step in enumerate(self._steps):
            text += self._through(step.finish(), i + 1)
        return text

    def _through(self, tokens: list[str], first: int) -> str:
        for step in self._steps[first:]:
            tokens = [out for token in tokens for out in step.push(token)]
        return "".join(tokens)


class StopMatcher:
    """Cuts a stream of text at the first stop string, wherever the pieces of the stream begin and end.

    The match that is complete first wins; of several that end together, the longest. ``matched`` is the stop
    string found, or ``None``.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise UsageError("a stop string must not be empty")
        self.stops = tuple(dict.fromkeys(stops))
        self.matched: str | None = None
        self._longest = max(map(len, self.stops), default=0)
        self._held = ""

    def push(self, text: str) -> str:
        """The text that cannot belong to a stop string; nothing more once ``matched`` is set."""
        if self.matched is not None:
            return ""
        text = self._held + text
        self._held = ""
        found = [(at + len(stop), -len(stop), stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            end, _, self.matched = min(found)
            return text[: end - len(self.matched)]
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self.stops):
                self._held = tail
                return text[:-length]
        return text

    def finish(self) -> str:
        """The text held back when the stream ends without a stop string."""
        held, self._held = self._held, ""
        return held


# -- decoder steps -----------------------------------------------------------------------------------


class _Step(Protocol):
    def push(self, token: str) -> list[str]:
        """The tokens that are certain after ``token``."""

    def finish(self) -> list[str]:
        """The tokens held back."""


class _Map:
    """A step that changes each token by itself."""

    def push(self, token: str) -> list[str]:
        return [self.change(token)]

    def finish(self) -> list[str]:
        return []

    def change(self, token: str) -> str:
        return token


class _Replace(_Map):
    def __init__(self, pattern: str, content: str) -> None:
        self.pattern = pattern
        self.content = content

    def change(self, token: str) -> str:
        return token.replace(self.pattern, self.content)


class _Metaspace(_Map):
    """The replacement character is a space, except in the first token when a space was prepended."""

    def __init__(self, replacement: str, prepended: bool) -> None:
        self.replacement = replacement
        self.first = prepended

    def change(self, token: str) -> str:
        space = "" if self.first else " "
        self.first = False
        return token.replace(self.replacement, space)


class _Join(_Map):
    """No decoder: tokens with spaces between them."""

    def __init__(self) -> None:
        self.first = True

    def change(self, token: str) -> str:
        text = token if self.first else " " + token
        self.first = False
        return text


class _StripStart(_Map):
    """Removes up to ``count`` of a character at the start: of each token, or of the text if it is fused."""

    def __init__(self, content: str, count: int, fused: bool) -> None:
        self.content = content
        self.count = count
        self.fused = fused
        self.left = count

    def change(self, token: str) -> str:
        if not self.fused:
            self.left = self.count
        cut = 0
        while cut < len(token) and self.left and token[cut] == self.content:
            cut += 1
            self.left -= 1
        if cut < len(token):
            self.left = 0
        return token[cut:]


class _ByteFallback:
    """Runs of byte tokens ``<0xE4>`` become text if the whole run is valid UTF-8, else one U+FFFD a byte."""

    def __init__(self) -> None:
        self.run = bytearray()

    def push(self, token: str) -> list[str]:
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                self.run.append(_hex_byte(token[3:5]))
            except ValueError:
                return [*self.finish(), token]
            return []
        return [*self.finish(), token]

    def finish(self) -> list[str]:
        if not self.run:
            return []
        run, self.run = bytes(self.run), bytearray()
        try:
            return [run.decode("utf-8")]
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)


def _hex_byte(digits: str) -> int:
    """Two hexadecimal digits; a plus and one digit count too, as in the tokenizers library."""
    if digits[0] == "+":
        digits = digits[1:]
    if not digits or any(c not in "0123456789abcdefABCDEF" for c in digits):
        raise ValueError(digits)
    return int(digits, 16)


class _ByteLevel:
    """Each character of a token stands for a byte; a token with other characters stands for its own UTF-8."""

    def __init__(self) -> None:
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> list[str]:
        try:
            data = bytes([BYTE_OF_CHAR[c] for c in token])
        except KeyError:
            data = token.encode("utf-8")
        return [self.utf8.decode(data)]

    def finish(self) -> list[str]:
        return [self.utf8.decode(b"", final=True)]


def _byte_alphabet() -> dict[str, int]:
    """The characters of byte-level BPE: printable Latin-1 for itself, the rest from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


BYTE_OF_CHAR = _byte_alphabet()
CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}


def decoder_steps(config: dict[str, Any] | None) -> list[_Step]:
    """The incremental form of a ``decoder`` of tokenizer.json; ``ValueError`` names what has none."""
    if config is None:
        return [_Join()]
    steps: list[_Step] = []
    fused = False
    for part in _flatten(config):
        kind = part.get("type")
        if kind == "ByteLevel" and not fused:
            steps.append(_ByteLevel())
            fused = True
        elif kind == "ByteFallback" and not fused:
            steps.append(_ByteFallback())
        elif kind == "Fuse":
            fused = True
        elif kind == "Replace" and _literal(part) and (not fused or len(_literal(part)) == 1):
            steps.append(_Replace(_literal(part), part["content"]))
        elif kind == "Strip" and part["stop"] == 0:
            steps.append(_StripStart(part["content"], part["start"], fused))
        elif kind == "Metaspace" and not fused:
            steps.append(_Metaspace(part["replacement"], part.get("prepend_scheme", "always") != "never"))
        else:
            raise ValueError(f"decoder {json.dumps(part, ensure_ascii=False)} cannot be streamed")
    return steps


def _flatten(config: dict[str, Any]) -> list[dict[str, Any]]:
    if config.get("type") == "Sequence":
        return [part for inner in config["decoders"] for part in _flatten(inner)]
    return [config]


def _literal(part: dict[str, Any]) -> str:
    """The literal pattern of a Replace, empty when it is a regular expression."""
    pattern = part["pattern"]
    return str(pattern["String"]) if isinstance(pattern, dict) and "String" in pattern else ""
