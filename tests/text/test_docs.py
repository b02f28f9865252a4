"""docs/text.md: its example runs, its list of pre-tokenizers is the code's."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

from kestrel.text.gguf_tokenizer import PRE_TOKENIZERS
from kestrel.text.tokenizer import TEMPLATE_FOLDER, TOKENIZER_FILES
from tests.support.text_models import byte_level

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "text.md").read_text(encoding="utf-8")


def test_the_example_runs(tmp_path: Path) -> None:
    byte_level()._backend.save(str(tmp_path / "tokenizer.json"))
    template = "{{ messages[0].content }}:\nfirst\n\nsecond"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", PAGE, re.S)
    assert code is not None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code[1].replace('"MODEL"', repr(str(tmp_path))), {})
    assert out.getvalue() == "Hi:\nfirst"


def test_the_list_of_pre_tokenizers_is_complete() -> None:
    listed = re.search(r"refused by name: (.*?)\.\n", PAGE, re.S)
    assert listed is not None
    assert re.findall(r"`([^`]+)`", listed[1]) == sorted(PRE_TOKENIZERS)


def test_the_table_of_files_is_complete() -> None:
    assert all(f"`{name}`" in PAGE for name in TOKENIZER_FILES)
    assert f"`{TEMPLATE_FOLDER}/*.jinja`" in PAGE
