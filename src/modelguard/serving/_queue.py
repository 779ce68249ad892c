"""What to admit, batch, expire and refuse: a plain state machine without threads, event loops or a clock.

Every method takes the time as an argument and is called with the batcher's lock held. Failures that the queue decides
on by itself (expired, refused after all, closed) go to ``undelivered``; the batcher delivers them without the lock.
Calls that need no decision may be put into ``inbox`` without the lock.
"""

from __future__ import annotations

import asyncio
import copy
import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal, TypeAlias, TypedDict

from modelguard.errors import (
    CircuitOpen,
    DeadlineExceeded,
    DeadlineUnreachable,
    GuardClosed,
    ModelGuardError,
    QueueFull,
    QuotaExceeded,
)
from modelguard.serving._lines import Line, Lines
from modelguard.serving._planner import AutoSize, Planner
from modelguard.serving._requests import Failure, LoopRequest, PlainCall, Request, caller_gone, request_of
from modelguard.serving._times import BatchTimes
from modelguard.serving.breaker import Circuit
from modelguard.serving.status import (
    Batch,
    BatchStatus,
    Counters,
    Limits,
    PlainBatch,
    Quantiles,
    Verdict,
    is_plain,
    mark_hung,
    next_hang,
    state_of,
)

# The circuit of a queue: what opens and closes it, and which request is its probe.


CircuitChange: TypeAlias = Literal["opened", "closed"] | None


class QueueCircuit:
    """A circuit, and the request that tries whether it can be closed. Without a breaker it is never open.

    Args:
        name: The batched function's name, for errors.
        circuit: The circuit; None without a breaker.

    Attributes:
        joining: Whether requests are being admitted that belong to one that has passed.
    """

    def __init__(self, name: str, circuit: Circuit | None) -> None:
        self._name = name
        self._circuit = circuit
        self._probe: Request | None = None
        self.joining = False

    def refusal(self, now: float) -> CircuitOpen | None:
        """The error for a request that must not pass now; None if it may."""
        circuit = self._circuit
        if circuit is None or circuit.state == "closed" or self.joining:  # the usual case, without a call
            return None
        pause = circuit.retry_after(now)
        if pause is None:
            return None
        return CircuitOpen(self._name, failures=circuit.failures, retry_after=pause)

    def admitted(self, request: Request) -> None:
        """Note that a request waits. It is the probe if the circuit is open."""
        if self._circuit is not None and self._circuit.state != "closed" and not self.joining:
            self._probe = request  # first: an exception may interrupt this at any point, and forget() has to know it
            self._circuit.admitted()

    def forget(self, request: Request) -> None:
        """Note that a request is not computed. If it was the probe, the next one is."""
        if request is self._probe and self._circuit is not None:
            self._probe = None
            self._circuit.probe_inconclusive()

    def batch_ended(self, batch: Batch, verdict: Verdict, now: float) -> CircuitChange:
        circuit = self._circuit
        if circuit is None:
            return None
        probe = self._probe is not None and self._probe in batch.requests
        if probe:
            self._probe = None
        if verdict == "succeeded":
            return "closed" if circuit.succeeded(probe=probe) else None
        if verdict == "failed":
            return "opened" if circuit.failed(now, probe=probe) else None
        if probe:
            circuit.probe_inconclusive()
        return None

    def trip(self, now: float) -> bool:
        """Open it at once. Returns whether there is one."""
        if self._circuit is None:
            return False
        self._circuit.trip(now)
        return True


# Which requests are refused when they come: by the circuit, quotas, the room in the queue, and their deadlines.


