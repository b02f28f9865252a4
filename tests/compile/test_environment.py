"""A missing or unfitting GPU, driver or package is one clear error; CUDA itself is stood in for."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from kestrel.cuda import compile as nvrtc
from kestrel.cuda.environment import check_versions, load_cupy, open_device
from kestrel.cuda.memory import memory_message
from kestrel.errors import BackendError


class FakeRuntimeError(RuntimeError):
    pass


def fake_cupy(
    driver: int = 13000,
    runtime: int = 13020,
    count: int | Exception = 1,
    capability: tuple[int, int] = (9, 0),
) -> Any:
    def device_count() -> int:
        if isinstance(count, Exception):
            raise count
        return count

    properties = {
        "name": b"Some GPU",
        "major": capability[0],
        "minor": capability[1],
        "multiProcessorCount": 132,
        "sharedMemPerBlockOptin": 232448,
        "totalGlobalMem": 150 << 30,
    }
    api = types.SimpleNamespace(
        CUDARuntimeError=FakeRuntimeError,
        driverGetVersion=lambda: driver,
        runtimeGetVersion=lambda: runtime,
        getDeviceCount=device_count,
        getDeviceProperties=lambda index: properties,
    )
    return types.SimpleNamespace(__version__="14.2.0", cuda=types.SimpleNamespace(runtime=api))


@pytest.fixture(autouse=True)
def nvrtc_13(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "supported_architectures", lambda: [75, 80, 86, 89, 90, 100, 120])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_fitting_device() -> None:
    device = open_device(0, fake_cupy())
    assert (device.name, device.architecture, device.multiprocessors) == ("Some GPU", "sm_90", 132)


@pytest.mark.parametrize(
    ("cupy", "index", "message"),
    [
        (fake_cupy(driver=0), 0, "no NVIDIA driver was found.*without --cuda"),
        (
            fake_cupy(driver=12080),
            0,
            r"supports CUDA up to 12\.8.*CuPy is for CUDA 13.*kestrel-exact\[cuda12\]",
        ),
        (fake_cupy(runtime=12090), 0, r"CuPy is for CUDA 12.*CUDA 13.*kestrel-exact\[cuda12\]"),
        (fake_cupy(count=FakeRuntimeError("cudaErrorNoDevice")), 0, "no usable GPU.*cudaErrorNoDevice"),
        (fake_cupy(count=0), 0, "no GPU cuda:0.*none"),
        (fake_cupy(count=2), 2, "no GPU cuda:2.*cuda:0 to cuda:1"),
        (fake_cupy(capability=(7, 5)), 0, r"capability 7\.5"),
    ],
    ids=["no driver", "old driver", "two majors", "no device", "none", "index", "old GPU"],
)
def test_refused(cupy: Any, index: int, message: str) -> None:
    with pytest.raises(BackendError, match=message) as caught:
        open_device(index, cupy)
    assert "\n" not in str(caught.value)


def test_visible_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(BackendError, match="CUDA_VISIBLE_DEVICES='7'"):
        open_device(0, fake_cupy(count=FakeRuntimeError("cudaErrorNoDevice")))


def test_a_newer_driver_is_fine() -> None:
    check_versions(driver=14000, runtime=13020, nvrtc_major=13)


def test_cupy_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(BackendError, match=r"needs CuPy, which is not installed: pip install 'kestrel-exact"):
        load_cupy()


def test_cupy_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(BackendError, match=r"cannot be imported \(libcudart.*kestrel-exact\[cuda13\]"):
        load_cupy()


def test_bindings_are_missing() -> None:
    code = (
        "import sys; sys.modules['cuda.bindings'] = None\n"
        "from kestrel.cuda.compile import nvrtc_version\n"
        "from kestrel.errors import BackendError\n"
        "try: nvrtc_version()\n"
        "except BackendError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "compiling kernels needs the package cuda-bindings" in result.stdout, result.stderr


def test_memory_message_has_the_numbers() -> None:
    text = memory_message("cuda:0", {"weights": 5 * 10**9, "KV cache": 2 * 10**9}, 6 * 10**9, 8 * 10**9)
    for part in ("weights 5.00 GB", "KV cache 2.00 GB", "together 7.00 GB", "free 6.00 GB of 8.00 GB", "-c"):
        assert part in text


@pytest.mark.skipif(
    Path("/dev/nvidiactl").exists() or importlib.util.find_spec("cupy") is None,
    reason="needs CuPy on a machine without a GPU",
)
def test_real_cupy_without_a_gpu() -> None:
    with pytest.raises(BackendError, match="no NVIDIA driver"):
        open_device(0)
