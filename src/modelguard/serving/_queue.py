"""What to admit, batch, expire and refuse: a plain state machine without threads, event loops or a clock.

Every method takes the time as an argument and is called with the batcher's lock held. Failures that the queue decides
on by itself (expired, refused after all, closed) go to ``undelivered``; the batcher delivers them without the lock.
"""

from __future__ import annotations

import contextlib
import copy
import heapq
import math
from collections import deque
from collections.abc import Hashable
from dataclasses import asdict
from typing import Any, Literal

from modelguard.errors import (
    CircuitOpen,
    DeadlineExceeded,
    DeadlineUnreachable,
    GuardClosed,
    ModelGuardError,
    QueueFull,
)
from modelguard.serving._batches import Batch, Counters, Limits, Verdict
from modelguard.serving._estimator import Estimator
from modelguard.serving._requests import Failure, Request, caller_gone
from modelguard.serving.breaker import Circuit
from modelguard.serving.status import BatchState, BatchStatus, Quantiles

#: This many requests that are done may stay in the queues and the heap before these are swept.
_STALE = 64
#: The quantiles are taken over this many batches.
_REMEMBERED = 512


class BatchQueue:
    """The state of one batcher.

    Attributes:
        waiting: Requests that wait, without those that expired or were cancelled.
        running: Batches under way.
        undelivered: Requests that failed out of turn, with their failures.
        closed: Nothing more is admitted.
        recent: Size, longest wait and run time of the last batches.
    """

    def __init__(self, limits: Limits, circuit: Circuit | None = None) -> None:
        self._limits = limits
        self._max_queue = limits.max_queue
        self._weighed = limits.weighed
        self.circuit = circuit
        self.estimator = Estimator(limits)
        self.waiting = 0
        self.running: list[Batch] = []
        self.undelivered: list[tuple[Request, Failure]] = []
        self.closed = False
        self.counters = Counters()
        self.recent: deque[tuple[int, float, float]] = deque(maxlen=_REMEMBERED)
        self._weight: float = 0
        self._ungrouped: deque[Request] = deque()
        self._queues: dict[Hashable, deque[Request]] = {None: self._ungrouped}
        self._may_refuse = circuit is not None  # for other reasons than a full queue
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap; the number makes entries comparable
        self._number = 0
        self._stale = 0  # requests in the queues that are done
        self._abandoned = 0  # requests in running batches that are done
        self._probe: Request | None = None

    # In

    def admit(self, request: Request, now: float) -> None:
        """Queue a request whose deadline, weight and group are set.

        Raises:
            GuardClosed, CircuitOpen, QueueFull, DeadlineUnreachable, DeadlineExceeded: It was not queued.
        """
        if self._deadlines and self._deadlines[0][0] <= now:
            self.expire(now)
        if self.waiting >= self._max_queue or self._may_refuse:
            self._check_room(now)
        bounded = request.deadline != math.inf
        if bounded:
            self._check_deadline(request, now)
        request.arrived = now
        if request.group is None:
            self._ungrouped.append(request)
        else:
            self._queues.setdefault(request.group, deque()).append(request)
        self.waiting += 1
        if self._weighed:
            self._weight += request.weight
        if bounded:
            self._number += 1
            heapq.heappush(self._deadlines, (request.deadline, self._number, request))
        if self._may_refuse and self.circuit is not None and self.circuit.admitted():
            self._probe = request

    def _check_room(self, now: float) -> None:
        if self.closed:
            raise GuardClosed(self._limits.name)
        if self.circuit is not None and (pause := self.circuit.retry_after(now)) is not None:
            self.counters.refused_open += 1
            raise CircuitOpen(self._limits.name, failures=self.circuit.failures, retry_after=pause)
        if self.waiting >= self._max_queue:
            self.counters.refused_full += 1
            pause = self.estimator.seconds_to_drain(self.waiting, now)
            raise QueueFull(self._limits.name, queued=self.waiting, retry_after=pause)

    def _check_deadline(self, request: Request, now: float) -> None:
        """Raise if, by what was measured, the answer would come after the deadline."""
        left = request.deadline - now
        if left <= 0:
            self.counters.expired += 1
            raise DeadlineExceeded(self._limits.name, waited=0.0)
        if self.waiting:  # the next in line is admitted whatever was measured: its run is a new measurement
            weight = self._weight + request.weight
            estimate = self.estimator.seconds_to_answer(self.waiting + 1, weight, self.running, now)
            if estimate is not None and estimate > left:
                self.counters.refused_late += 1
                raise DeadlineUnreachable(self._limits.name, estimate=estimate, left=left, retry_after=estimate - left)

    def withdraw(self, request: Request) -> None:
        """Undo an admission that an exception interrupted at any point: count again what is really there."""
        self._abandoned += request.state == "running"
        request.state = "done"
        queued = [one for queue in self._queues.values() for one in queue]
        waiting = [one for one in queued if one.state == "waiting"]
        self.waiting = len(waiting)
        self._weight = sum(one.weight for one in waiting) if self._weighed else 0
        self._stale = len(queued) - len(waiting)
        self._forget_probe(request)

    # Out

    def next_batch(self, now: float) -> Batch | float | None:
        """The next batch for a free thread; or seconds after which to ask again; or None until more is admitted."""
        self.expire(now)
        found: deque[Request] | None = None
        first = math.inf
        for group, queue in list(self._queues.items()):
            while queue and queue[0].state != "waiting":
                queue.popleft()
                self._stale -= 1
            if not queue:
                self._remove_group(group)
                continue
            due = self._due(queue, now) if self._limits.max_wait else queue[0].arrived
            if due < first:
                found, first = queue, due
        if found is None:
            return None
        return first - now if first > now else self._make_batch(found, now)

    def _due(self, queue: deque[Request], now: float) -> float:
        """When a batch of this queue has to start: at once if it is full, else ``max_wait`` after the first arrival."""
        waiting = [request for request in queue if request.state == "waiting"]
        fill = self._limits.fill(len(waiting), sum(request.weight for request in waiting))
        oldest = waiting[0].arrived
        if fill >= 1 or self.closed:
            return oldest
        due = oldest + self._limits.max_wait
        nearest = min(request.deadline for request in waiting)
        takes = self.estimator.seconds(fill, now)
        if takes is None:  # unmeasured, so the latest start that meets the deadline is unknown
            return oldest if nearest <= due else due
        return min(due, nearest - takes)

    def _make_batch(self, queue: deque[Request], now: float) -> Batch:
        limits = self._limits
        if self._stale or self._deadlines or limits.max_weight != math.inf:
            requests = self._select(queue, now)
        elif len(queue) <= limits.max_size:  # the usual case: everything that waits
            requests = list(queue)
            queue.clear()
        else:
            requests = [queue.popleft() for _ in range(limits.max_size)]
        for request in requests:
            request.state = "running"
        weight = sum([request.weight for request in requests]) if self._weighed else len(requests)
        self.waiting -= len(requests)
        self._weight -= weight if self._weighed else 0
        batch = Batch(requests, limits.fill(len(requests), weight), now)
        if self._weighed:
            requests.sort(key=lambda request: request.weight, reverse=True)
        self.running.append(batch)
        return batch

    def _select(self, queue: deque[Request], now: float) -> list[Request]:
        """The next requests that still wait, can still meet their deadlines, and fit into one batch by weight."""
        limits = self._limits
        spare = sum(request.state == "waiting" for request in queue) - limits.max_size if self._deadlines else 0
        takes = self.estimator.seconds(1.0, now) if spare > 0 else None
        requests: list[Request] = []
        weight = 0.0
        while queue and len(requests) < limits.max_size:
            request = queue[0]
            if request.state != "waiting":
                self._stale -= 1
            elif spare > 0 and takes is not None and now + takes > request.deadline:
                # It will be late in any case, and another request can use its place. Only if the batch is full all the
                # same: else, after one estimate that was too long, nothing might run and nothing be measured.
                spare -= 1
                self.counters.expired += 1
                self._remove_waiting(request, Failure(self._deadline_exceeded(request, now)))
            elif requests and weight + request.weight > limits.max_weight:
                break
            else:
                requests.append(request)
                weight += request.weight
            queue.popleft()
        return requests

    def finish(self, batch: Batch, outcomes: list[Any], failed: int = 0) -> tuple[list[Request], list[Any]]:
        """End a batch.

        Args:
            batch: Which one.
            outcomes: One for each of its requests.
            failed: How many outcomes are failures.

        Returns:
            The requests whose callers still wait, and their outcomes.
        """
        self.running.remove(batch)
        requests = batch.requests
        if self._abandoned:
            pairs = [pair for pair in zip(requests, outcomes, strict=True) if pair[0].state != "done"]
            self._abandoned -= len(requests) - len(pairs)
            requests, outcomes = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            failed = sum(type(outcome) is Failure for outcome in outcomes)
        for request in requests:
            request.state = "done"
        self.counters.batches += 1
        self.counters.failed += failed
        self.counters.answered += len(requests) - failed
        if len(self._deadlines) > _STALE + 4 * (self.waiting + sum(len(other.requests) for other in self.running)):
            self._sweep()
        return requests, outcomes

    def record_verdict(self, batch: Batch, verdict: Verdict, now: float) -> Literal["opened", "closed"] | None:
        """Tell the breaker how a batch went. Returns whether that opened or closed the circuit."""
        self.counters.failed_batches += verdict == "failed"
        if self.circuit is None:
            return None
        probe = self._probe is not None and self._probe in batch.requests
        if probe:
            self._probe = None
        if verdict == "succeeded":
            return "closed" if self.circuit.succeeded(probe=probe) else None
        if verdict == "inconclusive":
            if probe:
                self.circuit.probe_inconclusive()
            return None
        if not self.circuit.failed(now, probe=probe):
            return None
        pause = self.circuit.retry_after(now) or 0.0
        for request in self._waiting_requests():
            self.counters.refused_open += 1
            error = CircuitOpen(self._limits.name, failures=self.circuit.failures, retry_after=pause)
            self._drop(request, Failure(error))
        return "opened"

    def record_run(self, batch: Batch, seconds: float, now: float) -> None:
        """Record that the function ran once over all of a batch, and for how many seconds."""
        self.estimator.record(min(batch.fill, 1.0), len(batch.requests), seconds, now)
        self.recent.append((len(batch.requests), batch.started - batch.oldest, seconds))

    # Out of turn

    def expire(self, now: float) -> None:
        """Fail the requests whose deadline has come, whether they wait or are being computed."""
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if request.state != "done":
                self.counters.expired += 1
                self._drop(request, Failure(self._deadline_exceeded(request, now)))

    def next_deadline(self) -> float:
        """When :meth:`expire` has something to do; infinity for never."""
        while self._deadlines and self._deadlines[0][2].state == "done":
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def cancel(self, request: Request, *, notify: bool = False) -> bool:
        """Drop a request. Returns false if it has its answer already.

        Args:
            request: Which one.
            notify: Whether its caller still waits, and gets ``CallerGone``.
        """
        if request.state == "done":
            return False
        self.counters.cancelled += 1
        self._drop(request, caller_gone(self._limits.name) if notify else None)
        return True

    def close(self) -> None:
        """Admit nothing more. What waits is computed."""
        self.closed = self._may_refuse = True

    def refuse_waiting(self, error: ModelGuardError) -> None:
        """Fail everything that waits, each request with a copy of the error."""
        for request in self._waiting_requests():
            self._drop(request, Failure(copy.copy(error)))

    # Its state

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self.waiting and not self.running

    def status(self, now: float) -> BatchStatus:
        """Its state, counters and times."""
        sizes, waits, runs = zip(*self.recent, strict=True) if self.recent else ((), (), ())
        return BatchStatus(
            name=self._limits.name,
            state=self._state(),
            waiting=self.waiting,
            running=sum(len(batch.requests) for batch in self.running),
            batch_size=Quantiles.of(sizes),
            wait=Quantiles.of(waits),
            run=Quantiles.of(runs),
            rate=self.estimator.rate(now),
            **asdict(self.counters),
        )

    def _state(self) -> BatchState:
        if self.closed:
            return "closed"
        if self.circuit is None or self.circuit.state == "closed":
            return "open"
        return "circuit open" if self.circuit.state == "open" else "half-open"

    # Bookkeeping

    def _deadline_exceeded(self, request: Request, now: float) -> DeadlineExceeded:
        return DeadlineExceeded(self._limits.name, waited=now - request.arrived)

    def _waiting_requests(self) -> list[Request]:
        return [request for queue in self._queues.values() for request in queue if request.state == "waiting"]

    def _drop(self, request: Request, failure: Failure | None) -> None:
        """End a request out of turn. A waiting one stays in its queue, done, until the queue is next looked through."""
        if request.state == "waiting":
            self._stale += 1
            self._remove_waiting(request, failure)
        else:
            self._abandoned += 1
            self._end(request, failure)
        if self._stale > _STALE and self._stale > self.waiting:
            self._sweep()

    def _remove_waiting(self, request: Request, failure: Failure | None) -> None:
        self.waiting -= 1
        self._weight -= request.weight if self._weighed else 0
        request.item = None
        self._forget_probe(request)
        self._end(request, failure)

    def _end(self, request: Request, failure: Failure | None) -> None:
        request.state = "done"
        if failure is not None:
            self.undelivered.append((request, failure))

    def _forget_probe(self, request: Request) -> None:
        if request is self._probe and self.circuit is not None:
            self._probe = None
            self.circuit.probe_inconclusive()

    def _remove_group(self, group: Hashable) -> None:
        """Remove an empty queue. It stays if the group's hash has changed, because its values were modified."""
        if group is not None:
            with contextlib.suppress(Exception):
                del self._queues[group]

    def _sweep(self) -> None:
        for group, queue in list(self._queues.items()):
            waiting = [request for request in queue if request.state == "waiting"]
            queue.clear()
            queue.extend(waiting)
            if not waiting:
                self._remove_group(group)
        self._deadlines = [entry for entry in self._deadlines if entry[2].state != "done"]
        heapq.heapify(self._deadlines)
        self._stale = 0
