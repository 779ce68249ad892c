"""A model that is loaded by the first call."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from itertools import count


@functools.cache
def model() -> dict[str, list[float]]:
    chance = os.urandom(64)
    return {f"word{number}": [byte * number / 255 for byte in chance] for number in range(5000)}


def predict(text: str) -> float:
    return sum(sum(model().get(word, ())) for word in text.split())


def inputs() -> Iterator[str]:
    return (f"word{number % 5000} and word{number * 7 % 5000}" for number in count())


EXPECTED = {"calls": 3000}
