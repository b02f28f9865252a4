"""What it takes all multiprocessors to read one row at a time: ``python -m bench.gpu.row_reads``.

A launch writes a row of 2 to 16 KB, the next one reads it by every block. Prints the median block's cycles
from its first load to its last one's arrival, medians over repeats, by how far the row's lines of 128 bytes
lie apart. Needs a GPU.
"""

from __future__ import annotations

import numpy as np

from bench.gpu.context import markdown_table
from bench.gpu.device_code import DeviceCode

APART = (128, 256, 512, 1024, 2048, 4096)
SIZES = (2048, 8192, 16384)
REPEATS = 15


def main() -> None:
    code = DeviceCode("row_reads.cu")
    cupy = code.cupy
    blocks = code.device.multiprocessors
    row = cupy.zeros(APART[-1] * SIZES[-1] // 128, np.uint8)
    cycles = cupy.zeros(blocks, np.uint32)

    def median(size: int, apart: int) -> float:
        found = []
        for repeat in range(REPEATS + 2):  # the first two warm up
            where = row, np.int32(apart), np.int32(size // 16)
            code.launch("k_row_write", *where, np.uint32(repeat), grid=128)
            code.launch("k_row_read", *where, cycles, grid=blocks)
            cupy.cuda.get_current_stream().synchronize()
            found.append(float(np.median(cycles.get())))
        return float(np.median(found[2:]))

    rows = [[f"{size} bytes", *(f"{median(size, apart):.0f}" for apart in APART)] for size in SIZES]
    print(markdown_table([f"cycles, {blocks} blocks", *(f"{apart} apart" for apart in APART)], rows))


if __name__ == "__main__":
    main()
