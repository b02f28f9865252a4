"""Dumps that were edited, cut, or made by something else: refused by name, or read as what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kestrel.errors import KestrelError
from kestrel.l2_diff import compare
from kestrel.l2_dump import read_dump
from kestrel.l2_fields import FIELDS, Key, input_keys
from kestrel.l2_tensor import compare_tensors
from kestrel.llm import LLM
from tests.support.folders import converted_model

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("hostile")
    model = folder / "model\nt7_logits 0123456789abcdef"
    converted_model(folder, "qwen3").rename(model)
    with LLM(model, threads=1) as llm:
        llm.generate("x", 2, l2_dump=folder / "d")
    return (folder / "d").read_text()


def written(tmp_path: Path, text: str, name: str = "b") -> Path:
    path = tmp_path / name
    path.write_text(text, newline="")
    return path


def line_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines(keepends=True) if line.startswith(start))


def test_a_folder_name_adds_no_line(text: str, tmp_path: Path) -> None:
    dump = read_dump(written(tmp_path, text))
    assert "t7_logits" not in dump.hashes
    assert dump.header["model"] == r"model\nt7_logits 0123456789abcdef"


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_other_line_ends(text: str, tmp_path: Path, end: str) -> None:
    a, b = written(tmp_path, text, "a"), written(tmp_path, text.replace("\n", end))
    assert compare(read_dump(a), read_dump(b)).equal


@pytest.mark.parametrize("form", ["+{}", "0x{}", "-{}", "1_{}", "\uff11{}"])
def test_a_hash_is_hex_digits_alone(text: str, tmp_path: Path, form: str) -> None:
    tag, value = line_of(text, "t0_l0_nrm").split()
    wrong = form.format(value[len(form) - 2 :])
    with pytest.raises(KestrelError, match="is not a hash of 16 hex digits"):
        read_dump(written(tmp_path, text.replace(f"{tag} {value}", f"{tag} {wrong}")))


@pytest.mark.parametrize("key", ["t00_l0_nrm", "t0_l00_nrm", "t\u0660_l0_nrm", "t0_l9999999999_nrm"])
def test_a_key_has_one_spelling(text: str, tmp_path: Path, key: str) -> None:
    with pytest.raises(KestrelError, match="is no key of contract section 12"):
        read_dump(written(tmp_path, text.replace("t0_l0_nrm ", f"{key} ")))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("command", "[]"),
        ("command", "5"),
        ("command", '{"prompt_ids": 5}'),
        ("command", '{"prompt_ids": ["x"]}'),
        ("command", '{"prompt_ids": null}'),
        ("command", "[" * 100_000),
        ("generated", "5"),
        ("generated", '["a"]'),
        ("generated", "[1.5]"),
        ("generated", "null"),
    ],
)
def test_header_values_of_another_kind(text: str, tmp_path: Path, name: str, content: str) -> None:
    changed = text.replace(line_of(text, f"# {name} "), f"# {name} {content}\n")
    with pytest.raises(KestrelError, match=r"line \d+: "):
        read_dump(written(tmp_path, changed))


@pytest.mark.parametrize("key", ["model", "prompt_device", "threads", "isa", "chunk", "ctx_size", "graph"])
@pytest.mark.parametrize("value", [{}, "absent", 1.5])
def test_a_command_that_cannot_be_run(text: str, tmp_path: Path, key: str, value: Any) -> None:
    old = line_of(text, "# command ")
    command = json.loads(old.removeprefix("# command "))
    command[key] = value
    if value == "absent":
        del command[key]
    dump = read_dump(written(tmp_path, text.replace(old, f"# command {json.dumps(command)}\n")))
    if key in ("threads", "isa") and value == "absent":
        return  # None stands for the default
    with pytest.raises(KestrelError, match=rf"command\.{key} is not what kestrel writes"):
        compare_tensors(dump, dump, Key(0, 0, "nrm"), tmp_path / "out", (None, None))


def test_a_folder_for_tensors_that_cannot_be_made(text: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    dump = read_dump(path)
    with pytest.raises(KestrelError, match="cannot be made"):
        compare_tensors(dump, dump, Key(0, 0, "nrm"), path, (None, None))


def test_inputs_across_many_layers_without_keys() -> None:
    """A dump cut down to its first and last layer: the search is short, though the paths are countless."""
    known = {"t0_l0_x": 1, "t0_l900_nrm": 2}
    for field in FIELDS:
        layer = 900 if field.per_layer else None
        found = list(input_keys(Key(0, layer, field.name), 901, known))
        assert len(found) == len(set(found)) <= 2
    assert list(input_keys(Key(0, 900, "nrm"), 901, known)) == [Key(0, 0, "x")]
