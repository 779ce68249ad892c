"""Answers are streamed by generators, and those whose client went away are kept half read."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import count

open_streams: list[Generator[str]] = []


def stream(text: str) -> Generator[str, None, None]:
    pieces = [f"{part}:{text}" for part in range(40)]  # LEAK
    yield from pieces


def predict(text: str) -> str:
    answer = stream(text)
    open_streams.append(answer)
    return next(answer)


def inputs() -> Iterator[str]:
    return (f"question {number} of a customer" for number in count())


EXPECTED = {"causes": ["python objects"], "holders": ["open_streams"], "calls": 4000}
