"""The pages about commands and the Python interface agree with the code."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from kestrel import chat, cli, decode, doctor, errors, l2
from kestrel.llm import LLM, GenerationResult, StreamChunk
from kestrel.sampling import SamplingParams
from tests.support.shared import REPOSITORY


def page(name: str) -> str:
    return (REPOSITORY / "docs" / name).read_text(encoding="utf-8")


def flags(parser: cli.Parser) -> set[str]:
    found = {flag for action in parser._actions for flag in action.option_strings}
    for action in parser._actions:
        if isinstance(action.choices, dict):
            found |= {flag for sub in action.choices.values() for flag in flags(sub)}
    return found - {"-h", "--help"}


@pytest.mark.parametrize("module", [decode, chat, doctor, l2])
def test_every_flag_is_documented(module: object) -> None:
    text = page("cli.md") + page("l2.md")
    missing = {flag for flag in flags(module.build_parser()) if not re.search(rf"`?{flag}(?![\w-])", text)}
    assert missing == set()


def test_every_documented_flag_exists() -> None:
    known = set().union(*(flags(module.build_parser()) for module in (decode, chat, doctor, l2)))
    assert set(re.findall(r"--[a-z][a-z0-9-]+", page("cli.md"))) <= known | {"--help"}


def test_every_command_is_documented() -> None:
    for name, text in cli.COMMANDS.items():
        assert f"| `{name}` | {text}" in page("cli.md")


def test_the_python_page_names_everything() -> None:
    text = page("python-api.md")
    names = [n for n in vars(LLM) if not n.startswith("_") and n not in ("engine", "describe")]
    names += list(inspect.signature(LLM).parameters)
    names += [p for p in inspect.signature(LLM.stream).parameters if p != "self"]
    for record in (SamplingParams, GenerationResult, StreamChunk):
        names += [field.name for field in dataclasses.fields(record)]
    missing = [name for name in names if not re.search(rf"[`(, *]{name}[`(=,)]", text)]
    assert missing == []
    for name in ("UsageError", "ModelError", "ContextOverflowError", "NonFiniteError", "BackendError"):
        assert f"| `{name}` |" in text
        assert issubclass(getattr(errors, name), errors.KestrelError)


def test_the_python_example_runs(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", page("python-api.md"), re.DOTALL)
    example = example.replace("models/smollm2-135m-instruct", str(model_folder))
    names: dict[str, object] = {}
    exec(compile(example, "docs/python-api.md", "exec"), names)
    assert names["logits"].shape == (3, 384)
    assert names["result"].text in capsys.readouterr().out
