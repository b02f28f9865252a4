"""The same folder read by transformers: equal prompts, ids, texts and special tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kestrel.text.tokenizer import Tokenizer
from tests.support.difficult_text import ALL_STRINGS
from tests.support.shared import shared_path
from tests.support.templates import CONVERSATIONS, STRICT, THINKING, TOOLS
from tests.support.text_models import byte_fallback, byte_level

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip(
    "transformers", reason="compares with transformers, which is not installed"
)

TEMPLATES = {"thinking": THINKING, "strict": STRICT}
NAMES = {"bos_token": "<s>", "eos_token": "<|end|>"}


def save(tokenizer: Tokenizer, folder: Path, template: Any = None, **config: Any) -> Path:
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def both(folder: Path) -> tuple[Tokenizer, Any]:
    return Tokenizer.from_folder(folder), transformers.AutoTokenizer.from_pretrained(str(folder))


def outcome(render: Callable[..., str], *args: Any, **more: Any) -> str:
    """The text, or ``failed``: which error stands for a failure differs by design."""
    try:
        return render(*args, **more)
    except Exception:
        return "failed"


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Any]]:
    folders = {name: tmp_path_factory.mktemp(name) for name in TEMPLATES}
    return {
        name: both(save(byte_level(), folder, TEMPLATES[name], **NAMES)) for name, folder in folders.items()
    }


@pytest.mark.parametrize("tools", [None, TOOLS, []], ids=["no tools", "tools", "empty tools"])
@pytest.mark.parametrize("thinking", [None, True, False], ids=["absent", "think", "no think"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_prompts(
    renderers: dict[str, tuple[Tokenizer, Any]], conversation: str, thinking: bool | None, tools: Any
) -> None:
    messages = CONVERSATIONS[conversation]
    for ours, theirs in renderers.values():
        for add in (True, False):
            switch = {} if thinking is None else {"enable_thinking": thinking}
            expected = outcome(
                theirs.apply_chat_template,
                messages,
                tokenize=False,
                tools=tools,
                add_generation_prompt=add,
                **switch,
            )
            actual = outcome(
                ours.apply_chat_template,
                messages,
                tools=tools,
                enable_thinking=thinking,
                add_generation_prompt=add,
            )
            assert actual == expected


def test_most_prompts_are_no_failures(renderers: dict[str, tuple[Tokenizer, Any]]) -> None:
    """The comparison above would also pass if everything failed."""
    ours, _ = renderers["thinking"]
    failed = [
        name for name, turns in CONVERSATIONS.items() if outcome(ours.apply_chat_template, turns) == "failed"
    ]
    assert failed == ["unknown role"]


def test_named_templates(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain {{ x }}"},
        {"name": "tool_use", "template": "with {{ tools | length }}"},
    ]
    ours, theirs = both(save(byte_level(), tmp_path, named, **NAMES))
    turns = CONVERSATIONS["one turn"]
    for more in ({}, {"tools": TOOLS}, {"chat_template": "tool_use", "tools": TOOLS}, {"x": "y"}):
        expected = theirs.apply_chat_template(turns, tokenize=False, **more)
        assert ours.apply_chat_template(turns, add_generation_prompt=False, **more) == expected


def test_template_files(tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path, "from the configuration", **NAMES)
    (folder / "chat_template.jinja").write_bytes("from the file ü\r\n{{ eos_token }}\r\n".encode())
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag {{ documents }}", encoding="utf-8")
    ours, theirs = both(folder)
    turns = CONVERSATIONS["one turn"]
    assert ours.apply_chat_template(turns) == theirs.apply_chat_template(turns, tokenize=False)
    rag = ours.apply_chat_template(turns, chat_template="rag", documents=[{"title": "t"}])
    assert rag == theirs.apply_chat_template(
        turns, tokenize=False, chat_template="rag", documents=[{"title": "t"}]
    )


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_ids_and_text(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    ours, theirs = both(save(make(), tmp_path, bos_token="<s>"))
    check_ids_and_text(ours, theirs)


def check_ids_and_text(ours: Tokenizer, theirs: Any) -> None:
    assert ours.named_tokens == theirs.special_tokens_map
    for text in ALL_STRINGS:
        for add in (True, False):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == theirs(text, add_special_tokens=add)["input_ids"]
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_a_real_folder() -> None:
    folder = shared_path("models", "tiny-qwen3-moe")
    ours, theirs = both(folder)
    check_ids_and_text(ours, theirs)
    assert ours.eos_ids == (theirs.eos_token_id,)
    turns = CONVERSATIONS["three turns"]
    expected = theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(turns) == expected


def test_a_token_that_only_the_configuration_knows(tmp_path: Path) -> None:
    tokenizer = byte_level()
    flags = {"lstrip": True, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    added = {str(tokenizer.vocab_size): {"content": "<new>", **flags}}
    ours, theirs = both(save(tokenizer, tmp_path, bos_token="<s>", added_tokens_decoder=added))
    for text in ("a <new>a", "<new><s> <new>"):
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.vocab_size in ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_truncation_and_padding_of_the_file_do_not_cut_prompts(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer._backend.enable_truncation(4)
    tokenizer._backend.enable_padding(length=8)
    ours, theirs = both(save(tokenizer, tmp_path, bos_token="<s>"))
    for text in ("a" * 20, "a"):
        expected = theirs(text, add_special_tokens=False, truncation=False, padding=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == expected
        assert len(expected) == len(text)
