"""``_queue``: what is admitted, batched, expired and refused. No threads, no clock."""

from __future__ import annotations

import math
import random
import weakref
from typing import Any

import pytest
from tests.unit.serving.queues import filled, measure, measured, queue_of, request, run, taken

from modelguard.errors import CallerGone, DeadlineExceeded, DeadlineUnreachable, GuardClosed, QueueFull
from modelguard.serving import Limits
from modelguard.serving._queue import BatchQueue
from modelguard.serving._requests import Batch, Request

# A free thread


def test_a_lone_request_never_waits() -> None:
    """If no other request is there, it is the next batch."""
    queue, requests = filled(1)
    batch = queue.next_batch(0.0)
    assert isinstance(batch, Batch)
    assert requests == batch.requests
    assert queue.next_batch(0.0) is None


def test_a_free_thread_takes_all_that_waits_up_to_the_size() -> None:
    """In the order of arrival."""
    queue, _ = filled(6)
    assert [0, 1, 2, 3] == taken(queue, 0.0)
    assert [4, 5] == taken(queue, 0.0)


def test_different_keyword_arguments_do_not_share_a_batch() -> None:
    """Each group has its own batches; the one with the oldest item is first."""
    queue = queue_of()
    german, french = (("language", str, "de"),), (("language", str, "fr"),)
    for number, group in enumerate([german, french, german, None]):
        queue.admit(request(number, group=group), float(number))
    assert [[0, 2], [1], [3]] == [taken(queue, 9.0) for _ in range(3)]
    assert queue.next_batch(9.0) is None


def test_the_extras_of_a_batch_are_those_of_its_items() -> None:
    """As keyword arguments."""
    queue = queue_of()
    queue.admit(request(group=(("k", int, 2), ("language", str, "de"))), 0.0)
    batch = queue.next_batch(0.0)
    assert isinstance(batch, Batch)
    assert {"k": 2, "language": "de"} == batch.extras


# Waiting for a fuller batch


def test_max_wait_counts_from_the_oldest_request() -> None:
    """Counting from the last request could postpone the batch for ever."""
    queue = queue_of(max_wait=1.0)
    queue.admit(request(0), 0.0)
    queue.admit(request(1), 0.9)
    assert queue.next_batch(0.9) == pytest.approx(0.1)
    assert [0, 1] == taken(queue, 1.0)


def test_a_full_batch_does_not_wait() -> None:
    """It starts at once, whatever ``max_wait`` is."""
    queue, _ = filled(4, max_wait=1.0)
    assert [0, 1, 2, 3] == taken(queue, 0.0)


def test_max_wait_is_cut_to_the_nearest_deadline() -> None:
    """The batch starts early enough for its measured run time; at once if that size was not measured."""
    queue = queue_of(max_wait=1.0)
    queue.admit(request(0, deadline=0.5), 0.0)
    assert [0] == taken(queue, 0.0)
    queue = queue_of(max_wait=1.0, max_queue=100)
    measured(queue, {1: 0.2})
    queue.admit(request(0, deadline=0.5), 0.0)
    assert queue.next_batch(0.0) == pytest.approx(0.1), "as much as the run takes is kept in reserve"
    assert [0] == taken(queue, 0.1)


def test_max_wait_is_cut_for_all_that_waits() -> None:
    """Where only smaller batches were measured, each item is taken to last as long as there."""
    queue = queue_of(max_wait=10.0, max_size=8)
    measured(queue, {1: 0.1})
    for number in range(5):
        queue.admit(request(number, deadline=5.0), 0.0)
    assert queue.next_batch(0.0) == pytest.approx(5.0 - 2 * 5 * 0.1)


def test_a_deadline_far_away_does_not_cut_the_wait() -> None:
    """The batch starts after ``max_wait``, not earlier."""
    queue = queue_of(max_wait=1.0)
    queue.admit(request(0, deadline=60.0), 0.0)
    assert queue.next_batch(0.25) == pytest.approx(0.75)


# Bounds


