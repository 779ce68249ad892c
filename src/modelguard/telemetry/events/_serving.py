"""Events of batched functions."""

from __future__ import annotations

from dataclasses import dataclass

from modelguard.telemetry.events._base import Event


@dataclass(frozen=True, kw_only=True)
class BatchFinished(Event):
    """A batch was computed. Emitted only if there is a user-defined hook, or if the log is at level DEBUG.

    Attributes:
        size: The number of its items.
        waiting: The number of items that wait for the next batch.
        wait_seconds: How long the first of its items waited.
        run_seconds: How long it ran, including reruns.
        failed: The number of items that got an error.
        reruns: How often the function was called again to find the failing items.
        weight: The weight of the batch, with padding; 0 if items have no weights.
        padding: How much of it is padding; 0 unless the function was declared to pad.
        hung: How many other batches have been running for longer than ``hang_after``.
    """

    size: int
    waiting: int
    wait_seconds: float
    run_seconds: float
    failed: int
    reruns: int
    weight: float = 0.0
    padding: float = 0.0
    hung: int = 0


@dataclass(frozen=True, kw_only=True)
class BatchErrored(Event):
    """The batch function raised, did not return one result for each item, or has been running for too long.

    Attributes:
        size: The number of items in the batch.
        failed: The number of items that got an error; the others succeeded when they were run again.
        error: The error that the function raised for the whole batch.
        reruns: How often it was called again to find the failing items.
        hung: How many batches have been running for longer than ``hang_after``.
    """

    size: int
    failed: int
    error: str
    reruns: int
    hung: int = 0


@dataclass(frozen=True, kw_only=True)
class BatchSizeChosen(Event):
    """``max_size="auto"`` lets batches have more or fewer items than before, by a quarter at least.

    Also emitted if ``slo`` gets out of reach or within reach. At most once a second.

    Attributes:
        size: Most items in a batch from now on.
        previous: Most items before; 0 in the first event.
        slo: The latency goal in seconds; None if there is none any more, and ``size`` was given.
        item_seconds: How long one item alone takes, by what was measured, on the safe side.
        reachable: Whether that is within the goal. If it is not, items run alone.
    """

    size: int
    previous: int
    slo: float | None
    item_seconds: float
    reachable: bool


@dataclass(frozen=True, kw_only=True)
class RequestsRefused(Event):
    """Requests were refused or dropped since the last event of this kind. Emitted at most once a second.

    Attributes:
        full: Refused because the queue was full.
        late: Refused because, at the measured rate, the deadline could not be met.
        open: Refused because the circuit was open.
        quota: Refused because as many items with their key were waiting as the quota allows.
        expired: Dropped at their deadline.
        cancelled: Dropped because their caller no longer waits.
        waiting: Items that are waiting now.
    """

    full: int
    late: int
    open: int
    quota: int
    expired: int
    cancelled: int
    waiting: int


@dataclass(frozen=True, kw_only=True)
class CircuitOpened(Event):
    """Several consecutive batches have failed, or a probe has failed: requests are refused for a while.

    Attributes:
        failures: How many consecutive batches have failed.
        retry_after: Seconds until the next probe.
        error: The error of the last one.
    """

    failures: int
    retry_after: float
    error: str


@dataclass(frozen=True, kw_only=True)
class CircuitClosed(Event):
    """The probe has succeeded: requests are accepted again."""
