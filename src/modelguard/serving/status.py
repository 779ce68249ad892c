"""The status of a batched function, as values."""

from collections.abc import Iterable
from dataclasses import dataclass
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
