"""The status of a batched function, as values."""

import asyncio
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal, Self

from modelguard.serving._requests import PlainCall, Request, deliver_on_loops, request_of
from modelguard.serving.breaker import Circuit

__all__ = [
    "BatchState",
    "BatchStatus",
    "Quantiles",
]

#: ``"open"``: it admits items. ``"circuit open"``: the breaker refuses them. ``"half-open"``: one item is being tried.
#: ``"hung"``: a batch has run for longer than ``hang_after``.
BatchState = Literal["open", "circuit open", "half-open", "hung", "closed"]


# Without `from __future__ import annotations`: these classes are public under other modules' names, where
# typing.get_type_hints() could not resolve text.
@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """Quantiles over the last batches, at most 512; zero before the first one."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """The quantiles of some values. Each is one of the values; nothing is interpolated."""
        ordered = sorted(values)
        if not ordered:
            return cls()
        p50, p90, p99 = (ordered[min(int(len(ordered) * part), len(ordered) - 1)] for part in (0.5, 0.9, 0.99))
        return cls(p50=p50, p90=p90, p99=p99, max=ordered[-1])


@dataclass(frozen=True, kw_only=True)
class BatchStatus:
    """A batched function at one moment. Counts are of items, since the start or the last fork.

    Attributes:
        name: Its name.
        state: ``open`` (it admits items), ``circuit open``, ``half-open`` (one item is being tried), ``hung`` (a batch
            has run for longer than ``hang_after``), ``closed``.
        waiting: Items in the queue.
        running: Items that are being computed.
        running_seconds: How long the oldest batch has been running; 0 if none is.
        answered: Items that got a result.
        failed: Items that got an error from the function, or whose consumer was too slow for its stream.
        refused_full: Items refused because the queue was full, those that lost their place to another included.
        refused_late: Items refused because, by the measured run times, the answer would have come after the deadline.
        refused_open: Items refused because the circuit was open.
        refused_quota: Items refused because as many with their key were waiting as the quota allows.
        expired: Items whose deadline passed before their answer.
        cancelled: Items whose callers stopped waiting.
        batches: Batches that were computed.
        failed_batches: Batches that failed because of the model.
        bisected: Batches that were run again in parts to find the items at fault.
        batch_size: Items per batch.
        wait: Seconds that the first item of a batch waited, the longest wait in the batch.
        run: Seconds that the function took for a batch, where it did not raise.
        padding: Share of the computed weight that was padding, from 0 to 1; 0 unless ``padded`` is set.
        rate: Items per second that one thread computes, from the last batches; None if there were none in ten seconds.
        max_size: Most items that a batch may have now: what ``max_size="auto"`` has chosen for batches like the last
            one; fewer than ``max_size`` while many items make their batches raise.
        slo_reachable: Whether one item alone takes no longer than ``slo``; None before three runs, and without one.
    """

    name: str
    state: BatchState
    waiting: int
    running: int
    running_seconds: float
    answered: int
    failed: int
    refused_full: int
    refused_late: int
    refused_open: int
    refused_quota: int
    expired: int
    cancelled: int
    batches: int
    failed_batches: int
    bisected: int
    batch_size: Quantiles
    wait: Quantiles
    run: Quantiles
    padding: float
    rate: float | None
    max_size: int
    slo_reachable: bool | None


# The values that the queue works with: limits, batches and counters.


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
        max_size: Most items in a batch. With ``slo``, the bound of what is chosen.
        max_queue: Most items that wait.
        max_wait: Seconds that the oldest item waits for a fuller batch while a thread is free.
        max_weight: Most weight in a batch; infinity for no bound.
        deadline: Seconds that every item has from its arrival; infinity for no bound.
        threads: Threads that compute batches side by side.
        hang_after: Seconds after which a batch that runs counts as hung; infinity for never.
        weighed: Whether items have weights of their own; the heaviest then comes first in its batch.
        slo: Seconds from arrival to answer for which the size of batches is chosen; infinity for a fixed ``max_size``.
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
    slo: float = math.inf
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
        count: How many these are.
        group: Those, as the key of their line; None for none.
        weight: Their total weight, with padding; 0 if nothing is weighed.
        padding: How much of it is padding.
        started: When it was taken from the queue, in seconds on the batcher's clock.
        hung: Whether it has run for longer than ``hang_after``.
        oldest: When the first of them arrived.
    """

    __slots__ = ("count", "extras", "group", "hung", "oldest", "padding", "requests", "started", "weight")

    def __init__(self, requests: list[Request], weight: float, started: float) -> None:
        self.group = requests[0].group
        self.extras: dict[str, Any] = {} if self.group is None else requests[0].extras
        self.requests = requests
        self.count = len(requests)
        self.oldest = requests[0].arrived
        self.weight = weight
        self.padding = 0.0
        self.started = started
        self.hung = False

    @property
    def items(self) -> list[Any]:
        return [request.item for request in self.requests]

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


class PlainBatch(Batch):
    """Plain calls that are computed together. They get requests when something happens to one of them.

    Args:
        calls: The calls.
        timeout: Seconds that each of them has.
        started: As of any batch.
        weighed: Whether items have weights of their own.
    """

    __slots__ = ("_columns", "_timeout", "made")

    def __init__(self, calls: list[PlainCall], timeout: float, started: float, *, weighed: bool) -> None:
        self.oldest = calls[0][3]
        if weighed:
            calls.sort(key=_weight_of, reverse=True)
        self._columns = tuple(zip(*calls, strict=True))
        self._timeout = timeout
        self.made: dict[str, list[Request]] = {}
        self.group, self.extras = None, {}
        self.count = len(calls)
        self.weight = math.fsum(self._columns[4]) if weighed else 0.0
        self.padding = 0.0
        self.started = started
        self.hung = False

    @property
    def items(self) -> list[Any]:
        return list(self._columns[0])

    def has(self, future: asyncio.Future[Any]) -> bool:
        return any(one is future for one in self._columns[1])

    @property
    def requests(self) -> list[Request]:  # type: ignore[override]
        made = self.made.get("requests")
        return self.made.setdefault("requests", self._make()) if made is None else made  # one step: any thread asks

    def _make(self) -> list[Request]:
        requests: list[Request] = [request_of(call, self._timeout) for call in zip(*self._columns, strict=True)]
        for request in requests:
            request.state = "running"
        return requests

    def deliver(self, outcomes: list[Any]) -> None:
        _, futures, loops, _, _ = self._columns
        deliver_on_loops(loops, futures, outcomes)


_weight_of = itemgetter(4)


def is_plain(batch: Batch) -> bool:
    """Whether its calls have no requests, since nothing has happened to any of them."""
    return isinstance(batch, PlainBatch) and not batch.made


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


# Batches that overstay: which ones run for longer than ``hang_after``.


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
    return sum(batch.count for batch in running if batch.hung)


def state_of(running: Iterable[Batch], circuit: Circuit | None, *, closed: bool) -> BatchState:
    """The state of a queue, for its status."""
    if closed:
        return "closed"
    if items_in_hung(running):
        return "hung"
    if circuit is None or circuit.state == "closed":
        return "open"
    return "circuit open" if circuit.state == "open" else "half-open"
