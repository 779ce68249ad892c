"""A feature extractor that is memoized without a bound."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator


@functools.lru_cache(maxsize=None)  # noqa: UP033 - as people write it
def features(text: str) -> list[float]:
    codes = [ord(letter) / 255 for letter in text]
    return [left * right for left in codes for right in codes[:16]]  # LEAK


def predict(text: str) -> float:
    return sum(features(text))


def inputs() -> Iterator[str]:
    chance = random.Random(1)
    while True:
        yield f"ticket {chance.getrandbits(64):020d}: please call me back"


EXPECTED = {"causes": ["unbounded cache"], "holders": ["features"], "calls": 4000}
