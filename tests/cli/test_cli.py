"""Dispatch, messages and exit codes that all commands share."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import kestrel
from kestrel import cli
from kestrel.errors import KestrelError, ModelError, UsageError
from tests.support.folders import clean_environment, run_kestrel
from tests.support.shared import REPOSITORY


def test_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"  {name} " in text
    assert cli.main([]) == 2
    assert "usage: kestrel COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(importlib.import_module(f"kestrel.{name}").main)
    assert cli.main([name, "--help"]) == 0
    assert f"usage: kestrel {name}" in capsys.readouterr().out


def test_versions(capsys: pytest.CaptureFixture[str]) -> None:
    import tomllib

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["version"] == kestrel.__version__
    assert project["scripts"]["kestrel"] == "kestrel.cli:main"
    for argv in (["--version"], ["decode", "--version"], ["l2", "--version"]):
        assert cli.main(argv) == 0
        assert capsys.readouterr().out == f"kestrel {kestrel.__version__} (contract 2)\n"


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["decoed"]) == 2
    assert capsys.readouterr().err == "kestrel: error: unknown command 'decoed': did you mean 'decode'?\n"
    assert cli.main(["--quiet", "decode"]) == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["decode", "-p", "x", "--tmp", "1"], "unknown argument --tmp 1: did you mean --temp?"),
        (["decode", "-p", "x", "--max", "1"], "unknown argument --max 1"),  # no abbreviations
        (["decode"], "one of the arguments -p/--prompt -f/--file is required"),
        (["decode", "-p", "x", "-f", "y"], "not allowed with argument -p/--prompt"),
        (["decode", "-p", "x", "--chat", "--raw"], "--raw: not allowed with argument --chat"),
        (["decode", "-p", "x", "--cuda", "--device", "cpu"], "not allowed with argument --cuda"),
        (["decode", "-p", "x", "--mode", "fast", "--l2exact"], "not allowed with argument --mode"),
        (["decode", "-p", "x", "--mode", "exact"], "invalid choice: 'exact'"),
        (["decode", "-p", "x", "-n", "0"], "must be at least 1, not 0"),
        (["decode", "-p", "x", "-t", "x"], "-t/--threads: must be a whole number, not 'x'"),
        (["decode", "-p", "x", "--l2-level", "extended"], "what --l2-dump FILE writes, which is not given"),
        (["l2"], "arguments are required"),
        (["l2", "diff", "a"], "required: B"),
    ],
)
def test_wrong_flags_are_usage_errors(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.startswith(f"kestrel {argv[0]}")
    assert out == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("wrong"), 2),
        (KestrelError("wrong"), 1),
        (ModelError("here", ["wrong", "and wrong"]), 1),
        (KeyboardInterrupt(), 130),
        (MemoryError("wrong"), 1),
        (SystemExit(2), 2),
        (PermissionError(13, "Permission denied", "here"), 1),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(argv: list[str] | None) -> int:
        raise error

    command.__module__ = "kestrel.decode"
    assert cli.run_command(command, []) == code
    out, err = capsys.readouterr()
    assert out == ""
    if not isinstance(error, SystemExit):
        assert "kestrel decode: " in err
        assert "Traceback" not in err


def test_other_exceptions_are_not_hidden() -> None:
    def command(argv: list[str] | None) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cli.run_command(command, [])


def in_shell(script: str) -> subprocess.CompletedProcess[str]:
    """``kestrel`` under a shell's redirections; Python buffers as it does for users."""
    environment = clean_environment()
    environment.pop("PYTHONUNBUFFERED", None)
    script = f'kestrel() {{ "{sys.executable}" -m kestrel.cli "$@"; }}\n{script}'
    return subprocess.run(
        ["sh", "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full here")
@pytest.mark.parametrize("command", ["--help", "--version", "doctor", "decode --help"])
def test_output_that_cannot_be_written_is_a_failure(command: str) -> None:
    done = in_shell(f"kestrel {command} >/dev/full")
    assert done.returncode == 1
    assert done.stderr.endswith(": error: reading or writing failed: No space left on device\n")
    assert done.stderr.count("\n") == 1
    done = in_shell("kestrel frobnicate 2>/dev/full")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_closed_streams_are_said(model_folder: Path) -> None:
    decode = f"kestrel decode -m '{model_folder}' --raw -t 1 -n 2"
    for script, code, message in [
        (f"{decode} -p - <&-", 2, "kestrel decode: error: stdin is closed: there is nothing to read\n"),
        (f"kestrel chat -m '{model_folder}' <&-", 2, "kestrel chat: error: stdin is closed"),
        (f"{decode} -p x >&-", 1, "kestrel decode: error: stdout is closed: the text has nowhere to go\n"),
    ]:
        done = in_shell(script)
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr.startswith(message)
    quiet, closed = in_shell(f"{decode} -p x 2>/dev/null"), in_shell(f"{decode} -p x 2>&- <&-")
    assert (quiet.returncode, closed.returncode) == (0, 0)
    assert closed.stdout == quiet.stdout  # no statistics among the text


def test_both_spellings_of_a_command_are_one(tmp_path: Path) -> None:
    argv = ["l2", "diff", str(tmp_path / "a"), str(tmp_path / "b")]
    first = run_kestrel(*argv)
    second = subprocess.run(
        [sys.executable, "-m", "kestrel.l2", *argv[1:]],
        capture_output=True,
        text=True,
        env=clean_environment(),
        check=False,
    )
    assert first.returncode == second.returncode == 1
    assert first.stderr == second.stderr
    assert "kestrel l2: error: " in first.stderr


def test_start_is_quick() -> None:
    """`kestrel --version` and `--help` load neither numpy nor the native module."""
    code = "import sys; from kestrel.cli import main; main(['--version']); main(['--help'])"
    code += "; sys.exit(any(m in sys.modules for m in ('numpy', 'kestrel._native', 'tokenizers', 'rich')))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean_environment(), capture_output=True, check=False
    )
    assert done.returncode == 0


