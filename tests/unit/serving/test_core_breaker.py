"""``core`` with a breaker: when the circuit opens, what it refuses, and how it closes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.serving.cores import core, entry, run

from modelguard.errors import CircuitOpen, Overloaded
from modelguard.serving.batches import Batch
from modelguard.serving.breaker import Breaker
from modelguard.serving.core import Core
from modelguard.serving.entries import Failure


def failing(made: Core, times: int, now: float = 0.0) -> list[Any]:
    """So many batches of one fail."""
    changes = []
    for _ in range(times):
        made.admit(entry(), now)
        batch = made.take(now)
        assert isinstance(batch, Batch)
        made.finish(batch, [Failure(ValueError())], failed=1)
        changes.append(made.judge(batch, "bad", now))
    return changes


def test_the_circuit_opens_after_consecutive_failures() -> None:
    """One success in between begins the count anew."""
    made = core(Breaker(failures=3, cooldown=10.0))
    assert [None, None] == failing(made, 2)
    made.admit(entry(), 0.0)
    batch = made.take(0.0)
    assert isinstance(batch, Batch)
    run(made, batch, 0.1, 0.0)
    assert [None, None, "opened"] == failing(made, 3)
    with pytest.raises(CircuitOpen) as refused:
        made.admit(entry(), 4.0)
    assert (3, 6.0) == (refused.value.failures, refused.value.retry_after)


def test_what_waits_when_the_circuit_opens_is_refused_then() -> None:
    """It would have failed as well, only later."""
    made = core(Breaker(failures=1))
    made.admit(entry(), 0.0)
    batch = made.take(0.0)
    assert isinstance(batch, Batch)
    waiting = entry()
    made.admit(waiting, 0.0)
    made.judge(batch, "bad", 0.0)
    ((refused, failure),) = made.outbox
    assert waiting is refused
    assert isinstance(failure.error, CircuitOpen)


def test_one_probe_closes_the_circuit_or_doubles_the_cooldown() -> None:
    """While it is under way nothing else is let in."""
    made = core(Breaker(failures=1, cooldown=10.0, max_cooldown=15.0))
    failing(made, 1)
    assert ["opened"] == failing(made, 1, now=10.0)
    with pytest.raises(CircuitOpen) as refused:
        made.admit(entry(), 11.0)
    assert 14.0 == refused.value.retry_after
    made.admit(entry(), 25.0)
    with pytest.raises(CircuitOpen):
        made.admit(entry(), 25.0)
    batch = made.take(25.0)
    assert isinstance(batch, Batch)
    made.finish(batch, [1])
    assert "closed" == made.judge(batch, "good", 25.0)
    made.admit(entry(), 25.0)


@pytest.mark.parametrize("end", ["cancel", "expire", "neither"])
def test_a_probe_without_a_verdict_is_followed_by_another(end: str) -> None:
    """The circuit does not stay shut because its probe went away."""
    made = core(Breaker(failures=1, cooldown=10.0))
    failing(made, 1)
    probe = entry(deadline=11.0)
    made.admit(probe, 10.0)
    if end == "cancel":
        made.cancel(probe)
    elif end == "expire":
        made.expire(11.0)
    else:
        batch = made.take(10.0)
        assert isinstance(batch, Batch)
        made.finish(batch, [Failure(Overloaded("not now"))], failed=1)
        made.judge(batch, "neither", 10.0)
    made.admit(entry(), 11.0)
    assert 1 == made.waiting


def test_a_batch_from_before_the_opening_does_not_close_the_circuit() -> None:
    """It says nothing of the time after."""
    made = core(Breaker(failures=1, cooldown=10.0), workers=2, max_size=1)
    for number in range(2):
        made.admit(entry(number), 0.0)
    first, second = made.take(0.0), made.take(0.0)
    assert isinstance(first, Batch)
    assert isinstance(second, Batch)
    assert "opened" == made.judge(first, "bad", 0.0)
    assert made.judge(second, "good", 1.0) is None
    with pytest.raises(CircuitOpen):
        made.admit(entry(), 1.0)