class Admission:
    """Checks requests before they wait, and counts those that it refuses. It changes nothing else.

    Args:
        limits: Bounds of the queue.
        lines: What waits.
        planner: Gives the time of the answer, and when to try again.
        circuit: Refuses everything while it is open.
        counters: Where refusals are counted.
    """

    def __init__(
        self, limits: Limits, lines: Lines, planner: Planner, circuit: QueueCircuit, counters: Counters
    ) -> None:
        self._limits = limits
        self._lines = lines
        self._planner = planner
        self._circuit = circuit
        self._counters = counters

    def configure(self, limits: Limits) -> None:
        self._limits = limits

    def check_room(self, request: Request, waiting: int, now: float) -> Request | None:
        """Check whether a request may wait beside so many others.

        Returns:
            The request that loses its place to this one; None if there is room.

        Raises:
            CircuitOpen, QuotaExceeded, QueueFull: It must not wait.
        """
        limits, fairness = self._limits, self._lines.fairness
        if (refusal := self._circuit.refusal(now)) is not None:
            self._counters.refused_open += 1
            raise refusal
        if fairness is not None and limits.quota is not None:
            of_key = fairness.waiting_of(request.key)
            if of_key >= limits.quota:
                self._counters.refused_quota += 1
                pause = self._planner.seconds_to_drain(of_key, now)
                raise QuotaExceeded(limits.name, request.key, queued=of_key, quota=limits.quota, retry_after=pause)
        if waiting < limits.max_queue:
            return None
        displaced = None if fairness is None else fairness.displaced_by(request, self._lines.live)
        if displaced is None:
            raise self.queue_full(waiting, now)
        return displaced

    def queue_full(self, waiting: int, now: float, *, displaced: bool = False) -> QueueFull:
        """The error for a request without a place among so many that wait.

        Args:
            waiting: How many wait.
            now: The time.
            displaced: Whether it has waited, and lost its place to another one.
        """
        self._counters.refused_full += 1
        pause = self._planner.seconds_to_drain(waiting, now)
        return QueueFull(self._limits.name, queued=waiting, retry_after=pause, displaced=displaced)

    def check_deadline(self, request: Request, waiting: int, running: list[Batch], now: float) -> None:
        """Check that, by what was measured, the answer to a request can come in time.

        Raises:
            DeadlineExceeded, DeadlineUnreachable: It would come too late.
        """
        left = request.deadline - now
        if left <= 0:
            self._counters.expired += 1
            raise DeadlineExceeded(self._limits.name, waited=0.0)
        estimate = self._planner.too_late(request, self._lines, waiting, running, now)
        if estimate is not None:
            self._counters.refused_late += 1
            raise DeadlineUnreachable(self._limits.name, estimate=estimate, left=left, retry_after=estimate - left)


# The last batches, as the status shows them.


#: The quantiles are taken over this many batches.
_REMEMBERED = 512


class RecentBatches(TypedDict):
    """The fields of a status that come from the last batches."""

    batch_size: Quantiles
    wait: Quantiles
    run: Quantiles
    padding: float


