"""The same request again and again, in one process and in several, gives the same dump."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kestrel import _native
from kestrel.cpu import CpuBackend
from tests.support.forward import assert_same_bits, make_model, random_ids, run_tokens
from tests.support.models import tiny_config
from tests.support.shared import REPOSITORY

PROGRAM = """
import sys
from kestrel.cpu import CpuBackend
from tests.support.forward import make_model, random_ids, run_tokens
from tests.support.models import tiny_config

config = tiny_config("qwen3_moe")
threads = int(sys.argv[1]) or None
model = make_model(config, backend=CpuBackend(threads))
run = run_tokens(model, random_ids(40, config.vocab_size), chunk=int(sys.argv[2]), taps="extended")
for key, value in sorted(run.keys.items()):
    print(f"{key} {value:016x}")
"""


def test_ten_times_in_one_process() -> None:
    config = tiny_config("qwen3_moe")
    ids = random_ids(40, config.vocab_size)
    model = make_model(config, backend=CpuBackend(2))
    first = run_tokens(model, ids, taps="extended")
    for _ in range(9):
        assert_same_bits(run_tokens(model, ids, taps="extended"), first)


@pytest.mark.parametrize("isa", _native.isa_available())
def test_in_three_processes(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1, 2 and all threads, and other chunks in each."""
    monkeypatch.setenv("KESTREL_ISA", isa)
    dumps = []
    for threads, chunk in ((1, 40), (2, 7), (0, 1)):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(threads), str(chunk)],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
        )
        dumps.append(done.stdout)
    config = tiny_config("qwen3_moe")
    here = run_tokens(make_model(config), random_ids(40, config.vocab_size), taps="extended")
    lines = "".join(f"{key} {value:016x}\n" for key, value in sorted(here.keys.items()))
    assert lines.count("\n") == 40 * (2 * 20 + 2)
    for dump in dumps:
        assert dump == lines
