"""Each request puts its clean-up around the one before: a chain of closures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count


def at_shutdown() -> None:
    """Nothing to do yet."""


def add_hook(buffer: bytearray) -> None:
    global at_shutdown
    before = at_shutdown

    def flush() -> None:  # LEAK
        buffer.clear()
        before()

    at_shutdown = flush


def predict(number: int) -> int:
    buffer = bytearray(str(number).encode() * 500)  # LEAK
    add_hook(buffer)
    return len(buffer)


def inputs() -> Iterator[int]:
    return count(100_000)


hook: Callable[[], None] = at_shutdown

EXPECTED = {"causes": ["python objects"], "holders": ["at_shutdown"], "calls": 4000}