def test_a_full_queue_refuses_at_once() -> None:
    """``retry_after`` is the time until there is room, by the measured rate."""
    queue = queue_of()
    measure(queue, 4, 2.0)  # two items a second
    for number in range(8):
        queue.admit(request(number), 0.0)
    with pytest.raises(QueueFull) as refused:
        queue.admit(request(), 0.0)
    assert (8, 4.0) == (refused.value.queued, refused.value.retry_after)
    assert 8 == queue.waiting


def test_what_expired_makes_room() -> None:
    """A queue full of expired requests refuses nothing."""
    queue = queue_of()
    for _ in range(8):
        queue.admit(request(deadline=1.0), 0.0)
    queue.admit(request(), 1.0)
    assert 1 == queue.waiting
    assert 8 == sum(isinstance(failure.error, DeadlineExceeded) for _, failure in queue.undelivered)


def test_what_was_cancelled_makes_room_and_is_not_computed() -> None:
    """Its place goes to the next request."""
    queue, requests = filled(8)
    assert queue.cancel(requests[0])
    assert not queue.cancel(requests[0]), "once"
    queue.admit(request(8), 0.0)
    assert [1, 2, 3, 4] == taken(queue, 0.0)
    assert [5, 6, 7, 8] == taken(queue, 0.0)


def test_cancelled_requests_do_not_pile_up_behind_a_stuck_model() -> None:
    """Queues and deadlines stay small, however many requests come and go while nothing is computed."""
    queue = queue_of()
    for number in range(10_000):
        one = request(number, deadline=1e6)
        queue.admit(one, 0.0)
        queue.cancel(one)
    assert len(queue._lines.ungrouped.requests) < 200
    assert len(queue._expiry) < 200


def test_answered_items_do_not_stay_until_their_deadline() -> None:
    """A deadline of an hour does not keep the items of an hour in memory."""
    queue = queue_of()
    for number in range(1_000):
        queue.admit(request(number, deadline=3600.0), 0.0)
        batch = queue.next_batch(0.0)
        assert isinstance(batch, Batch)
        run(queue, batch, 0.0, 0.0)
    assert len(queue._expiry) < 200


# Deadlines


def test_a_deadline_that_has_passed_is_not_queued() -> None:
    """The caller gets ``DeadlineExceeded`` at once."""
    queue = queue_of()
    with pytest.raises(DeadlineExceeded):
        queue.admit(request(deadline=1.0), 1.0)
    assert queue.idle


def test_an_item_that_is_being_computed_expires_too() -> None:
    """Its caller gets an error at the deadline, and the late result is dropped."""
    queue = queue_of()
    one, other = request(1, deadline=1.0), request(2)
    queue.admit(one, 0.0)
    queue.admit(other, 0.0)
    batch = queue.next_batch(0.0)
    assert isinstance(batch, Batch)
    assert 1.0 == queue.next_check()
    queue.expire(1.0)
    assert [one] == [answered for answered, _ in queue.undelivered]
    assert ([other], ["b"]) == queue.finish(batch, ["a", "b"])


def test_nothing_is_refused_on_a_guess() -> None:
    """As long as only single items were measured, a full batch may take no longer than they do."""
    queue = queue_of(max_queue=100)
    measured(queue, {1: 1.0})
    for number in range(4):
        queue.admit(request(number, deadline=1.5), 0.0)
    assert 4 == queue.waiting


def test_with_measurements_what_would_be_late_is_refused_at_once() -> None:
    """A batch takes a second, so the second batch has its answers after two."""
    queue = queue_of(max_queue=100)
    measured(queue, {1: 1.0, 4: 1.0})
    for number in range(4):
        queue.admit(request(number, deadline=1.5), 0.0)
    with pytest.raises(DeadlineUnreachable) as refused:
        queue.admit(request(deadline=1.5), 0.0)
    assert (2.0, 1.5, 0.5) == (refused.value.estimate, refused.value.left, refused.value.retry_after)
    queue.admit(request(deadline=2.5), 0.0)


def test_an_item_that_is_cancelled_in_its_batch_is_there_until_the_batch_ends() -> None:
    """Its thread may not have read it yet: the function must not get None instead."""
    queue, requests = filled(2)
    batch = queue.next_batch(0.0)
    assert isinstance(batch, Batch)
    assert queue.cancel(requests[0])
    assert [0, 1] == [one.item for one in batch.requests]
    queue.finish(batch, [0, 1])
    assert [None, None] == [one.item for one in requests]


