"""Tests that need a GPU skip, saying why, where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kestrel.cpu import CpuBackend
from kestrel.cuda.device import CudaBackend
from kestrel.cuda.environment import open_device
from kestrel.errors import BackendError


def _why_not() -> str | None:
    try:
        open_device(0)
    except BackendError as error:
        return str(error)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    reason = _why_not() if ours else None
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def gpu() -> Iterator[CudaBackend]:
    backend = CudaBackend(0, "l2exact")
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def cpu() -> CpuBackend:
    return CpuBackend()
