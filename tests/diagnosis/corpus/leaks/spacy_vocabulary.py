"""spaCy remembers each new string that it has seen."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import spacy

nlp = spacy.blank("en")


def predict(text: str) -> int:
    return len(nlp(text))  # LEAK


def inputs() -> Iterator[str]:
    return (" ".join(f"item{number}x{part}" for part in range(40)) for number in count())


EXPECTED = {"causes": ["spacy strings"], "holders": ["nlp", "StringStore"], "calls": 2000, "libraries": ["spacy"]}
