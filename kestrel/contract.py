"""Versions and constants of the numerics contract (``docs/numerics.md``).

A dump names ``CONTRACT``; dumps of different contracts are never compared. A rule that changes raises the
version of its section and ``CONTRACT`` with it.
"""

from __future__ import annotations

from types import MappingProxyType

CONTRACT = "2"

# Section of docs/numerics.md -> version of its rule.
SECTIONS = MappingProxyType(
    {
        "0": 2,  # arithmetic
        "1": 1,  # weight formats
        "2": 1,  # activation quantisation a8
        "3": 2,  # matrix times rows
        "4": 2,  # norms
        "5": 1,  # rotary embedding
        "6": 1,  # KV cache
        "7": 2,  # attention
        "8": 1,  # router
        "9": 1,  # embedding, FFN, residuals
        "10": 1,  # output and sampling
        "11": 1,  # UCRT functions
        "12": 1,  # L2 keys
        "13": 1,  # modes
    }
)

GROUP = 32  # weights, or activations, under one scale
LANES = 8  # partial sums of a dot product of quantised groups
SUM_LANES = 32  # of a bf16 dot product, of a norm's squares, of a chunk's exponentials
VALUE_CODE_MAX = 32767  # of the weights of V in a chunk
A8_ZERO_BELOW = 2.0**-100  # a group or head row whose largest magnitude is below this is all zeros
ATTENTION_CHUNK = 256  # KV positions under one maximum and one scale of weights
NAN_BITS = 0x7FC00000  # the canonical f32 NaN
FNV_OFFSET = 1469598103934665603
FNV_PRIME = 1099511628211
