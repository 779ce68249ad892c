"""Queues and requests for tests, and what the batcher does with them."""

from __future__ import annotations

import math
from typing import Any

from modelguard.serving import Limits
from modelguard.serving._execution import Computed
from modelguard.serving._queue import BatchQueue
from modelguard.serving._requests import Batch, Request
from modelguard.serving.breaker import Breaker, Circuit


def request(
    item: object = 0,
    *,
    deadline: float = math.inf,
    weight: float = 1,
    group: Any = None,
    key: Any = None,
    priority: int = 0,
) -> Request:
    made = Request(item)
    made.key, made.priority = key, priority
    made.number = item  # type: ignore[attr-defined]  # the item itself is let go with the answer
    made.deadline, made.weight, made.group = deadline, weight, group
    return made


def queue_of(breaker: Breaker | None = None, **limits: Any) -> BatchQueue:
    settings = {"name": "f", "max_size": 4, "max_queue": 8, **limits}
    return BatchQueue(Limits(**settings), None if breaker is None else Circuit(breaker))


def filled(count: int, **limits: Any) -> tuple[BatchQueue, list[Request]]:
    queue = queue_of(**limits)
    requests = [request(number) for number in range(count)]
    for one in requests:
        queue.admit(one, 0.0)
    return queue, requests


def run(queue: BatchQueue, batch: Batch, seconds: float, now: float, verdict: Any = "succeeded") -> None:
    """End a batch, as the batcher does."""
    queue.learn(batch, Computed([], whole=verdict == "succeeded"), seconds, now)
    queue.finish(batch, [one.item for one in batch.requests])
    queue.record_verdict(batch, verdict, now)


def taken(queue: BatchQueue, now: float) -> list[Any]:
    batch = queue.next_batch(now)
    assert isinstance(batch, Batch)
    return [one.item for one in batch.requests]


def measure(queue: BatchQueue, size: int, seconds: float, now: float = 0.0) -> None:
    """Compute three batches of that size, which is enough for an estimate."""
    for _ in range(3):
        for number in range(size):
            queue.admit(request(number), now)
        batch = queue.next_batch(now)
        assert isinstance(batch, Batch)
        run(queue, batch, seconds, now)


def measured(queue: BatchQueue, seconds: dict[int, float], now: float = 0.0) -> None:
    """Batches of these sizes took so long, three times each."""
    for _ in range(3):
        for size, each in seconds.items():
            queue.times.record(size, 0.0, None, each, now)
