"""Drives a batch queue on a simulated clock: hours of overload in seconds, the same every time.

One thread computes. While its model runs, the clock moves on, requests arrive and expire, as they would beside a real
thread. The same state machine is driven that serves real requests; only clock and thread are simulated.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelguard.errors import BatchFailed, CallerGone, DeadlineExceeded, ModelGuardError, Overloaded
from modelguard.serving import Limits
from modelguard.serving._execution import BatchFunction, compute
from modelguard.serving._queue import BatchQueue
from modelguard.serving._requests import Batch, Failure, Request

#: How many lengths of the part of a run in which requests are admitted are tried.
_PARTS = 60

#: Seconds that a batch of these items takes, at this time, with these keyword arguments.
Cost = Callable[[list[Any], float, dict[str, Any]], float]


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """One request to come.

    Attributes:
        at: When, in seconds.
        item: What is computed; an item that is ``bad`` makes its batch raise.
        timeout: Seconds that it has.
        weight: Its weight.
        group: Its keyword arguments.
        bad: Whether the model raises for it.
        key: Whose it is.
        priority: How far it goes before others of its key.
        leaves: Seconds after which its caller gives up, whatever became of it.
        client: The client that sent it, and sends another one when it has its answer; None for nobody.
    """

    at: float
    item: Any
    timeout: float
    weight: float = 1
    group: Any = None
    bad: bool = False
    key: Any = None
    priority: int = 0
    leaves: float = math.inf
    client: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Arrival) and self.item == other.item

    def __hash__(self) -> int:
        return hash(self.item)


@dataclass(slots=True)
class Outcome:
    """What became of the requests that arrived after the warm-up."""

    offered: int = 0
    answered: int = 0
    refused: int = 0
    expired: int = 0
    failed: int = 0
    harmed: int = 0  # healthy items that got BatchFailed
    seconds: float = 0.0
    runs: int = 0
    sizes: list[int] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Answers in time for each second."""
        return self.answered / self.seconds


def poisson(
    rate: float, seconds: float, make: Callable[[float, random.Random], Arrival], seed: int = 1
) -> list[Arrival]:
    """Arrivals at this rate, at random."""
    dice = random.Random(seed)
    arrivals, at = [], 0.0
    while (at := at + dice.expovariate(rate)) < seconds:
        arrivals.append(make(at, dice))
    return arrivals


class _Simulated(Request):
    """A request that notes its outcome."""

    def __init__(self, arrival: Arrival, simulation: Simulation) -> None:
        self.item = arrival
        self.arrival = arrival
        self.deadline = arrival.at + arrival.timeout
        self.weight = arrival.weight
        self.group = arrival.group
        self.key = arrival.key
        self.priority = arrival.priority
        self._simulation = simulation

    def deliver(self, outcome: Any) -> None:
        self._simulation.note(self.arrival, outcome)


def _check(item: Arrival) -> None:
    """Stands for a function of the model that works on one item: the traceback then names the item."""
    if item.bad:
        raise ValueError("bad item")