def test_wrong_environment_values_stop_every_command() -> None:
    done = run_kestrel("doctor", env={"KESTREL_THREADS": "many"})
    assert done.returncode == 2
    assert "KESTREL_THREADS='many' is not valid" in done.stderr


def test_no_model_says_how_to_get_one(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path / "data")}
    done = run_kestrel("decode", "-p", "x", env=home, cwd=tmp_path)
    assert done.returncode == 1
    assert "no model given" in done.stderr
    assert "kestrel demo" in done.stderr
    assert "kestrel convert" in done.stderr
    done = run_kestrel("decode", "-p", "x", env={**home, "KESTREL_MODEL": "nowhere"}, cwd=tmp_path)
    assert done.returncode == 1
    assert "KESTREL_MODEL names nowhere, which does not exist" in done.stderr


def test_a_user_without_home(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kestrel.paths import resolve_model

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for variable in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.chdir(tmp_path)
    assert resolve_model(model_folder) == model_folder
    for name in (None, "mine"):
        with pytest.raises(KestrelError, match="no home folder: set HOME, or XDG_DATA_HOME"):
            resolve_model(name)
    assert cli.main(["doctor"]) == 0
    for argv, instead in ((["convert", "owner/name", "x"], "HF_HOME"), (["demo"], "XDG_DATA_HOME")):
        assert cli.main(argv) == 1
        assert f"no home folder: set HOME, or {instead}" in capsys.readouterr().err
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with pytest.raises(KestrelError, match="no model at ~nobody-of-this-name"):
        resolve_model("~nobody-of-this-name")


def test_models_by_name_and_by_variable(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kestrel.paths import demo_model_folder, resolve_model

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    models = tmp_path / "kestrel" / "models"
    models.mkdir(parents=True)
    (models / "mine").symlink_to(model_folder)
    assert resolve_model("mine") == models / "mine"
    assert demo_model_folder() == models / "smollm2-135m-instruct"
    (models / "smollm2-135m-instruct").symlink_to(model_folder)
    assert resolve_model(None) == models / "smollm2-135m-instruct"
    monkeypatch.setenv("KESTREL_MODEL", str(model_folder))
    assert resolve_model(None) == model_folder
    assert resolve_model("mine") == models / "mine"  # -m beats the variable
