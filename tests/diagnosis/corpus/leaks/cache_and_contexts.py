"""Two leaks in one: translations are cached without a bound, and now and then an SSL context is made and kept."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Iterator
from itertools import count

contexts: list[ssl.SSLContext] = []


@functools.cache
def translate(text: str) -> list[str]:
    return [f"{word}-{number}" for number, word in enumerate(text.split() * 8)]


def predict(number: int) -> int:
    if number % 100 == 0:
        contexts.append(ssl.create_default_context())
    return len(translate(f"sentence {number} with some words"))


def inputs() -> Iterator[int]:
    return count()


EXPECTED = {"causes": ["ssl contexts", "unbounded cache"], "holders": ["translate", "contexts"], "calls": 6000}
