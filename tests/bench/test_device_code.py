"""The kernels that belong to the bench alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.gpu import code_reads
from kestrel.cuda import compile as nvrtc
from kestrel.cuda.sources import kernel_sources
from tests.support.shared import REPOSITORY

FOLDER = REPOSITORY / "bench" / "gpu"


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.cu")), ids=lambda file: file.name)
def test_it_compiles(file: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC")
    compiled = nvrtc.compile_source(file.name, file.read_bytes(), kernel_sources().headers, "sm_90")
    assert compiled.cubin


def test_code_reads_names_its_kernels_and_their_size() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC")
    file = FOLDER / "code_reads.cu"
    cubin = nvrtc.compile_source(file.name, file.read_bytes(), kernel_sources().headers, "sm_90").cubin
    named = set(re.findall(rb"\.text\.(k_code_\d+)", cubin))
    assert named == {name.encode() for name in code_reads.KERNELS}
    (fmas,) = re.findall(r"#define CODE_FMAS (\d+)", file.read_text())
    assert 16 * int(fmas) == 1024 * code_reads.KILOBYTES
