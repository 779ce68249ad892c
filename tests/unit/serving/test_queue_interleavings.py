"""``_queue`` under any order of events. No threads, no clock."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.serving.queues import request

from modelguard.errors import DeadlineExceeded, GuardClosed, Overloaded
from modelguard.serving import Limits
from modelguard.serving._execution import Computed
from modelguard.serving._queue import BatchQueue
from modelguard.serving._requests import Batch, Failure, Request
from modelguard.serving.breaker import Breaker, Circuit

VERDICTS = st.sampled_from(["succeeded", "succeeded", "failed", "inconclusive"])


class Interleavings(RuleBasedStateMachine):
    """Any order of admissions, plain calls, batches, ends, expiries and cancellations."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.number = 0
        self.admitted: dict[int, Request] = {}
        self.answers: dict[int, Any] = {}
        self.cancelled: set[int] = set()

    @initialize(
        max_size=st.integers(1, 4),
        max_queue=st.integers(4, 9),
        threads=st.integers(1, 3),
        max_wait=st.sampled_from([0.0, 0.0, 2.0]),
        max_weight=st.sampled_from([math.inf, 6.0]),
        failures=st.sampled_from([None, 1, 3]),
        fair=st.booleans(),
        padded=st.booleans(),
        quota=st.sampled_from([None, None, 3]),
        deadline=st.sampled_from([math.inf, math.inf, 9.0]),
    )
    def begin(
        self,
        *,
        max_size: int,
        max_queue: int,
        threads: int,
        max_wait: float,
        max_weight: float,
        failures: int | None,
        fair: bool,
        padded: bool,
        quota: int | None,
        deadline: float,
    ) -> None:
        self.limits = Limits(
            name="f",
            max_size=max_size,
            max_queue=max_queue,
            threads=threads,
            max_wait=max_wait,
            max_weight=max_weight,
            weighed=max_weight != math.inf,
            padded=padded and max_weight != math.inf,
            fair=fair,
            quota=quota,
            deadline=deadline,
            shares={"a": 3.0},
        )
        circuit = None if failures is None else Circuit(Breaker(failures=failures, cooldown=3.0, max_cooldown=6.0))
        self.queue = BatchQueue(self.limits, circuit)
        self.batches: list[Batch] = []
        self.most_waiting = max_queue

    @rule(
        bound=st.sampled_from([None, None, 0.0, 1.0, 3.0, 50.0]),
        weight=st.integers(1, 6),
        group=st.sampled_from([None, None, (("k", int, 1),)]),
        key=st.sampled_from([None, "a", "b"]),
        priority=st.sampled_from([0, 0, 0, 2]),
    )
    def admit(self, bound: float | None, weight: int, group: Any, key: Any, priority: int) -> None:
        self.number += 1
        left = self.limits.deadline if bound is None else min(bound, self.limits.deadline)
        one = request(self.number, deadline=self.now + left, group=group)
        one.weight = weight if self.limits.weighed else 1
        if self.queue.ordered:
            one.key, one.priority = key, priority
        try:
            self.queue.admit(one, self.now)
        except (Overloaded, DeadlineExceeded, GuardClosed):
            self.collect()
            return
        self.admitted[self.number] = one
        self.collect()

    @rule(weight=st.integers(1, 6))
    def call(self, weight: int = 1) -> None:
        """A plain call, as the batcher lets them in."""
        queue = self.queue
        if len(queue.inbox) + queue.waiting >= queue.sure or self.now > queue.overdue:
            return
        self.number += 1
        one = self.admitted[self.number] = request(self.number, deadline=self.now + self.limits.deadline)
        one.arrived, one.weight = self.now, weight if self.limits.weighed else 1
        queue.inbox.append(one)

    @rule()
    def take(self) -> None:
        if len(self.batches) >= self.limits.threads:
            return
        found = self.queue.next_batch(self.now)
        self.collect()
        if isinstance(found, Batch):
            self.check(found)
            self.batches.append(found)
        elif found is None:
            assert 0 == self.queue.waiting + len(self.queue.inbox)
        else:
            assert self.limits.max_wait
            assert 0 < found <= self.limits.max_wait + 1e-9  # an error of rounding

    @rule(
        max_size=st.integers(1, 4),
        max_queue=st.integers(4, 9),
        max_wait=st.sampled_from([0.0, 2.0, 5.0]),
        slo=st.sampled_from([math.inf, 8.0]),
    )
    def configure(self, max_size: int, max_queue: int, max_wait: float, slo: float) -> None:
        self.limits = replace(self.limits, max_size=max_size, max_queue=max_queue, max_wait=max_wait, slo=slo)
        self.queue.configure(self.limits)
        self.most_waiting = max(max_queue, self.queue.waiting)
        assert not self.queue.inbox

    def number_of(self, one: Request) -> int:
        return one.number  # type: ignore[attr-defined, no-any-return]

    def numbers_of(self, batch: Batch) -> list[int]:
        return [self.number_of(one) for one in batch.requests]

    def check(self, batch: Batch) -> None:
        numbers = self.numbers_of(batch)
        assert numbers
        assert not {*numbers} & {*self.answers}
        assert not {*numbers} & self.cancelled
        assert len(numbers) <= self.limits.max_size
        assert len(numbers) == 1 or batch.weight <= self.limits.max_weight
        assert 1 == len({one.group for one in batch.requests})
        assert all(one.deadline > self.now for one in batch.requests)
        if self.queue.ordered or self.limits.padded:
            return
        if not self.limits.weighed:
            assert numbers == sorted(numbers), "in the order of arrival"
        alive = self.alive()
        same = [n for n, one in alive.items() if one.group == batch.requests[0].group and n not in numbers]
        older = [n for n in same if n not in self.running() and n < min(numbers)]
        bounded = any(one.deadline != math.inf for one in batch.requests)
        assert bounded or all(alive[n].deadline != math.inf for n in older), (
            "the oldest of its kind is in it, unless others would be late because of it, or have less time"
        )

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), verdict=VERDICTS, seconds=st.floats(0.0, 5.0))
    def finish(self, data: st.DataObject, verdict: Any, seconds: float) -> None:
        batch = self.batches.pop(data.draw(st.integers(0, len(self.batches) - 1)))
        computed = Computed([], whole=verdict == "succeeded", bad=0.5 * (verdict == "failed"))
        self.queue.learn(batch, computed, seconds, self.now)
        self.end(batch)
        self.queue.record_verdict(batch, verdict, self.now)
        self.collect()

    def end(self, batch: Batch) -> None:
        numbers = self.numbers_of(batch)
        outcomes = [("result of", number) for number in numbers]
        for one, outcome in zip(*self.queue.finish(batch, outcomes), strict=True):
            assert ("result of", self.number_of(one)) == outcome, "another's result"
            self.answer(self.number_of(one), outcome)

    @precondition(lambda self: not self.queue.ordered)
    @rule()
    def order(self) -> None:
        """A first call with a key or a priority."""
        self.queue.order()

    @precondition(lambda self: self.admitted)
    @rule(data=st.data(), notify=st.booleans())
    def cancel(self, data: st.DataObject, *, notify: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.admitted)))
        before = number in self.answers or number in self.cancelled
        assert before != self.queue.cancel(self.admitted[number], notify=notify)
        if not before and not notify:
            self.cancelled.add(number)
        self.collect()

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.queue.expire_all(self.now)
        self.collect()
        assert self.queue.next_check() > self.now

    @precondition(lambda self: len(self.admitted) > 10 and not self.queue.closed)  # else most runs would close at once
    @rule()
    def close(self) -> None:
        self.queue.close()

    @precondition(lambda self: self.queue.closed and self.queue.waiting)
    @rule()
    def give_up(self) -> None:
        self.queue.refuse_all(GuardClosed("f"))
        self.collect()

    def collect(self) -> None:
        settled, self.queue.undelivered = self.queue.undelivered, []
        for one, failure in settled:
            if isinstance(failure, Failure) and isinstance(failure.error, DeadlineExceeded):
                assert one.deadline != math.inf
            self.answer(self.number_of(one), failure)

    def answer(self, number: int, outcome: Any) -> None:
        assert number not in self.answers, "answered twice"
        assert number not in self.cancelled, "answered after its caller had cancelled"
        self.answers[number] = outcome

    def running(self) -> set[int]:
        return {number for batch in self.batches for number in self.numbers_of(batch)}

    def alive(self) -> dict[int, Any]:
        return {n: one for n, one in self.admitted.items() if n not in self.answers and n not in self.cancelled}

    @invariant()
    def counts(self) -> None:
        if not hasattr(self, "queue"):
            return
        running = self.running()
        waiting = [one for n, one in self.alive().items() if n not in running]
        assert len(waiting) == self.queue.waiting + len(self.queue.inbox) <= self.most_waiting
        assert all((one.state == "done") != (n in self.alive()) for n, one in self.admitted.items())
        if self.queue.ordered or self.limits.weighed:
            self.queue.take_in()
        if self.queue.ordered:
            fairness = self.queue._lines.fairness
            counts = Counter(one.key for one in waiting)
            assert all(counts[key] == fairness.waiting_of(key) for key in (None, "a", "b"))
            assert self.limits.quota is None or max(counts.values(), default=0) <= self.limits.quota
            assert waiting or not len(fairness), "a key was kept"
        if self.limits.weighed:
            assert sum(one.weight for one in waiting) == pytest.approx(sum(line.weight for line in self.queue._lines))

    def teardown(self) -> None:
        if not hasattr(self, "queue"):
            return
        self.queue.close()
        while self.batches or self.queue.waiting or self.queue.inbox:
            self.now += 3.0
            while self.batches:
                batch = self.batches.pop()
                self.end(batch)
            self.take()
        assert self.queue.idle
        assert {*self.admitted} == {*self.answers} | self.cancelled, "a request was lost"


