"""chat: turns from a pipe and at a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kestrel.llm import LLM
from tests.support.folders import clean_environment, converted_model, run_kestrel

FLAGS = ["-t", "1", "-n", "6"]


def answers(model: Path, *questions: str) -> list[str]:
    """What the interface gives for the same conversation, each request from an empty cache."""
    messages: list[dict[str, str]] = []
    texts = []
    with LLM(model, threads=1) as llm:
        for question in questions:
            messages.append({"role": "user", "content": question})
            texts.append(llm.generate(llm.chat_prompt(messages), 6).text)
            messages.append({"role": "assistant", "content": texts[-1]})
    return texts


def test_turns_from_a_pipe(model_folder: Path) -> None:
    done = run_kestrel(
        "chat", "-m", model_folder, *FLAGS, stdin="hello\n\nwho are you?\n/reset\nhello\n/quit\nnever read\n"
    )
    assert done.returncode == 0
    first, second = answers(model_folder, "hello", "who are you?")
    assert done.stdout == f"{first}\n{second}\n{first}\n"
    assert "18 tokens" in done.stderr  # statistics of all turns
    assert "reused" in done.stderr
    assert ">" not in done.stderr


def test_messages_with_a_slash(model_folder: Path) -> None:
    done = run_kestrel("chat", "-m", model_folder, *FLAGS, "-q", stdin="//usr\n/help\n")
    assert (done.returncode, done.stdout) == (0, answers(model_folder, "/usr")[0] + "\n")
    assert "/reset" in done.stderr
    done = run_kestrel("chat", "-m", model_folder, *FLAGS, "-q", stdin="/resett\nhello\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert "unknown command /resett" in done.stderr


def test_a_full_context_is_said(model_folder: Path) -> None:
    done = run_kestrel("chat", "-m", model_folder, *FLAGS, "-c", "40", stdin="hello\n" * 4)
    assert done.returncode == 1
    assert done.stdout.startswith(answers(model_folder, "hello")[0] + "\n")
    assert "kestrel chat: error: context limit 40" in done.stderr


def test_a_model_without_template_is_refused_at_once(tmp_path: Path, model_folder: Path) -> None:
    for path in model_folder.iterdir():
        if path.name != "chat_template.jinja":
            (tmp_path / path.name).symlink_to(path)
    done = run_kestrel("chat", "-m", tmp_path, stdin="hello\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no chat template" in done.stderr


def test_a_dump_toggle_is_not_ignored_silently(model_folder: Path, tmp_path: Path) -> None:
    done = run_kestrel(
        "chat", "-m", model_folder, *FLAGS, stdin="/quit\n", env={"KESTREL_L2_DUMP": str(tmp_path / "d")}
    )
    assert "KESTREL_L2_DUMP is not used by chat" in done.stderr


class Terminal:
    """A process on a pseudo-terminal."""

    def __init__(self, argv: list[str]) -> None:
        self.parent, child = pty.openpty()
        self.process = subprocess.Popen(
            argv,
            stdin=child,
            stdout=child,
            stderr=child,
            env=clean_environment(TERM="dumb"),
            start_new_session=True,
            preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
        )
        os.close(child)
        self.seen = ""

    def find(self, pattern: str, seconds: float) -> str | None:
        """Everything up to the match of ``pattern``, or None where it does not come in time."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen)):
            ready, _, _ = select.select([self.parent], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                return None
            self.seen += os.read(self.parent, 4096).decode("utf-8", "replace")
        text, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return text

    def until(self, pattern: str, seconds: float = 60) -> str:
        """As ``find``, but it has to come."""
        text = self.find(pattern, seconds)
        assert text is not None, f"no {pattern!r} in {self.seen[-2000:]!r}"
        return text

    def leave(self, pattern: str) -> str:
        """Ctrl-C at the prompt, again where readline loses it between its prompt and its wait for input."""
        for _ in range(20):
            self.send("\x03")
            if (text := self.find(pattern, 3)) is not None:
                return text
        return self.until(pattern, 0)

    def send(self, text: str) -> None:
        os.write(self.parent, text.encode())


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_conversation_at_a_terminal(tmp_path: Path) -> None:
    model = converted_model(tmp_path, "llama", max_position=200_000)
    argv = ["-m", str(model), "-c", "200000", "--ignore-eos", "-t", "1"]
    terminal = Terminal([sys.executable, "-m", "kestrel.chat", *argv])
    terminal.until("/help lists commands")
    terminal.until("> ")
    terminal.send("hello\n")
    terminal.until("hello\r\n.{20}")
    terminal.send("\x03")  # ends the answer, not the conversation
    terminal.until("\n> ")
    terminal.send("/nonsense\n")
    terminal.until("unknown command /nonsense")
    terminal.until("> ")
    terminal.send("/reset\n")
    terminal.until("> ")
    terminal.leave("peak memory: .*\n")  # no answer is running
    assert terminal.process.wait(timeout=60) == 130
    os.close(terminal.parent)
