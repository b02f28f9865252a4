"""decode: streams, JSON, stdin, files, statistics, interruption."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kestrel.cli import run_command
from kestrel.decode import main
from kestrel.llm import LLM
from tests.support.folders import clean_environment, converted_model, run_kestrel

FAST = ["-t", "1", "-c", "128"]


@pytest.fixture(scope="module")
def endless_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose context takes minutes to fill."""
    return converted_model(tmp_path_factory.mktemp("endless"), "llama", max_position=200_000)


def endless(folder: Path) -> list[str]:
    flags = ["-m", str(folder), "-c", "200000", "--ignore-eos", "-t", "1"]
    return [sys.executable, "-m", "kestrel.decode", *flags]


def decode(model: Path, *argv: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert run_command(main, ["-m", str(model), *FAST, *argv]) == code
    return capsys.readouterr()


def test_text_alone_on_stdout(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = decode(model_folder, "-p", "Who are you?", "-n", "12", capsys=capsys)
    with LLM(model_folder, threads=1) as llm:
        prompt = llm.chat_prompt([{"role": "user", "content": "Who are you?"}])
        expected = llm.generate(prompt, 12).text
    assert out == expected + "\n"
    lines = err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["prompt", "generation", "peak memory"]
    assert f"{len(prompt)} tokens" in lines[0]
    assert "12 tokens" in lines[1]
    assert lines[0].endswith("tok/s")
    assert lines[2].endswith("GB")
    assert decode(model_folder, "-p", "Who are you?", "-n", "12", "-q", capsys=capsys) == (out, "")


def test_raw_chat_and_system(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ids(*argv: str) -> str:
        out, _ = decode(model_folder, "-n", "1", "--json", *argv, capsys=capsys)
        with LLM(model_folder, threads=1) as llm:
            return llm.tokenizer.decode(json.loads(out)["prompt_token_ids"], skip_special_tokens=False)

    assert ids("-p", "hello", "--raw") == "hello"
    turn = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert ids("-p", "hello") == ids("-p", "hello", "--chat") == turn
    assert ids("-p", "hello", "--system", "Be brief") == "<|im_start|>system\nBe brief<|im_end|>\n" + turn
    assert ids("-p", "hello", "--no-think") == turn + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("flag", [["--system", "x"], ["--no-think"]])
def test_template_flags_need_a_template(
    model_folder: Path, capsys: pytest.CaptureFixture[str], flag: list[str]
) -> None:
    out, err = decode(model_folder, "-p", "x", "--raw", *flag, capsys=capsys, code=2)
    assert out == ""
    assert f"{flag[0]} needs a chat template, but --raw was given" in err


def test_a_model_without_template(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    for path in model_folder.iterdir():
        if path.name != "chat_template.jinja":
            (plain / path.name).symlink_to(path)
    out, _ = decode(plain, "-p", "hello", "-n", "3", capsys=capsys)
    assert out == decode(model_folder, "-p", "hello", "-n", "3", "--raw", capsys=capsys)[0]
    _, err = decode(plain, "-p", "hello", "--chat", capsys=capsys, code=1)
    assert "no chat template" in err
    _, err = decode(plain, "-p", "hello", "--system", "x", capsys=capsys, code=2)
    assert "the model has no chat template" in err


def test_json(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = decode(model_folder, "-p", "hello", "-n", "5", "--json", "-q", "--raw", capsys=capsys)
    assert out.count("\n") == 1
    assert err == ""
    facts = json.loads(out)
    with LLM(model_folder, threads=1) as llm:
        result = llm.generate("hello", 5)
    assert facts["text"] == result.text
    assert facts["token_ids"] == list(result.token_ids)
    assert facts["prompt_token_ids"] == list(result.prompt_token_ids)
    assert (facts["finish_reason"], facts["generated_tokens"]) == ("length", 5)
    assert (facts["mode"], facts["backend"], facts["threads"]) == ("l2exact", "cpu", "1")
    assert facts["peak_memory_bytes"] > 0


def test_sampling_flags_reach_the_sampler(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--raw", "-p", "hello", "-n", "12", "--json", "--temp", "0.9", "--top-k", "50"]
    flags += ["--top-p", "0.9", "--min-p", "0.01", "-s", "7"]
    facts = json.loads(decode(model_folder, *flags, capsys=capsys)[0])
    with LLM(model_folder, threads=1) as llm:
        params = {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 7}
        result = llm.generate("hello", 12, **params)
        stop = result.text[4:7]
        stopped = llm.generate("hello", 12, **params, stop=stop)
    assert facts["text"] == result.text
    facts = json.loads(decode(model_folder, *flags, "--stop", stop, capsys=capsys)[0])
    assert (facts["text"], facts["finish_reason"], facts["stop"]) == (stopped.text, "stop", stop)
    _, err = decode(model_folder, *["-p", "x", "-n", "1", "-s", "3", "--top-p", "0.5"], capsys=capsys)
    assert "--top-p, --seed has no effect at temperature 0" in err


def test_values_out_of_range_are_usage_errors(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in [
        (["--temp", "-1"], "temperature must be a finite number >= 0, not -1.0"),
        (["--temp", "1", "--top-p", "2"], "top_p must be"),
        (["--stop", ""], "stop must be non-empty"),
        (["-c", "100000"], "context size must be 1 to 512, the model's limit, not 100000"),
        (["--device", "tpu"], "unknown device 'tpu'"),
    ]:
        _, err = decode(model_folder, "-p", "x", *flags, capsys=capsys, code=2)
        assert message in err


def test_a_context_overflow_of_the_model_itself(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, err = decode(model_folder, "-p", "hello", "--raw", "-n", "99999999", capsys=capsys, code=1)
    assert "the model has no more than 512: shorten the request" in err


def test_context_overflow_names_the_numbers(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = decode(model_folder, "-p", "hello", "--raw", "-n", "500", capsys=capsys, code=1)
    assert out == ""
    assert "context limit 128: " in err
    assert "500 new tokens" in err
    assert "up to 512" in err


def test_cuda_without_a_gpu_is_refused_not_replaced(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount():
            pytest.skip("this machine has a GPU")
    except Exception:
        pass
    for flags in (["--cuda"], ["--device", "cuda:0"], ["--decode-device", "cuda"]):
        out, err = decode(model_folder, "-p", "x", *flags, capsys=capsys, code=1)
        assert out == ""
        assert "kestrel decode: error: " in err


def test_modes_on_the_cpu_are_announced_once(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exact, quiet = decode(model_folder, "-p", "x", "-n", "4", capsys=capsys)
    assert "reference" not in quiet
    for flag in (["--mode", "fast"], ["--bitexact"]):
        out, err = decode(model_folder, "-p", "x", "-n", "4", *flag, capsys=capsys)
        assert out == exact
        assert err.count("runs the exact reference") == 1


# -- prompts from files and pipes ----------------------------------------------------------------------------


def test_stdin_and_files_are_the_prompt(model_folder: Path, tmp_path: Path) -> None:
    common = ["decode", "-m", model_folder, *FAST, "-n", "3", "--raw", "--json", "-q"]
    text = "naïve café\n東京"
    (tmp_path / "p.txt").write_text(text + "\n", encoding="utf-8")
    runs = [
        run_kestrel(*common, "-p", text),
        run_kestrel(*common, "-p", "-", stdin=text + "\n"),
        run_kestrel(*common, "-f", "-", stdin=text),
        run_kestrel(*common, "-f", tmp_path / "p.txt"),
    ]
    assert [run.returncode for run in runs] == [0] * 4
    assert len({str(json.loads(run.stdout)["token_ids"]) for run in runs}) == 1
    assert len({str(json.loads(run.stdout)["prompt_token_ids"]) for run in runs}) == 1


def test_bad_prompts_are_usage_errors(model_folder: Path, tmp_path: Path) -> None:
    common = ["decode", "-m", model_folder]
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    for argv, message in [
        (["-f", tmp_path / "none"], "cannot be read: No such file"),
        (["-f", tmp_path], "cannot be read: Is a directory"),
        (["-f", tmp_path / "latin"], "is not UTF-8 text: byte 3 is 0xe9"),
        (["--raw", "-p", ""], "the prompt is empty"),
    ]:
        done = run_kestrel(*common, *argv)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr


# -- ends ----------------------------------------------------------------------------------------------------


def read_some(process: subprocess.Popen[bytes], count: int = 50) -> bytes:
    assert process.stdout is not None
    return os.read(process.stdout.fileno(), count)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_ctrl_c_prints_what_is_known_and_exits_130(
    endless_folder: Path, tmp_path: Path, flags: list[str]
) -> None:
    dump = tmp_path / "dump"
    process = subprocess.Popen(
        [*endless(endless_folder), "-p", "x", "--l2-dump", str(dump), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(),
    )
    if flags:  # no text to wait for: the partial dump shows that it runs
        while not list(tmp_path.iterdir()):
            time.sleep(0.05)
        time.sleep(0.3)
    else:
        read_some(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    message = err.decode()
    assert "generation: " in message
    assert "was not written" in message
    assert "Traceback" not in message
    assert list(tmp_path.iterdir()) == []
    if flags:
        assert json.loads(out)["finish_reason"] == "cancelled"


def test_a_terminated_dump_leaves_nothing(endless_folder: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*endless(endless_folder), "-p", "x", "--l2-dump", str(tmp_path / "dump")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(),
    )
    read_some(process)
    assert list(tmp_path.iterdir()) != []
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pipe_ends_quietly(endless_folder: Path) -> None:
    process = subprocess.Popen(
        [*endless(endless_folder), "-p", "x"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(),
    )
    read_some(process)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()


def on_terminal(argv: list[str], term: str) -> tuple[bytes, bytes]:
    """What a command writes to stdout, a pipe, and to stderr, a terminal."""
    parent, child = pty.openpty()
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=child, env=clean_environment(TERM=term)
    ) as process:
        os.close(child)
        shown = b""
        while True:
            try:
                part = os.read(parent, 4096)
            except OSError:  # the other end closed
                break
            if not part:
                break
            shown += part
        assert process.stdout is not None
        out = process.stdout.read()
    os.close(parent)
    assert process.returncode == 0
    return out, shown


def test_progress_is_for_terminals(model_folder: Path) -> None:
    """A bar for a long prompt on a terminal; the text does not mix with it."""
    argv = [sys.executable, "-m", "kestrel.decode", "-m", str(model_folder), "-t", "1", "--chunk", "8"]
    argv += ["-p", "word " * 60, "-n", "4", "--raw"]
    out, shown = on_terminal(argv, "xterm")
    assert b"\x1b[" in shown
    assert "━" in shown.decode()
    assert b"generation:" in shown
    piped = subprocess.run(argv, capture_output=True, env=clean_environment(), check=True)
    assert piped.stdout == out
    assert b"\x1b" not in piped.stderr
    assert len(piped.stderr.splitlines()) == 3
    assert b"\x1b" not in out
    _, dumb = on_terminal(argv, "dumb")  # it cannot draw a bar
    assert [line.partition(b":")[0] for line in dumb.splitlines()] == [
        b"prompt",
        b"generation",
        b"peak memory",
    ]


def test_one_token_is_counted_as_one(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = decode(model_folder, "-p", "hello", "--raw", "-n", "1", capsys=capsys)
    assert "generation:  1 token in 0.00 s, - tok/s" in err
