"""The status of a batched function, as values."""

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

__all__ = ["BatchState", "BatchStatus", "Quantiles"]

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
        if not (ordered := sorted(values)):
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
        max_size: Most items that a batch may have now: what ``AutoSize`` has chosen for batches like the last
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
