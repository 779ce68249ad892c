"""``core``: what is admitted, batched, expired and refused. No thread, no clock."""

from __future__ import annotations

import pytest
from tests.unit.serving.cores import core, entry, evidence, filled, run, taken

from modelguard.errors import CallerGone, DeadlineExceeded, DeadlineUnreachable, GuardClosed, QueueFull
from modelguard.serving.batches import Batch, Limits

# A free worker


def test_a_lone_request_never_waits() -> None:
    """With nobody else there, it is the next batch."""
    made, entries = filled(1)
    batch = made.take(0.0)
    assert isinstance(batch, Batch)
    assert entries == batch.entries
    assert made.take(0.0) is None


def test_a_free_worker_takes_all_that_waits_up_to_the_size() -> None:
    """In the order of arrival."""
    made, _ = filled(6)
    assert [0, 1, 2, 3] == taken(made, 0.0)
    assert [4, 5] == taken(made, 0.0)


def test_different_keyword_arguments_do_not_share_a_batch() -> None:
    """Each group by itself, the one with the oldest item first."""
    made = core()
    german, french = (("language", str, "de"),), (("language", str, "fr"),)
    for number, group in enumerate([german, french, german, None]):
        made.admit(entry(number, group=group), float(number))
    assert [[0, 2], [1], [3]] == [taken(made, 9.0) for _ in range(3)]
    assert made.take(9.0) is None


def test_the_extras_of_a_batch_are_those_of_its_items() -> None:
    """As keyword arguments."""
    made = core()
    made.admit(entry(group=(("k", int, 2), ("language", str, "de"))), 0.0)
    batch = made.take(0.0)
    assert isinstance(batch, Batch)
    assert {"k": 2, "language": "de"} == batch.extras


# Waiting for company


def test_max_wait_counts_from_the_oldest_request() -> None:
    """And not from the last, which would put it off for ever."""
    made = core(max_wait=1.0)
    made.admit(entry(0), 0.0)
    made.admit(entry(1), 0.9)
    assert made.take(0.9) == pytest.approx(0.1)
    assert [0, 1] == taken(made, 1.0)


def test_a_full_batch_does_not_wait() -> None:
    """There is nothing to wait for."""
    made, _ = filled(4, max_wait=1.0)
    assert [0, 1, 2, 3] == taken(made, 0.0)


def test_max_wait_is_cut_to_the_nearest_deadline() -> None:
    """By what a batch of that size takes; at once where nobody knows."""
    made = core(max_wait=1.0)
    made.admit(entry(0, deadline=0.5), 0.0)
    assert [0] == taken(made, 0.0)
    made = core(max_wait=1.0, max_queue=100)
    made._limits = Limits(name="f", max_size=4, max_queue=100)
    evidence(made, 1, 0.2)
    made._limits = Limits(name="f", max_size=4, max_queue=100, max_wait=1.0)
    made.admit(entry(0, deadline=0.5), 0.0)
    assert made.take(0.0) == pytest.approx(0.3)
    assert [0] == taken(made, 0.3)


def test_a_deadline_far_away_does_not_cut_the_wait() -> None:
    """Nor is anything sent early because of it."""
    made = core(max_wait=1.0)
    made.admit(entry(0, deadline=60.0), 0.0)
    assert made.take(0.25) == pytest.approx(0.75)


# Bounds


def test_a_full_queue_refuses_at_once() -> None:
    """With the time after which there is room, by the measured rate."""
    made = core()
    evidence(made, 4, 2.0)  # two items a second
    for number in range(8):
        made.admit(entry(number), 0.0)
    with pytest.raises(QueueFull) as refused:
        made.admit(entry(), 0.0)
    assert (8, 4.0) == (refused.value.queued, refused.value.retry_after)
    assert 8 == made.waiting


def test_what_expired_makes_room() -> None:
    """A queue full of the dead refuses nobody."""
    made = core()
    for _ in range(8):
        made.admit(entry(deadline=1.0), 0.0)
    made.admit(entry(), 1.0)
    assert 1 == made.waiting
    assert 8 == sum(isinstance(failure.error, DeadlineExceeded) for _, failure in made.outbox)


def test_what_was_called_off_makes_room_and_is_not_computed() -> None:
    """Its place goes to the next."""
    made, entries = filled(8)
    assert made.cancel(entries[0])
    assert not made.cancel(entries[0]), "once"
    made.admit(entry(8), 0.0)
    assert [1, 2, 3, 4] == taken(made, 0.0)
    assert [5, 6, 7, 8] == taken(made, 0.0)


def test_a_stuck_model_does_not_gather_the_dead() -> None:
    """Queues and deadlines stay small however many come and go while nothing is computed."""
    made = core()
    for number in range(10_000):
        one = entry(number, deadline=1e6)
        made.admit(one, 0.0)
        made.cancel(one)
    assert len(made._plain) < 200
    assert len(made._deadlines) < 200


