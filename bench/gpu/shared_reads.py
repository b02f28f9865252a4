"""What loads from shared memory cost when lanes read the same: ``python -m bench.gpu.shared_reads``.

Every warp of one block loads 64 times 16 bytes a lane. Prints the multiprocessor's cycles a load, which are
those of the slowest warp over the loads of all warps, by who reads the same 16 bytes, medians over repeats.
Needs a GPU.
"""

from __future__ import annotations

import numpy as np

from bench.gpu.context import markdown_table
from bench.gpu.device_code import DeviceCode

PATTERNS = (  # in the order of shared_unit in shared_reads.cu
    "none",
    "2 neighbours",
    "4 neighbours",
    "8 neighbours",
    "2 lanes 16 apart",
    "4 lanes 8 apart",
    "8 lanes 4 apart",
    "all",
)
WARPS = (4, 8, 12, 16)
READS = 64  # of a warp, as in shared_reads.cu
REPEATS = 15


def main() -> None:
    code = DeviceCode("shared_reads.cu")
    cupy = code.cupy

    def median(pattern: int, warps: int) -> float:
        found = []
        for _ in range(REPEATS):
            cycles = cupy.zeros(warps, np.uint32)
            code.launch("k_shared_reads", np.int32(pattern), cycles, grid=1, block=32 * warps)
            found.append(int(cycles.get().max()) / (READS * warps))
        return float(np.median(found))

    rows = [[name, *(f"{median(i, w):.1f}" for w in WARPS)] for i, name in enumerate(PATTERNS)]
    print(markdown_table(["cycles a load; who shares", *(f"{w} warps" for w in WARPS)], rows))


if __name__ == "__main__":
    main()
