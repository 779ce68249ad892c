"""Errors are kept for a status page; their tracebacks keep the frames, and all that was in them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

ERRORS: list[Exception] = []


def parse(text: str) -> list[int]:
    parts = text.split(",")  # LEAK
    return [int(part) for part in parts]


def predict(text: str) -> int | None:
    try:
        return sum(parse(text))
    except ValueError as error:
        ERRORS.append(error)
        return None


def inputs() -> Iterator[str]:
    for number in count(1000):
        yield ",".join(str(number + part) for part in range(60)) + (",x" if number % 2 else "")


EXPECTED = {"causes": ["tracebacks"], "holders": ["ERRORS"], "calls": 6000}
