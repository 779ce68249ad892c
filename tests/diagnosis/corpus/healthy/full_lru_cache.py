"""An lru_cache(1024) that is full before long."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import count


@lru_cache(maxsize=1024)
def features(text: str) -> list[float]:
    return [ord(letter) * number / 255 for number, letter in enumerate(text * 10)]


def predict(text: str) -> float:
    return sum(features(text))


def inputs() -> Iterator[str]:
    return (f"a text that comes once, {number}" for number in count())


EXPECTED = {"calls": 10000}
