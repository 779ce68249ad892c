"""A conversation whose turns refer to the one before: no container holds them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count


class Turn:
    def __init__(self, text: str, previous: Turn | None) -> None:
        self.text = text
        self.words = text.split()  # LEAK
        self.previous = previous


newest: Turn | None = None


def predict(text: str) -> int:
    global newest
    newest = Turn(text, newest)  # LEAK
    before = newest.previous
    return len(newest.words) - (len(before.words) if before else 0)


def inputs() -> Iterator[str]:
    return (f"turn {number} " + " ".join(f"said{number + part}" for part in range(30)) for number in count())


EXPECTED = {"causes": ["python objects"], "holders": ["newest", "Turn.previous"], "calls": 5000}