class PlainInterleavings(Interleavings):
    """Mostly plain calls, which wait in the inbox until something happens to one of them."""

    @initialize(
        max_size=st.integers(1, 4),
        max_queue=st.integers(4, 9),
        threads=st.integers(1, 3),
        deadline=st.sampled_from([math.inf, 9.0, 40.0]),
        seconds=st.floats(0.001, 2.0),
    )
    def begin(  # type: ignore[override]
        self, *, max_size: int, max_queue: int, threads: int, deadline: float, seconds: float
    ) -> None:
        super().begin(
            max_size=max_size,
            max_queue=max_queue,
            threads=threads,
            max_wait=0.0,
            max_weight=math.inf,
            failures=None,
            fair=False,
            padded=False,
            quota=None,
            deadline=deadline,
        )
        for _ in range(4):  # measured, so that it is known what is surely in time
            self.call() if self.queue.sure else self.admit(None, 1, None, None, 0)
            self.take()
            batch = self.batches.pop()
            self.now += seconds
            self.queue.learn(batch, Computed([]), seconds, self.now)
            self.end(batch)
            self.queue.record_verdict(batch, "succeeded", self.now)

    @rule(count=st.integers(1, 6))
    def calls(self, count: int) -> None:
        for _ in range(count):
            self.call()

    @precondition(lambda self: False)
    @rule()
    def order(self) -> None:
        """Requests with keys take another way for ever."""


for machine in (Interleavings, PlainInterleavings):
    machine.TestCase.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
TestInterleavings = Interleavings.TestCase
TestInterleavings.__doc__ = "No item is lost, answered twice or answered with another's result, in any order of events."
TestPlainInterleavings = PlainInterleavings.TestCase
TestPlainInterleavings.__doc__ = "Nor is one that waits in the inbox."
