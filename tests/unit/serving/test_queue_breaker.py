"""``_queue`` with a breaker: when the circuit opens, what it refuses, and how it closes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.serving.queues import queue_of, request, run

from modelguard.errors import CircuitOpen, Overloaded
from modelguard.serving import Limits
from modelguard.serving._queue import BatchQueue
from modelguard.serving._requests import Batch, Failure
from modelguard.serving.breaker import Breaker, Circuit


def failing(queue: BatchQueue, times: int, now: float = 0.0) -> list[Any]:
    """Let this many batches of one item fail."""
    changes = []
    for _ in range(times):
        queue.admit(request(), now)
        batch = queue.next_batch(now)
        assert isinstance(batch, Batch)
        queue.finish(batch, [Failure(ValueError())], failed=1)
        changes.append(queue.record_verdict(batch, "failed", now))
    return changes


def test_the_circuit_opens_after_consecutive_failures() -> None:
    """A success in between starts the count again."""
    queue = queue_of(Breaker(failures=3, cooldown=10.0))
    assert [None, None] == failing(queue, 2)
    queue.admit(request(), 0.0)
    batch = queue.next_batch(0.0)
    assert isinstance(batch, Batch)
    run(queue, batch, 0.1, 0.0)
    assert [None, None, "opened"] == failing(queue, 3)
    with pytest.raises(CircuitOpen) as refused:
        queue.admit(request(), 4.0)
    assert (3, 6.0) == (refused.value.failures, refused.value.retry_after)


def test_the_end_of_the_cooldown_is_told_to_the_moment() -> None:
    """Also of one that is short, and in its last second."""
    queue = queue_of(Breaker(failures=1, cooldown=0.2))
    failing(queue, 1)
    for now in (0.0, 0.15):
        with pytest.raises(CircuitOpen) as refused:
            queue.admit(request(), now)
        assert refused.value.retry_after == pytest.approx(0.2 - now)
    queue.admit(request(), 0.2)


def test_what_waits_when_the_circuit_opens_is_refused_then() -> None:
    """Waiting requests are not kept for a model that is failing."""
    queue = queue_of(Breaker(failures=1))
    queue.admit(request(), 0.0)
    batch = queue.next_batch(0.0)
    assert isinstance(batch, Batch)
    waiting = request()
    queue.admit(waiting, 0.0)
    queue.record_verdict(batch, "failed", 0.0)
    ((refused, failure),) = queue.undelivered
    assert waiting is refused
    assert isinstance(failure.error, CircuitOpen)


def test_one_probe_closes_the_circuit_or_doubles_the_cooldown() -> None:
    """While it is under way nothing else is admitted."""
    queue = queue_of(Breaker(failures=1, cooldown=10.0, max_cooldown=15.0))
    failing(queue, 1)
    assert ["opened"] == failing(queue, 1, now=10.0)
    with pytest.raises(CircuitOpen) as refused:
        queue.admit(request(), 11.0)
    assert 14.0 == refused.value.retry_after
    queue.admit(request(), 25.0)
    with pytest.raises(CircuitOpen):
        queue.admit(request(), 25.0)
    batch = queue.next_batch(25.0)
    assert isinstance(batch, Batch)
    queue.finish(batch, [1])
    assert "closed" == queue.record_verdict(batch, "succeeded", 25.0)
    queue.admit(request(), 25.0)


@pytest.mark.parametrize("end", ["cancel", "expire", "inconclusive"])
def test_a_probe_without_a_verdict_is_followed_by_another(end: str) -> None:
    """The circuit does not stay open for ever because its probe was cancelled or expired."""
    queue = queue_of(Breaker(failures=1, cooldown=10.0))
    failing(queue, 1)
    probe = request(deadline=11.0)
    queue.admit(probe, 10.0)
    if end == "cancel":
        queue.cancel(probe)
    elif end == "expire":
        queue.expire(11.0)
    else:
        batch = queue.next_batch(10.0)
        assert isinstance(batch, Batch)
        queue.finish(batch, [Failure(Overloaded("not now"))], failed=1)
        queue.record_verdict(batch, "inconclusive", 10.0)
    queue.admit(request(), 11.0)
    assert 1 == queue.waiting


def test_a_probe_whose_caller_is_interrupted_is_followed_by_another() -> None:
    """A signal handler that raises in the middle of its admission does not leave the circuit waiting for it."""

    class Interrupting(Circuit):
        def admitted(self, one: object) -> None:
            super().admitted(one)
            if self.state != "closed" and not interrupted:
                interrupted.append(True)
                raise KeyboardInterrupt

    interrupted: list[bool] = []
    queue = BatchQueue(Limits(name="f", max_size=4, max_queue=8), Interrupting(Breaker(failures=1, cooldown=10.0)))
    failing(queue, 1)
    probe = request()
    with pytest.raises(KeyboardInterrupt):
        queue.admit(probe, 10.0)
    queue.withdraw(probe)  # as the batcher does then
    queue.admit(request(), 10.0)
    assert 1 == queue.waiting


def test_a_batch_from_before_the_opening_does_not_close_the_circuit() -> None:
    """It says nothing about the model after that."""
    queue = queue_of(Breaker(failures=1, cooldown=10.0), threads=2, max_size=1)
    for number in range(2):
        queue.admit(request(number), 0.0)
    first, second = queue.next_batch(0.0), queue.next_batch(0.0)
    assert isinstance(first, Batch)
    assert isinstance(second, Batch)
    assert "opened" == queue.record_verdict(first, "failed", 0.0)
    assert queue.record_verdict(second, "succeeded", 1.0) is None
    with pytest.raises(CircuitOpen):
        queue.admit(request(), 1.0)
