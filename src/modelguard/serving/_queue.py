"""What to admit, batch, expire and refuse: a plain state machine without threads, event loops or a clock.

Every method takes the time as an argument and is called with the batcher's lock held. Failures that the queue decides
on by itself (expired, refused after all, closed) go to ``undelivered``; the batcher delivers them without the lock.
Requests that need no decision may be put into ``inbox`` without the lock.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import deque
from dataclasses import asdict
from typing import Any

from modelguard.errors import DeadlineExceeded, GuardClosed, ModelGuardError
from modelguard.serving._admission import Admission
from modelguard.serving._auto_size import AutoSize
from modelguard.serving._batches import Batch, Counters, Limits, Verdict
from modelguard.serving._circuit import CircuitChange, QueueCircuit
from modelguard.serving._expiry import Expiry
from modelguard.serving._hung import mark_hung, next_hang, state_of
from modelguard.serving._lines import Line, Lines
from modelguard.serving._planner import Planner
from modelguard.serving._recent import Recent
from modelguard.serving._requests import Failure, Request, caller_gone
from modelguard.serving._times import BatchTimes
from modelguard.serving.breaker import Circuit
from modelguard.serving.status import BatchStatus

#: This many requests that are done may stay in the lines before these are swept.
_STALE = 64


class BatchQueue:
    """The state of one batcher.

    Attributes:
        inbox: Requests without keyword arguments or deadline that wait as well, and are not counted yet.
        waiting: Requests that wait, without those that expired or were cancelled.
        running: Batches under way.
        undelivered: Requests that failed out of turn, with their failures.
        closed: Nothing more is admitted.
        may_refuse: Whether requests may be refused for other reasons than a full queue or their deadlines.
        times: How long batches take.
    """

    def __init__(self, limits: Limits, circuit: Circuit | None = None) -> None:
        self.circuit = circuit
        self.times = BatchTimes()
        self._planner = Planner(limits, self.times)
        self._lines = Lines(limits, self._planner.latest_start)
        self._lines.full_size = self._planner.most
        self._ungrouped = self._lines.ungrouped
        self._take_limits(limits)
        self._expiry = Expiry()
        self.inbox: deque[Request] = deque()
        self.waiting = 0
        self.running: list[Batch] = []
        self.undelivered: list[tuple[Request, Failure]] = []
        self.reopen()
        self.counters = Counters()
        self._queue_circuit = QueueCircuit(limits.name, circuit)
        self._admission = Admission(limits, self._lines, self._planner, self._queue_circuit, self.counters)
        self._recent = Recent()
        self._stale = 0  # requests in the lines that are done
        self._abandoned = 0  # requests in running batches that are done
        if limits.fair or limits.quota is not None:
            self.order()

    @property
    def ordered(self) -> bool:
        """Whether requests go by their keys and priorities, and not in the order of their arrival."""
        return self._lines.fairness is not None

    def order(self) -> None:
        """From now on, requests have keys and priorities."""
        self._sorted = self._picky = True  # first: an exception may interrupt this at any point
        self.take_in()
        self._lines.order()

    def _take_limits(self, limits: Limits) -> None:
        self._limits = limits
        self._max_queue = limits.max_queue
        # Whether a line has to know more than its requests, and whether the next batch may be others than the first.
        self._sorted = self.ordered or limits.weighed or limits.max_wait > 0
        bounded = limits.max_weight != math.inf or limits.slo != math.inf
        self._picky = self.ordered or bounded or limits.padded

    def configure(self, limits: Limits, now: float) -> None:
        """Bound batches, queue and calls by these limits from now on. What waits keeps its deadline and its wait."""
        self.take_in()
        self._take_limits(limits)
        self._admission.configure(limits)
        self._planner.configure(limits)
        self._lines.configure(limits, self._planner.most, now)

    # In

    def take_in(self) -> None:
        """Move what is in the inbox to its line."""
        if count := len(self.inbox):
            self.waiting += count  # first: callers add up both, and may count a request twice, but not miss one
            self._planner.note_patient(count)
            take = self.inbox.popleft
            if self._sorted:
                for _ in range(count):
                    request = take()
                    self._lines.add(request, request.arrived)
            else:
                self._ungrouped.waiting += count
                self._ungrouped.requests.extend([take() for _ in range(count)])

    def admit(self, request: Request, now: float) -> None:
        """Queue a request whose deadline, weight and group are set.

        Raises:
            GuardClosed, CircuitOpen, QuotaExceeded, QueueFull, DeadlineUnreachable, DeadlineExceeded: It was not
                queued.
        """
        if self.inbox:
            self.take_in()
        if self._expiry and self._expiry.nearest <= now:
            self.expire(now)
        request.arrived = now
        displaced = None
        if self.waiting >= self._max_queue or self.may_refuse:
            if self.closed:
                raise GuardClosed(self._limits.name)
            displaced = self._admission.check_room(request, self.waiting, now)
        bounded = request.deadline != math.inf
        if bounded:
            self._admission.check_deadline(request, self.waiting, self.running, now)
        else:
            self._planner.note_patient(1)
        if displaced is not None:
            self._drop(displaced, Failure(self._admission.queue_full(self.waiting, now, displaced=True)))
        if request.group is not None or self._sorted:
            self._lines.add(request, now)
        else:  # what it would do, without its call
            ungrouped = self._ungrouped
            ungrouped.requests.append(request)
            ungrouped.waiting += 1
        self.waiting += 1
        if bounded:
            self._expiry.add(request)
        if self.may_refuse:
            self._queue_circuit.admitted(request)

    def admit_together(self, requests: list[Request], now: float) -> None:
        """Queue several requests, all of them or none. They take the place of no other. Raises what :meth:`admit` does.

        The circuit looks at the first one alone: when it lets one request through, that may be one of many items.
        """
        self.take_in()
        self.expire(now)
        if not self.closed and self.waiting + len(requests) > self._max_queue:
            raise self._admission.queue_full(self.waiting, now)
        try:
            for request in requests:
                self.admit(request, now)
                self._queue_circuit.joining = True
        except ModelGuardError:
            self.withdraw(*requests)
            raise
        finally:
            self._queue_circuit.joining = False

    def withdraw(self, *requests: Request) -> None:
        """Undo admissions that an exception interrupted at any point: count again what is really there."""
        self.take_in()
        for request in requests:
            self._abandoned += request.state == "running"
            request.state = "done"
        self._expiry.settle(list(requests))
        self._lines.sweep()
        self.waiting = sum(line.waiting for line in self._lines)
        self._stale = 0
        for request in requests:
            self._queue_circuit.forget(request)

    # Out

    def next_batch(self, now: float) -> Batch | float | None:
        """The next batch for a free thread; or seconds after which to ask again; or None until more is admitted."""
        self.take_in()
        self.expire(now)
        while True:
            found = self._lines.next(now, closed=self.closed)
            if not isinstance(found, Line):
                return None if found is None else found - now
            requests = self._take(found, now)
            if requests:
                return self._start(requests, now)

    def _take(self, line: Line, now: float) -> list[Request]:
        """Take the requests of the next batch out of their line. None if all of them would be late."""
        if self._stale or self._expiry or self._picky:
            requests = self._choose(line, now)
        elif len(line.requests) <= (most := self._planner.most):  # the usual case: everything that waits
            requests = list(line.requests)
            line.requests.clear()
        else:
            requests = [line.requests.popleft() for _ in range(most)]
        for request in requests:
            request.state = "running"
        self.waiting -= len(requests)
        if line.group is not None or self._sorted:
            self._lines.taken(line, requests)
        else:
            line.waiting -= len(requests)
        return requests

    def _choose(self, line: Line, now: float) -> list[Request]:
        if not self._stale and self._planner.takes_all(line, self._lines, self._expiry.nearest, now):
            requests = list(line.requests)
            line.requests.clear()
            return requests
        requests, late = self._planner.choose(line, self._lines, now)
        for request in late:
            self._drop_late(request, now)
        if len(requests) == line.waiting:
            self._stale -= len(line.requests) - line.waiting
            line.requests.clear()
            return requests
        self._stale -= self._lines.take_out(line, requests)
        return requests

    def _start(self, requests: list[Request], now: float) -> Batch:
        batch = Batch(requests, 0.0, now)
        if self._sorted:
            batch.oldest = min(request.arrived for request in requests)
            if self._limits.weighed:
                batch.weigh(padded=self._limits.padded)
        self.running.append(batch)
        return batch

    def finish(self, batch: Batch, outcomes: list[Any], failed: int = 0) -> tuple[list[Request], list[Any]]:
        """End a batch.

        Args:
            batch: Which one.
            outcomes: One for each of its requests.
            failed: How many outcomes are failures.

        Returns:
            The requests whose callers still wait, and their outcomes.
        """
        self.take_in()
        self.running.remove(batch)
        requests = batch.requests
        if self._abandoned:
            pairs = [pair for pair in zip(requests, outcomes, strict=True) if pair[0].state != "done"]
            self._abandoned -= len(requests) - len(pairs)
            requests, outcomes = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            failed = sum(type(outcome) is Failure for outcome in outcomes)
        for request in batch.requests:  # what _end would do, without its call
            request.state = "done"
            request.item = None
        if self._expiry:
            self._expiry.settle(requests)
        self.counters.batches += 1
        self.counters.failed += failed
        self.counters.answered += len(requests) - failed
        return requests, outcomes

    def answer(self, requests: list[Request], outcomes: list[Any]) -> tuple[list[Request], list[Any]]:
        """Answer some requests of a batch that is still being computed.

        Returns:
            The requests whose callers still wait, and their outcomes.
        """
        live = [pair for pair in zip(requests, outcomes, strict=True) if pair[0].state != "done"]
        failed = sum(type(outcome) is Failure for _, outcome in live)
        for request, _ in live:
            self._end(request, None)
        self._abandoned += len(live)
        self.counters.failed += failed
        self.counters.answered += len(live) - failed
        return [pair[0] for pair in live], [pair[1] for pair in live]

    def record_verdict(self, batch: Batch, verdict: Verdict, now: float) -> CircuitChange:
        """Tell the breaker how a batch went. Returns whether that opened or closed the circuit."""
        self.counters.failed_batches += verdict == "failed"
        change = self._queue_circuit.batch_ended(batch.requests, verdict, now)
        if change == "opened":
            self._refuse_because_open(now)
        return change

    def note_hung(self, now: float) -> bool:
        """Note the batches that have newly overstayed, and open the circuit. Returns whether there are any."""
        found = mark_hung(self.running, self._limits.hang_after, now)
        if found and self._queue_circuit.trip(now):
            self._refuse_because_open(now)
        return found

    def _refuse_because_open(self, now: float) -> None:
        for request in tuple(self._lines.live()):
            if (refusal := self._queue_circuit.refusal(now)) is not None:
                self.counters.refused_open += 1
                self._drop(request, Failure(refusal))

    def record_run(self, batch: Batch, seconds: float, now: float) -> None:
        """Record that the function ran once over all of a batch, and for how many seconds."""
        self.times.record(len(batch.requests), batch.weight, batch.group, seconds, now)
        self._recent.note(batch, seconds)

    def record_part(self, batch: Batch, count: int, weight: float, seconds: float, now: float) -> None:
        """Record one run of the function that succeeded, over so many items of a batch."""
        useful = batch.weight - batch.padding
        padded = weight * batch.weight / useful if useful > 0 else weight
        self.times.record(count, padded if self._limits.weighed else 0.0, batch.group, seconds, now)

    def record_end(self, batch: Batch, seconds: float, now: float, *, reruns: int = 0, bad: float = 0.0) -> None:
        """Record how long a batch kept its thread, how often it was run again, and the share of bad items."""
        self.times.record_batch(len(batch.requests), seconds, now)
        self._planner.note_batch(batch, seconds, now, reruns=reruns, bad=bad)
        self._lines.full_size = self._planner.most

    # Out of turn

    def expire(self, now: float) -> None:
        """Fail the requests whose deadline has come, whether they wait or are being computed."""
        while (request := self._expiry.pop(now)) is not None:
            self._drop_late(request, now)

    def next_deadline(self) -> float:
        """When :meth:`expire` has something to do; infinity for never."""
        return self._expiry.next()

    def next_check(self) -> float:
        """When :meth:`expire` or :meth:`note_hung` has something to do; infinity for never."""
        return min(self._expiry.next(), next_hang(self.running, self._limits.hang_after))

    def cancel(self, request: Request, *, notify: bool = False) -> bool:
        """Drop a request. Returns false if it has its answer already.

        Args:
            request: Which one.
            notify: Whether its caller still waits, and gets ``CallerGone``.
        """
        if request.state == "done":
            return False
        self.take_in()
        self.counters.cancelled += 1
        self._drop(request, caller_gone(self._limits.name) if notify else None)
        return True

    def close(self) -> None:
        """Admit nothing more. What waits is computed."""
        self.closed = self.may_refuse = True

    def reopen(self) -> None:
        """Admit items again."""
        self.closed = False
        self.may_refuse = self.circuit is not None or self._limits.quota is not None

    def refuse_waiting(self, error: ModelGuardError) -> None:
        """Fail everything that waits, each request with a copy of the error."""
        self.take_in()
        for request in tuple(self._lines.live()):
            self._drop(request, Failure(copy.copy(error)))

    def refuse_running(self, error: ModelGuardError) -> None:
        """Fail everything that is being computed: nobody will be there to get the results."""
        for request in [one for batch in self.running for one in batch.requests if one.state == "running"]:
            self._drop(request, Failure(copy.copy(error)))

    def disown(self) -> None:
        """In a forked child: what waits and runs is the parent's, and cancelling it here must change nothing."""
        for request in itertools.chain(self.inbox, self._lines.live(), *(batch.requests for batch in self.running)):
            request.state = "done"

    # Its state

    @property
    def auto_size(self) -> AutoSize:
        """What chooses the size of batches by a latency goal."""
        return self._planner.auto

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not (self.waiting or self.running or self.inbox)

    def status(self, now: float) -> BatchStatus:
        """Its state, counters and times."""
        self.take_in()
        return BatchStatus(
            name=self._limits.name,
            state=state_of(self.running, self.circuit, closed=self.closed),
            waiting=self.waiting,
            running=sum(len(batch.requests) for batch in self.running),
            running_seconds=max((now - batch.started for batch in self.running), default=0.0),
            rate=self.times.rate(now),
            max_size=self._planner.most,
            slo_reachable=self._planner.auto.reachable,
            **self._recent.summary(),
            **asdict(self.counters),
        )

    # Bookkeeping

    def _drop_late(self, request: Request, now: float) -> None:
        self.counters.expired += 1
        self._drop(request, Failure(DeadlineExceeded(self._limits.name, waited=now - request.arrived)))

    def _drop(self, request: Request, failure: Failure | None) -> None:
        """End a request out of turn. A waiting one stays in its queue, done, until the queue is next looked through."""
        if request.state == "waiting":
            self._stale += 1
            self._remove_waiting(request, failure)
        else:
            self._abandoned += 1
            self._end(request, failure)
            if request.departure is not None:
                request.departure.set()
        if self._stale > _STALE and self._stale > self.waiting:
            self._lines.sweep()
            self._stale = 0

    def _remove_waiting(self, request: Request, failure: Failure | None) -> None:
        self.waiting -= 1
        self._lines.removed(request)
        self._queue_circuit.forget(request)
        self._end(request, failure)

    def _end(self, request: Request, failure: Failure | None) -> None:
        if request.state != "running":  # else the batch is about to read it, or has; finish() lets it go
            request.item = None  # it may be large, and callers keep futures longer than they need them
        request.state = "done"
        if request.timer is not None:
            self._expiry.settle([request])
        if failure is not None:
            self.undelivered.append((request, failure))
