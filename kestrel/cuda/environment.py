"""Are a GPU, a driver, CuPy and NVRTC there, and do they fit together? One clear error for each fault."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any

from kestrel.cuda import compile as nvrtc
from kestrel.errors import BackendError

_INSTALL = (
    "pip install 'kestrel-exact[cuda13]', in a checkout pip install -e '.[cuda13]' "
    "(or [cuda12] for a driver of CUDA 12)"
)


@dataclass(frozen=True)
class Device:
    """One GPU that can run the kernels."""

    index: int
    name: str
    capability: tuple[int, int]
    architecture: str  # the kernels' machine code, "sm_90"
    multiprocessors: int
    shared_bytes_per_block: int  # the most dynamic shared memory a kernel may ask for
    total_bytes: int
    driver: int  # CUDA version of the driver, 13000
    runtime: int  # CUDA version CuPy was built with
    cupy: str
    nvrtc: str


def load_cupy() -> Any:
    """The module ``cupy``, or BackendError saying how to get it."""
    try:
        return importlib.import_module("cupy")
    except ModuleNotFoundError as error:
        if error.name == "cupy":
            raise BackendError(f"running on a GPU needs CuPy, which is not installed: {_INSTALL}") from error
        raise BackendError(f"CuPy is installed but cannot be imported ({error}): {_INSTALL}") from error
    except ImportError as error:
        raise BackendError(f"CuPy is installed but cannot be imported ({error}): {_INSTALL}") from error


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def check_versions(driver: int, runtime: int, nvrtc_major: int) -> None:
    """The driver, CuPy's CUDA and NVRTC must share a CUDA major; the driver may be newer.

    ``driver`` is 0 where there is none. Raises BackendError.
    """
    if driver == 0:
        raise BackendError(
            "no NVIDIA driver was found: install one (nvidia-smi must list the GPU), or run without --cuda"
        )
    if driver // 1000 < runtime // 1000:
        raise BackendError(
            f"the NVIDIA driver supports CUDA up to {_version(driver)}, but the installed CuPy is for CUDA "
            f"{runtime // 1000}: install a newer driver, or CuPy for CUDA {driver // 1000} "
            f"by pip install 'kestrel-exact[cuda{driver // 1000}]'"
        )
    if nvrtc_major != runtime // 1000:
        raise BackendError(
            f"CuPy is for CUDA {runtime // 1000}, but NVRTC and cuda-bindings are for CUDA {nvrtc_major}: "
            f"install packages of one CUDA major, by pip install 'kestrel-exact[cuda{runtime // 1000}]'"
        )


def open_device(index: int, cupy: Any | None = None) -> Device:
    """Check everything that running on GPU ``index`` needs, and describe it. Raises BackendError."""
    cupy = load_cupy() if cupy is None else cupy
    runtime = cupy.cuda.runtime
    driver_version, runtime_version = int(runtime.driverGetVersion()), int(runtime.runtimeGetVersion())
    check_versions(driver_version, runtime_version, nvrtc.nvrtc_version()[0])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hint = f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else ""
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise BackendError(
            f"the driver shows no usable GPU{hint}: {error}; nvidia-smi must list it, or run without --cuda"
        ) from error
    if not 0 <= index < count:
        known = "there is none" if count == 0 else f"there are cuda:0 to cuda:{count - 1}"
        raise BackendError(f"there is no GPU cuda:{index}{hint}: {known}")
    try:
        properties = runtime.getDeviceProperties(index)
    except runtime.CUDARuntimeError as error:
        raise BackendError(f"GPU cuda:{index} does not answer: {error}") from error
    name = properties["name"]
    capability = (int(properties["major"]), int(properties["minor"]))
    return Device(
        index=index,
        name=name.decode() if isinstance(name, bytes) else str(name),
        capability=capability,
        architecture=nvrtc.architecture(*capability),
        multiprocessors=int(properties["multiProcessorCount"]),
        shared_bytes_per_block=int(properties["sharedMemPerBlockOptin"]),
        total_bytes=int(properties["totalGlobalMem"]),
        driver=driver_version,
        runtime=runtime_version,
        cupy=str(cupy.__version__),
        nvrtc=".".join(map(str, nvrtc.nvrtc_version())),
    )
