"""spaCy on 100 texts, again and again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import spacy

nlp = spacy.blank("en")


def predict(text: str) -> int:
    return sum(token.is_alpha for token in nlp(text))


def inputs() -> Iterator[str]:
    return cycle([" ".join(f"item{number}x{part}" for part in range(40)) for number in range(100)])


EXPECTED = {"calls": 3000, "libraries": ["spacy"]}
