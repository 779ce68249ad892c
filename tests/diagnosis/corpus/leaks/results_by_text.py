"""Answers that are remembered in a dict of the module, and never removed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import count

RESULTS: dict[str, dict[str, object]] = {}


def classify(text: str) -> dict[str, object]:
    digest = hashlib.sha256(text.encode()).digest()
    scores = {f"label-{number}": byte / 255 for number, byte in enumerate(digest)}  # LEAK
    return {"text": text, "scores": scores, "best": max(scores, key=scores.__getitem__)}  # LEAK


def predict(text: str) -> object:
    if text not in RESULTS:
        RESULTS[text] = classify(text)  # LEAK
    return RESULTS[text]["best"]


def inputs() -> Iterator[str]:
    return (f"order {number} has not arrived" for number in count(1000))


EXPECTED = {"causes": ["python objects"], "holders": ["RESULTS"], "calls": 4000}
