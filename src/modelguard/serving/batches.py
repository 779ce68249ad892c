"""What a batcher is made of: its limits, its batches, and the count of what has happened."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from modelguard.serving.entries import Entry

#: ``"good"``: an item succeeded; ``"bad"``: the model is to blame; ``"neither"``: nobody can tell.
Verdict = Literal["good", "bad", "neither"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds a batch and a queue; see :func:`~modelguard.serving.making.batched`."""

    name: str
    max_size: int
    max_queue: int
    max_wait: float = 0.0
    max_weight: float = math.inf
    workers: int = 1
    sort: bool = False

    def share(self, count: int, weight: float) -> float:
        """How many full batches they make."""
        return max(count / self.max_size, weight / self.max_weight)


class Batch:
    """Entries that are computed together.

    Attributes:
        extras: Keyword arguments that they share.
        entries: In the order in which they are computed.
        share: How full it is, where 1 is full.
        started: When it was taken.
        oldest: When the first of them had arrived.
    """

    __slots__ = ("entries", "extras", "oldest", "share", "started")

    def __init__(self, entries: list[Entry], share: float, started: float) -> None:
        self.extras: dict[str, Any] = {name: value for name, _, value in entries[0].group or ()}
        self.entries = entries
        self.oldest = entries[0].arrived
        self.share = share
        self.started = started


@dataclass(slots=True)
class Tally:
    """What has happened, in items; ``batches``, ``failed_batches`` and ``bisected`` are in batches."""

    answered: int = 0
    failed: int = 0
    refused_full: int = 0
    refused_late: int = 0
    refused_open: int = 0
    expired: int = 0
    cancelled: int = 0
    batches: int = 0
    failed_batches: int = 0
    bisected: int = 0
