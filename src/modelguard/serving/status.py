"""What a batched function tells of itself on request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from modelguard.serving.core import Core


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """Of the last batches, at most 512; zero before the first."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Quantiles:
        """The quantiles of some values, each of which occurs among them."""
        ordered = sorted(values)
        if not ordered:
            return cls()
        p50, p90, p99 = (ordered[min(int(len(ordered) * share), len(ordered) - 1)] for share in (0.5, 0.9, 0.99))
        return cls(p50=p50, p90=p90, p99=p99, max=ordered[-1])


@dataclass(frozen=True, kw_only=True)
class BatchStatus:
    """A batched function at one moment. Counts are of items, since the start or the last fork.

    Attributes:
        name: Its name.
        state: ``open`` (it lets items in), ``circuit open``, ``half-open`` (one item is being tried), ``closed``.
        waiting: Items in the queue.
        running: Items that are being computed.
        answered: Items that have had a result.
        failed: Items that have had an error of the function's.
        refused_full: Items refused because the queue was full.
        refused_late: Items refused because by the measured rate the deadline could not be met.
        refused_open: Items refused because the circuit was open.
        expired: Items whose deadline came before their answer.
        cancelled: Items whose callers did not wait any more.
        batches: Batches that were computed.
        failed_batches: Batches that failed by the model's fault.
        bisected: Batches that were run again in parts, to find the items at fault.
        batch_size: Items of a batch.
        wait: Seconds that the first item of a batch had waited, which is the longest wait in it.
        run: Seconds that the function ran on a batch, where it did not raise.
        rate: Items a second that one worker computes, by the last batches; None if there were none in ten seconds.
    """

    name: str
    state: Literal["open", "circuit open", "half-open", "closed"]
    waiting: int
    running: int
    answered: int
    failed: int
    refused_full: int
    refused_late: int
    refused_open: int
    expired: int
    cancelled: int
    batches: int
    failed_batches: int
    bisected: int
    batch_size: Quantiles
    wait: Quantiles
    run: Quantiles
    rate: float | None


def describe(name: str, core: Core, now: float) -> BatchStatus:
    """The status, under the batcher's lock."""
    tally = core.tally
    sizes, waits, runs = zip(*core.recent, strict=True) if core.recent else ((), (), ())
    return BatchStatus(
        name=name,
        state=_state(core),
        waiting=core.waiting,
        running=sum(len(batch.entries) for batch in core.running),
        answered=tally.answered,
        failed=tally.failed,
        refused_full=tally.refused_full,
        refused_late=tally.refused_late,
        refused_open=tally.refused_open,
        expired=tally.expired,
        cancelled=tally.cancelled,
        batches=tally.batches,
        failed_batches=tally.failed_batches,
        bisected=tally.bisected,
        batch_size=Quantiles.of(sizes),
        wait=Quantiles.of(waits),
        run=Quantiles.of(runs),
        rate=core.estimator.rate(now),
    )


def _state(core: Core) -> Literal["open", "circuit open", "half-open", "closed"]:
    if core.closed:
        return "closed"
    if core.circuit is None or core.circuit.state == "closed":
        return "open"
    return "circuit open" if core.circuit.state == "open" else "half-open"
