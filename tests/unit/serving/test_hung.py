"""A model that hangs is seen: by status, readiness, events and the breaker, while it hangs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.frameworks.asgi_by_hand import ask, never
from tests.unit.serving.gated import Gated, queued, until
from tests.unit.serving.queues import queue_of, request

from modelguard import Breaker, Execution, batched, telemetry
from modelguard.errors import CircuitOpen, InvalidOption, QueueFull
from modelguard.serving._requests import Batch


def hanging(**options: Any) -> Any:
    queue = queue_of(hang_after=5.0, **options)
    queue.admit(request(1), 0.0)
    assert isinstance(queue.next_batch(0.0), Batch)
    return queue


def test_a_batch_hangs_after_a_while() -> None:
    """It is noted once, and the state says so until it ends."""
    queue = hanging()
    assert 5.0 == queue.next_check()
    assert not queue.note_hung(4.9)
    assert "open" == queue.status(4.9).state
    assert queue.note_hung(5.0)
    assert not queue.note_hung(6.0), "once"
    assert ("hung", 1, 6.0) == (queue.status(6.0).state, queue.status(6.0).running, queue.status(6.0).running_seconds)
    queue.finish(queue.running[0], [1])
    assert "open" == queue.status(7.0).state


def test_a_hung_batch_opens_the_circuit() -> None:
    """What waits and what comes is refused at once, instead of at its deadline."""
    queue = hanging(breaker=Breaker(failures=5, cooldown=10))
    queue.admit(request(2), 1.0)
    queue.note_hung(5.0)
    assert [CircuitOpen] == [type(failure.error) for _, failure in queue.undelivered]
    with pytest.raises(CircuitOpen):
        queue.admit(request(3), 6.0)


def test_a_hung_model_makes_a_service_unready(model: Gated, events: list[telemetry.Event]) -> None:
    """The probe answers 503 while it hangs, and an event tells why; it is ready again when the batch has ended."""
    f = batched(max_size=1, execution=Execution(hang_after=0.01), name="f")(model)
    f.submit("first")
    model.busy()
    until(lambda: not f.ready)
    assert "hung" == f.status().state
    assert 503 == ask(never, path="/readyz", options={"guards": [f]}).status
    until(lambda: any(isinstance(event, telemetry.BatchErrored) for event in events))
    (errored,) = (event for event in events if isinstance(event, telemetry.BatchErrored))
    assert "running for more than 0.01 s" in errored.error
    assert 1 == errored.hung
    model.gate.set()
    until(lambda: f.ready and any(isinstance(event, telemetry.BatchFinished) for event in events))
    assert [0] == [event.hung for event in events if isinstance(event, telemetry.BatchFinished)]
    assert {"status": "ready"} == json.loads(ask(never, path="/readyz", options={"guards": [f]}).body)


def test_refusals_are_reported_while_no_batch_ends(model: Gated, events: list[telemetry.Event]) -> None:
    """Else the alert on refused requests would fire only when the hung batch has ended."""
    f = batched(max_size=1, max_queue=1, name="beside a hung batch")(model)
    queued(f, model, "second")
    with pytest.raises(QueueFull):
        f.submit("third")

    def refusals() -> list[telemetry.RequestsRefused]:  # those of an earlier test's function may still come
        found = (event for event in list(events) if isinstance(event, telemetry.RequestsRefused))
        return [event for event in found if event.guard == f.name]

    until(lambda: bool(refusals()))
    (refused,) = refusals()
    assert (1, 1) == (refused.full, refused.waiting)


def test_without_a_deadline_a_batch_may_take_for_ever() -> None:
    """With one it hangs after ten times as long, but not before a minute."""
    assert float("inf") == batched(max_size=1)(sorted).limits.hang_after
    assert 60.0 == batched(max_size=1, deadline="2s")(sorted).limits.hang_after
    assert 300.0 == batched(max_size=1, deadline="30s")(sorted).limits.hang_after
    assert 3.0 == batched(max_size=1, execution=Execution(hang_after="3s"))(sorted).limits.hang_after


@pytest.mark.parametrize("invalid", [0, -1, "soon", True])
def test_an_invalid_time_is_rejected(invalid: Any) -> None:
    """With the fix."""
    with pytest.raises(InvalidOption, match="hang_after"):
        Execution(hang_after=invalid)
