"""Text to token ids and back, from the files of a model folder.

``tokenizer.json`` does the work, through the ``tokenizers`` library. Its own post-processor decides what
``add_special_tokens`` adds, as in transformers; ``tokenizer_config.json`` names the special tokens and may
hold the chat template; ``generation_config.json`` (else ``config.json``) lists the ids that end a text.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kestrel.errors import ChatTemplateError, ModelError, UsageError
from kestrel.text.stream_decoder import StopMatcher, StreamDecoder, decoder_steps

if TYPE_CHECKING:
    import gguf
    import tokenizers

__all__ = ["StopMatcher", "StreamDecoder", "Tokenizer", "tokenizer_files_from_gguf"]

# The files that a tokenizer may consist of, besides additional_chat_templates/*.jinja.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)
TEMPLATE_FOLDER = "additional_chat_templates"
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of a model; make it with ``from_folder`` or ``from_files``.

    ``eos_ids`` are all ids that end a text (those of the generation settings, then that of ``eos_token``),
    ``bos_id`` is the id of ``bos_token`` or ``None``, ``special_tokens`` the texts of the tokens that
    ``decode`` skips, ``chat_templates`` the templates by name, ``vocab_size`` one more than the highest id.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named_tokens: Mapping[str, str],
        eos_ids: Sequence[int],
        chat_templates: Mapping[str, str],
    ) -> None:
        self._backend = backend
        self.named_tokens = dict(named_tokens)
        self.eos_ids = tuple(eos_ids)
        bos = self.named_tokens.get("bos_token")
        self.bos_id: int | None = None if bos is None else backend.token_to_id(bos)
        self.chat_templates = dict(chat_templates)

    # -- loading ---------------------------------------------------------------------------------------

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a model folder; ``ModelError`` lists every fault of its files."""
        folder = Path(path)
        if not folder.is_dir():
            raise ModelError(str(folder), ["not a folder"])
        found = [folder / name for name in TOKENIZER_FILES]
        found += sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))
        faults: list[str] = []
        files: dict[str, bytes] = {}
        for file in found:
            if file.is_file():
                name = file.relative_to(folder).as_posix()
                try:
                    files[name] = file.read_bytes()
                except OSError as error:
                    faults.append(f"{name} cannot be read: {error.strerror}")
        if faults:
            raise ModelError(str(folder), faults)
        if "tokenizer.json" not in files and (folder / "tokenizer.model").is_file():
            hint = "tokenizer.model alone is not read: save the tokenizer with transformers to get the file"
            raise ModelError(str(folder), [f"tokenizer.json is missing; {hint}"])
        return cls.from_files(files, where=str(folder))

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], *, where: str) -> Tokenizer:
        """The tokenizer of files given by name; ``where`` stands in messages."""
        return _Loader(files, where).load()

    # -- text ------------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The ids of ``text``; special tokens written in it are found.

        ``add_special_tokens`` adds what the tokenizer puts around a text (often a BOS token). A rendered chat
        template has its own, so it is encoded without.
        """
        try:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        except TypeError:
            at = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
            if at is None:
                raise
            raise UsageError(
                f"the text is not Unicode: character {at} is the lone surrogate U+{ord(text[at]):04X}"
            ) from None
        return list(encoding.ids)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; bytes that are no character become U+FFFD, ids without a token are skipped."""
        return str(self._backend.decode(_ids(ids), skip_special_tokens=skip_special_tokens))

    def stream(self, skip_special_tokens: bool = True) -> StreamDecoder:
        """Decodes token by token, with the text of ``decode``."""
        return StreamDecoder(self, skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, ``None`` where there is none."""
        token = self._backend.id_to_token(_ids([token_id])[0])
        return None if token is None else str(token)

    def token_to_id(self, token: str) -> int | None:
        token_id = self._backend.token_to_id(token)
        return None if token_id is None else int(token_id)

    @cached_property
    def vocab_size(self) -> int:
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        return frozenset(t.content for t in self._backend.get_added_tokens_decoder().values() if t.special)

    @cached_property
    def decoder_config(self) -> dict[str, Any] | None:
        """The decoder as tokenizer.json spells it."""
        return _decoder_config(self._backend)

    # -- chat ------------------------------------------------------------------------------------------

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **extra: Any,
    ) -> str:
        """The prompt text of a conversation, as transformers renders it.

        ``enable_thinking`` reaches the template unless it is ``None``; ``tools`` are JSON schemas;
        ``chat_template`` is the name of one of the model's templates, or the text of another. ``extra``
        reaches the template by name. Encode the result with ``add_special_tokens=False``.
        """
        from kestrel.text.chat_template import render_chat_template

        template = self._chat_template(chat_template, tools is not None)
        if enable_thinking is not None:
            extra["enable_thinking"] = enable_thinking
        return render_chat_template(
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **{**self.named_tokens, **extra},
        )

    def chat_template_variables(self) -> frozenset[str]:
        """Names that the model's templates read from outside, for instance ``enable_thinking``."""
        from kestrel.text.chat_template import template_variables

        return frozenset().union(*map(template_variables, self.chat_templates.values()))

    def _chat_template(self, chosen: str | None, with_tools: bool) -> str:
        templates = self.chat_templates
        if chosen in templates:
            return templates[chosen]
        if chosen is not None and "{" in chosen:
            return chosen
        if chosen is not None:
            known = ", ".join(sorted(templates)) or "none"
            raise UsageError(
                f"no chat template is named {chosen!r} (known: {known}), and it is not a template"
            )
        name = "tool_use" if with_tools and "tool_use" in templates else "default"
        if name in templates:
            return templates[name]
        if templates:
            raise ChatTemplateError(f"no default chat template: choose one of {', '.join(sorted(templates))}")
        raise ChatTemplateError("the model has no chat template: give plain text (--raw), or a chat_template")


def tokenizer_files_from_gguf(reader: gguf.GGUFReader) -> dict[str, bytes]:
    """Tokenizer files made from the metadata of a GGUF file; see ``kestrel.text.gguf_tokenizer``."""
    from kestrel.text.gguf_tokenizer import tokenizer_files_from_gguf as build

    files: dict[str, bytes] = build(reader)
    return files


def _ids(ids: Iterable[int]) -> list[int]:
    checked = [operator.index(i) for i in ids]
    if checked and not 0 <= min(checked) <= max(checked) < 1 << 32:
        raise UsageError("token ids must lie in 0 .. 4294967295")
    return checked


def _decoder_config(backend: tokenizers.Tokenizer) -> dict[str, Any] | None:
    decoder = backend.decoder
    if decoder is None:
        return None
    config: dict[str, Any] = json.loads(decoder.__getstate__())
    return config


class _Loader:
    """Reads tokenizer files and collects their faults."""

    def __init__(self, files: Mapping[str, bytes], where: str) -> None:
        self.files = files
        self.where = where
        self.faults: list[str] = []

    def load(self) -> Tokenizer:
        backend = self._backend()
        config = self._object("tokenizer_config.json")
        names = self._named_tokens(config)
        eos_ids = self._eos_ids()
        templates = self._templates(config)
        if backend is not None:
            self._check_added_tokens(backend, config)
            eos_ids = self._check_ids(backend, names, eos_ids)
        if self.faults or backend is None:
            raise ModelError(self.where, self.faults)
        return Tokenizer(backend, named_tokens=names, eos_ids=eos_ids, chat_templates=templates)

    def _backend(self) -> tokenizers.Tokenizer | None:
        import tokenizers

        data = self.files.get("tokenizer.json")
        if data is None:
            self.faults.append("tokenizer.json is missing")
            return None
        try:
            backend = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises bare exceptions
            self.faults.append(f"tokenizer.json is damaged: {error}")
            return None
        backend.no_truncation()  # saved settings of a training run: they would cut or pad prompts
        backend.no_padding()
        try:
            decoder_steps(_decoder_config(backend))
        except ValueError as error:
            self.faults.append(f"tokenizer.json: {error}")
        return backend

    def _object(self, name: str) -> dict[str, Any]:
        """A JSON object of a file, empty when the file is absent."""
        if name not in self.files:
            return {}
        try:
            value = json.loads(self.files[name].decode("utf-8"))
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # escapes can spell half a character
        except UnicodeDecodeError as error:
            self.faults.append(f"{name} is not UTF-8 at byte {error.start}")
        except UnicodeEncodeError:
            self.faults.append(f"{name} holds a lone surrogate, which is no Unicode text")
        except (ValueError, RecursionError) as error:  # ValueError: also numbers of thousands of digits
            self.faults.append(f"{name} is not JSON: {error}")
        else:
            if isinstance(value, dict):
                return value
            self.faults.append(f"{name} must hold an object, not {type(value).__name__}")
        return {}

    def _named_tokens(self, config: dict[str, Any]) -> dict[str, str]:
        names: dict[str, str] = {}
        legacy = {} if "added_tokens_decoder" in config else self._object("special_tokens_map.json")
        for file, source in (("tokenizer_config.json", config), ("special_tokens_map.json", legacy)):
            for name in TOKEN_NAMES:
                value = source.get(name)
                text = value.get("content") if isinstance(value, dict) else value
                if isinstance(text, str):
                    names[name] = text
                elif value is not None:
                    self.faults.append(f"{file}: {name} must be a token, not {value!r}")
        return names

    def _eos_ids(self) -> list[int]:
        for name in ("generation_config.json", "config.json"):
            value = self._object(name).get("eos_token_id")
            if value is None:
                continue
            ids = value if isinstance(value, list) else [value]
            if all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
                return ids
            self.faults.append(f"{name}: eos_token_id must be an id or a list of ids, not {value!r}")
        return []

    def _templates(self, config: dict[str, Any]) -> dict[str, str]:
        """Template files take the place of the templates in tokenizer_config.json."""
        templates: dict[str, str] = {}
        for file in self.files:
            if not file.endswith(".jinja"):
                continue
            name = "default" if file == "chat_template.jinja" else Path(file).stem
            try:
                templates[name] = self.files[file].decode("utf-8")
            except UnicodeDecodeError as error:
                self.faults.append(f"{file} is not UTF-8 at byte {error.start}")
        if templates:
            return templates
        value = config.get("chat_template")
        if value is None:
            return {}
        if isinstance(value, str):
            return {"default": value}
        if isinstance(value, dict):
            value = [{"name": name, "template": template} for name, template in value.items()]
        if not isinstance(value, list) or not all(_is_named_template(item) for item in value):
            self.faults.append(
                "tokenizer_config.json: chat_template must be a text or a list of name and template"
            )
            return {}
        for item in value:
            if item["name"] in templates:
                self.faults.append(f"tokenizer_config.json: two chat templates are named {item['name']!r}")
            templates[item["name"]] = item["template"]
        return templates

    def _check_added_tokens(self, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
        """Tokens that only tokenizer_config.json knows are added; their ids must come out as it says."""
        import tokenizers

        listed = config.get("added_tokens_decoder", {})
        where = "tokenizer_config.json: added_tokens_decoder"
        if not isinstance(listed, dict) or not all(_is_added_token(*item) for item in listed.items()):
            self.faults.append(f"{where} must map ids to tokens")
            return
        for key in sorted(listed, key=int):
            token, wanted = listed[key], int(key)
            if backend.token_to_id(token["content"]) is None:
                flags = {
                    name: bool(token[name])
                    for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
                    if name in token
                }
                backend.add_tokens([tokenizers.AddedToken(token["content"], **flags)])
            got = backend.token_to_id(token["content"])
            if got != wanted:
                self.faults.append(
                    f"{where} gives {token['content']!r} the id {wanted}, tokenizer.json {got}"
                )

    def _check_ids(
        self, backend: tokenizers.Tokenizer, names: dict[str, str], eos_ids: list[int]
    ) -> list[int]:
        for name in ("bos_token", "eos_token"):
            if name in names and backend.token_to_id(names[name]) is None:
                self.faults.append(f"{name} {names[name]!r} is not in the vocabulary")
        for i in eos_ids:
            if not 0 <= i < 1 << 32 or backend.id_to_token(i) is None:
                self.faults.append(f"eos_token_id {i} is not in the vocabulary")
        eos = backend.token_to_id(names["eos_token"]) if "eos_token" in names else None
        return list(dict.fromkeys([*eos_ids, *([] if eos is None else [eos])]))


def _is_named_template(item: object) -> bool:
    return isinstance(item, dict) and all(isinstance(item.get(key), str) for key in ("name", "template"))


def _is_added_token(key: str, token: object) -> bool:
    is_id = key.isascii() and key.isdecimal() and len(key) <= 10
    return is_id and isinstance(token, dict) and isinstance(token.get("content"), str)
