"""What code costs that has not run lately: ``python -m bench.gpu.code_reads``.

A recorded chain of launches goes through some kernels of 8 KB of straight code in turn. Prints the cycles
for a KB of the median block's first warp, the first and the second time that a launch passes through its
code, by how much code the chain goes through before it comes back, and by warps of a block. Needs a GPU.
"""

from __future__ import annotations

import numpy as np

from bench.gpu.context import markdown_table
from bench.gpu.device_code import DeviceCode

KILOBYTES = 8  # of a kernel, as in code_reads.cu
KERNELS = [f"k_code_{i}{j}" for i in range(8) for j in range(4)]
FOOTPRINTS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32)  # kernels in turn
ROUNDS = 4
WARPS = (1, 4)  # of a block: one to each quarter of a multiprocessor, at most


def main() -> None:
    code = DeviceCode("code_reads.cu")
    cupy = code.cupy
    blocks = code.device.multiprocessors
    stream = cupy.cuda.Stream(non_blocking=True)

    def cycles(kernels: int, warps: int) -> tuple[float, float]:
        out = cupy.zeros((kernels, 2, blocks), np.uint32)
        with stream:
            stream.begin_capture()
            for _ in range(ROUNDS):
                for i in range(kernels):
                    code.launch(KERNELS[i], out[i], np.float32(0.5), grid=blocks, block=32 * warps)
            graph = stream.end_capture()
            for _ in range(3):
                graph.launch(stream)
            stream.synchronize()
        first, second = np.median(out.get(), axis=(0, 2)) / KILOBYTES
        return float(first), float(second)

    rows = []
    for kernels in FOOTPRINTS:
        found = [cycles(kernels, warps) for warps in WARPS]
        rows.append([f"{KILOBYTES * kernels} KB", *(f"{a:.0f}, {b:.0f}" for a, b in found)])
    heads = [f"{warps} warps: first, second pass" for warps in WARPS]
    print(markdown_table(["code in turn; cycles a KB", *heads], rows))


if __name__ == "__main__":
    main()
