"""A method that is memoized: the cache belongs to the class, and holds each instance too."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import count


class Scorer:
    def __init__(self, language: str) -> None:
        self.language = language
        self.weights = {letter: 1 / (1 + number) for number, letter in enumerate("etaoinshrdlu")}

    @cache  # noqa: B019 - the leak
    def score(self, text: str) -> list[float]:
        return [self.weights.get(letter, 0.5) * number for number, letter in enumerate(text * 4)]  # LEAK


def predict(text: str) -> float:
    return max(Scorer("en").score(text))


def inputs() -> Iterator[str]:
    return (f"review {number}: it arrived in time and works" for number in count())


EXPECTED = {"causes": ["unbounded cache"], "holders": ["Scorer.score"], "calls": 4000}
