"""Errors of batched functions and deadlines."""

from __future__ import annotations

from modelguard.errors._base import ModelGuardError, Overloaded, shortened

__all__ = [
    "BatchFailed",
    "CallerGone",
    "CircuitOpen",
    "ConsumerTooSlow",
    "DeadlineExceeded",
    "DeadlineUnreachable",
    "ItemRefused",
    "ItemTooHeavy",
    "QueueFull",
    "QuotaExceeded",
    "WrongResults",
]


class QueueFull(Overloaded):
    """The queue has reached its limit, so the request was rejected: immediately, or when another one took its place.

    Attributes:
        function: The batched function's name.
        queued: The number of requests in the queue.
        displaced: Whether it was in the queue, and a request whose turn is earlier took its place.
    """

    def __init__(self, function: str, *, queued: int, retry_after: float, displaced: bool = False) -> None:
        why = ", and one whose turn is earlier took the place of this one" if displaced else ""
        super().__init__(f"{function}(): the queue is full, with {queued} requests{why}", retry_after=retry_after)
        self.function = function
        self.queued = queued
        self.displaced = displaced


class QuotaExceeded(Overloaded):
    """As many requests with this key wait as its quota allows; a web service answers 429.

    Attributes:
        function: The batched function's name.
        key: ``repr`` of the key, shortened to at most 200 characters.
        queued: How many of its requests wait.
        quota: How many may.
    """

    def __init__(self, function: str, key: object, *, queued: int, quota: int, retry_after: float) -> None:
        self.key = shortened(key)
        super().__init__(
            f"{function}(): {queued} requests with the key {self.key} wait, and the quota of a key is {quota}",
            retry_after=retry_after,
        )
        self.function = function
        self.queued = queued
        self.quota = quota


class DeadlineUnreachable(Overloaded):
    """At the measured rate the answer would come after the deadline, so the request was rejected immediately.

    Attributes:
        function: The batched function's name.
        estimate: Seconds that the answer would have taken.
        left: Seconds that were left until the deadline.
    """

    def __init__(self, function: str, *, estimate: float, left: float, retry_after: float) -> None:
        super().__init__(
            f"{function}(): the answer would take {estimate:.3f} s, and the deadline is in {left:.3f} s",
            retry_after=retry_after,
        )
        self.function = function
        self.estimate = estimate
        self.left = left


class CircuitOpen(Overloaded):
    """The model has failed several times in a row, so it gets no requests for a while.

    Attributes:
        function: The batched function's name.
        failures: How many batches have failed in a row.
    """

    def __init__(self, function: str, *, failures: int, retry_after: float) -> None:
        super().__init__(
            f"{function}(): {failures} batches have failed in a row; next try in {retry_after:.1f} s",
            retry_after=retry_after,
        )
        self.function = function
        self.failures = failures


class DeadlineExceeded(ModelGuardError, TimeoutError):
    """The request was accepted, but its deadline passed in the queue or during the batch; a web service answers 504.

    Attributes:
        function: The batched function's name.
        waited: Seconds since the request arrived.
    """

    def __init__(self, function: str, *, waited: float) -> None:
        super().__init__(f"{function}(): no answer within the deadline; {waited:.3f} s have passed")
        self.function = function
        self.waited = waited


class CallerGone(ModelGuardError, RuntimeError):
    """The request was dropped because its caller no longer waits, for example after a client has disconnected.

    Attributes:
        function: The batched function's name.
    """

    def __init__(self, function: str) -> None:
        super().__init__(f"{function}(): the caller no longer waits, so the request was dropped")
        self.function = function


class ConsumerTooSlow(ModelGuardError, RuntimeError):
    """A stream's consumer took its parts so slowly that others had to wait for it, so it gets no more of them.

    Attributes:
        function: The batched function's name.
    """

    def __init__(self, function: str) -> None:
        super().__init__(
            f"{function}(): the consumer kept others waiting, because it did not take its parts; the rest was dropped. "
            "max_buffer= and slow_after= allow more"
        )
        self.function = function


class ItemRefused(ModelGuardError, ValueError):
    """An item that cannot be put into a batch. It was not queued, and other items are not affected.

    Attributes:
        function: The batched function's name.
        why: The reason.
    """

    def __init__(self, function: str, *, why: str) -> None:
        super().__init__(f"{function}(): {why}")
        self.function = function
        self.why = why


class ItemTooHeavy(ItemRefused):
    """An item that alone weighs more than a whole batch may; a web service answers 413.

    Attributes:
        weight: The item's weight.
        max_weight: The largest weight of a batch.
    """

    def __init__(self, function: str, *, weight: float, max_weight: float) -> None:
        super().__init__(function, why=f"the item weighs {weight:g}, and a whole batch may weigh {max_weight:g}")
        self.weight = weight
        self.max_weight = max_weight


class BatchFailed(ModelGuardError, RuntimeError):
    """A whole batch failed, and no single item is known to be the cause. The original error is the ``__cause__``.

    Attributes:
        function: The batched function's name.
        size: How many items the batch had.
        reason: The failure in one line.
    """

    def __init__(self, function: str, reason: str, *, size: int) -> None:
        super().__init__(f"{function}() failed on a batch of {size}: {reason}")
        self.function = function
        self.size = size
        self.reason = reason


class WrongResults(BatchFailed, TypeError):
    """The batch function did not return one result for each item, in the order of the items."""