def test_answered_items_do_not_stay_until_their_deadline() -> None:
    """Else an hour's deadline would keep an hour's items."""
    made = core()
    for number in range(1_000):
        made.admit(entry(number, deadline=3600.0), 0.0)
        batch = made.take(0.0)
        assert isinstance(batch, Batch)
        run(made, batch, 0.0, 0.0)
    assert len(made._deadlines) < 200


# Deadlines


def test_a_deadline_that_has_passed_is_not_queued() -> None:
    """It cannot be met."""
    made = core()
    with pytest.raises(DeadlineExceeded):
        made.admit(entry(deadline=1.0), 1.0)
    assert made.idle


def test_an_item_that_is_being_computed_expires_too() -> None:
    """Its caller is told at the deadline, and the late result goes nowhere."""
    made = core()
    one, other = entry(1, deadline=1.0), entry(2)
    made.admit(one, 0.0)
    made.admit(other, 0.0)
    batch = made.take(0.0)
    assert isinstance(batch, Batch)
    assert 1.0 == made.next_deadline()
    made.expire(1.0)
    assert [one] == [answered for answered, _ in made.outbox]
    assert ([other], ["b"]) == made.finish(batch, ["a", "b"])


def test_nothing_is_refused_on_a_guess() -> None:
    """Measurements of single items say nothing of full batches."""
    made = core(max_queue=100)
    evidence(made, 1, 1.0)
    for number in range(50):
        made.admit(entry(number, deadline=0.5), 0.0)
    assert 50 == made.waiting


def test_with_evidence_what_would_be_late_is_refused_at_the_door() -> None:
    """A full batch takes a second: the second batch has its answers after two."""
    made = core(max_queue=100)
    evidence(made, 4, 1.0)
    for number in range(4):
        made.admit(entry(number, deadline=1.5), 0.0)
    with pytest.raises(DeadlineUnreachable) as refused:
        made.admit(entry(deadline=1.5), 0.0)
    assert (2.0, 1.5, 0.5) == (refused.value.estimate, refused.value.left, refused.value.retry_after)
    made.admit(entry(deadline=2.5), 0.0)


def test_what_runs_already_counts_for_the_time_it_has_left() -> None:
    """A batch that began 0.75 s ago, and takes one, has a quarter left."""
    made = core(max_queue=100)
    evidence(made, 4, 1.0)
    for number in range(8):
        made.admit(entry(number), 0.0)
    assert isinstance(made.take(0.0), Batch)
    with pytest.raises(DeadlineUnreachable) as refused:
        made.admit(entry(deadline=1.0), 0.75)
    assert 2.25 == refused.value.estimate


def test_evidence_grows_old() -> None:
    """A slow hour is not held against the next one."""
    made = core(max_queue=100)
    evidence(made, 4, 1.0)
    for number in range(8):
        made.admit(entry(number, deadline=11.5), 11.0)
    assert 8 == made.waiting


def test_who_would_be_next_is_let_in_whatever_was_measured() -> None:
    """Else, after one slow spell, nothing would ever be measured again."""
    made = core()
    evidence(made, 1, 10.0)
    made.admit(entry(deadline=0.5), 0.0)
    assert 1 == made.waiting


def test_what_is_bound_to_be_late_leaves_its_place_to_others() -> None:
    """It is not computed if a full batch can be made without it."""
    made = core(max_queue=100)
    for number in range(6):
        made.admit(entry(number, deadline=0.5 if number < 3 else 9.0), 0.0)
    for _ in range(3):
        made.estimator.record(1.0, 4, 1.0, 0.0)
    assert [2, 3, 4, 5] == taken(made, 0.0)
    assert [0, 1] == [expired.item or number for number, (expired, _) in enumerate(made.outbox)]


# Weights


def test_a_batch_weighs_no_more_than_it_may() -> None:
    """What does not fit waits for the next one, in its turn."""
    made = core(max_weight=10.0, sort=True)
    for number, weight in enumerate([4, 5, 3, 1]):
        made.admit(entry(number, weight=weight), 0.0)
    assert [1, 0] == taken(made, 0.0)
    assert [2, 3] == taken(made, 0.0)
    assert 0 == made._weight


def test_the_heaviest_comes_first() -> None:
    """So that what is padded together is of about the same length."""
    made = core(sort=True)
    for number, weight in enumerate([1, 3, 2]):
        made.admit(entry(number, weight=weight), 0.0)
    assert [1, 2, 0] == taken(made, 0.0)


# The end


def test_closing_computes_what_waits_and_lets_nothing_in() -> None:
    """Unless its time is over."""
    made, entries = filled(6)
    made.close()
    with pytest.raises(GuardClosed):
        made.admit(entry(), 0.0)
    assert [0, 1, 2, 3] == taken(made, 0.0)
    made.give_up(GuardClosed("f"))
    assert entries[4:] == [refused for refused, _ in made.outbox]
    assert made.take(0.0) is None


def test_who_hangs_up_is_told_if_somebody_still_waits() -> None:
    """A handler that runs on gets an error instead of no answer at all."""
    made, (one,) = filled(1)
    made.cancel(one, told=True)
    ((gone, failure),) = made.outbox
    assert one is gone
    assert isinstance(failure.error, CallerGone)
