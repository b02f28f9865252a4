"""Runs attention on arrays that begin or end where memory does; a read outside kills the process (SIGSEGV).

``python -m tests.ops.guarded_attention``, started by test_attention.py.
"""

from __future__ import annotations

import sys

import numpy as np

from tests.ops.forms import FORMS
from tests.ops.guarded_matmul import guarded, release
from tests.ops.test_attention import expected_of, make_case, run
from tests.support.bits import assert_bits_equal

INPUTS = ("q", "kq", "ks", "vq", "vs", "pos", "base")


def main() -> int:
    for hd in (16, 32, 48, 80, 128):
        for last in (0, 6, 12, 31, 32, 256, 258):
            case = make_case(nh=5, nkv=1, hd=hd, positions=[last, last], slots=last + 1)
            want = expected_of(case)
            for at_end in (True, False):
                arrays = {name: guarded(case[name], at_end) for name in INPUTS}
                for isa, threads in FORMS:
                    got = run({**case, **arrays}, isa, threads)
                    what = f"hd={hd} last={last} at_end={at_end} {isa} {threads}"
                    assert_bits_equal(got, np.asarray(want), what)
                release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
