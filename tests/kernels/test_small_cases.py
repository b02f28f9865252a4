"""The cases of the tests on a GPU through the shim: a fault of theirs shows where there is no GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("kestrel._simt", reason="the shim is built by `make native`")

from kestrel.cpu import CpuBackend
from kestrel.simt import SimtBackend
from tests.support.bits import assert_bits_equal
from tests.support.op_cases import Case, run_case, small_cases


@pytest.mark.parametrize("case", list(small_cases()), ids=str)
def test_bits_equal_the_reference(case: Case) -> None:
    actual, expected = run_case(case, SimtBackend()), run_case(case, CpuBackend())
    for name, array in expected.items():
        assert_bits_equal(actual[name], array, f"{case} {name}", any_nan=case.any_nan)