def test_what_runs_already_counts_for_the_time_it_has_left() -> None:
    """A batch that takes a second and began 0.75 s ago has 0.25 s left."""
    queue = queue_of(max_queue=100)
    measured(queue, {1: 1.0, 4: 1.0})
    for number in range(8):
        queue.admit(request(number), 0.0)
    assert isinstance(queue.next_batch(0.0), Batch)
    with pytest.raises(DeadlineUnreachable) as refused:
        queue.admit(request(deadline=1.0), 0.75)
    assert 2.25 == refused.value.estimate


def test_a_batch_is_not_larger_than_its_deadlines_allow() -> None:
    """With a second for each item, three are computed in three seconds, and the next ones after them."""
    queue = queue_of(max_queue=100)
    measured(queue, {1: 1.0, 4: 4.0})
    for number in range(6):
        queue.admit(request(number, deadline=3.5 if number < 3 else 9.0), 0.0)
    assert [0, 1, 2] == taken(queue, 0.0)
    assert [3, 4, 5] == taken(queue, 3.0)


def test_a_later_item_with_an_earlier_deadline_bounds_the_batch_too() -> None:
    """Each deadline in the batch holds, not only that of the oldest item."""
    queue = queue_of(max_queue=100)
    measured(queue, {1: 1.0, 4: 4.0})
    for number, deadline in enumerate([9.0, 2.5, 9.0, 9.0]):
        queue.admit(request(number, deadline=deadline), 0.0)
    assert [0, 1] == taken(queue, 0.0)


def test_the_nearest_deadline_goes_first() -> None:
    """Where a batch has no room for all that wait, it takes those with the least time, in the order of their calls."""
    queue = queue_of(max_queue=100)
    measured(queue, {1: 1.0, 4: 1.0})
    for number, left in enumerate([9.0, 8.0, 3.0, 7.0, 2.0, 9.0]):
        queue.admit(request(number, deadline=left), 0.0)
    assert [1, 2, 3, 4] == taken(queue, 0.0)


def test_the_nearest_deadline_goes_first_from_the_end_of_the_queue() -> None:
    """Also where batches are small: as many as usually wait are compared, and not only the oldest."""
    queue = queue_of(max_size=1, max_queue=256)
    measure(queue, 1, 0.1)
    for number in range(200):
        queue.admit(request(number, deadline=100.0), 0.0)
    queue.admit(request("urgent", deadline=0.5), 0.0)
    assert ["urgent"] == taken(queue, 0.0)


def test_who_has_no_deadline_is_not_passed_for_ever() -> None:
    """It counts as if it had the longest time that requests have had: what comes later than that goes behind it."""
    queue = queue_of(max_queue=100)
    measured(queue, {1: 1.0, 4: 1.0})
    for _ in range(4):
        queue.admit(request("first", deadline=5.0), 0.0)
    assert ["first"] * 4 == taken(queue, 0.0)
    queue.admit(request("patient"), 1.0)
    for number in range(3):
        queue.admit(request(number, deadline=5.5), 1.0)
    for number in range(3, 8):
        queue.admit(request(number, deadline=9.0), 2.5)
    assert {"patient", 0, 1, 2} == set(taken(queue, 2.5))


def test_batches_stay_small_where_larger_ones_compute_no_more() -> None:
    """A model that computes one item after the other: an answer needs not wait for those behind it."""
    queue = queue_of(max_size=32, max_queue=100)
    measured(queue, {1: 0.1, 4: 0.4, 32: 3.2})
    for number in range(40):
        queue.admit(request(number), 0.0)
    batch = queue.next_batch(0.0)
    assert isinstance(batch, Batch)
    run(queue, batch, 3.2, 3.2)
    assert 1 == len(taken(queue, 3.2))


