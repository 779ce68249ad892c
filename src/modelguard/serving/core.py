"""What to admit, to batch, to expire and to refuse. A plain state machine: no thread, no event loop, no clock.

Every method takes the time as an argument and is called under the batcher's lock. What the core answers by itself
(expired, refused after all, closed) goes to ``outbox``, from where the batcher hands it over outside of the lock.
"""

from __future__ import annotations

import contextlib
import copy
import heapq
import math
from collections import deque
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Literal

from modelguard.errors import (
    CircuitOpen,
    DeadlineExceeded,
    DeadlineUnreachable,
    GuardClosed,
    ModelGuardError,
    QueueFull,
)
from modelguard.serving.batches import Batch, Limits, Tally, Verdict
from modelguard.serving.entries import DONE, RUNNING, WAITING, Entry, Failure, gone
from modelguard.serving.estimate import Estimator

if TYPE_CHECKING:
    from modelguard.serving.breaker import Circuit


#: Seconds to retry after while nothing has been measured.
_UNKNOWN = 1.0
#: So many dead entries may lie in queues and heap before these are swept.
_DEAD = 64
#: Batches that the quantiles are taken of.
_REMEMBERED = 512


class Core:
    """The state of one batcher.

    Attributes:
        waiting: Entries that wait, without those that expired or were called off.
        running: Batches under way.
        outbox: What is to be answered, and how.
        closed: Nothing more is admitted.
        recent: Size, longest wait and run time of the last batches.
    """

    def __init__(self, limits: Limits, circuit: Circuit | None = None) -> None:
        self._limits = limits
        self._max_queue = limits.max_queue
        self._sort = limits.sort
        self.circuit = circuit
        self.estimator = Estimator()
        self.waiting = 0
        self.running: list[Batch] = []
        self.outbox: list[tuple[Entry, Failure]] = []
        self.closed = False
        self.tally = Tally()
        self.recent: deque[tuple[int, float, float]] = deque(maxlen=_REMEMBERED)
        self._weight: float = 0
        self._plain: deque[Entry] = deque()
        self._queues: dict[Hashable, deque[Entry]] = {None: self._plain}
        self._gated = circuit is not None  # whether there is more to ask at the door than for room
        self._deadlines: list[tuple[float, int, Entry]] = []
        self._number = 0
        self._dead = 0  # entries in the queues that need no answer any more
        self._abandoned = 0  # the same in running batches
        self._probe: Entry | None = None

    # In

    def admit(self, entry: Entry, now: float) -> None:
        """Queue an entry whose deadline, weight and group are set.

        Raises:
            GuardClosed, CircuitOpen, QueueFull, DeadlineUnreachable, DeadlineExceeded: It was not queued.
        """
        if self._deadlines and self._deadlines[0][0] <= now:
            self.expire(now)
        if self.waiting >= self._max_queue or self._gated:
            self._refuse(now)
        if entry.deadline != math.inf:
            self._refuse_late(entry, now)
        entry.arrived = now
        if entry.group is None:
            self._plain.append(entry)
        else:
            self._queues.setdefault(entry.group, deque()).append(entry)
        self.waiting += 1
        if self._sort:
            self._weight += entry.weight
        if entry.deadline != math.inf:
            self._number += 1
            heapq.heappush(self._deadlines, (entry.deadline, self._number, entry))
        if self._gated and self.circuit is not None and self.circuit.passed():
            self._probe = entry

    def _refuse(self, now: float) -> None:
        """Raise if nothing is let in."""
        if self.closed:
            raise GuardClosed(self._limits.name)
        if self.circuit is not None and (pause := self.circuit.refuses(now)) is not None:
            self.tally.refused_open += 1
            raise CircuitOpen(self._limits.name, failures=self.circuit.failures, retry_after=pause)
        if self.waiting >= self._max_queue:
            self.tally.refused_full += 1
            raise QueueFull(self._limits.name, queued=self.waiting, retry_after=self._until_drained(now))

    def withdraw(self, entry: Entry) -> None:
        """Undo an admission that an exception interrupted, wherever it was: count again what is really there."""
        self._abandoned += entry.place == RUNNING
        entry.place = DONE
        every = [one for queue in self._queues.values() for one in queue]
        alive = [one for one in every if not one.place]
        self.waiting = len(alive)
        self._weight = sum(one.weight for one in alive) if self._limits.sort else 0
        self._dead = len(every) - len(alive)
        if entry is self._probe and self.circuit is not None:
            self._probe = None
            self.circuit.unproven()

    def _refuse_late(self, entry: Entry, now: float) -> None:
        """Raise if by what is known it could not be answered in time."""
        left = entry.deadline - now
        if left <= 0:
            self.tally.expired += 1
            raise DeadlineExceeded(self._limits.name, waited=0.0)
        if self.waiting:  # who would be the next is let in whatever was measured: its run is the measurement of today
            estimate = self._until_answered(entry.weight, now)
            if estimate is not None and estimate > left:
                self.tally.refused_late += 1
                raise DeadlineUnreachable(self._limits.name, estimate=estimate, left=left, retry_after=estimate - left)

    def _until_answered(self, weight: float, now: float) -> float | None:
        """Seconds until one more entry would have its answer, None without evidence at the sizes that it takes."""
        share = self._limits.share(self.waiting + 1, self._weight + weight)
        ahead = math.ceil(share) - 1
        # Behind a full batch it will stand in a full one: more arrive meanwhile.
        own = self.estimator.seconds(1.0 if ahead else share, now)
        if own is None:
            return None
        busy = 0.0
        if len(self.running) >= self._limits.workers:
            busy = math.fsum(self._left(batch, now) for batch in self.running)
        return (busy + ahead * own) / self._limits.workers + own

    def _left(self, batch: Batch, now: float) -> float:
        return max(batch.started + (self.estimator.seconds(batch.share, now) or 0.0) - now, 0.0)

    def _until_drained(self, now: float) -> float:
        rate = self.estimator.rate(now)
        return _UNKNOWN if rate is None else self.waiting / (rate * self._limits.workers)

    # Out

    def take(self, now: float) -> Batch | float | None:
        """The next batch for a free worker; or seconds after which to ask again; or None until more is admitted."""
        self.expire(now)
        found: deque[Entry] | None = None
        first = math.inf
        for group, queue in list(self._queues.items()):
            while queue and queue[0].place:
                queue.popleft()
                self._dead -= 1
            if not queue:
                self._remove(group)
                continue
            due = self._due(queue, now) if self._limits.max_wait else queue[0].arrived
            if due < first:
                found, first = queue, due
        if found is None:
            return None
        return first - now if first > now else self._form(found, now)

    def _due(self, queue: deque[Entry], now: float) -> float:
        """When a batch of this queue has to go: full at once, else ``max_wait`` after the oldest arrived."""
        alive = [entry for entry in queue if not entry.place]
        share = self._limits.share(len(alive), sum(entry.weight for entry in alive))
        oldest = alive[0].arrived
        if share >= 1 or self.closed:
            return oldest
        due = oldest + self._limits.max_wait
        nearest = min(entry.deadline for entry in alive)
        takes = self.estimator.seconds(share, now)
        if takes is None:  # nobody knows how early it has to begin
            return oldest if nearest <= due else due
        return min(due, nearest - takes)

    def _form(self, queue: deque[Entry], now: float) -> Batch:
        limits = self._limits
        if self._dead or self._deadlines or limits.max_weight != math.inf:
            entries = self._choose(queue, now)
        elif len(queue) <= limits.max_size:  # the common case: all that waits
            entries = list(queue)
            queue.clear()
        else:
            entries = [queue.popleft() for _ in range(limits.max_size)]
        for entry in entries:
            entry.place = RUNNING
        weight = sum([entry.weight for entry in entries]) if limits.sort else len(entries)
        self.waiting -= len(entries)
        self._weight -= weight if limits.sort else 0
        batch = Batch(entries, limits.share(len(entries), weight), now)
        if limits.sort:
            entries.sort(key=lambda entry: entry.weight, reverse=True)
        self.running.append(batch)
        return batch

    def _choose(self, queue: deque[Entry], now: float) -> list[Entry]:
        """The next entries that are alive, may still be in time, and weigh no more than a batch may."""
        limits = self._limits
        spare = sum(not entry.place for entry in queue) - limits.max_size if self._deadlines else 0
        takes = self.estimator.seconds(1.0, now) if spare > 0 else None
        entries: list[Entry] = []
        weight = 0.0
        while queue and len(entries) < limits.max_size:
            entry = queue[0]
            if entry.place:
                self._dead -= 1
            elif spare > 0 and takes is not None and now + takes > entry.deadline:
                # Too late whatever is done, and others can use its place. Only if they fill it: else nothing might
                # run, and nothing be measured, after one estimate that was too long.
                spare -= 1
                self.tally.expired += 1
                self._leave(entry, Failure(self._overdue(entry, now)))
            elif entries and weight + entry.weight > limits.max_weight:
                break
            else:
                entries.append(entry)
                weight += entry.weight
            queue.popleft()
        return entries

    def finish(self, batch: Batch, outcomes: list[Any], failed: int = 0) -> tuple[list[Entry], list[Any]]:
        """A batch has ended, with one outcome for each of its entries, of which so many are failures.

        Returns:
            Those that still wait for an answer, and their outcomes.
        """
        self.running.remove(batch)
        entries = batch.entries
        if self._abandoned:
            pairs = [(entry, outcome) for entry, outcome in zip(entries, outcomes, strict=True) if entry.place != DONE]
            self._abandoned -= len(entries) - len(pairs)
            entries, outcomes = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            failed = sum(type(outcome) is Failure for outcome in outcomes)
        for entry in entries:
            entry.place = DONE
        self.tally.batches += 1
        self.tally.failed += failed
        self.tally.answered += len(entries) - failed
        if len(self._deadlines) > _DEAD + 4 * (self.waiting + sum(len(other.entries) for other in self.running)):
            self._sweep()
        return entries, outcomes

    def judge(self, batch: Batch, verdict: Verdict, now: float) -> Literal["opened", "closed"] | None:
        """Tell the breaker how a batch went, and whether that opens or closes the circuit."""
        self.tally.failed_batches += verdict == "bad"
        if self.circuit is None:
            return None
        probe = self._probe is not None and self._probe in batch.entries
        if probe:
            self._probe = None
        if verdict == "good":
            return "closed" if self.circuit.succeeded(probe=probe) else None
        if verdict == "neither":
            if probe:
                self.circuit.unproven()
            return None
        if not self.circuit.failed(now, probe=probe):
            return None
        pause = self.circuit.refuses(now) or 0.0
        for entry in self._alive():
            self.tally.refused_open += 1
            self._drop(
                entry, Failure(CircuitOpen(self._limits.name, failures=self.circuit.failures, retry_after=pause))
            )
        return "opened"

    def record(self, batch: Batch, seconds: float, now: float) -> None:
        """The function has run once over all of a batch, for so many seconds."""
        self.estimator.record(min(batch.share, 1.0), len(batch.entries), seconds, now)
        self.recent.append((len(batch.entries), batch.started - batch.oldest, seconds))

    # Out of turn

    def expire(self, now: float) -> None:
        """Answer those whose deadline has come, whether they wait or are being computed."""
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = heapq.heappop(self._deadlines)[2]
            if entry.place != DONE:
                self.tally.expired += 1
                self._drop(entry, Failure(self._overdue(entry, now)))

    def next_deadline(self) -> float:
        """When :meth:`expire` has something to do; infinity for never."""
        while self._deadlines and self._deadlines[0][2].place == DONE:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def cancel(self, entry: Entry, *, told: bool = False) -> bool:
        """Nobody wants its answer any more; false if it has been given already.

        Args:
            entry: Which one.
            told: Whether somebody waits all the same, and is to get ``CallerGone``.
        """
        if entry.place == DONE:
            return False
        self.tally.cancelled += 1
        self._drop(entry, gone(self._limits.name) if told else None)
        return True

    def close(self) -> None:
        """Admit nothing more. What waits is computed."""
        self.closed = self._gated = True

    def give_up(self, error: ModelGuardError) -> None:
        """Refuse what waits."""
        for entry in self._alive():
            self._drop(entry, Failure(copy.copy(error)))

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self.waiting and not self.running

    def _overdue(self, entry: Entry, now: float) -> DeadlineExceeded:
        return DeadlineExceeded(self._limits.name, waited=now - entry.arrived)

    def _alive(self) -> list[Entry]:
        return [entry for queue in self._queues.values() for entry in queue if not entry.place]

    def _drop(self, entry: Entry, failure: Failure | None) -> None:
        """Answer an entry out of turn. If it waits, it lies dead in its queue until somebody comes by."""
        if entry.place == WAITING:
            self._dead += 1
            self._leave(entry, failure)
        else:
            self._abandoned += 1
            self._settle(entry, failure)
        if self._dead > _DEAD and self._dead > self.waiting:
            self._sweep()

    def _leave(self, entry: Entry, failure: Failure | None) -> None:
        self.waiting -= 1
        self._weight -= entry.weight if self._limits.sort else 0
        entry.item = None
        if entry is self._probe and self.circuit is not None:
            self._probe = None
            self.circuit.unproven()
        self._settle(entry, failure)

    def _settle(self, entry: Entry, failure: Failure | None) -> None:
        entry.place = DONE
        if failure is not None:
            self.outbox.append((entry, failure))

    def _remove(self, group: Hashable) -> None:
        """Forget the queue of a group. Values that have changed since, and so their hash, leave an empty one behind."""
        if group is not None:
            with contextlib.suppress(Exception):
                del self._queues[group]

    def _sweep(self) -> None:
        for group, queue in list(self._queues.items()):
            alive = [entry for entry in queue if not entry.place]
            queue.clear()
            queue.extend(alive)
            if not alive:
                self._remove(group)
        self._deadlines = [due for due in self._deadlines if due[2].place != DONE]
        heapq.heapify(self._deadlines)
        self._dead = 0
