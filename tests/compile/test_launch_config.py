"""What the driver is told of a launch: clusters, and whether it may begin early."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from kestrel.launch import Launch

driver: Any = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from kestrel.cuda.device import CudaBackend, PreparedLaunch, launch_config  # noqa: E402


class NoArgs(ctypes.Structure):
    _fields_ = ()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("cluster", [1, 2, 8])
def test_attributes(cluster: int, early: bool) -> None:
    launch = Launch("k_any", (32, 2, 3), (64, 1, 1), 1000, NoArgs(), cluster=cluster)
    config = launch_config(launch, early=early)
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (32, 2, 3)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (64, 1, 1)
    assert config.sharedMemBytes == 1000
    found = {attribute.id: attribute.value for attribute in config.attrs}
    assert len(found) == config.numAttrs
    kinds = driver.CUlaunchAttributeID
    expected = set()
    if early:
        kind = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        expected.add(kind)
        assert found[kind].programmaticStreamSerializationAllowed == 1
    if cluster > 1:
        kind = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        expected.add(kind)
        size = found[kind].clusterDim
        assert (size.x, size.y, size.z) == (cluster, 1, 1)
    assert set(found) == expected


def test_a_launch_has_no_clusters_unless_it_says_so() -> None:
    assert Launch("k_any", (1, 1, 1), (32, 1, 1), 0, NoArgs()).cluster == 1


class Driver:
    """Notes how kernels are launched."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any]] = []  # kernel and configuration, None for a plain launch

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: int, extra: int) -> tuple[int]:
        self.calls.append((function, config))
        return (0,)

    def cuLaunchKernel(self, function: Any, *geometry: Any) -> tuple[int]:
        self.calls.append((function, None))
        return (0,)


@pytest.mark.parametrize("side", [False, True])
def test_a_launch_without_the_one_before_it_keeps_its_clusters(side: bool) -> None:
    class Config:
        hStream: Any = None

    def prepared(name: str, early: Any, clustered: Any) -> PreparedLaunch:
        launch = Launch(name, (8, 1, 1), (32, 1, 1), 0, NoArgs(), cluster=2 if clustered else 1)
        return PreparedLaunch(launch, name, None, None, 0, early, clustered, None)

    backend = object.__new__(CudaBackend)
    backend.name, backend._driver, backend._handles = "cuda:0", Driver(), ("main", "side")
    early, clustered, follows = Config(), Config(), Config()
    both, cluster = prepared("both", early, clustered), prepared("cluster", None, clustered)
    plain, programmatic = prepared("plain", None, None), prepared("programmatic", follows, None)
    cases: list[tuple[bool, list[PreparedLaunch], list[Any]]] = [
        (True, [both], [clustered]),
        (False, [both], [early]),
        (True, [plain, both], [None, early]),
        (True, [both, programmatic], [clustered, follows]),
        (True, [programmatic, cluster], [None, clustered]),
        (False, [cluster, plain, programmatic], [clustered, None, follows]),
    ]
    for alone, queue, expected in cases:
        backend._driver.calls.clear()
        backend.launch(queue, side=side, alone=alone)
        wanted = [(item.function, config) for item, config in zip(queue, expected, strict=True)]
        assert backend._driver.calls == wanted
        assert all(c.hStream == backend._handles[side] for _, c in wanted if c is not None)
