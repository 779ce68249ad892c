"""A pool of work areas: as many as were ever used at once, and at most 64."""

from __future__ import annotations

import random
from collections.abc import Iterator

free: list[bytearray] = []


def predict(at_once: int) -> int:
    taken = [free.pop() if free else bytearray(b"\x01" * 200_000) for _ in range(at_once)]
    for area in taken:
        area[0] = at_once
    free.extend(taken)
    del free[64:]
    return len(free)


def inputs() -> Iterator[int]:
    chance = random.Random(1)
    while True:
        yield min(64, 1 + int(chance.expovariate(0.1)))


EXPECTED = {"calls": 6000}
