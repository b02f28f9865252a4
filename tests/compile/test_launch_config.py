"""What the driver is told of a launch that may begin early."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from kestrel.launch import Launch

driver: Any = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from kestrel.cuda.device import early_config  # noqa: E402


class NoArgs(ctypes.Structure):
    _fields_ = ()


def test_an_early_launch() -> None:
    config = early_config(Launch("k_any", (32, 2, 3), (64, 1, 1), 1000, NoArgs()))
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (32, 2, 3)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (64, 1, 1)
    assert config.sharedMemBytes == 1000
    assert config.numAttrs == 1
    (attribute,) = config.attrs
    assert attribute.id == driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert attribute.value.programmaticStreamSerializationAllowed == 1
