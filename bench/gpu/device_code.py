"""Compiles and launches the few kernels that belong to the bench alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kestrel.cuda import compile as nvrtc
from kestrel.cuda.environment import load_cupy, open_device
from kestrel.cuda.sources import KernelSources, kernel_sources


class DeviceCode:
    """The kernels of one ``.cu`` file of this folder, compiled with the exact flags."""

    def __init__(self, name: str) -> None:
        self.cupy = load_cupy()
        self.device = open_device(0, self.cupy)
        text = (Path(__file__).parent / name).read_bytes()
        sources = KernelSources({name: text}, kernel_sources().headers)
        path = nvrtc.cubin_path(nvrtc.Unit(name, False), self.device.architecture, sources)
        self._module = self.cupy.RawModule(path=str(path))

    def launch(self, kernel: str, *arguments: Any, grid: int = 2048, block: int = 256) -> None:
        """On the current stream; arguments are CuPy arrays or numpy scalars."""
        assert all(isinstance(a, (self.cupy.ndarray, np.generic)) for a in arguments)
        self._module.get_function(kernel)((grid,), (block,), arguments)
