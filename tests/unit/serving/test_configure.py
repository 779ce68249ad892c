"""``Batched.configure``: options change while a function serves, all of them or none."""

from __future__ import annotations

import math
from inspect import signature
from typing import Any

import pytest
from tests.unit.serving.gated import TIMEOUT, Gated, queued, until
from tests.unit.serving.queues import filled, measured, queue_of, request, taken

from modelguard import AutoSize, Execution, batched
from modelguard.errors import DeadlineExceeded, GuardClosed, InvalidOption, QueueFull, WouldDeadlock
from modelguard.serving import Limits
from modelguard.serving._batch_options import Changes


def limits(**options: Any) -> Limits:
    return Limits(**{"name": "f", "max_size": 4, "max_queue": 8, **options})


def doubled(numbers: list[int]) -> list[int]:
    return [2 * number for number in numbers]


# Options


def test_what_is_changed_is_in_force_and_the_rest_stays() -> None:
    """`limits` and `status()` show it."""
    with batched(max_size=4, max_wait="10ms", deadline="2s", name="f")(doubled) as f:
        f.configure(max_size=8, max_queue=64, deadline="1s")
        expected = Limits(name="f", max_size=8, max_queue=64, max_wait=0.01, deadline=1.0, hang_after=60.0)
        assert expected == f.limits
        assert 8 == f.status().max_size
        assert 6 == f(3)
        f.configure(max_wait=0, deadline=None, execution=Execution(hang_after="5s"))
        assert Limits(name="f", max_size=8, max_queue=64, hang_after=5.0) == f.limits
        f.configure(execution=None)
        assert math.inf == f.limits.hang_after
        f.configure()
        assert 8 == f.limits.max_size


def test_every_option_is_known() -> None:
    """What cannot be changed is told apart from what does not exist."""
    keywords = {one.name for one in signature(batched).parameters.values() if one.kind is one.KEYWORD_ONLY}
    rejections = dict.fromkeys(keywords - Changes.__annotations__.keys(), "cannot be changed")
    with batched(max_size=4, name="f")(doubled) as f:
        for option, why in {**rejections, "max_szie": "is no option of batched"}.items():
            change: dict[str, Any] = {option: 1}
            with pytest.raises(InvalidOption, match=f"{option}=1: {why}"):
                f.configure(**change)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"max_size": 0}, "max_size"),
        ({"max_size": True}, "max_size"),
        ({"max_size": "automatic"}, "max_size"),
        ({"max_size": "auto"}, "max_size"),
        ({"max_size": 9}, "max_queue"),
        ({"max_queue": 3}, "max_queue"),
        ({"max_wait": -1}, "max_wait"),
        ({"deadline": "soon"}, "deadline"),
        ({"deadline": 0}, "deadline"),
        ({"execution": Execution(loop="caller")}, "loop"),
        ({"execution": "1m"}, "execution"),
        ({"slo": "100ms"}, "slo"),
        ({"threads": 2}, "threads"),
        ({"max_szie": 2}, "max_szie"),
        ({"name": "g"}, "name"),
    ],
    ids=str,
)
def test_an_invalid_change_changes_nothing(changes: dict[str, Any], argument: str) -> None:
    """Also not what is valid beside it, in whichever order they are written; the error names it and gives a fix."""
    with batched(max_size=4, max_queue=8, name="f")(doubled) as f:
        before = f.limits
        others: dict[str, Any] = {"max_wait": "1s", "deadline": "3s"}
        for written in ({**changes, **(others | changes)}, {**others, **changes}):
            with pytest.raises(InvalidOption) as rejected:
                f.configure(**written)
            assert argument == rejected.value.argument
            assert rejected.value.fix
            assert before == f.limits
        assert 6 == f(3)


def test_a_number_ends_the_choice_of_the_size() -> None:
    """`AutoSize` and back; a new goal needs no other option."""
    with batched(max_size=4, max_queue=64, name="f")(doubled) as f:
        f.configure(max_size=AutoSize(slo="100ms"))
        assert (64, 0.1) == (f.limits.max_size, f.limits.slo)
        f.configure(max_size=AutoSize(slo="50ms"))
        assert (64, 0.05) == (f.limits.max_size, f.limits.slo)
        f.configure(max_queue=32)
        assert (32, 0.05) == (f.limits.max_size, f.limits.slo)
        f.configure(max_size=8)
        assert (8, math.inf) == (f.limits.max_size, f.limits.slo)
        assert f.status().slo_reachable is None


def test_a_closed_function_cannot_be_configured() -> None:
    """It says so; what it was stays readable."""
    f = batched(max_size=4, name="f")(doubled)
    f.close()
    with pytest.raises(GuardClosed):
        f.configure(max_size=8)
    assert 4 == f.limits.max_size


class Service:
    """A service with a batched method."""

    @batched(max_size=4)
    def scale(self, numbers: list[int]) -> list[int]:
        return doubled(numbers)


def test_a_method_is_configured_on_an_instance() -> None:
    """Each instance has its own queue, and its own options from then on."""
    one, other = Service(), Service()
    with pytest.raises(TypeError, match="call it on an instance"):
        Service.scale.configure(max_size=8)  # type: ignore[attr-defined]
    one.scale.configure(max_size=8)
    assert (8, 4) == (one.scale.limits.max_size, other.scale.limits.max_size)


