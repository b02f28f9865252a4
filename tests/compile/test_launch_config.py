"""What the driver is told of a launch: clusters, and whether it may begin early."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from kestrel.launch import Launch

driver: Any = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from kestrel.cuda.device import launch_config  # noqa: E402


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
