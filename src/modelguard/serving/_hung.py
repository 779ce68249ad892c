"""Batches that overstay: which ones run for longer than ``hang_after``."""

from __future__ import annotations

import math
from collections.abc import Iterable

from modelguard.serving._batches import Batch
from modelguard.serving.breaker import Circuit
from modelguard.serving.status import BatchState

__all__ = ["count_hung", "items_in_hung", "mark_hung", "next_hang", "state_of"]


def mark_hung(running: Iterable[Batch], hang_after: float, now: float) -> bool:
    """Mark the batches that have newly overstayed; returns whether there are any."""
    found = [batch for batch in running if not batch.hung and now - batch.started >= hang_after]
    for batch in found:
        batch.hung = True
    return bool(found)


def next_hang(running: Iterable[Batch], hang_after: float) -> float:
    """When :func:`mark_hung` may have something to do; infinity for never."""
    return min((batch.started + hang_after for batch in running if not batch.hung), default=math.inf)


def count_hung(running: Iterable[Batch]) -> int:
    """How many batches hang."""
    return sum(batch.hung for batch in running)


def items_in_hung(running: Iterable[Batch]) -> int:
    """How many items are in batches that hang."""
    return sum(len(batch.requests) for batch in running if batch.hung)


def state_of(running: Iterable[Batch], circuit: Circuit | None, *, closed: bool) -> BatchState:
    """The state of a queue, for its status."""
    if closed:
        return "closed"
    if items_in_hung(running):
        return "hung"
    if circuit is None or circuit.state == "closed":
        return "open"
    return "circuit open" if circuit.state == "open" else "half-open"
