"""What compute-sanitizer watches: every op at small shapes and a few tokens of small models.

Each buffer is an allocation of its own, so that a byte past its end is seen. ``racecheck`` takes fewer cases:
it slows shared memory down a hundredfold.
"""

from __future__ import annotations

import sys
from typing import Any

from kestrel.cuda.device import CudaBackend
from kestrel.engine import Engine
from kestrel.ops import WType
from tests.support.dumps import generate
from tests.support.models import random_weights, tiny_config
from tests.support.op_cases import run_case, small_cases


class PlainAllocations:
    """Stands in for the pool: one cudaMalloc a buffer."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    def malloc(self, size: int) -> Any:
        return self._cupy.cuda.MemoryPointer(self._cupy.cuda.Memory(size), 0)

    def free_all_blocks(self) -> None:
        pass

    def free_bytes(self) -> int:
        return 0

    def used_bytes(self) -> int:
        return 0


def main() -> None:
    quick = sys.argv[1:] == ["racecheck"]
    backend = CudaBackend(0, "l2exact")
    backend._memory._pool = PlainAllocations(backend._cupy)
    for number, case in enumerate(small_cases()):
        if not quick or number % 2 == 0:
            run_case(case, backend)
    for family in ("qwen3_moe", "llama"):
        config = tiny_config(family)  # type: ignore[arg-type]
        weights = random_weights(config, WType.q4local)
        engine = Engine(config, weights, backend, context=320)
        generate(engine, [int(t) for t in range(3, 3 + (40 if quick else 260))], 6)
    for mode in ("fast", "bitexact"):
        other = CudaBackend(0, mode)  # type: ignore[arg-type]
        other._memory._pool = PlainAllocations(other._cupy)
        config = tiny_config("qwen3_moe")
        generate(Engine(config, random_weights(config, WType.q4local), other, context=64), [1, 2, 3, 4, 5], 4)
    print("target finished")


if __name__ == "__main__":
    main()
