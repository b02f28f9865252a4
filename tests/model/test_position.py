"""What a backend is told of the next run's position: a choice of launches may hang on it, bits do not."""

from __future__ import annotations

import numpy as np

from kestrel.cpu import CpuBackend
from tests.support.forward import make_model
from tests.support.models import tiny_config


class Told(CpuBackend):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: list[int] = []

    def at_position(self, position: int) -> None:
        self.positions.append(position)


def test_every_input_says_how_far_it_goes() -> None:
    backend = Told()
    model = make_model(tiny_config("qwen3"), backend=backend, slots=40, max_rows=4)
    for positions in ([0], [7, 5, 6], [39], []):
        ids = np.zeros(len(positions), np.int32)
        model.load_rows(ids, np.array(positions, np.int32))
    assert backend.positions == [0, 7, 39, 0]