class Simulation:
    """One batch queue, one thread, one model, on a clock of their own.

    Args:
        limits: The options of the queue.
        cost: How long the model takes.
        arrivals: The requests, in order.
        warm_up: Seconds at the start that do not count.
        named: Whether the model works on one item at a time when it raises for it.
        queue: What is driven; by default a queue with these limits.
        then: Gives the next request of a client whose last one has ended at this time; None for none.
    """

    def __init__(
        self,
        limits: Limits,
        cost: Cost,
        arrivals: Iterable[Arrival],
        *,
        warm_up: float = 0.0,
        named: bool = False,
        queue: Any = None,
        then: Callable[[Arrival, float], Arrival | None] = lambda _last, _now: None,
    ) -> None:
        self.now = 0.0
        self.queue = BatchQueue(limits) if queue is None else queue
        self.outcome = Outcome()
        self._cost = cost
        self._then = then
        self._number = itertools.count()
        self._arrivals: list[tuple[float, int, Arrival, Request | None]] = []
        self._end = 0.0
        for arrival in arrivals:
            self._arrivals.append((arrival.at, next(self._number), arrival, None))
            self._end = max(self._end, arrival.at)
        heapq.heapify(self._arrivals)
        self._warm_up = warm_up
        self._named = named
        self._function = BatchFunction(run=self._run, name=limits.name, isolate=True, clock=lambda: self.now)

    def run(self) -> Outcome:
        """Serve until the last request has come, and what waits then."""
        while True:
            found = self.queue.next_batch(self.now)
            self._deliver_undelivered()
            if isinstance(found, Batch):
                self._compute(found)
            elif self._arrivals:
                until = self._arrivals[0][0]
                self._advance(until if found is None else min(until, self.now + found))
            elif found is None:
                break
            else:
                self._advance(self.now + found)
        self.outcome.seconds = self._end - self._warm_up
        return self.outcome

    def note(self, arrival: Arrival, outcome: Any) -> None:
        """Count what became of a request."""
        if arrival.client is not None and (following := self._then(arrival, self.now)) is not None:
            heapq.heappush(self._arrivals, (following.at, next(self._number), following, None))
            self._end = max(self._end, following.at)
        if arrival.at < self._warm_up:
            return
        counts = self.outcome
        error = outcome.error if isinstance(outcome, Failure) else None
        if error is None:
            counts.answered += self.now <= arrival.at + arrival.timeout
        elif isinstance(error, DeadlineExceeded):
            counts.expired += 1
        elif isinstance(error, Overloaded):
            counts.refused += 1
        else:
            counts.failed += 1
            counts.harmed += isinstance(error, BatchFailed) and not arrival.bad

    def _advance(self, until: float) -> None:
        while self._arrivals and self._arrivals[0][0] <= until:
            at, _, arrival, leaving = heapq.heappop(self._arrivals)
            self._expire(at)
            self.now = max(self.now, at)
            if leaving is not None:
                if self.queue.cancel(leaving) and arrival.client is not None:
                    self.note(arrival, Failure(CallerGone("f")))
                continue
            self.outcome.offered += arrival.at >= self._warm_up
            request = _Simulated(arrival, self)
            try:
                self.queue.admit(request, self.now)
            except ModelGuardError as error:
                self.note(arrival, Failure(error))
                continue
            if arrival.leaves != math.inf:
                heapq.heappush(self._arrivals, (arrival.at + arrival.leaves, next(self._number), arrival, request))
        self._expire(until)
        self.now = max(self.now, until)

    def _expire(self, until: float) -> None:
        while (at := self.queue.next_check()) <= until:
            self.now = max(self.now, at)
            self.queue.expire(self.now)
            self._deliver_undelivered()

    def _compute(self, batch: Batch) -> None:
        started = self.now
        self.outcome.sizes.append(len(batch.requests))
        computed = compute(self._function, batch, self._answer)
        self.queue.learn(batch, computed, self.now - started, self.now)
        requests, outcomes = self.queue.finish(batch, computed.outcomes, computed.failed)
        self.queue.record_verdict(batch, computed.verdict, self.now)
        for request, outcome in zip(requests, outcomes, strict=True):
            request.deliver(outcome)
        self._deliver_undelivered()

    def _answer(self, requests: list[Request], outcomes: list[Any]) -> None:
        for request, outcome in zip(*self.queue.answer(requests, outcomes), strict=True):
            request.deliver(outcome)

    def _run(self, items: Sequence[Arrival], **extras: Any) -> list[Any]:
        self.outcome.runs += 1
        self._advance(self.now + self._cost(list(items), self.now, extras))
        for item in items:
            if self._named:
                _check(item)
        if any(item.bad for item in items):
            raise ValueError("bad item")
        return list(items)

    def _deliver_undelivered(self) -> None:
        pairs, self.queue.undelivered = self.queue.undelivered, []
        for request, failure in pairs:
            request.deliver(failure)


