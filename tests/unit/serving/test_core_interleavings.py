"""``core`` under any order of events. No thread, no clock."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.serving.cores import entry

from modelguard.errors import DeadlineExceeded, GuardClosed, Overloaded
from modelguard.serving.batches import Batch, Limits
from modelguard.serving.breaker import Breaker, Circuit
from modelguard.serving.core import Core
from modelguard.serving.entries import DONE, Entry, Failure


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
