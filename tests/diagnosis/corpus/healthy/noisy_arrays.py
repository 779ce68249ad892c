"""Temporary arrays of all sizes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

chance = np.random.default_rng(7)


def predict(rows: int) -> float:
    matrix = chance.random((rows, 300))
    return float((matrix.T @ matrix).trace())


def inputs() -> Iterator[int]:
    sizes = np.random.default_rng(1)
    while True:
        yield int(sizes.integers(1, 1000))


EXPECTED = {"calls": 300, "libraries": ["numpy"]}
