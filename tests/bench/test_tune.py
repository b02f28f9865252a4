"""What the benches of variants and of notes make of their arguments, without a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from bench.gpu.notes import KERNEL, WORDS, cycles, main, noting
from bench.gpu.timeline import BLOCKS, LAUNCHES
from bench.gpu.tune import variants
from kestrel.cuda import compile as nvrtc
from kestrel.cuda.sources import KernelSources, kernel_sources
from kestrel.launch import Tuning

KERNELS = Path(__file__).parents[2] / "kernels"


def test_values_and_folders_join_to_variants(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    shutil.copytree(KERNELS, folder)
    (folder / "stages.cu").write_text("// other\n")
    both = f"{folder}+router_rows=2"
    found = list(variants(["streams=4,8", "streams=4,8+router_rows=1,2", str(folder), both]))
    assert [v.name for v in found] == [
        "defaults",
        *("streams=4", "streams=8"),
        *("streams=4+router_rows=1", "streams=4+router_rows=2"),
        *("streams=8+router_rows=1", "streams=8+router_rows=2"),
        str(folder),
        both,
    ]
    assert found[0].tuning == Tuning()
    assert found[0].sources is None
    assert found[4].tuning == Tuning(streams=4, router_rows=2)
    assert found[5].tuning == Tuning(streams=8, router_rows=1)
    assert found[8].tuning == Tuning(router_rows=2)
    assert found[8].sources is not None
    assert found[8].sources.units["stages.cu"] == b"// other\n"
    (_, automatic) = variants(["shared_carveout=-1"])
    assert automatic.tuning == Tuning(shared_carveout=-1)


@pytest.mark.parametrize(
    "text", ["no_such_field=1", "streams", "streams=4+/no/such/folder", "router_rows=1+x=2"]
)
def test_an_unknown_variant_is_refused(text: str) -> None:
    with pytest.raises(SystemExit, match="is neither NAME=VALUE,VALUE nor a folder"):
        list(variants([text]))


def test_a_value_that_is_no_number_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"'router_rows=1,x': 'x' is not a number"):
        list(variants(["router_rows=1,x"]))


def test_kernels_with_notes_compile() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC")
    before = kernel_sources()
    stages = before.units["stages.cu"].replace(
        b"    stream.finish(in, out);\n", b"    note(1);\n    stream.finish(in, out);\n"
    )
    sources, names = noting(KernelSources({**before.units, "stages.cu": stages}, before.headers))
    compiled = nvrtc.compile_source(
        "stages.cu", sources.units["stages.cu"], sources.headers, "sm_90", fast=False
    )
    assert b"clock_notes" in compiled.cubin
    assert "k_matmul_add_q4" in names


def test_cycles_of_notes() -> None:
    """Two launches of one kernel, one of another; blocks without note 1, or without an end, are left out."""
    modules = [np.zeros((LAUNCHES, BLOCKS, WORDS), np.int64) for _ in range(2)]

    def block(launch: int, number: int, kernel: int, **notes: int) -> None:
        row = modules[kernel][launch, number]
        row[KERNEL] = kernel + 1
        for name, value in notes.items():
            row[int(name[1:])] = value

    block(3, 0, 0, n0=90, n1=100, n2=150)
    block(3, 1, 0, n0=80, n1=110, n2=170)
    block(3, 2, 0, n2=999)
    block(7, 0, 0, n0=970, n1=1000, n2=1070)
    block(4, 5, 1, n1=10, n14=30)
    modules[1][4, 6, 1] = 5  # never ended
    assert cycles(modules, ["k_a", "k_b"]) == [
        ["k_a", "0", "2", "-30", "-25", "-20"],
        ["k_a", "2", "2", "60", "62", "65"],
        ["k_b", "14", "1", "20", "20", "20"],
    ]


def test_a_folder_without_kernels_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "is no copy of the folder kernels/" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(KERNELS), "--layers", "48"])
    assert "--layers must be 1 to 36, not 48" in capsys.readouterr().err
