"""The values that the queue works with: limits, batches and counters."""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from modelguard.serving._requests import Request

#: What a batch says about the model: ``"succeeded"`` if an item succeeded, ``"failed"`` if the model is at fault,
#: ``"inconclusive"`` if the errors say nothing about it.
Verdict = Literal["succeeded", "failed", "inconclusive"]


# Without `from __future__ import annotations`: Limits is public under another module's name, where
# typing.get_type_hints() could not resolve text.
@dataclass(frozen=True, kw_only=True)
class Limits:
    """The bounds of a batched function; see :func:`~modelguard.batched`.

    Attributes:
        name: The function's name in events and errors.
        max_size: Most items in a batch.
        max_queue: Most items that wait.
        max_wait: Seconds that the oldest item waits for a fuller batch while a thread is free.
        max_weight: Most weight in a batch; infinity for no bound.
        deadline: Seconds that every item has from its arrival; infinity for no bound.
        threads: Threads that compute batches side by side.
        hang_after: Seconds after which a batch that runs counts as hung; infinity for never.
        weighed: Whether items have weights of their own; the heaviest then comes first in its batch.
        padded: Whether each item of a batch costs as much as the heaviest one.
        fair: Whether items have keys of their own; those of web requests count in any case.
        shares: The shares of keys; 1 for all others.
        quota: Most items of one key that wait; None for no bound.
        ageing: Seconds of waiting that count as much as one step of priority.
    """

    name: str
    max_size: int
    max_queue: int
    max_wait: float = 0.0
    max_weight: float = math.inf
    deadline: float = math.inf
    threads: int = 1
    hang_after: float = math.inf
    weighed: bool = False
    padded: bool = False
    fair: bool = False
    shares: Mapping[Hashable, float] = field(default_factory=dict, hash=False)
    quota: int | None = None
    ageing: float = 10.0

    def fill(self, count: int, weight: float) -> float:
        """How many full batches so many items of that total weight make: 0.5 is half a batch, 2 is two."""
        return max(count / self.max_size, weight / self.max_weight)


class Batch:
    """Requests that are computed together.

    Attributes:
        extras: Keyword arguments that they share.
        requests: In the order in which they are computed.
        group: Those, as the key of their line; None for none.
        weight: Their total weight, with padding; 0 if nothing is weighed.
        padding: How much of it is padding.
        started: When it was taken from the queue, in seconds on the batcher's clock.
        hung: Whether it has run for longer than ``hang_after``.
        oldest: When the first of them arrived.
    """

    __slots__ = ("extras", "group", "hung", "oldest", "padding", "requests", "started", "weight")

    def __init__(self, requests: list[Request], weight: float, started: float) -> None:
        self.group = requests[0].group
        self.extras: dict[str, Any] = {} if self.group is None else requests[0].extras
        self.requests = requests
        self.oldest = requests[0].arrived
        self.weight = weight
        self.padding = 0.0
        self.started = started
        self.hung = False

    def weigh(self, *, padded: bool) -> None:
        """Put the heaviest request first, and set the weight.

        Args:
            padded: Whether each item costs as much as the heaviest one.
        """
        requests = self.requests
        requests.sort(key=lambda request: request.weight, reverse=True)
        self.weight = math.fsum(request.weight for request in requests)
        if padded:
            weight = requests[0].weight * len(requests)
            self.padding, self.weight = max(weight - self.weight, 0.0), weight


@dataclass(slots=True)
class Counters:
    """What has happened, in items; ``batches``, ``failed_batches`` and ``bisected`` count batches."""

    answered: int = 0
    failed: int = 0
    refused_full: int = 0
    refused_late: int = 0
    refused_open: int = 0
    refused_quota: int = 0
    expired: int = 0
    cancelled: int = 0
    batches: int = 0
    failed_batches: int = 0
    bisected: int = 0
