"""Tokenizers from folders: what is read from which file, and what a user reads when files are damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel.errors import ChatTemplateError, ModelError, UsageError
from kestrel.text.tokenizer import Tokenizer
from tests.support.difficult_text import ALL_STRINGS
from tests.support.shared import shared_path
from tests.support.text_models import BYTE_LEVEL, FLAGS, byte_level, make, tokenizer_json

BASE = tokenizer_json(["a", "b"], BYTE_LEVEL, special=["<s>", "</s>", "<eot>"])
TURNS = [{"role": "user", "content": "hi"}]


def write(folder: Path, **files: Any) -> Path:
    """``files`` by stem: bytes and text as they are, anything else as JSON."""
    for stem, value in {"tokenizer": BASE, **files}.items():
        if value is None:
            continue
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        (folder / f"{stem}.json").write_bytes(data)
    return folder


def faults(folder: Path) -> list[str]:
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_folder(folder)
    assert caught.value.where == str(folder)
    return caught.value.faults


# -- ids that begin and end a text -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer_config", "expected"),
    [
        ({"eos_token_id": [4, 3]}, {"eos_token_id": 2}, {}, (4, 3)),
        ({"eos_token_id": 4}, None, {}, (4,)),
        ({}, {"eos_token_id": 3}, {}, (3,)),
        (None, {"eos_token_id": [3, 4]}, {}, (3, 4)),
        ({"eos_token_id": [4]}, None, {"eos_token": "</s>"}, (4, 3)),
        ({"eos_token_id": [3, 4, 3]}, None, {"eos_token": {"content": "</s>", **FLAGS}}, (3, 4)),
        ({"eos_token_id": None}, {}, {"eos_token": None}, ()),
    ],
)
def test_ids_that_end_a_text(
    tmp_path: Path, generation: Any, config: Any, tokenizer_config: Any, expected: tuple[int, ...]
) -> None:
    write(tmp_path, generation_config=generation, config=config, tokenizer_config=tokenizer_config)
    assert Tokenizer.from_folder(tmp_path).eos_ids == expected


def test_bos(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(write(tmp_path)).bos_id is None
    assert Tokenizer.from_folder(write(tmp_path, tokenizer_config={"bos_token": "<s>"})).bos_id == 2
    assert Tokenizer.from_folder(write(tmp_path)).named_tokens == {"bos_token": "<s>"}


def test_names_from_the_older_file(tmp_path: Path) -> None:
    older = {"bos_token": {"content": "<s>", **FLAGS}, "eos_token": "</s>"}
    tokenizer = Tokenizer.from_folder(write(tmp_path, special_tokens_map=older))
    assert tokenizer.bos_id == 2
    assert tokenizer.eos_ids == (3,)


def test_the_post_processor_decides_what_is_added(tmp_path: Path) -> None:
    post = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]}},
    }
    tokenizer = Tokenizer.from_folder(write(tmp_path, tokenizer={**BASE, "post_processor": post}))
    assert tokenizer.encode("ab", add_special_tokens=True) == [2, 0, 1]
    assert tokenizer.encode("ab", add_special_tokens=False) == [0, 1]
    assert tokenizer.encode("a</s>b", add_special_tokens=False) == [0, 3, 1]
    assert tokenizer.decode([2, 0, 3, 1]) == "ab"
    assert tokenizer.decode([2, 0, 3, 1], skip_special_tokens=False) == "<s>a</s>b"


def test_vocabulary(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path))
    assert tokenizer.vocab_size == 5
    assert tokenizer.special_tokens == {"<s>", "</s>", "<eot>"}
    assert tokenizer.token_to_id("<eot>") == 4
    assert tokenizer.token_to_id("zz") is None
    assert tokenizer.id_to_token(4) == "<eot>"
    assert tokenizer.id_to_token(5) is None
    assert tokenizer.decode([0, 99, 1]) == "ab"


def test_truncation_and_padding_of_a_training_run_are_off(tmp_path: Path) -> None:
    cut = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    pad = {
        "strategy": {"Fixed": 4},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 1,
        "pad_type_id": 0,
        "pad_token": "b",
    }
    write(tmp_path, tokenizer={**BASE, "truncation": cut, "padding": pad})
    assert Tokenizer.from_folder(tmp_path).encode("aaa", add_special_tokens=False) == [0, 0, 0]


# -- chat templates --------------------------------------------------------------------------------


def test_no_chat_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path))
    with pytest.raises(ChatTemplateError, match="the model has no chat template"):
        tokenizer.apply_chat_template(TURNS)
    assert tokenizer.apply_chat_template(TURNS, chat_template="{{ messages[0].role }}") == "user"
    assert tokenizer.chat_template_variables() == frozenset()


def test_named_templates_without_a_default(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "R{{ x }}"}, {"name": "tool_use", "template": "T"}]
    tokenizer = Tokenizer.from_folder(write(tmp_path, tokenizer_config={"chat_template": named}))
    assert tokenizer.apply_chat_template(TURNS, tools=[]) == "T"
    assert tokenizer.apply_chat_template(TURNS, chat_template="rag", x=1) == "R1"
    with pytest.raises(ChatTemplateError, match="no default chat template: choose one of rag, tool_use"):
        tokenizer.apply_chat_template(TURNS)
    with pytest.raises(UsageError, match=r"no chat template is named 'rga' \(known: rag, tool_use\)"):
        tokenizer.apply_chat_template(TURNS, chat_template="rga")
    assert tokenizer.chat_template_variables() == {"x"}


def test_a_template_file_takes_the_place_of_the_configuration(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"chat_template": "old", "eos_token": "</s>"})
    (tmp_path / "chat_template.jinja").write_bytes(b"new\r\n{{ eos_token }}\n")
    assert Tokenizer.from_folder(tmp_path).apply_chat_template(TURNS) == "new\n</s>"


# -- faults ----------------------------------------------------------------------------------------


def test_every_fault_is_listed_at_once(tmp_path: Path) -> None:
    write(
        tmp_path,
        tokenizer=b'{"version": "1.0", "model": {',
        tokenizer_config={"bos_token": 7, "chat_template": [{"name": "x"}]},
        generation_config=b"[]",
        config=b"\xff",
    )
    (tmp_path / "additional_chat_templates").mkdir()
    listed = faults(tmp_path)
    expected = [
        "tokenizer.json is damaged: ",
        "tokenizer_config.json: bos_token must be a token, not 7",
        "generation_config.json must hold an object, not list",
        "config.json is not UTF-8 at byte 0",
        "tokenizer_config.json: chat_template must be a text or a list of name and template",
    ]
    assert [fault[: len(start)] for fault, start in zip(listed, expected, strict=True)] == expected


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"tokenizer": None}, r": tokenizer\.json is missing$"),
        ({"tokenizer": b""}, r"tokenizer\.json is damaged"),
        ({"tokenizer": b"\x00" * 64}, r"tokenizer\.json is damaged"),
        ({"tokenizer": {"model": {"type": "Nonsense"}}}, r"tokenizer\.json is damaged"),
        ({"tokenizer_config": b"[" * 100_000}, r"tokenizer_config\.json is not JSON: "),
        ({"tokenizer_config": b'{"x": ' + b"9" * 5000 + b"}"}, r"tokenizer_config\.json is not JSON: "),
        ({"tokenizer_config": b"{"}, r"tokenizer_config\.json is not JSON: .* line 1 column 2"),
        ({"tokenizer_config": {"eos_token": "</x>"}}, r"eos_token '</x>' is not in the vocabulary"),
        ({"tokenizer_config": {"bos_token": "<x>"}}, r"bos_token '<x>' is not in the vocabulary"),
        ({"generation_config": {"eos_token_id": [3, 99]}}, r"eos_token_id 99 is not in the vocabulary"),
        ({"generation_config": {"eos_token_id": -1}}, r"eos_token_id -1 is not in the vocabulary"),
        (
            {"generation_config": {"eos_token_id": "3"}},
            r"eos_token_id must be an id or a list of ids, not '3'",
        ),
        ({"generation_config": {"eos_token_id": [True]}}, r"must be an id or a list of ids"),
        ({"config": {"eos_token_id": 1 << 40}}, r"eos_token_id 1099511627776 is not in the vocabulary"),
        ({"tokenizer_config": {"chat_template": 3}}, r"chat_template must be a text or a list"),
        (
            {
                "tokenizer_config": {
                    "chat_template": [{"name": "a", "template": "1"}, {"name": "a", "template": "2"}]
                }
            },
            r"two chat templates are named 'a'",
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"9": {"content": "</s>"}}}},
            r"added_tokens_decoder gives '</s>' the id 9, tokenizer\.json 3",
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"9": {"content": "<new>"}}}},
            r"added_tokens_decoder gives '<new>' the id 9, tokenizer\.json 5",
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"x": {}}}},
            r"added_tokens_decoder must map ids to tokens",
        ),
        ({"tokenizer_config": {"added_tokens_decoder": []}}, r"added_tokens_decoder must map ids to tokens"),
    ],
)
def test_faults(tmp_path: Path, files: dict[str, Any], fault: str) -> None:
    write(tmp_path, **files)
    with pytest.raises(ModelError, match=fault):
        Tokenizer.from_folder(tmp_path)
    assert len(faults(tmp_path)) == 1


def test_a_sentence_piece_file_alone_is_explained(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    assert "save the tokenizer with transformers" in faults(tmp_path)[0]


def test_a_template_that_is_not_utf8(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"ab\xff")
    assert faults(tmp_path) == ["chat_template.jinja is not UTF-8 at byte 2"]


def test_no_folder(tmp_path: Path) -> None:
    assert faults(tmp_path / "absent") == ["not a folder"]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_files_give_a_model_error_or_load(data: st.DataObject) -> None:
    """A byte changed or the end cut off, anywhere: never another exception."""
    files = {
        "tokenizer.json": json.dumps(BASE).encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "</s>", "added_tokens_decoder": {}}).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [3]}).encode(),
    }
    name = data.draw(st.sampled_from(sorted(files)))
    content = bytearray(files[name])
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] = data.draw(st.integers(0, 255))
    else:
        del content[at:]
    try:
        tokenizer = Tokenizer.from_files({**files, name: bytes(content)}, where="test")
    except ModelError:
        return
    tokenizer.encode("ab<s>", add_special_tokens=True)


# -- text ------------------------------------------------------------------------------------------


def test_a_lone_surrogate_is_refused_with_its_place() -> None:
    with pytest.raises(UsageError, match=r"character 2 is the lone surrogate U\+D83D"):
        byte_level().encode("ab\ud83d", add_special_tokens=False)


@pytest.mark.parametrize("ids", [[-1], [1 << 32], [0, -5]])
def test_numbers_that_are_no_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(UsageError, match=r"token ids must lie in 0 \.\. 4294967295"):
        byte_level().decode(ids)


def test_a_text_that_is_no_text() -> None:
    with pytest.raises(TypeError):
        byte_level().encode(b"a", add_special_tokens=False)  # type: ignore[arg-type]


def test_empty_text() -> None:
    tokenizer = byte_level()
    assert tokenizer.encode("", add_special_tokens=False) == []
    assert tokenizer.decode([]) == ""


def test_a_real_folder_round_trip() -> None:
    tokenizer = Tokenizer.from_folder(shared_path("models", "tiny-qwen3-moe"))
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.vocab_size == 8192
    for text in ALL_STRINGS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        decoder = tokenizer.stream(skip_special_tokens=False)
        streamed = "".join(map(decoder.push, ids)) + decoder.finish()
        assert streamed == tokenizer.decode(ids, skip_special_tokens=False)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    assert prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(prompt, add_special_tokens=False)[0] == tokenizer.token_to_id("<|im_start|>")


def test_a_decoder_may_be_absent() -> None:
    assert make(tokenizer_json(["a", "b"], None)).decode([0, 1]) == "a b"


def test_importing_is_light() -> None:
    heavy = "{'tokenizers', 'jinja2', 'gguf', 'numpy'}"
    code = f"import sys, kestrel.text.tokenizer; sys.exit(bool({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
