"""A call that waits 200 ms for another service."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count


def predict(number: int) -> list[int]:
    time.sleep(0.2)
    return [number] * 1000


def inputs() -> Iterator[int]:
    return count()


EXPECTED = {"calls": 48, "slow": True}