def test_a_forked_child_starts_with_the_options_in_force() -> None:
    """As its parent has them at the fork."""
    with batched(max_size=4, name="f")(doubled) as f:
        f.configure(max_size=8, deadline="1s")
        f._batcher.after_fork_in_child()
        assert (8, 1.0) == (f.limits.max_size, f.limits.deadline)
        assert 8 == f.status().max_size
        assert 6 == f(3)


def test_a_signal_handler_in_the_middle_of_a_call_cannot_configure() -> None:
    """It would change the bounds between two steps of an admission."""
    with batched(max_size=4, name="f")(doubled) as f, f._batcher._lock, pytest.raises(WouldDeadlock, match="configure"):
        f.configure(max_size=8)


# What waits


def test_what_waits_keeps_its_deadline(model: Gated) -> None:
    """What was admitted without one has none, whatever is configured afterwards; what comes then has one."""
    with batched(max_size=4)(model) as f:
        (waits,) = queued(f, model, 3)
        f.configure(deadline="1ms")
        with pytest.raises(DeadlineExceeded):  # by submit() itself where a millisecond is over at once
            f.submit(4).result(TIMEOUT)
        f.configure(deadline=None)
        model.gate.set()
        assert 3 == waits.result(TIMEOUT)


def test_a_shorter_queue_refuses_nobody_who_is_in_it(model: Gated) -> None:
    """New items are refused until there is room."""
    with batched(max_size=2, max_queue=8)(model) as f:
        waiting = queued(f, model, *range(6))
        f.configure(max_queue=2)
        with pytest.raises(QueueFull):
            f.submit(7)
        model.gate.set()
        assert [*range(6)] == [one.result(TIMEOUT) for one in waiting]
        assert 8 == f(8)


def test_batches_have_the_new_size_at_once(model: Gated) -> None:
    """What waits is computed in batches of it."""
    with batched(max_size=2, max_queue=16)(model) as f:
        waiting = queued(f, model, *range(8))
        f.configure(max_size=5)
        model.gate.set()
        assert [*range(8)] == [one.result(TIMEOUT) for one in waiting]
    assert [1, 5, 3] == [len(batch) for batch in model.batches]


def test_what_waits_for_a_fuller_batch_starts_when_that_is_not_asked_for_any_more(model: Gated) -> None:
    """The thread that waits for it looks again."""
    model.gate.set()
    with batched(max_size=4, max_wait="1h")(model) as f:
        waits = f.submit(3)
        until(lambda: bool(f._batcher._idle))
        f.configure(max_wait=0)
        assert 3 == waits.result(TIMEOUT)


def test_what_came_before_waits_no_longer_than_it_would_have() -> None:
    """It was admitted where nothing waits for others; what comes later does, as configured."""
    queue = queue_of()
    for number in range(2):
        queue.admit(request(number), 0.0)
    queue.configure(limits(max_wait=5.0))
    assert [0, 1] == taken(queue, 1.0)
    queue.admit(request(2), 2.0)
    assert 5.0 == queue.next_batch(2.0)
    queue.configure(limits(max_wait=9.0))
    assert 4.0 == queue.next_batch(3.0)
    queue.configure(limits(max_wait=2.0))
    assert 1.0 == queue.next_batch(3.0)
    queue.configure(limits(max_wait=9.0))
    assert 0.5 == queue.next_batch(3.5), "the shortest wait that was in force while it waited"
    assert [2] == taken(queue, 4.0)


def test_the_wait_of_what_is_gone_does_not_count() -> None:
    """After a change while nothing waits, the new wait holds in full."""
    queue = queue_of(max_wait=1.0)
    queue.configure(limits(max_wait=9.0))
    queue.admit(request(1), 0.5)
    assert 9.0 == queue.next_batch(0.5)


def test_deadlines_shorten_a_wait_that_is_configured_later() -> None:
    """A request that was admitted with a deadline starts in time for it."""
    queue = queue_of(max_wait=60.0)
    measured(queue, {1: 0.5, 2: 0.5})
    queue.admit(request(1, deadline=30.0), 0.0)
    queue.configure(limits(max_wait=90.0))
    found = queue.next_batch(0.0)
    assert isinstance(found, float)
    assert 28.0 < found < 29.5


def test_a_batch_that_runs_counts_as_hung_by_the_new_time(model: Gated) -> None:
    """`hang_after` can be shortened while a batch overstays."""
    with batched(max_size=4)(model) as f:
        (waits,) = queued(f, model, 3)
        assert "open" == f.status().state
        f.configure(execution=Execution(hang_after="1ms"))
        until(lambda: f.status().state == "hung")
        f.configure(execution=Execution(hang_after="1h"))
        model.gate.set()
        assert 3 == waits.result(TIMEOUT)
        until(lambda: f.status().state == "open")


def test_what_fills_a_batch_does_not_wait_for_a_larger_one() -> None:
    """Three items are a full batch of two, and one that waits for another. A larger size holds for what comes later."""
    queue, _ = filled(3, max_size=2, max_wait=60.0)
    queue.configure(limits(max_wait=60.0))
    assert [0, 1, 2] == taken(queue, 0.0)
    queue.admit(request(3), 1.0)
    assert 60.0 == queue.next_batch(1.0)


def test_what_fills_no_batch_waits_on_after_a_change() -> None:
    """One item does not fill a batch of two."""
    queue, _ = filled(1, max_size=2, max_wait=60.0)
    queue.configure(limits(max_wait=60.0))
    assert 60.0 == queue.next_batch(0.0)
