"""``_padding`` behind the queue: batches of items of like weight, for functions that pad."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.serving.queues import queue_of, request, run

from modelguard.serving._queue import BatchQueue
from modelguard.serving._requests import Batch

#: What MiniLM takes on one core: 5 ms a run and 0.27 ms a token.
FIXED, UNIT = 0.005, 0.00027


def padded_queue(**limits: Any) -> BatchQueue:
    return queue_of(**{"max_size": 8, "max_queue": 256, "weighed": True, "padded": True, **limits})


def take(queue: BatchQueue, now: float = 0.0) -> Batch:
    batch = queue.next_batch(now)
    assert isinstance(batch, Batch)
    return batch


def weights(batch: Batch) -> list[float]:
    return [one.weight for one in batch.requests]


def learn(queue: BatchQueue, fixed: float = FIXED, unit: float = UNIT) -> None:
    """Batches of many sizes and weights took as long as such a model takes."""
    for count in (1, 2, 4, 8):
        for weight in (10, 100, 500):
            queue.times.record(count, count * weight, None, fixed + unit * count * weight, 0.0)


def test_a_batch_is_made_of_items_of_like_weight() -> None:
    """From all that waits, around the oldest; with the heaviest first."""
    queue = padded_queue(max_size=3)
    for weight in (100, 10, 500, 101, 11, 480, 99, 12, 490):
        queue.admit(request(weight, weight=weight), 0.0)
    assert [[101, 100, 99], [12, 11, 10], [500, 490, 480]] == [weights(take(queue)) for _ in range(3)]


def test_what_a_full_batch_leaves_behind_waits_no_longer() -> None:
    """Four items fill a batch, of which two are taken; the others start at once, and the next one waits again."""
    queue = padded_queue(max_size=4, max_wait=60.0)
    learn(queue)
    for weight in (10, 500, 11, 490):
        queue.admit(request(weight, weight=weight), 0.0)
    assert [[11, 10], [500, 490]] == [weights(take(queue)) for _ in range(2)]
    queue.admit(request(12, weight=12), 1.0)
    assert 60.0 == queue.next_batch(1.0)


@pytest.mark.parametrize("known", [False, True])
def test_equal_weights_go_in_the_order_of_arrival(known: bool) -> None:  # noqa: FBT001 - pytest passes it
    """Where there is nothing to choose from, it is as without ``padded``."""
    queue = padded_queue(max_size=3)
    if known:
        learn(queue)
    for number in range(9):
        queue.admit(request(number, weight=7), 0.0)
    assert [[0, 1, 2], [3, 4, 5], [6, 7, 8]] == [[one.item for one in take(queue).requests] for _ in range(3)]


def test_the_bound_on_weight_counts_padding() -> None:
    """Ten items, of which the heaviest weighs 100, weigh 1,000."""
    queue = padded_queue(max_size=10, max_weight=1000.0)
    for number in range(20):
        queue.admit(request(number, weight=100 if number == 0 else 90), 0.0)
    batch = take(queue)
    assert (10, 1000.0) == (len(batch.requests), batch.weight)
    queue = padded_queue(max_size=10, max_weight=500.0)
    for number in range(20):
        queue.admit(request(number, weight=100 if number == 0 else 90), 0.0)
    assert 5 == len(take(queue).requests)


def test_a_run_that_costs_little_is_not_filled_with_padding() -> None:
    """An item of 500 is not computed with items of 10, which would each cost as much as it does."""
    queue = padded_queue()
    learn(queue)
    for weight in (500, *[10] * 7):
        queue.admit(request(weight, weight=weight), 0.0)
    assert [500] == weights(take(queue))
    assert [10] * 7 == weights(take(queue))


def test_a_run_that_costs_much_is_filled() -> None:
    """Where the time hardly depends on the weights, as on large GPUs, padding is cheaper than another run."""
    queue = padded_queue()
    learn(queue, fixed=0.05, unit=1e-7)
    for weight in (500, *[10] * 7):
        queue.admit(request(weight, weight=weight), 0.0)
    assert 8 == len(take(queue).requests)


def test_padding_is_shown() -> None:
    """As a share of what was computed."""
    queue = padded_queue(max_size=2)
    for weight in (100, 50):
        queue.admit(request(weight, weight=weight), 0.0)
    batch = take(queue)
    assert (200, 50) == (batch.weight, batch.padding)
    run(queue, batch, 1.0, 1.0)
    assert 0.25 == queue.status(1.0).padding


def test_without_padding_nothing_is_shown() -> None:
    """``weight=`` alone says nothing about what the function does with it."""
    queue = queue_of(weighed=True)
    for weight in (100, 50):
        queue.admit(request(weight, weight=weight), 0.0)
    batch = take(queue)
    run(queue, batch, 1.0, 1.0)
    assert (150, 0.0) == (batch.weight, queue.status(1.0).padding)


def test_a_request_that_would_be_late_goes_first() -> None:
    """The batch is made around it, whatever is older."""
    queue = padded_queue()
    for _ in range(8):
        queue.admit(request("old", weight=500, deadline=100.0), 0.0)
    queue.admit(request("urgent", weight=10, deadline=0.1), 0.0)
    learn(queue)
    assert ["urgent"] == [one.item for one in take(queue).requests]


def test_a_batch_is_no_larger_than_its_deadlines_allow() -> None:
    """Of many equal items, as many as are in time."""
    queue = padded_queue(max_size=64)
    for number in range(64):
        queue.admit(request(number, weight=100, deadline=0.1), 0.0)
    learn(queue)
    batch = take(queue)
    assert 1 <= len(batch.requests) <= 4
    assert FIXED + UNIT * batch.weight <= 0.1


def test_what_will_be_late_in_any_case_fails_at_once() -> None:
    """And is not computed."""
    queue = padded_queue()
    learn(queue)
    running = request("first", weight=10)
    queue.admit(running, 0.0)
    batch = take(queue)
    queue.admit(request("late", weight=500, deadline=0.16), 0.0)
    queue.admit(request("in time", weight=10, deadline=0.16), 0.0)
    run(queue, batch, 0.0077, 0.1)
    assert ["in time"] == [one.item for one in take(queue, 0.1).requests]
    assert ["late"] == [one.number for one, _ in queue.undelivered]  # type: ignore[attr-defined]


@given(
    coming=st.lists(st.tuples(st.integers(0, 500), st.sampled_from([math.inf, 0.3, 3.0])), min_size=1, max_size=60),
    size=st.integers(1, 9),
    max_weight=st.sampled_from([math.inf, 800.0]),
    known=st.booleans(),
)
def test_every_item_is_computed_once_and_the_oldest_next(
    coming: list[tuple[int, float]],
    size: int,
    max_weight: float,
    known: bool,  # noqa: FBT001 - pytest passes it
) -> None:
    """Unless it gives way to one that would be late; so an item waits for at most one batch for each older one."""
    queue = padded_queue(max_size=size, max_weight=max_weight)
    for number, (weight, deadline) in enumerate(coming):
        queue.admit(request(number, weight=weight, deadline=deadline), 0.0)
    if known:
        learn(queue)
    computed: list[int] = []
    while queue.waiting:
        hurried = any(one.deadline != math.inf for one in queue._lines.live())
        oldest = next(queue._lines.live()).item
        found = queue.next_batch(0.0)
        if not isinstance(found, Batch):
            break
        assert len(found.requests) == 1 or found.weight <= max_weight
        assert found.weight == max(weights(found)) * len(found.requests)
        assert hurried or oldest in [one.item for one in found.requests]
        computed += [one.item for one in found.requests]
    failed = [one.number for one, _ in queue.undelivered]  # type: ignore[attr-defined]
    assert list(range(len(coming))) == sorted(computed + failed)


def test_fair_shares_hold_with_padding() -> None:
    """A key whose items are like those of nobody else gets its share all the same."""
    queue = padded_queue(fair=True, max_size=4, max_queue=1000)
    learn(queue)
    dice = random.Random(1)
    for number in range(400):
        queue.admit(request(number, key="greedy", weight=dice.randint(90, 110)), 0.0)
    for number in range(20):
        queue.admit(request(number, key="polite", weight=10), 0.0)
    polite = sum(one.key == "polite" for _ in range(12) for one in take(queue).requests)
    assert 20 == polite
