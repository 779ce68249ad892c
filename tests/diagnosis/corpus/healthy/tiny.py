"""The smallest function."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count


def predict(number: int) -> int:
    return number + 1


def inputs() -> Iterator[int]:
    return count()


EXPECTED = {"calls": 20000}
