"""Trees with parents: garbage for the collector, which comes as always."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any


def parse(text: str) -> dict[str, Any]:
    root: dict[str, Any] = {"word": None, "children": []}
    for word in text.split():
        root["children"].append({"word": word, "parent": root, "children": []})
    return root


def predict(text: str) -> int:
    return len(parse(text)["children"])


def inputs() -> Iterator[str]:
    return (" ".join(f"word{number + part}" for part in range(20)) for number in count())


EXPECTED = {"calls": 5000}
