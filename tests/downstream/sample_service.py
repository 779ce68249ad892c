"""Counts the words of texts, by a model that is replaced every hour, in batches.

``SAMPLE_LEAK=1`` seeds a leak, as a service has one: a log of all requests that nobody ever clears.
"""

from __future__ import annotations

import os

from modelguard import TTL, Uses, batched, guard

requests: list[dict[str, str]] = []


class Counter:
    """Stands for a model: it holds a table, and is slow to make."""

    def __init__(self) -> None:
        self.table = bytes(8_000_000)

    def count(self, text: str) -> int:
        """Count the words of one text."""
        return len(text.split())


counter = guard(Counter, reload_on=TTL("1h") | Uses(50_000), name="counter")


@counter
def count(model: Counter, text: str) -> int:
    """Count the words of one text."""
    if os.environ.get("SAMPLE_LEAK"):
        requests.append({"text": text})
    return model.count(text)


@batched(max_size=16, deadline="2s")
@counter
def count_all(model: Counter, texts: list[str]) -> list[int]:
    """Count the words of many texts."""
    return [model.count(text) for text in texts]
