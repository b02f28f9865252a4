"""Every op on the GPU against the reference, bit for bit, at small and awkward shapes."""

from __future__ import annotations

import pytest

from kestrel.cpu import CpuBackend
from kestrel.cuda.device import CudaBackend
from tests.support.bits import assert_bits_equal
from tests.support.op_cases import Case, run_case, small_cases


@pytest.mark.parametrize("case", list(small_cases()), ids=str)
def test_bits_equal_the_reference(case: Case, gpu: CudaBackend, cpu: CpuBackend) -> None:
    actual, expected = run_case(case, gpu), run_case(case, cpu)
    for name, array in expected.items():
        assert_bits_equal(actual[name], array, f"{case} {name}", any_nan=case.any_nan)