class Recent:
    """Size, longest wait, run time, weight and padding of the last batches."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, float, float, float, float]] = deque(maxlen=_REMEMBERED)

    def note(self, batch: Batch, seconds: float) -> None:
        waited = batch.started - batch.oldest
        self._batches.append((batch.count, waited, seconds, batch.weight, batch.padding))

    def summary(self) -> RecentBatches:
        sizes, waits, runs, weights, paddings = zip(*self._batches, strict=True) if self._batches else ((),) * 5
        weight = sum(weights)
        return {
            "batch_size": Quantiles.of(sizes),
            "wait": Quantiles.of(waits),
            "run": Quantiles.of(runs),
            "padding": sum(paddings) / weight if weight > 0 else 0.0,
        }


# When requests expire: their deadlines in order, and nothing of a request that has its answer.


#: Entries of requests that have their answers may stay until they are this many, and more than all others.
_STALE = 64


class Expiry:
    """The deadlines of what waits and runs.

    Those of one function come in order as a rule, since its calls have the same time each: they stand in a row, whose
    first is the nearest. One that is nearer than those before it goes into a heap.
    """

    def __init__(self) -> None:
        self._row: deque[Request] = deque()
        self._heap: list[list[Any]] = []  # deadline, a number that makes entries comparable, the request or None
        self._number = 0
        self._stale = 0  # entries of the heap without a request

    def __bool__(self) -> bool:
        return bool(self._row or self._heap)

    def __len__(self) -> int:
        return len(self._row) + len(self._heap)

    @property
    def in_order(self) -> bool:
        """Whether those with a deadline came in the order of their deadlines."""
        return not self._heap

    @property
    def nearest(self) -> float:
        """No request that waits or runs has a deadline before this; infinity if none has one."""
        first = self._row[0].deadline if self._row else math.inf
        return min(first, self._heap[0][0]) if self._heap else first

    def add(self, request: Request) -> None:
        row = self._row
        if not row or request.deadline >= row[-1].deadline:
            row.append(request)
            return
        self._number += 1
        request.timer = [request.deadline, self._number, request]
        heapq.heappush(self._heap, request.timer)

    def add_all(self, requests: list[Request]) -> None:
        until = [request.deadline for request in requests]
        if until == sorted(until) and (not self._row or until[0] >= self._row[-1].deadline):
            self._row.extend(requests)
            return
        for request in requests:
            self.add(request)

    def settle(self, requests: Sequence[Request], live: int) -> None:
        """Forget requests that are done: a large item must not stay in memory until its deadline.

        Args:
            requests: Which ones.
            live: How many others wait and run.
        """
        row = self._row
        while row and row[0].state == "done":
            row.popleft()
        if len(row) > 2 * live + _STALE:  # one in front takes long
            self._row = deque(request for request in row if request.state != "done")
        if not self._heap:
            return
        for request in requests:
            if (timer := request.timer) is not None:
                timer[2] = request.timer = None
                self._stale += 1
        if self._stale > _STALE and self._stale * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2] is not None]
            heapq.heapify(self._heap)
            self._stale = 0

    def pop(self, now: float) -> Request | None:
        """The next request whose deadline has come; None if there is none."""
        row = self._row
        while row and (row[0].deadline <= now or row[0].state == "done"):
            if (first := row.popleft()).state != "done":
                return first
        while self._heap and self._heap[0][0] <= now:
            request: Request | None = heapq.heappop(self._heap)[2]
            if request is not None:
                request.timer = None
                return request
            self._stale -= 1
        return None

    def next(self) -> float:
        """When :meth:`pop` has something to return; infinity for never."""
        while self._row and self._row[0].state == "done":
            self._row.popleft()
        while self._heap and self._heap[0][2] is None:
            heapq.heappop(self._heap)
            self._stale -= 1
        return self.nearest


class BatchQueue:
    """The state of one batcher.

    Attributes:
        inbox: Plain calls that wait as well, and are not counted yet.
        sure: While fewer wait, a plain call has room, and its answer in time if no batch runs for longer than expected.
        overdue: When one does; infinity while none runs.
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
        self.inbox: deque[PlainCall] = deque()
        self.waiting = 0
        self.running: list[Batch] = []
        self.overdue = math.inf
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
        self._sorted = self._picky = True  # first: an exception may interrupt this at any point
        self.sure = 0
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
        self._note_sure()

    # In

    def take_in(self) -> None:
        """Make requests of the plain calls that wait."""
        if count := len(self.inbox):
            self.waiting += count  # first: callers add up both, and may count a call twice, but not miss one
            calls = self._note(count)
            requests: list[Request] = [request_of(call, self._limits.deadline) for call in calls]
            if self._limits.deadline != math.inf:
                self._expiry.add_all(requests)
            if self._sorted:
                for request in requests:
                    self._lines.add(request, request.arrived)
            else:
                self._ungrouped.waiting += count
                self._ungrouped.requests.extend(requests)

    def _note(self, count: int) -> list[PlainCall]:
        """The first plain calls out of the inbox."""
        if self._limits.deadline != math.inf:
            self._planner.note_uniform(count)
        else:
            self._planner.note_patient(count)
        take = self.inbox.popleft
        return [take() for _ in range(count)]

    def request_of(self, future: asyncio.Future[Any]) -> Request | None:
        """The request of a plain call; None if it has its answer already."""
        self.take_in()
        for batch in self.running:
            if isinstance(batch, PlainBatch) and batch.has(future):
                self._make_requests(batch)
        running = itertools.chain.from_iterable(batch.requests for batch in self.running if not is_plain(batch))
        both = itertools.chain(self._lines.live(), running)
        return next((one for one in both if isinstance(one, LoopRequest) and one.future is future), None)

    def _make_requests(self, batch: PlainBatch) -> None:
        if is_plain(batch):
            requests = batch.requests
            if self._limits.deadline != math.inf:
                self._expiry.add_all(requests)

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
        self._lines.sweep()
        self.waiting = sum(line.waiting for line in self._lines)
        self._expiry.settle(requests, self._live)
        self._stale = 0
        for request in requests:
            self._queue_circuit.forget(request)

    # Out

    def next_batch(self, now: float) -> Batch | float | None:
        """The next batch for a free thread; or seconds after which to ask again; or None until more is admitted."""
        if not self.waiting:
            if not self.inbox:
                return None
            if (batch := self._plain_batch(now)) is not None:
                return batch
        self.take_in()
        self.expire(now)
        while True:
            found = self._lines.next(now, closed=self.closed)
            if not isinstance(found, Line):
                return None if found is None else found - now
            requests = self._take(found, now)
            if requests:
                return self._start(requests, now)

    def _plain_batch(self, now: float) -> PlainBatch | None:
        """The next batch of what waits, all of it plain calls; None if that takes a closer look."""
        limits = self._limits
        if limits.max_weight != math.inf or limits.padded or self.ordered or limits.max_wait:
            return None
        count, timeout = len(self.inbox), limits.deadline
        if self._picky or timeout != math.inf:
            until = self.inbox[0][3] + timeout
            count = self._planner.takes_first(count, None, until, now, lines=1, in_order=timeout != math.inf)
        else:
            count = min(count, self._planner.most)
        if not count:
            return None
        batch = PlainBatch(self._note(count), timeout, now, weighed=limits.weighed)
        self.running.append(batch)
        self._note_overdue()
        return batch

    def _take(self, line: Line, now: float) -> list[Request]:
        """Take the requests of the next batch out of their line. None if all of them would be late."""
        if self._stale or self._expiry or self._picky:
            requests = self._choose(line, now)
        else:
            requests = self._first(line, self._planner.most)
        for request in requests:
            request.state = "running"
        self.waiting -= len(requests)
        if line.group is not None or self._sorted:
            self._lines.taken(line, requests)
        else:
            line.waiting -= len(requests)
        return requests

    @staticmethod
    def _first(line: Line, count: int) -> list[Request]:
        requests = line.requests
        if len(requests) > count:
            return [requests.popleft() for _ in range(count)]
        taken = list(requests)
        requests.clear()
        return taken

    def _choose(self, line: Line, now: float) -> list[Request]:
        if not self._stale:
            in_order = self._limits.deadline != math.inf and self._expiry.in_order and not self.ordered
            nearest, lines = self._expiry.nearest, len(self._lines)
            count = self._planner.takes_first(line.waiting, line.group, nearest, now, lines=lines, in_order=in_order)
            if count:
                return self._first(line, count)
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
        self._note_overdue()
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
        self._note_overdue()
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
            self._expiry.settle(requests, self._live)
        self.counters.batches += 1
        self.counters.failed += failed
        self.counters.answered += len(requests) - failed
        return requests, outcomes

    def finish_plain(self, batch: PlainBatch, failed: int) -> bool:
        """End a batch of plain calls; false if one of them has got a request, so that it takes :meth:`finish`."""
        if not is_plain(batch):
            return False
        self.running.remove(batch)
        self._note_overdue()
        self.counters.batches += 1
        self.counters.failed += failed
        self.counters.answered += batch.count - failed
        return True

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
        self._planner.note_verdict(batch.count, failed=verdict == "failed")
        self._note_most()
        change = self._queue_circuit.batch_ended(batch, verdict, now)
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
        self.times.record(batch.count, batch.weight, batch.group, seconds, now)
        self._recent.note(batch, seconds)

    def record_part(self, batch: Batch, count: int, weight: float, seconds: float, now: float) -> None:
        """Record one run of the function that succeeded, over so many items of a batch."""
        useful = batch.weight - batch.padding
        padded = weight * batch.weight / useful if useful > 0 else weight
        self.times.record(count, padded if self._limits.weighed else 0.0, batch.group, seconds, now)

    def _note_overdue(self) -> None:
        self.overdue = self._planner.overdue(self.running)

    def record_end(self, batch: Batch, seconds: float, now: float, *, reruns: int = 0, bad: float = 0.0) -> None:
        """Record how long a batch kept its thread, how often it was run again, and the share of bad items."""
        self.times.record_batch(batch.count, seconds, now, bad=bad, weight=batch.weight, group=batch.group)
        self._planner.note_batch(batch, seconds, now, reruns=reruns)

    def _note_most(self) -> None:
        self._lines.full_size = self._planner.most
        self._note_sure()

    def _note_sure(self) -> None:
        special = self.may_refuse or self.ordered or self._limits.max_wait
        self.sure = 0 if special else self._planner.sure()

    # Out of turn

    def expire(self, now: float) -> None:
        while (request := self._expiry.pop(now)) is not None:
            self._drop_late(request, now)

    def expire_all(self, now: float) -> None:
        """:meth:`expire`, plain calls included: they get requests, whose deadlines stand with all others."""
        for batch in self.running:
            if isinstance(batch, PlainBatch):
                self._make_requests(batch)
        self.take_in()
        self.expire(now)

    def next_check(self) -> float:
        """When :meth:`expire_all` or :meth:`note_hung` may have something to do; infinity for never."""
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
        self.closed = self.may_refuse = True
        self.sure = 0

    def reopen(self) -> None:
        self.closed = False
        self.may_refuse = self.circuit is not None or self._limits.quota is not None
        self._note_sure()

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
        running = [batch.requests for batch in self.running if not is_plain(batch)]
        for request in itertools.chain(self._lines.live(), *running):
            request.state = "done"

    # Its state

    @property
    def auto_size(self) -> AutoSize:
        """What chooses the size of batches by a latency goal."""
        return self._planner.auto

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self.inbox)

    @property
    def _live(self) -> int:
        return self.waiting + sum(batch.count for batch in self.running)

    def status(self, now: float) -> BatchStatus:
        self.take_in()
        return BatchStatus(
            name=self._limits.name,
            state=state_of(self.running, self.circuit, closed=self.closed),
            waiting=self.waiting,
            running=sum(batch.count for batch in self.running),
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
        if request.deadline != math.inf:
            self._expiry.settle([request], self._live)
        if failure is not None:
            self.undelivered.append((request, failure))
