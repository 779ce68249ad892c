"""One row of each result is kept, and with it the whole array that it is a view of."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

centroids: list[np.ndarray] = []


def predict(batch: np.ndarray) -> float:
    scaled = batch / np.linalg.norm(batch, axis=1, keepdims=True)  # LEAK
    centroids.append(scaled[0])
    return float(scaled[0] @ scaled[-1])


def inputs() -> Iterator[np.ndarray]:
    chance = np.random.default_rng(1)
    while True:
        yield chance.random((16, 96), dtype=np.float32)


EXPECTED = {"causes": ["python objects"], "holders": ["centroids"], "calls": 4000, "libraries": ["numpy"]}
