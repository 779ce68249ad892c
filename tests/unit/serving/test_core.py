"""``core``: what is admitted, batched, expired and refused, under any order of events. No thread, no clock."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from modelguard.errors import (
    CallerGone,
    CircuitOpen,
    DeadlineExceeded,
    DeadlineUnreachable,
    GuardClosed,
    Overloaded,
    QueueFull,
)
from modelguard.serving.breaker import Breaker, Circuit
from modelguard.serving.core import Batch, Core, Limits
from modelguard.serving.entries import DONE, Entry, Failure


def entry(item: object = 0, *, deadline: float = math.inf, weight: float = 1, group: Any = None) -> Entry:
    made = Entry(item)
    made.deadline, made.weight, made.group = deadline, weight, group
    return made


def core(breaker: Breaker | None = None, **limits: Any) -> Core:
    settings = {"name": "f", "max_size": 4, "max_queue": 8, **limits}
    return Core(Limits(**settings), None if breaker is None else Circuit(breaker))


def filled(count: int, **limits: Any) -> tuple[Core, list[Entry]]:
    made = core(**limits)
    entries = [entry(number) for number in range(count)]
    for one in entries:
        made.admit(one, 0.0)
    return made, entries


def run(made: Core, batch: Batch, seconds: float, now: float, verdict: Any = "good") -> None:
    """The batch's end, as the batcher tells it."""
    if verdict == "good":
        made.record(batch, seconds, now)
    made.finish(batch, [one.item for one in batch.entries])
    made.judge(batch, verdict, now)


def taken(made: Core, now: float) -> list[Any]:
    batch = made.take(now)
    assert isinstance(batch, Batch)
    return [one.item for one in batch.entries]


def evidence(made: Core, size: int, seconds: float, now: float = 0.0) -> None:
    """Three batches of that size have been measured."""
    for _ in range(3):
        for number in range(size):
            made.admit(entry(number), now)
        batch = made.take(now)
        assert isinstance(batch, Batch)
        run(made, batch, seconds, now)


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


# The breaker


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


