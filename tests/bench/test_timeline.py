"""The timeline of a step: what is changed in the kernels, and what is made of their notes."""

from __future__ import annotations

import re

import numpy as np
import pytest

from bench.gpu.timeline import BLOCKS, LAUNCHES, WORDS, instrumented, launches_of, layer, main, summary
from kestrel.cuda import compile as nvrtc
from kestrel.cuda.sources import KernelSources, kernel_sources


def test_every_kernel_notes_its_end_and_its_wait() -> None:
    before = kernel_sources()
    after, names = instrumented(before)
    text = b"\n".join(before.units.values()).decode()
    assert sorted(names) == sorted(re.findall(r"^KERNEL .*?void (?:FORM\()?(k_\w+)", text, re.M))
    assert len(set(names)) == len(names)
    for number in range(len(names)):
        assert b"".join(after.units.values()).count(f"timeline_note(2, {number});".encode()) == 1
    assert after.headers["port.cuh"].count(b"timeline_note(1, 0)") == 2


def test_text_that_changed_is_an_error() -> None:
    sources = kernel_sources()
    port = sources.headers["port.cuh"].replace(b"griddepcontrol.wait;", b"griddepcontrol.wait ;")
    with pytest.raises(ValueError, match=r"port\.cuh holds 0 times"):
        instrumented(KernelSources(sources.units, {**sources.headers, "port.cuh": port}))


def test_the_changed_kernels_compile() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC")
    sources, _ = instrumented(kernel_sources())
    text = sources.units["attention_stage.cu"]
    compiled = nvrtc.compile_source("attention_stage.cu", text, sources.headers, "sm_90", fast=False)
    assert b"timeline_notes" in compiled.cubin


def noted(kernel: int, blocks: list[tuple[int, int, int]], places: tuple[int, ...] = (0, 1, 2)) -> np.ndarray:
    notes = np.zeros((BLOCKS, WORDS), np.int64)
    for row, (ready, waited, ended), place in zip(notes, blocks, places, strict=False):
        row[:] = ready, waited, ended, kernel, place, ready - 7
    return notes


def test_times_of_launches() -> None:
    """Two layers of two kernels of two modules; a block that never waited is left out."""
    modules = [np.zeros((LAUNCHES, BLOCKS, WORDS), np.int64) for _ in range(2)]
    modules[0][5] = noted(0, [(90, 100, 150), (95, 101, 160), (0, 0, 0)])
    modules[1][9] = noted(1, [(120, 200, 260), (130, 205, 300)])
    modules[0][200] = noted(0, [(250, 340, 380), (260, 340, 390)], places=(7, 7))
    modules[1][0] = noted(1, [(350, 400, 470), (360, 402, 500)])
    launches = launches_of(modules, ["k_a", "k_b"])
    assert [launch.kernel for launch in launches] == ["k_a", "k_b", "k_a", "k_b"]
    assert [len(launch.ended) for launch in launches] == [2, 2, 2, 2]
    # Of k_a its second launch alone: 340 - 300, 385 - 340, 390 - 340, 340 - 260, one SM; of k_b both.
    assert summary(launches) == [
        ["k_b", "2", "25", "82", "100", "55", "1"],
        ["k_a", "1", "40", "45", "50", "80", "2"],
    ]
    assert layer(launches, 1) == [
        ["k_a", "2", "1", "-87", "-80", "0", "40", "45", "50"],
        ["k_b", "2", "2", "13", "20", "60", "130", "145", "160"],
    ]


def test_more_layers_than_have_notes_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--layers", "48"])
    assert "--layers must be 1 to 36, not 48" in capsys.readouterr().err
