"""What a profiler watches: decode steps of a few layers of the shape of Qwen3-30B-A3B, launched one by one.

    ncu --clock-control none --set full -k regex:k_ --launch-skip 60 --launch-count 20 \\
        python -m bench.gpu.profile_target
"""

from __future__ import annotations

import sys

import numpy as np

from bench.gpu.synthetic import DeviceWeights, make_weights, synthetic_config
from kestrel.engine import Engine


def main() -> None:
    depth = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    config = synthetic_config(2)
    backend = DeviceWeights("l2exact", graph=False)
    engine = Engine(config, make_weights(config, backend), backend, context=depth + 64)
    model = engine.decode_model
    step = model.step(1, 1)
    for position in range(depth, depth + 8):
        model.load_rows(np.array([position % 997], np.int32), np.array([position], np.int32))
        step.program.run()
    print(f"{step.program.launches} launches a step, 8 steps")  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
