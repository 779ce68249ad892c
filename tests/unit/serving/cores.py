"""Cores and entries made by hand, and what the batcher would tell them."""

from __future__ import annotations

import math
from typing import Any

from modelguard.serving.batches import Batch, Limits
from modelguard.serving.breaker import Breaker, Circuit
from modelguard.serving.core import Core
from modelguard.serving.entries import Entry


def entry(item: object = 0, *, deadline: float = math.inf, weight: float = 1, group: Any = None) -> Entry:
    made = Entry(item)
    made.deadline, made.weight, made.group = deadline, weight, group
    return made


def core(breaker: Breaker | None = None, **limits: Any) -> Core:
    settings = {"name": "f", "max_size": 4, "max_queue": 8, **limits}
    return Core(Limits(**settings), None if breaker is None else Circuit(breaker))


def filled(count: int, **limits: Any) -> tuple[Core, list[Entry]]:
    made = core(**limits)
    entries = [entry(number) for number in range(count)]
    for one in entries:
        made.admit(one, 0.0)
    return made, entries


def run(made: Core, batch: Batch, seconds: float, now: float, verdict: Any = "good") -> None:
    """The batch's end, as the batcher tells it."""
    if verdict == "good":
        made.record(batch, seconds, now)
    made.finish(batch, [one.item for one in batch.entries])
    made.judge(batch, verdict, now)


def taken(made: Core, now: float) -> list[Any]:
    batch = made.take(now)
    assert isinstance(batch, Batch)
    return [one.item for one in batch.entries]


def evidence(made: Core, size: int, seconds: float, now: float = 0.0) -> None:
    """Three batches of that size have been measured."""
    for _ in range(3):
        for number in range(size):
            made.admit(entry(number), now)
        batch = made.take(now)
        assert isinstance(batch, Batch)
        run(made, batch, seconds, now)
