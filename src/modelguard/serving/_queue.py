"""What to admit, batch, expire and refuse: a plain state machine without threads, event loops or a clock.

Every method takes the time as an argument and is called with the batcher's lock held. Failures that the queue decides
on by itself (expired, refused after all, closed) go to ``undelivered``; the batcher delivers them without the lock.
Calls that need no decision may be put into ``inbox`` without the lock.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from modelguard.errors import (
    CallerGone,
    CircuitOpen,
    DeadlineExceeded,
    DeadlineUnreachable,
    GuardClosed,
    ModelGuardError,
    QueueFull,
    QuotaExceeded,
)
from modelguard.serving._execution import Computed
from modelguard.serving._lines import Line, Lines
from modelguard.serving._planner import GoalSize, Planner
from modelguard.serving._requests import Batch, Failure, Request, count_failures
from modelguard.serving._times import BatchTimes
from modelguard.serving.breaker import Circuit, CircuitChange
from modelguard.serving.status import BatchState, BatchStatus, Counters, Limits, Quantiles, Verdict

#: The status shows quantiles over this many batches.
_REMEMBERED = 512


#: What an item counts as that ends with such an error.
_COUNTED: dict[type[ModelGuardError], str] = {
    QueueFull: "refused_full",
    DeadlineUnreachable: "refused_late",
    CircuitOpen: "refused_open",
    QuotaExceeded: "refused_quota",
    DeadlineExceeded: "expired",
}
#: Entries of requests that have their answers may stay until they are this many, and more than all others.
_STALE = 64


class Expiry:
    """The deadlines of what waits and runs, and nothing of a request that has its answer."""

    def __init__(self) -> None:
        self._heap: list[list[Any]] = []  # deadline, a number that makes entries comparable, early, the request or None
        self._number = itertools.count()
        self._latest = -math.inf
        self._stale = 0  # entries without a request
        self.early = 0  # requests with a deadline before that of one that came earlier

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def nearest(self) -> float:
        """No request that waits or runs has a deadline before this; infinity if none has one."""
        return self._heap[0][0] if self._heap else math.inf

    def add(self, request: Request) -> None:
        early = request.deadline < self._latest
        self.early += early
        self._latest = max(self._latest, request.deadline)
        request.timer = [request.deadline, next(self._number), early, request]
        heapq.heappush(self._heap, request.timer)

    def settle(self, requests: Iterable[Request]) -> None:
        """Forget requests that are done: a large item must not stay in memory until its deadline."""
        for request in requests:
            if (timer := request.timer) is not None:
                timer[3] = request.timer = None
                self.early -= timer[2]
                self._stale += 1
        while self._heap and self._heap[0][3] is None:
            heapq.heappop(self._heap)
            self._stale -= 1
        if self._stale > _STALE and self._stale * 2 > len(self._heap):  # one in front takes long
            self._heap = [entry for entry in self._heap if entry[3] is not None]
            heapq.heapify(self._heap)
            self._stale = 0
        if not self._heap:
            self._latest, self._stale, self.early = -math.inf, 0, 0

    def pop(self, now: float) -> Request | None:
        if self.nearest > now:
            return None
        request: Request = self._heap[0][3]
        self.settle([request])
        return request


class BatchQueue:
    """The state of one batcher.

    Attributes:
        sure: While fewer wait, one more has room, and its answer in time if no batch runs for longer than expected.
        may_refuse: Whether requests may be refused for other reasons than a full queue or their deadlines.
    """

    def __init__(self, limits: Limits, circuit: Circuit | None = None) -> None:
        self.circuit = circuit
        self.times = BatchTimes()
        self._planner = Planner(limits, self.times)
        self._lines = Lines(limits, self._planner.latest_start)
        self._limits = limits
        self._expiry = Expiry()
        self.inbox: deque[Request] = deque()  # requests that wait as well, and are not counted yet
        self._emptying = False  # whether the inbox is: a finalizer that calls meanwhile leaves it alone
        self.waiting = 0  # requests that wait, without those that expired or were cancelled
        self.running: list[Batch] = []
        self.overdue = math.inf  # when one does; infinity while none runs
        self.undelivered: list[tuple[Request, Failure]] = []  # requests that failed out of turn, with their failures
        self.reopen()
        self.counters = Counters()
        # Size, longest wait, run time, weight and padding of the last batches.
        self._recent: deque[tuple[int, float, float, float, float]] = deque(maxlen=_REMEMBERED)
        self._abandoned = 0  # requests in running batches that are done
        if limits.fair or limits.quota is not None:
            self.order()

    @property
    def ordered(self) -> bool:
        """Whether requests go by their keys and priorities, and not in the order of their arrival."""
        return self._lines.fairness is not None

    def order(self) -> None:
        self.sure = 0
        self.take_in()
        self._lines.order()

    def configure(self, limits: Limits) -> None:
        """Bound batches, queue and calls by these limits from now on. What waits keeps its deadline and its wait."""
        self.take_in()
        self._limits = limits
        self._planner.configure(limits)
        self._lines.configure(limits)
        self._note_most()

    # In

    def take_in(self) -> None:
        """Have what was put into the inbox wait with all others. What an exception interrupts leaves the rest there."""
        count = len(self.inbox)
        if not count or self._emptying:
            return
        self._emptying = True
        try:
            self._planner.arrivals.note(self._limits.deadline, count)
            for _ in range(count):
                request = self.inbox[0]
                if request.deadline != math.inf and request.timer is None:
                    self._expiry.add(request)
                self._lines.add(request)
                self.waiting += 1  # first: callers add up both, and may count a call twice, but not miss one
                self.inbox.popleft()
        except BaseException:
            if self.inbox and self.inbox[0] in self._lines.of(self.inbox[0]).requests:
                self.inbox.popleft()
            self.waiting = self._lines.recount()
            raise
        finally:
            self._emptying = False

    def _note(self, count: int) -> list[Request]:
        """The first requests out of the inbox."""
        self._emptying = True
        try:
            self._planner.arrivals.note(self._limits.deadline, count)
            take = self.inbox.popleft
            return [take() for _ in range(min(count, len(self.inbox)))]
        finally:
            self._emptying = False

    def admit(self, request: Request, now: float) -> None:
        """Queue a request whose deadline, weight and group are set."""
        if self.inbox:
            self.take_in()
        self.expire(now)
        try:
            self._admit(request, now)
        except ModelGuardError as error:
            self._count_lost(error)
            raise

    def admit_together(self, requests: Sequence[Request], now: float) -> None:
        """Queue several requests, all of them or none. They take the place of no other. Raises what :meth:`admit` does.

        The circuit looks at the first one alone: when it lets one request through, that may be one of many items.
        """
        self.take_in()
        self.expire(now)
        try:
            if not self.closed and self.waiting + len(requests) > self._limits.max_queue:
                raise self._queue_full(now)
            for request in requests:
                self._admit(request, now, joining=request is not requests[0])
        except ModelGuardError as error:
            self._count_lost(error, len(requests))
            self.withdraw(*requests)
            raise

    def _admit(self, request: Request, now: float, *, joining: bool = False) -> None:
        """Queue a request, which may be joining one that has passed the circuit."""
        request.arrived = now
        displaced = None
        if self.waiting >= self._limits.max_queue or self.may_refuse:
            displaced = self._check_room(request, now, joining=joining)
        bounded = request.deadline != math.inf
        if bounded:
            self._refuse_if_late(request, now)
        else:
            self._planner.arrivals.note(math.inf)
        if displaced is not None:
            self._drop(displaced, self._queue_full(now, displaced=True))
        self._lines.add(request)
        self.waiting += 1
        if bounded:
            self._expiry.add(request)
        if self.circuit is not None and not joining:
            self.circuit.admitted(request)

    def _count_lost(self, error: ModelGuardError, count: int = 1) -> None:
        """Count items that were refused, or dropped out of turn."""
        if (counter := _COUNTED.get(type(error))) is not None:
            setattr(self.counters, counter, getattr(self.counters, counter) + count)

    def find_place(self, request: Request) -> None:
        """Compare what says where a request waits with that of others. Raises what their own code does."""
        self._lines.find(request.group)
        if self._lines.fairness is not None:
            self._lines.fairness.waiting_of(request.key)

    def withdraw(self, *requests: Request) -> None:
        """Undo admissions that an exception interrupted at any point: count again what is really there."""
        self.take_in()
        for request in requests:
            self._abandoned += request.state == "running"
            request.state = "done"
        self.waiting = self._lines.recount()
        self._expiry.settle(requests)
        self._forget(*requests)

    # Whether a request may pass: the circuit, quotas, the room in the queue, and its deadline

    def _circuit_open(self, now: float) -> CircuitOpen | None:
        """The error for a request that must not pass now; None if it may."""
        circuit = self.circuit
        if circuit is None or (pause := circuit.retry_after(now)) is None:
            return None
        return CircuitOpen(self._limits.name, failures=circuit.failures, retry_after=pause)

    def _forget(self, *requests: Request) -> None:
        """Note that requests are not computed."""
        if self.circuit is not None:
            for request in requests:
                self.circuit.forget(request)

    def _check_room(self, request: Request, now: float, *, joining: bool) -> Request | None:
        """The request that loses its place to this one; None if there is room."""
        limits, fairness = self._limits, self._lines.fairness
        if self.closed:
            raise GuardClosed(limits.name)
        if not joining and (refusal := self._circuit_open(now)) is not None:
            raise refusal
        if fairness is not None and limits.quota is not None:
            of_key = fairness.waiting_of(request.key)
            if of_key >= limits.quota:
                # Keys take turns: as many of each go first, after what runs, of which half is over on average.
                ahead = min(of_key * len(fairness), self.waiting) + sum(1 + batch.count for batch in self.running) // 2
                pause = self._planner.seconds_to_drain(ahead, now)
                raise QuotaExceeded(limits.name, request.key, queued=of_key, quota=limits.quota, retry_after=pause)
        if self.waiting < limits.max_queue:
            return None
        displaced = None if fairness is None else fairness.displaced_by(request, self._lines.live)
        if displaced is None:
            raise self._queue_full(now)
        return displaced

    def _queue_full(self, now: float, *, displaced: bool = False) -> QueueFull:
        """The error for a request without a place; ``displaced``: it has waited, and lost its place to another one."""
        pause = self._planner.seconds_to_drain(self.waiting, now)
        return QueueFull(self._limits.name, queued=self.waiting, retry_after=pause, displaced=displaced)

    def _refuse_if_late(self, request: Request, now: float) -> None:
        left = request.deadline - now
        if left <= 0:
            raise DeadlineExceeded(self._limits.name, waited=0.0)
        estimate = self._planner.estimate_if_late(request, self._lines, self.waiting, self.running, now)
        if estimate is not None:
            raise DeadlineUnreachable(self._limits.name, estimate=estimate, left=left, retry_after=estimate - left)

    # Out

    def next_batch(self, now: float) -> Batch | float | None:
        """The next batch for a free thread; or seconds after which to ask again; or None until more is admitted."""
        if not self.waiting:
            if not self.inbox:
                return None
            nearest = self.inbox[0].deadline
            count = 0 if self.ordered else self._planner.next_size_from_inbox(len(self.inbox), nearest, now)
            if count and (requests := self._note(count)):
                return self._start(requests, now)
        self.take_in()
        self.expire(now)
        while True:
            found = self._lines.next(now, closed=self.closed)
            if not isinstance(found, Line):
                return None if found is None else found - now
            if (batch := self._take_next_batch(found, now)) is not None:
                return batch

    def _take_next_batch(self, line: Line, now: float) -> Batch | None:
        """Start the next batch of a line; None if all of its requests would be late."""
        early = self._expiry.early > 0
        requests, late = self._planner.choose_next_batch(line, self._lines, now, self._expiry.nearest, early=early)
        for request in late:
            self._drop_late(request, now)
        self.waiting -= len(requests)
        self._lines.taken(line, requests)
        if not requests:
            return None
        batch = self._start(requests, now)
        if self.ordered or self._limits.padded:  # so the first of them may not have come first
            batch.oldest = min(request.arrived for request in requests)
        return batch

    def _start(self, requests: list[Request], now: float) -> Batch:
        for request in requests:
            request.state = "running"
        batch = Batch(requests, now)
        if self._limits.weighed:
            batch.weigh(padded=self._limits.padded)
        self.running.append(batch)
        self.overdue = self._planner.overdue(self.running)
        return batch

    def finish(self, batch: Batch, outcomes: list[Any], failed: int = 0) -> tuple[list[Request], list[Any]]:
        """End a batch. Returns the requests whose callers still wait, and their outcomes."""
        requests = batch.requests
        if self._abandoned:
            requests, outcomes = _live(requests, outcomes)
            self._abandoned -= batch.count - len(requests)
            failed = count_failures(outcomes)
        for request in batch.requests:  # what _end would do, without its call
            request.state = "done"
            request.item = None
        if self._expiry:
            self._expiry.settle(batch.requests)
        self.running.remove(batch)
        self.overdue = self._planner.overdue(self.running)
        self.counters.batches += 1
        self._count(len(requests), failed)
        return requests, outcomes

    def answer(self, requests: list[Request], outcomes: list[Any]) -> tuple[list[Request], list[Any]]:
        """:meth:`finish` for some requests of a batch that is still being computed."""
        requests, outcomes = _live(requests, outcomes)
        for request in requests:
            self._end(request)
        self._abandoned += len(requests)
        self._count(len(requests), count_failures(outcomes))
        return requests, outcomes

    def _count(self, ended: int, failed: int) -> None:
        self.counters.failed += failed
        self.counters.answered += ended - failed

    def record_verdict(self, batch: Batch, verdict: Verdict, now: float) -> CircuitChange:
        """Tell the breaker how a batch went. Returns whether that opened or closed the circuit."""
        self.counters.failed_batches += verdict == "failed"
        self._planner.note_verdict(batch.count, failed=verdict == "failed")
        self._note_most()
        change = None if self.circuit is None else self.circuit.ended(batch.requests, verdict, now)
        if change == "opened":
            self._refuse_because_open(now)
        return change

    def note_hung(self, now: float) -> bool:
        """Note the batches that have newly overstayed, and open the circuit. Returns whether there are any."""
        found = [one for one in self.running if not one.hung and now - one.started >= self._limits.hang_after]
        for batch in found:
            batch.hung = True
        if found and self.circuit is not None:
            self.circuit.trip(now)
            self._refuse_because_open(now)
        return bool(found)

    @property
    def hung(self) -> list[Batch]:
        """The batches that have overstayed."""
        return [batch for batch in self.running if batch.hung]

    def _refuse_because_open(self, now: float) -> None:
        for request in tuple(self._lines.live()):
            if (refusal := self._circuit_open(now)) is not None:
                self._drop(request, refusal)

    def learn(self, batch: Batch, computed: Computed, seconds: float, now: float, *, between: float = 0.0) -> None:
        """Learn from a batch that has kept its thread for so many seconds, and begun so many after the one before."""
        group = batch.group
        if computed.error is None and computed.whole:
            self.times.record(batch.count, batch.weight, group, seconds + between, now)
            waited = batch.started - batch.oldest
            self._recent.append((batch.count, waited, seconds, batch.weight, batch.padding))
        useful = batch.weight - batch.padding
        for count, weight, took in computed.parts:
            padded = weight * batch.weight / useful if useful > 0 else weight
            self.times.record(count, padded if self._limits.weighed else 0.0, group, took, now)
        self.times.record_batch(batch.count, seconds + between, now, bad=computed.bad, weight=batch.weight, group=group)
        self._planner.note_batch(batch, seconds, now)

    def _note_most(self) -> None:
        if self._planner.max_size != self._lines.full_size:
            self._lines.fill_at(self._planner.max_size)
        special = self.may_refuse or self.ordered or self._limits.max_wait
        self.sure = 0 if special else self._planner.sure()

    # Out of turn

    def expire(self, now: float) -> None:
        while (request := self._expiry.pop(now)) is not None:
            self._drop_late(request, now)

    def expire_all(self, now: float) -> None:
        """:meth:`expire`, also what came straight from the inbox: those deadlines stand with all others from now on."""
        for request in itertools.chain.from_iterable(batch.requests for batch in self.running):
            if request.timer is None and request.state == "running" and request.deadline != math.inf:
                self._expiry.add(request)
        self.take_in()
        self.expire(now)

    def next_check(self) -> float:
        """When :meth:`expire_all` or :meth:`note_hung` may have something to do; infinity for never."""
        overstays = [batch.started + self._limits.hang_after for batch in self.running if not batch.hung]
        return min([self._expiry.nearest, *overstays])

    def cancel(self, request: Request, *, notify: bool = False) -> bool:
        """Drop a request, whose caller may still wait, and is notified. Returns false if it has its answer already."""
        if request.state == "done":
            return False
        self.take_in()
        self.counters.cancelled += 1
        self._drop(request, CallerGone(self._limits.name) if notify else None)
        return True

    def close(self) -> None:
        self.closed = self.may_refuse = True
        self.sure = 0

    def reopen(self) -> None:
        self.closed = False
        self.may_refuse = self.circuit is not None or self._limits.quota is not None
        self._note_most()

    def refuse_all(self, error: ModelGuardError, *, running: bool = False) -> None:
        """Fail everything that waits, each request with a copy of the error; and what is being computed, too."""
        self.take_in()
        batches = self.running if running else []
        computed = [one for batch in batches for one in batch.requests if one.state == "running"]
        for request in (*self._lines.live(), *computed):
            self._drop(request, copy.copy(error))

    def disown(self) -> None:
        """In a forked child: what waits and runs is the parent's, and cancelling it changes nothing."""
        for request in itertools.chain(self.inbox, self._lines.live(), *(batch.requests for batch in self.running)):
            request.state = "done"

    # Its state

    @property
    def auto_size(self) -> GoalSize:
        return self._planner.auto

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self.inbox)

    def _state(self) -> BatchState:
        if self.closed:
            return "closed"
        if self.hung:
            return "hung"
        if self.circuit is None or self.circuit.state == "closed":
            return "open"
        return "circuit open" if self.circuit.state == "open" else "half-open"

    def status(self, now: float) -> BatchStatus:
        self.take_in()
        sizes, waits, runs, weights, paddings = zip(*self._recent, strict=True) if self._recent else ((),) * 5
        weight = sum(weights)
        return BatchStatus(
            name=self._limits.name,
            state=self._state(),
            waiting=self.waiting,
            running=sum(batch.count for batch in self.running),
            running_seconds=max((now - batch.started for batch in self.running), default=0.0),
            rate=self.times.rate(now),
            max_size=self._planner.max_size,
            slo_reachable=self._planner.auto.reachable,
            batch_size=Quantiles.of(sizes),
            wait=Quantiles.of(waits),
            run=Quantiles.of(runs),
            padding=sum(paddings) / weight if weight > 0 else 0.0,
            **asdict(self.counters),
        )

    # Bookkeeping

    def _drop_late(self, request: Request, now: float) -> None:
        self._drop(request, DeadlineExceeded(self._limits.name, waited=now - request.arrived))

    def _drop(self, request: Request, error: ModelGuardError | None) -> None:
        """End a request out of turn."""
        waiting = request.state == "waiting"
        self._end(request)  # first: an exception may interrupt this at any point
        if error is not None:
            self.undelivered.append((request, Failure(error)))
            self._count_lost(error)
        if waiting:
            self.waiting -= 1
            self._lines.removed(request)
            self._forget(request)
        else:
            self._abandoned += 1
            if request.departure is not None:
                request.departure.set()

    def _end(self, request: Request) -> None:
        if request.state != "running":  # else the batch is about to read it, or has; finish() lets it go
            request.item = None  # it may be large, and callers keep futures longer than they need them
        request.state = "done"
        if request.deadline != math.inf:
            self._expiry.settle([request])


def _live(requests: list[Request], outcomes: list[Any]) -> tuple[list[Request], list[Any]]:
    """Those whose callers still wait, and their outcomes."""
    live = [request.state != "done" for request in requests]
    return list(itertools.compress(requests, live)), list(itertools.compress(outcomes, live))
