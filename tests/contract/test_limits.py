"""The exact border of sections 2 and 6: below 2^-100 a group or head row is zero, from there on it is not."""

from __future__ import annotations

import numpy as np
import pytest

from kestrel import _native
from kestrel.contract import A8_ZERO_BELOW
from tests.support.bits import assert_bits_equal
from tests.support.run_op import run_op

BORDER = np.float32(A8_ZERO_BELOW)
BELOW = np.nextafter(BORDER, np.float32(0))
# Three rows of 32: largest magnitude at the border, just below it, and just below it with the other sign.
ROWS = np.zeros((3, 32), np.float32)
ROWS[:, 7] = [BORDER, BELOW, -BELOW]
ROWS[:, 20] = BORDER / 2
SCALES = np.array([BORDER / np.float32(127), 0, 0], np.float32)


@pytest.mark.parametrize("isa", _native.isa_available())
def test_a8_border(isa: str) -> None:
    q, d, gsum = np.full((3, 32), 9, np.int8), np.full((3, 1), 9, np.float32), np.full((3, 1), 9, np.int32)
    run_op("quantize_a8", isa=isa, x=ROWS.copy(), q=q, d=d, gsum=gsum, M=3, K=32)
    assert_bits_equal(d[:, 0], SCALES)
    np.testing.assert_array_equal(gsum[:, 0], [127 + 64, 0, 0])  # 63.5 rounds to even
    assert not q[1:].any()


@pytest.mark.parametrize("isa", _native.isa_available())
def test_kv_border(isa: str) -> None:
    kq, vq = (np.full((3, 1, 32), 9, np.int8) for _ in range(2))
    ks, vs = (np.full((3, 1), 9, np.float32) for _ in range(2))
    pos, base = np.arange(3, dtype=np.int32), np.zeros(3, np.int32)
    rows = {"k": ROWS.copy(), "v": ROWS.copy(), "kq": kq, "ks": ks, "vq": vq, "vs": vs}
    run_op("kv_append", isa=isa, **rows, pos=pos, base=base, M=3, nkv=1, hd=32, ld=32)
    for codes, scales in ((kq, ks), (vq, vs)):
        assert_bits_equal(scales[:, 0], SCALES)
        assert codes[0].any()
        assert not codes[1:].any()
