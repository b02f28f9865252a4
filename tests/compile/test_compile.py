"""Flags, cache and messages of kestrel.cuda.compile, on small sources."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kestrel.cuda import compile as nvrtc
from kestrel.cuda.sources import KernelSources, kernel_sources, read_sources
from kestrel.errors import BackendError

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and NVRTC")

UNIT = b'#include "value.cuh"\nextern "C" __global__ void k_value(float *y) { y[0] = VALUE; }\n'
SOURCES = KernelSources(units={"value.cu": UNIT}, headers={"value.cuh": b"#define VALUE 1.0f\n"})
EXACT = nvrtc.Unit("value.cu", False)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KESTREL_CACHE_DIR", str(tmp_path))
    return tmp_path / "cubin"


def test_exact_flags() -> None:
    flags = nvrtc.options("sm_90", fast=False)
    assert flags[-4:] == ["--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"]
    assert "-std=c++17" in flags
    assert "-arch=sm_90" in flags
    assert not [flag for flag in flags if "fast_math" in flag]


def test_no_other_file_has_nvrtc_flags() -> None:
    package = Path(nvrtc.__file__).parents[1]
    for path in package.rglob("*.py"):
        if path.name != "compile.py":
            text = path.read_text()
            assert "--fmad" not in text, path
            assert "--use_fast_math" not in text, path


def test_units_and_fast_units() -> None:
    sources = KernelSources(units={"a.cu": b"k_a", "b.cu": b"k_b k_b_fast", "c.cu": b"FORM(k_c)"}, headers={})
    assert [u.label for u in nvrtc.units(sources)] == ["a", "b", "c", "b-fast", "c-fast"]
    assert [u.label for u in nvrtc.units(sources, fast=False)] == ["a", "b", "c"]


def test_cubin_is_machine_code_of_the_architecture() -> None:
    path = nvrtc.cubin_path(EXACT, "sm_90", SOURCES)
    data = path.read_bytes()
    assert data.startswith(b"\x7fELF")
    assert nvrtc.kernels_in(data) == ["k_value"]


def test_second_call_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    first = nvrtc.cubin_path(EXACT, "sm_90", SOURCES)
    monkeypatch.setattr(nvrtc, "compile_source", None)
    assert nvrtc.cubin_path(EXACT, "sm_90", SOURCES) == first


def _changed() -> dict[str, KernelSources]:
    return {
        "a byte of the unit": dataclasses.replace(SOURCES, units={"value.cu": UNIT + b"\n"}),
        "a byte of a header": dataclasses.replace(SOURCES, headers={"value.cuh": b"#define VALUE 2.0f\n"}),
        "a header more": dataclasses.replace(SOURCES, headers={**SOURCES.headers, "b.cuh": b""}),
        "a byte moved from name to text": dataclasses.replace(
            SOURCES, headers={"value.cu": b"h#define VALUE 1.0f\n"}
        ),
    }


@pytest.mark.parametrize("what", _changed())
def test_key_covers(what: str) -> None:
    assert nvrtc.cache_key(EXACT, _changed()[what], "sm_90") != nvrtc.cache_key(EXACT, SOURCES, "sm_90")


def test_key_covers_architecture_mode_flags_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {nvrtc.cache_key(EXACT, SOURCES, "sm_90"), nvrtc.cache_key(EXACT, SOURCES, "sm_80")}
    keys.add(nvrtc.cache_key(nvrtc.Unit("value.cu", True), SOURCES, "sm_90"))
    monkeypatch.setattr(nvrtc, "COMMON_FLAGS", (*nvrtc.COMMON_FLAGS, "-lineinfo"))
    keys.add(nvrtc.cache_key(EXACT, SOURCES, "sm_90"))
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: (99, 0))
    keys.add(nvrtc.cache_key(EXACT, SOURCES, "sm_90"))
    assert len(keys) == 5


def test_changed_header_gives_other_machine_code() -> None:
    first = nvrtc.cubin_path(EXACT, "sm_90", SOURCES)
    second = nvrtc.cubin_path(EXACT, "sm_90", _changed()["a byte of a header"])
    assert first.read_bytes() != second.read_bytes()


@pytest.mark.parametrize("damage", ["truncated", "flipped bit", "empty"])
def test_damaged_entry_is_noticed(damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = nvrtc.cubin_path(EXACT, "sm_90", SOURCES)
    good = path.read_bytes()
    flipped = bytes([*good[:-9], good[-9] ^ 1, *good[-8:]])
    path.write_bytes({"truncated": good[: len(good) // 2], "flipped bit": flipped, "empty": b""}[damage])
    assert nvrtc.cubin_path(EXACT, "sm_90", SOURCES).read_bytes() == good
    assert str(path) in capsys.readouterr().err


def test_no_partial_file_stays(own_cache: Path) -> None:
    nvrtc.cubin_path(EXACT, "sm_90", SOURCES)
    assert [p.suffix for p in own_cache.iterdir()] == [".cubin"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_unwritable_cache_is_one_clear_error(own_cache: Path) -> None:
    own_cache.parent.chmod(0o500)
    with pytest.raises(BackendError, match="KESTREL_CACHE_DIR"):
        nvrtc.cubin_path(EXACT, "sm_90", SOURCES)


def test_cache_path_that_is_a_file(own_cache: Path) -> None:
    own_cache.write_text("")
    with pytest.raises(BackendError, match="KESTREL_CACHE_DIR"):
        nvrtc.cubin_path(EXACT, "sm_90", SOURCES)


def test_compile_error_shows_numbered_source_and_options() -> None:
    broken = b"// one\n// two\n__device__ int f() { return missing; }\n// four\n"
    with pytest.raises(BackendError) as caught:
        nvrtc.compile_source("broken.cu", broken, {}, "sm_90")
    message = str(caught.value)
    assert ">    3 | __device__ int f() { return missing; }" in message
    assert "     2 | // two" in message
    assert '"missing" is undefined' in message
    assert "--fmad=false --ftz=false" in message


def test_compile_error_in_a_header_shows_the_header() -> None:
    sources = dataclasses.replace(SOURCES, headers={"value.cuh": b"\n#define VALUE 1.0f\nint 5;\n"})
    with pytest.raises(BackendError, match=r"value\.cuh:\n(.*\n)*>    3 \| int 5;"):
        nvrtc.cubin_path(EXACT, "sm_90", sources)


def test_a_file_that_was_not_handed_over_cannot_be_included() -> None:
    with pytest.raises(BackendError, match=r"missing\.cuh"):
        nvrtc.compile_source("a.cu", b'#include "missing.cuh"\n', {}, "sm_90")


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((8, 0), "sm_80"), ((8, 7), "sm_86"), ((9, 0), "sm_90"), ((10, 3), "sm_100"), ((12, 1), "sm_120")],
)
def test_architecture(capability: tuple[int, int], expected: str) -> None:
    assert nvrtc.architecture(*capability, supported=[75, 80, 86, 89, 90, 100, 120]) == expected


@pytest.mark.parametrize(
    ("capability", "message"), [((7, 5), r"capability 7\.5.*8\.0"), ((13, 0), r"cannot compile.*newer")]
)
def test_architecture_refused(capability: tuple[int, int], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        nvrtc.architecture(*capability, supported=[75, 80, 90, 120])


def test_installed_sources_are_found() -> None:
    sources = kernel_sources()
    assert "op_args.h" in sources.headers


def test_check_command_sees_a_planted_fault(tmp_path: Path) -> None:
    (tmp_path / "norm.cu").write_text(
        'extern "C" __global__ void k_rms_norm_cpu(float *y) { y[0] = rsqrtf(y[1]); }\n'
    )
    command = [
        sys.executable,
        "-m",
        "kestrel.cuda.compile",
        "--check",
        "--arch",
        "sm_90",
        "--kernels",
        str(tmp_path),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert "k_rms_norm_cpu: approximation" in result.stderr
    assert "norm           k_rms_norm_cpu" in result.stdout

    (tmp_path / "norm.cu").write_text(
        'extern "C" __global__ void k_rms_norm_cpu(float *y) { y[0] = 1.0f / sqrtf(y[1]); }\n'
    )
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == 0


def test_every_kernel_compiles_and_passes_the_lint() -> None:
    """Hopper here, where kernels may begin early; ``make compile-check`` takes all architectures."""
    from kestrel.cuda.check import check
    from kestrel.cuda.sources import kernels_folder

    reports = check(read_sources(kernels_folder()), ["sm_90"], jobs=os.cpu_count() or 1)
    assert [fault for report in reports for fault in report.faults] == []