def in_order(arrivals: Sequence[Arrival], cost: Cost, size: int, *, warm_up: float = 0.0, max_queue: int = 256) -> int:
    """Answers in time of a plain queue: batches of at most this size in the order of arrival, without what has expired.

    It refuses nothing but what finds it full, and learns nothing.
    """
    now, coming, answered = 0.0, 0, 0
    waiting: deque[Arrival] = deque()
    while waiting or coming < len(arrivals):
        if not waiting:
            now = max(now, arrivals[coming].at)
        while coming < len(arrivals) and arrivals[coming].at <= now:
            one = arrivals[coming]
            if len(waiting) >= max_queue:
                waiting = deque(other for other in waiting if other.at + other.timeout > one.at)
            if len(waiting) < max_queue:
                waiting.append(one)
            coming += 1
        batch: list[Arrival] = []
        while waiting and len(batch) < size:
            one = waiting.popleft()
            if one.at + one.timeout > now:
                batch.append(one)
        if batch:
            now += cost(batch, now, {})
            answered += sum(one.at >= warm_up and now <= one.at + one.timeout for one in batch)
    return answered


def clairvoyant(
    arrivals: Sequence[Arrival], fixed: float, each: float, max_size: int, *, warm_up: float = 0.0
) -> float:
    """Answers a second of a batcher that knows each batch's exact time: the best of many sizes to aim at.

    For healthy items of equal weight and one deadline. It drops the oldest items where that makes room for a batch of
    the size that it aims at.
    """
    healthy = [arrival for arrival in arrivals if not arrival.bad]
    end = arrivals[-1].at
    sizes = sorted(
        {size for size in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32, 48, 64) if size < max_size} | {max_size}
    )
    answered = max(_aim(healthy, fixed, each, size, max_size=max_size, warm_up=warm_up) for size in sizes)
    return answered / (end - warm_up)


def at_the_door(
    arrivals: Sequence[Arrival], fixed: float, each: float, max_size: int, *, warm_up: float = 0.0
) -> float:
    """Answers a second of a batcher that knows each batch's exact time, and decides on a request when it arrives.

    It admits those that arrive in the last part of a run, as many as a batch may have that is in time for the first of
    them; it answers all that it admits. The best of many lengths of that part.
    """
    healthy = [arrival for arrival in arrivals if not arrival.bad]
    end, timeout = arrivals[-1].at, arrivals[0].timeout
    most = max(timeout - fixed - each, 0.0)
    answered = max(
        _admit_in(healthy, fixed, each, most * part / _PARTS, max_size=max_size, warm_up=warm_up)
        for part in range(_PARTS + 1)
    )
    return answered / (end - warm_up)


def _admit_in(
    arrivals: Sequence[Arrival], fixed: float, each: float, window: float, *, max_size: int, warm_up: float
) -> int:
    now, coming, answered = 0.0, 0, 0
    room = min(_room(arrivals[0].timeout - window, fixed, each), max_size)
    while coming < len(arrivals):
        first = coming
        while coming < len(arrivals) and arrivals[coming].at <= now and coming - first < room:
            coming += 1
        if coming == first:  # nobody waits: the next one runs alone
            now, coming = arrivals[first].at, first + 1
        answered += sum(one.at >= warm_up for one in arrivals[first:coming])
        now += fixed + each * (coming - first)
        while coming < len(arrivals) and arrivals[coming].at <= now - window:
            coming += 1  # refused
    return answered


def _aim(arrivals: Sequence[Arrival], fixed: float, each: float, aim: int, *, max_size: int, warm_up: float) -> int:
    now, coming, answered = 0.0, 0, 0
    waiting: deque[Arrival] = deque()
    while waiting or coming < len(arrivals):
        if not waiting:
            now = max(now, arrivals[coming].at)
        while coming < len(arrivals) and arrivals[coming].at <= now:
            waiting.append(arrivals[coming])
            coming += 1
        while waiting:
            room = _room(waiting[0].at + waiting[0].timeout - now, fixed, each)
            if room >= min(aim, len(waiting)) and room:
                break
            waiting.popleft()
        if not waiting:
            continue
        room = min(_room(waiting[0].at + waiting[0].timeout - now, fixed, each), max_size, len(waiting))
        batch = [waiting.popleft() for _ in range(room)]
        now += fixed + each * len(batch)
        answered += sum(one.at >= warm_up for one in batch)
    return answered


def _room(left: float, fixed: float, each: float) -> int:
    """How many items a batch may have that is to end within this time."""
    if left < fixed + each - 1e-9:
        return 0
    return 10**6 if each == 0 else math.floor((left - fixed) / each + 1e-9)
