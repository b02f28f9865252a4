"""Runs matmul on arrays that begin or end where memory does; a read outside kills the process with SIGSEGV.

``python -m tests.ops.guarded_matmul WTYPE``, started by test_matmul.py.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from kestrel.ops import WType
from tests.ops.matmul_reference import Input, all_forms, product, random_input
from tests.support.bits import assert_bits_equal
from tests.support.models import random_tensor
from tests.support.run_op import run_op

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_mappings: list[mmap.mmap] = []  # kept alive


def guarded(array: Any, at_end: bool) -> Any:
    """A copy of ``array`` in pages with a forbidden one on either side, at their end or at their start."""
    size = -(-max(array.nbytes, 1) // PAGE) * PAGE
    mapping = mmap.mmap(-1, size + 2 * PAGE)
    _mappings.append(mapping)
    raw = np.frombuffer(mapping, np.uint8)
    end = PAGE + size
    start = end - array.nbytes if at_end else PAGE
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    for page in (0, end):
        if _libc.mprotect(ctypes.c_void_p(raw.ctypes.data + page), ctypes.c_size_t(PAGE), 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect failed")
    return copy


def release() -> None:
    """Give back what ``guarded`` made."""
    _mappings.clear()


def main() -> int:
    wtype = WType[sys.argv[1]]
    rng = np.random.default_rng(0)
    lengths = (32, 64, 224, 256, 288, 352, 416) if wtype != WType.bf16 else (1, 7, 8, 12, 31, 33, 48, 63, 256)
    for k in lengths:
        for n, at_end in itertools.product((1, 7, 21, 40), (True, False)):
            w = random_tensor(rng, wtype, n, k)
            scale = None if w.scale is None else guarded(w.scale, at_end)
            w = replace(w, codes=guarded(w.codes, at_end), scale=scale)
            for M in (1, 2, 5, 9):
                data = Input(*(guarded(a, at_end) for a in random_input(rng, M, k).arrays.values()))
                want = product(w, data)
                for form in all_forms():
                    raw = np.full(M * n + 64, np.float32(7.25))
                    y = raw[32 : 32 + M * n].reshape(M, n)
                    with form.chosen():
                        run_op("matmul", form.threads, form.isa, w=[w], n_w=1, M=M, y=y, **data.arrays)
                    assert_bits_equal(y, want, f"k={k} n={n} M={M} {form}")
                    assert (raw[:32] == 7.25).all(), f"written before y: k={k} n={n} M={M} {form}"
                    assert (raw[32 + M * n :] == 7.25).all(), f"written after y: k={k} n={n} M={M} {form}"
            release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