def test_batches_of_a_quick_model_are_full_whatever_chance_says_of_them() -> None:
    """Their times are those of the interpreter's lock: now and then one takes ten times more."""
    for seed in range(5):
        dice, queue = random.Random(seed), queue_of(max_size=32, max_queue=100, deadline=5.0)
        sizes, now = [], 0.0
        for number in range(1000):
            while queue.waiting < (64 if number > 20 else number + 1):
                queue.admit(request(deadline=now + 5.0), now)
            batch = queue.next_batch(now)
            assert isinstance(batch, Batch)
            sizes += [batch.count] if number > 40 else []
            seconds = 1e-4 * (10 if dice.random() < 0.02 else dice.uniform(1, 3))
            now += seconds
            run(queue, batch, seconds, now)
        assert {32} == set(sizes), seed


@pytest.mark.parametrize("pause", [1.0, 60.0])
@pytest.mark.parametrize("groups", [1, 3])
def test_what_comes_together_now_and_then_is_computed_together(groups: int, pause: float) -> None:
    """Nothing arrives while its batches run, so nothing is gained by smaller ones."""
    queue = queue_of(max_size=64, max_queue=100, weighed=True)
    now = 0.0
    for _ in range(20):
        now += pause
        for number in range(60):
            group = None if groups == 1 else (("k", int, number % groups),)
            queue.admit(request(deadline=now + 2.0, weight=number % 7 + 1, group=group), now)
        sizes = []
        while isinstance(batch := queue.next_batch(now), Batch):
            sizes.append(batch.count)
            run(queue, batch, 0.005 + 1e-4 * batch.count, now := now + 0.005 + 1e-4 * batch.count)
    assert [60 // groups] * groups == sizes


def test_after_a_batch_that_failed_as_a_whole_half_as_many_share_the_next() -> None:
    """Several bad items may be at fault, or the model: either way fewer healthy ones fail beside them."""
    queue = queue_of(max_size=8, max_queue=100)
    for number in range(40):
        queue.admit(request(number), 0.0)
    sizes = []
    for verdict in ("failed", "failed", "succeeded", "succeeded", "succeeded"):
        batch = queue.next_batch(0.0)
        assert isinstance(batch, Batch)
        sizes.append(len(batch.requests))
        run(queue, batch, 0.0, 0.0, verdict)
    assert [8, 4, 2, 4, 8] == sizes


def test_what_filled_a_smaller_batch_after_a_failure_does_not_wait_when_the_size_grows_again() -> None:
    """Two items fill two batches of one. The first one doubles the size, of which the other alone is half."""
    queue, _ = filled(2, max_size=2, max_wait=60.0)
    batch = queue.next_batch(0.0)
    assert isinstance(batch, Batch)
    run(queue, batch, 0.1, 0.1, "failed")
    for number in range(2, 4):
        queue.admit(request(number), 1.0)
    batch = queue.next_batch(1.0)
    assert isinstance(batch, Batch)
    assert [2] == [one.item for one in batch.requests]
    run(queue, batch, 0.1, 1.1)
    assert [3] == taken(queue, 1.1)
    queue.admit(request(4), 2.0)
    assert 60.0 == queue.next_batch(2.0)


def test_measurements_grow_old() -> None:
    """After a slow time nothing is refused because of it."""
    queue = queue_of(max_queue=100)
    measure(queue, 4, 1.0)
    for number in range(8):
        queue.admit(request(number, deadline=11.5), 11.0)
    assert 8 == queue.waiting


def test_the_next_in_line_is_admitted_whatever_was_measured() -> None:
    """So new measurements are made after a slow time."""
    queue = queue_of()
    measure(queue, 1, 10.0)
    queue.admit(request(deadline=0.5), 0.0)
    assert 1 == queue.waiting


def test_what_cannot_be_in_time_even_alone_takes_nobodys_turn() -> None:
    """While the last run shows that, it is refused, also beside an idle thread; it is tried anew after a second."""
    queue = queue_of()
    measure(queue, 1, 10.0)
    queue.admit(request("first", deadline=0.5), 0.0)
    batch = queue.next_batch(0.0)
    assert isinstance(batch, Batch)
    run(queue, batch, 10.0, 10.0)
    with pytest.raises(DeadlineUnreachable):
        queue.admit(request(deadline=11.0), 10.5)
    queue.admit(request("again", deadline=11.6), 11.1)
    assert ["again"] == taken(queue, 11.1)


def computed(queue: BatchQueue, seconds: float, now: float, group: object = None) -> float:
    """One request with a second more than its run takes, on an idle thread; returns when it ends."""
    queue.admit(request("one", deadline=now + seconds + 1.0, group=group), now)
    batch = queue.next_batch(now)
    assert isinstance(batch, Batch)
    run(queue, batch, seconds, now + seconds)
    return now + seconds


def test_what_cannot_be_in_time_is_tried_anew_after_twice_the_time_of_a_run() -> None:
    """A fast model that is idle refuses for milliseconds, not for a second."""
    queue, now = queue_of(), 0.0
    for seconds in [0.0100, 0.0102] * 5 + [0.0100]:
        now = computed(queue, seconds, now)
    with pytest.raises(DeadlineUnreachable):
        queue.admit(request(deadline=now + 0.019 + 0.005), now + 0.019)
    queue.admit(request("again", deadline=now + 0.021 + 0.005), now + 0.021)
    assert ["again"] == taken(queue, now + 0.021)


def test_runs_that_made_all_times_longer_refuse_nothing_on_an_idle_thread() -> None:
    """Until it is known again how much times differ, they may have been a stall: the next request is tried."""
    queue, now = queue_of(), 0.0
    for seconds in [0.005] * 10 + [0.2] * 3:
        now = computed(queue, seconds, now)
    queue.admit(request("next", deadline=now + 0.1), now)
    assert ["next"] == taken(queue, now)


def test_runs_of_other_keyword_arguments_do_not_show_that_a_slow_first_run_was_usual() -> None:
    """A language that took a minute to load is tried again, however busy others are."""
    german, english = (("lang", str, "de"),), (("lang", str, "en"),)
    queue, now = queue_of(), 0.0
    for _ in range(5):
        now = computed(queue, 0.005, now, english)
    now = computed(queue, 60.0, now, german)
    for _ in range(5):
        now = computed(queue, 0.005, now, english)
    queue.admit(request("hallo", deadline=now + 0.3, group=german), now)
    assert ["hallo"] == taken(queue, now)


def test_a_short_deadline_is_left_out_of_a_batch_that_has_to_keep_up() -> None:
    """Where as much comes as full batches compute, none is made small for a request that only a small one answers."""
    queue = queue_of(max_queue=100)
    now = 0.0
    for _ in range(10):  # three items a second come, and batches of four compute as many
        for number in range(4):
            queue.admit(request(number, deadline=now + 60.0), now)
        batch = queue.next_batch(now)
        assert isinstance(batch, Batch)
        now += 4 / 3
        run(queue, batch, 4 / 3, now)
    measured(queue, {1: 1.0, 4: 4 / 3}, now)
    queue.admit(request("short", deadline=now + 1.2), now)
    for number in range(4):
        queue.admit(request(number, deadline=now + 60.0), now)
    assert [0, 1, 2, 3] == taken(queue, now)
    assert 1 == queue.status(now).expired


class Looked(Request):
    """Counts how often its state is asked for."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        Looked.looks += name == "state"
        return super().__getattribute__(name)


@pytest.mark.parametrize("limits", [{}, {"max_weight": 4.0, "weighed": True}, {"padded": True, "weighed": True}])
def test_the_next_batch_is_chosen_without_looking_at_all_that_waits(
    limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With deadlines too, a batch is chosen as fast from thousands as from a few."""
    queue = queue_of(max_queue=5_000, **limits)
    measured(queue, {1: 0.01, 4: 0.013})
    queue.admit(request("first"), 0.0)
    for number in range(4_000):
        one = Looked(number)
        one.deadline = 100.0 + number
        queue.admit(one, 0.0)
    monkeypatch.setattr(Looked, "looks", 0)
    for _ in range(3):
        assert isinstance(queue.next_batch(0.0), Batch)
    assert Looked.looks < 500


def test_what_is_bound_to_be_late_leaves_its_place_to_others() -> None:
    """It is not computed, and its caller need not wait for the deadline to know."""
    queue = queue_of(max_queue=100)
    for number in range(6):
        queue.admit(request(number, deadline=0.5 if number < 3 else 9.0), 0.0)
    measured(queue, {1: 1.0, 4: 1.0})
    assert [3, 4, 5] == taken(queue, 0.0)
    assert 3 == sum(isinstance(failure.error, DeadlineExceeded) for _, failure in queue.undelivered)


def test_the_first_item_is_computed_even_if_it_seems_too_late() -> None:
    """Only a run shows that the model has become faster."""
    queue = queue_of(max_queue=100)
    measured(queue, {1: 10.0, 4: 10.0})
    queue.admit(request(0, deadline=5.0), 0.0)
    assert [0] == taken(queue, 0.0)


def test_groups_are_priced_by_themselves() -> None:
    """A batch of other keyword arguments in front takes its own time, and not that of a full batch."""
    queue = queue_of(max_queue=100)
    measured(queue, {1: 1.0, 4: 4.0})
    for number in range(3):
        queue.admit(request(number, group=(("k", int, number),)), 0.0)
    with pytest.raises(DeadlineUnreachable) as refused:
        queue.admit(request(deadline=3.5), 0.0)
    assert 4.0 == pytest.approx(refused.value.estimate)
    queue.admit(request(deadline=4.5), 0.0)


# Weights


def test_a_batch_weighs_no_more_than_it_may() -> None:
    """An item that does not fit waits for the next batch, in order."""
    queue = queue_of(max_weight=10.0, weighed=True)
    for number, weight in enumerate([4, 5, 3, 1]):
        queue.admit(request(number, weight=weight), 0.0)
    assert [1, 0] == taken(queue, 0.0)
    assert [2, 3] == taken(queue, 0.0)
    assert 0 == queue._lines.ungrouped.weight


def test_the_heaviest_comes_first() -> None:
    """Items of similar weight stand next to each other in a batch."""
    queue = queue_of(weighed=True)
    for number, weight in enumerate([1, 3, 2]):
        queue.admit(request(number, weight=weight), 0.0)
    assert [1, 2, 0] == taken(queue, 0.0)


# The end


def test_closing_computes_what_waits_and_admits_nothing() -> None:
    """What still waits at the end of the timeout is refused."""
    queue, requests = filled(6)
    queue.close()
    with pytest.raises(GuardClosed):
        queue.admit(request(), 0.0)
    assert [0, 1, 2, 3] == taken(queue, 0.0)
    queue.refuse_all(GuardClosed("f"))
    assert requests[4:] == [refused for refused, _ in queue.undelivered]
    assert queue.next_batch(0.0) is None


def test_a_cancelled_call_that_still_waits_gets_an_error() -> None:
    """A handler that continues without its client gets ``CallerGone`` instead of no answer."""
    queue, (one,) = filled(1)
    queue.cancel(one, notify=True)
    ((cancelled, failure),) = queue.undelivered
    assert one is cancelled
    assert isinstance(failure.error, CallerGone)


def test_at_the_end_of_the_process_what_runs_is_refused_as_well() -> None:
    """Its caller would wait for a thread that has ended."""
    queue, requests = filled(2)
    batch = queue.next_batch(0.0)
    assert isinstance(batch, Batch)
    queue.close()
    queue.refuse_all(GuardClosed("f"), running=True)
    assert requests == [refused for refused, _ in queue.undelivered]
    assert ([], []) == queue.finish(batch, ["late", "late"])


def test_what_has_left_a_group_is_kept_by_nobody() -> None:
    """While a batch hangs, callers of groups come and leave: few of their requests are kept."""
    queue = queue_of()
    queue.admit(request(0, group=(("lang", str, "ja"),)), 0.0)
    left: weakref.WeakSet[Request] = weakref.WeakSet()
    for number in range(200):
        one = request(number, group=(("lang", str, "en"),))
        queue.admit(one, 0.0)
        assert queue.cancel(one)
        left.add(one)
    del one
    assert len(left) <= 16


def test_what_has_left_a_group_is_not_kept_by_new_limits() -> None:
    """Nor when a wait for fuller batches is set meanwhile."""
    queue = queue_of()
    one = request(0, group=(("lang", str, "ja"),))
    queue.admit(one, 0.0)
    queue.configure(Limits(name="f", max_size=4, max_queue=8, max_wait=1.0))
    assert queue.cancel(one)
    kept = weakref.ref(one)
    del one
    assert kept() is None


def test_what_was_computed_of_a_group_is_not_kept_until_another_one_comes() -> None:
    """Of the last batch neither results nor event loops stay in memory."""
    queue = queue_of()
    for number in range(6):
        queue.admit(request(number, group=(("lang", str, "en"),)), 0.0)
    kept: weakref.WeakSet[Request] = weakref.WeakSet()
    for _ in range(2):
        batch = queue.next_batch(0.0)
        assert isinstance(batch, Batch)
        kept.update(batch.requests)
        run(queue, batch, 1.0, 1.0)
    del batch
    assert not kept


def test_the_next_group_is_found_without_looking_at_all_of_them() -> None:
    """A free thread takes its batch at once, also with thousands of keyword arguments."""
    queue = queue_of(max_queue=5_000)
    for number in range(4_000):
        queue.admit(request(number, group=(("k", int, number),)), float(number))
    assert [[0], [1], [2]] == [taken(queue, 5_000.0) for _ in range(3)]
    assert 4_000 - len(queue._lines._arrived) <= 3


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("deadline", [math.inf, 9.0])
def test_an_exception_by_a_signal_loses_nobody_who_waits_in_the_inbox(deadline: float, after: int) -> None:
    """A thread that asks for the status, or calls, moves what coroutines on other threads have put there."""
    queue = queue_of()
    queue.inbox.extend(request(number, deadline=deadline) for number in range(4))

    class Interrupting(dict[Any, None]):
        def __setitem__(self, request: Any, value: None) -> None:
            if after:
                super().__setitem__(request, value)
            if request.item == 2:
                raise KeyboardInterrupt
            super().__setitem__(request, value)

    queue._lines.ungrouped.requests = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        queue.status(0.0)
    queue._lines.ungrouped.requests = dict(queue._lines.ungrouped.requests)
    assert 4 == queue.waiting + len(queue.inbox)
    assert 4 == queue.status(0.0).waiting
    if deadline == math.inf:
        assert [0, 1, 2, 3] == taken(queue, 0.0)
    else:
        queue.expire_all(9.0)
        assert 4 == len(queue.undelivered) == queue.status(9.0).expired
    assert queue.status(9.0).waiting == 0


@pytest.mark.parametrize("after", [0, 1])
def test_a_finalizer_that_calls_while_the_inbox_is_emptied_changes_nothing_for_others(after: int) -> None:
    """It may run at any point, in the thread that holds the lock."""
    queue = queue_of()
    queue.inbox.extend(request(number) for number in range(3))

    class Finalizing(dict[Any, None]):
        def __setitem__(self, one: Any, value: None) -> None:
            if after:
                super().__setitem__(one, value)
            if one.item == 1:
                queue.admit(request("last"), 0.0)
            super().__setitem__(one, value)

    queue._lines.ungrouped.requests = Finalizing()
    assert 4 == queue.status(0.0).waiting
    assert {0, 1, 2, "last"} == set(taken(queue, 0.0))
    assert (0, 0) == (queue.waiting, len(queue.inbox))


def test_a_batch_that_begins_can_read_all_of_its_items() -> None:
    """A caller that leaves in the moment between does not turn its item into None; at the end the item is let go."""
    queue, (leaves, stays) = filled(2)
    batch = queue.next_batch(0.0)
    assert isinstance(batch, Batch)
    queue.cancel(leaves)
    assert [0, 1] == [one.item for one in batch.requests]
    queue.finish(batch, ["late", "in time"])
    assert [None, None] == [leaves.item, stays.item]


# Forks


def test_a_child_does_not_cancel_what_is_its_parents() -> None:
    """What was queued before a fork counts in no queue of the child."""
    queue, requests = filled(6)
    taken(queue, 0.0)
    queue.inbox.append(late := request(6))
    queue.disown()
    own = queue_of()
    assert [False] * 7 == [own.cancel(one) for one in [*requests, late]]
    assert (0, 0) == (own.waiting, own.status(0.0).cancelled)