class Interleavings(RuleBasedStateMachine):
    """Any order of admissions, batches, ends, expiries and cancellations."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.number = 0
        self.admitted: dict[int, Entry] = {}
        self.answers: dict[int, Any] = {}
        self.cancelled: set[int] = set()

    @initialize(
        max_size=st.integers(1, 4),
        max_queue=st.integers(4, 9),
        workers=st.integers(1, 3),
        max_wait=st.sampled_from([0.0, 0.0, 2.0]),
        max_weight=st.sampled_from([math.inf, 6.0]),
        failures=st.sampled_from([None, 1, 3]),
    )
    def begin(
        self,
        *,
        max_size: int,
        max_queue: int,
        workers: int,
        max_wait: float,
        max_weight: float,
        failures: int | None,
    ) -> None:
        self.limits = Limits(
            name="f",
            max_size=max_size,
            max_queue=max_queue,
            workers=workers,
            max_wait=max_wait,
            max_weight=max_weight,
            sort=max_weight != math.inf,
        )
        circuit = None if failures is None else Circuit(Breaker(failures=failures, cooldown=3.0, max_cooldown=6.0))
        self.core = Core(self.limits, circuit)
        self.batches: list[Batch] = []

    @rule(
        bound=st.sampled_from([None, None, 0.0, 1.0, 3.0, 50.0]),
        weight=st.integers(1, 6),
        group=st.sampled_from([None, None, (("k", int, 1),)]),
    )
    def admit(self, bound: float | None, weight: int, group: Any) -> None:
        self.number += 1
        one = entry(self.number, deadline=math.inf if bound is None else self.now + bound, group=group)
        one.weight = weight if self.limits.sort else 1
        try:
            self.core.admit(one, self.now)
        except (Overloaded, DeadlineExceeded, GuardClosed):
            self.collect()
            return
        self.admitted[self.number] = one
        self.collect()

    @rule()
    def take(self) -> None:
        if len(self.batches) >= self.limits.workers:
            return
        found = self.core.take(self.now)
        self.collect()
        if isinstance(found, Batch):
            self.check(found)
            self.batches.append(found)
        elif found is None:
            assert 0 == self.core.waiting
        else:
            assert self.limits.max_wait
            assert 0 < found <= self.limits.max_wait

    def check(self, batch: Batch) -> None:
        numbers = [one.item for one in batch.entries]
        assert numbers
        assert not {*numbers} & {*self.answers}
        assert not {*numbers} & self.cancelled
        assert len(numbers) <= self.limits.max_size
        assert len(numbers) == 1 or sum(one.weight for one in batch.entries) <= self.limits.max_weight
        assert 1 == len({one.group for one in batch.entries})
        assert all(one.deadline > self.now for one in batch.entries)
        if not self.limits.sort:
            assert numbers == sorted(numbers), "in the order of arrival"
        same = [n for n, one in self.alive().items() if one.group == batch.entries[0].group and n not in numbers]
        running = {one.item for other in self.batches for one in other.entries}
        assert all(n > min(numbers) for n in same if n not in running), "the oldest of its kind is in it"

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), verdict=st.sampled_from(["good", "good", "bad", "neither"]), seconds=st.floats(0.0, 5.0))
    def finish(self, data: st.DataObject, verdict: Any, seconds: float) -> None:
        batch = self.batches.pop(data.draw(st.integers(0, len(self.batches) - 1)))
        if verdict == "good":
            self.core.record(batch, seconds, self.now)
        entries, outcomes = self.core.finish(batch, [("result of", one.item) for one in batch.entries])
        for one, outcome in zip(entries, outcomes, strict=True):
            assert ("result of", one.item) == outcome, "another's result"
            self.answer(one, outcome)
        self.core.judge(batch, verdict, self.now)
        self.collect()

    @precondition(lambda self: self.admitted)
    @rule(data=st.data(), told=st.booleans())
    def cancel(self, data: st.DataObject, *, told: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.admitted)))
        before = number in self.answers or number in self.cancelled
        assert before != self.core.cancel(self.admitted[number], told=told)
        if not before and not told:
            self.cancelled.add(number)
        self.collect()

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.core.expire(self.now)
        self.collect()
        assert self.core.next_deadline() > self.now

    @rule()
    def close(self) -> None:
        self.core.close()

    @precondition(lambda self: self.core.closed)
    @rule()
    def give_up(self) -> None:
        self.core.give_up(GuardClosed("f"))
        self.collect()

    def collect(self) -> None:
        settled, self.core.outbox = self.core.outbox, []
        for one, failure in settled:
            self.answer(one, failure)

    def answer(self, one: Entry, outcome: Any) -> None:
        number = next(n for n, known in self.admitted.items() if known is one)
        assert number not in self.answers, "answered twice"
        assert number not in self.cancelled, "answered after its caller had left"
        self.answers[number] = outcome
        if isinstance(outcome, Failure) and isinstance(outcome.error, DeadlineExceeded):
            assert one.deadline != math.inf

    def alive(self) -> dict[int, Entry]:
        return {n: one for n, one in self.admitted.items() if n not in self.answers and n not in self.cancelled}

    @invariant()
    def counts(self) -> None:
        if not hasattr(self, "core"):
            return
        running = {one.item for batch in self.batches for one in batch.entries}
        waiting = [one for n, one in self.alive().items() if n not in running]
        assert len(waiting) == self.core.waiting <= self.limits.max_queue
        assert all((one.place == DONE) != (n in self.alive()) for n, one in self.admitted.items())
        if self.limits.sort:
            assert sum(one.weight for one in waiting) == self.core._weight

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.close()
        while self.core.waiting or self.batches:
            self.now += 3.0
            while self.batches:
                batch = self.batches.pop()
                for pair in zip(
                    *self.core.finish(batch, [("result of", one.item) for one in batch.entries]), strict=True
                ):
                    self.answer(*pair)
            self.take()
        assert self.core.idle
        assert {*self.admitted} == {*self.answers} | self.cancelled, "somebody was lost"


Interleavings.TestCase.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
TestInterleavings = Interleavings.TestCase
TestInterleavings.__doc__ = "No item is lost, answered twice or answered with another's result, in any order of events."
