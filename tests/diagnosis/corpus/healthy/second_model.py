"""A second model, loaded when the first text in its language comes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count

models: dict[str, bytearray] = {}


def model_of(language: str) -> bytearray:
    if language not in models:
        models[language] = bytearray(os.urandom(1) * 60_000_000)
    return models[language]


def predict(text: str) -> int:
    model = model_of("ja" if text.endswith("。") else "en")
    return sum(model[hash(word) % len(model)] for word in text.split())


def inputs() -> Iterator[str]:
    return (f"text {number} of some words" + ("。" if number % 1100 == 1099 else "") for number in count())


EXPECTED = {"calls": 2000}
