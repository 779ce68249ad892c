"""Answers that are generators, read to their end."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count


def predict(text: str) -> Iterator[str]:
    words = text.split() * 50
    for word in words:
        yield word.upper()


def inputs() -> Iterator[str]:
    return (f"question {number} of a customer" for number in count())


EXPECTED = {"calls": 4000}
