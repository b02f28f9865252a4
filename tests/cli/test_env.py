"""The table of environment variables, and docs/env.md, which is made from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kestrel.backends import Placement, choose_mode
from kestrel.env import DEVELOPMENT, Env, env, markdown
from kestrel.errors import UsageError
from tests.support.shared import REPOSITORY


def test_the_document_holds_the_table() -> None:
    text = (REPOSITORY / "docs" / "env.md").read_text(encoding="utf-8")
    assert markdown() in text, "docs/env.md is out of date: paste the output of kestrel.env.markdown()"


def test_names_and_spellings_are_unique() -> None:
    names = [name for variable in Env.table() for name in (variable.name, *variable.aliases)]
    assert len(names) == len(set(names))
    assert all(variable.name.startswith("KESTREL_") for variable in Env.table())


def test_no_other_module_reads_a_variable_of_ours() -> None:
    known = {name for v in Env.table() for name in (v.name, *v.aliases)}
    for path in (REPOSITORY / "kestrel").rglob("*.py"):
        if path.name == "env.py":
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            if "environ" in line or "getenv" in line:
                assert not any(f'"{name}"' in line for name in known), f"{path}: {line.strip()}"


def test_variables_read_outside_the_package_are_listed() -> None:
    """Otherwise a developer who sets one gets a warning of an unknown variable from every command."""
    paths = [REPOSITORY / "setup.py", *(REPOSITORY / "tests").rglob("*.py")]
    read = re.compile(r"""(?:environ(?:\.get)?[\[(]|getenv\()["'](KESTREL_\w+)["']""")
    names = {name for path in paths for name in read.findall(path.read_text(encoding="utf-8"))}
    assert "KESTREL_SHARED" in names
    assert names <= {*DEVELOPMENT, *(variable.name for variable in Env.table())}


def test_unset_and_empty_are_none() -> None:
    for values in ({}, {"KESTREL_ISA": "", "KESTREL_THREADS": "", "KESTREL_L2EXACT": ""}):
        settings = Env(values)
        assert (settings.isa, settings.threads, settings.l2exact, settings.model) == (None, None, None, None)


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("0", False), ("true", True), ("OFF", False), ("Yes", True)]
)
def test_flags(text: str, value: bool) -> None:
    assert Env({"KESTREL_FORCE_CPU": text}).force_cpu is value


def test_values() -> None:
    settings = Env({"KESTREL_THREADS": "3", "KESTREL_ISA": "scalar", "KESTREL_MODEL": "~/m"})
    assert settings.threads == 3
    assert settings.isa == "scalar"
    assert settings.model == Path.home() / "m"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KESTREL_ISA", "sse2"),
        ("KESTREL_THREADS", "0"),
        ("KESTREL_THREADS", "two"),
        ("KESTREL_L2EXACT", "2"),
        ("VLLM_CUDA_L2EXACT", "maybe"),
    ],
)
def test_invalid_values_name_the_variable(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"^{name}='{value}' is not valid: expected "):
        Env({name: value}).check()


@pytest.mark.parametrize(
    ("alias", "field"),
    [
        ("VLLM_CUDA_L2EXACT", "l2exact"),
        ("VLLM_CUDA_ATTN_BITEXACT", "attn_bitexact"),
        ("VLLM_CUDA_FORCE_CPU", "force_cpu"),
        ("VLLM_CUDA_DECODE", "cuda_decode"),
        ("VLLM_CUDA_INFER", "cuda_infer"),
    ],
)
def test_old_spellings_count_and_warn_once(
    alias: str, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Env({alias: "1"})
    assert getattr(settings, field) is True
    assert getattr(settings, field) is True
    settings.check()
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert f"{alias} is an old spelling: use KESTREL_" in warning


def test_spellings_that_disagree_are_an_error() -> None:
    with pytest.raises(UsageError, match="KESTREL_L2EXACT='1' and VLLM_CUDA_L2EXACT='0' disagree"):
        Env({"KESTREL_L2EXACT": "1", "VLLM_CUDA_L2EXACT": "0"}).check()
    assert Env({"KESTREL_L2EXACT": "1", "VLLM_CUDA_L2EXACT": "1"}).l2exact is True


def test_unknown_variables_are_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    Env({"KESTREL_THREAD": "2", "KESTREL_ZZZZZ": "1", "OTHER": "x"}).check()
    warning = capsys.readouterr().err
    assert "unknown environment variable KESTREL_THREAD; did you mean KESTREL_THREADS?" in warning
    assert "unknown environment variable KESTREL_ZZZZZ, it is ignored" in warning
    assert "OTHER" not in warning


# -- what the toggles decide ---------------------------------------------------------------------------------


def set_all(monkeypatch: pytest.MonkeyPatch, values: str) -> None:
    for item in values.split():
        name, _, value = item.partition("=")
        monkeypatch.setenv(f"KESTREL_{name}", value)


@pytest.mark.parametrize(
    ("values", "flag", "mode"),
    [
        ("", None, "l2exact"),
        ("", "fast", "fast"),
        ("L2EXACT=1", None, "l2exact"),
        ("L2EXACT=1", "fast", "fast"),  # a flag beats a variable
        ("L2EXACT=1 ATTN_BITEXACT=1", None, "l2exact"),
        ("ATTN_BITEXACT=1", None, "bitexact"),
        ("ATTN_BITEXACT=0", None, "l2exact"),
        ("L2EXACT=0", None, "fast"),
        ("L2EXACT=0 ATTN_BITEXACT=1", None, "bitexact"),
    ],
)
def test_mode(monkeypatch: pytest.MonkeyPatch, values: str, flag: str | None, mode: str) -> None:
    set_all(monkeypatch, values)
    assert choose_mode(flag) == mode


@pytest.mark.parametrize(
    ("values", "flags", "expected"),
    [
        ("", (None, None, None), ("cpu", "cpu")),
        ("", ("cuda:1", None, None), ("cuda:1", "cuda:1")),
        ("CUDA_INFER=1", (None, None, None), ("cuda", "cuda")),
        ("CUDA_DECODE=1", (None, None, None), ("cuda", "cuda")),
        ("CUDA_INFER=1", ("cpu", None, None), ("cpu", "cpu")),
        # The first seed's command for isolating a difference: prompt on the CPU, decode on the GPU.
        ("CUDA_DECODE=1 CUDA_INFER=1 FORCE_CPU=1", (None, None, None), ("cpu", "cuda")),
        ("FORCE_CPU=1", ("cuda", None, None), ("cpu", "cuda")),
        ("FORCE_CPU=1", ("cuda", "cuda", None), ("cuda", "cuda")),
        ("FORCE_CPU=1", (None, None, None), ("cpu", "cpu")),
        ("CUDA_DECODE=0", ("cuda", None, None), ("cuda", "cpu")),
        ("CUDA_DECODE=0", (None, None, None), ("cpu", "cpu")),
        ("", ("cuda", "cpu", None), ("cpu", "cuda")),
        ("", ("cuda", None, "cpu"), ("cuda", "cpu")),
    ],
)
def test_placement(
    monkeypatch: pytest.MonkeyPatch,
    values: str,
    flags: tuple[str | None, str | None, str | None],
    expected: tuple[str, str],
) -> None:
    set_all(monkeypatch, values)
    placement = Placement.choose(*flags)
    assert (placement.prompt, placement.decode) == expected


def test_the_module_reads_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KESTREL_ISA", "scalar")
    assert env.isa == "scalar"
    monkeypatch.delenv("KESTREL_ISA")
    assert env.isa is None
