"""The workers of one mold: who gets which, who waits, which is replaced, and when a new one may start."""

from __future__ import annotations

import copy
import math
import os
import random
import threading
import time
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Protocol, get_args

from modelguard import telemetry
from modelguard.errors import CircuitOpen, QueueFull
from modelguard.isolation._channel import Channel
from modelguard.isolation._isolation_options import IsolationOptions
from modelguard.isolation.status import WorkerState
from modelguard.lifecycle.policies import Backoff
from modelguard.runtime import child_processes
from modelguard.serving.breaker import Circuit
from modelguard.serving.status import Verdict
from modelguard.telemetry import Event, Reason, WorkerEndCause, logger

#: Whether there are workers. ``ended``: none until the next call; ``returning``: that call waits for the first of them.
Presence = Literal["present", "ended", "returning"]

#: A mold is replaced when so many of its workers in a row have not come up.
FAILED_STARTS = 2


#: Seconds that a call waits for the mold's report of how its worker ended.
_REPORT = 1.0


class Worker:
    """One worker process, as its owner sees it. :class:`Workers` keeps its state, and whether it is worn."""

    channel: Channel  # once its mold was told to start it

    def __init__(self, number: int) -> None:
        self.number = number
        self.state: WorkerState = "starting"
        self.worn = False
        self.calls = 0
        self.pid = 0
        self.pidfd: int | None = None
        self.born = time.monotonic()
        self.exit: str | None = None
        self._exited = threading.Event()
        # Held while the descriptor is used: the next one that is opened gets its number, and may be another process's.
        # Reentrant: the garbage collector may end a dropped stream, and with it this process, at any point.
        self._lock = threading.RLock()

    def kill(self) -> None:
        with self._lock:
            if self.pidfd is not None:
                child_processes.send_kill(self.pidfd)
            elif self.pid and self.exit is None:
                child_processes.kill([self.pid])

    def has_exited(self, how: str) -> None:
        with self._lock:
            self.exit = self.exit or how
            pidfd, self.pidfd = self.pidfd, None
            if pidfd is not None:
                os.close(pidfd)
        self._exited.set()

    def how_it_ended(self) -> str:
        self._exited.wait(_REPORT)
        return self.exit or "unknown"


class Holder(Protocol):
    """Who takes a worker."""

    worker: Worker
    held: bool


_BUSY = frozenset({"busy", "retiring"})


# Calls that wait for a worker, in the order in which they get one.


class CallTimes(NamedTuple):
    """The times of one call, on the monotonic clock, and whether it is run again.

    Then its failure says nothing new about the model, and no circuit and no backoff holds it up: how often it is run
    again is bounded anyway.
    """

    arrived: float
    until: float = math.inf
    again: bool = False


@dataclass(slots=True, eq=False, repr=False)
class Claim:
    """A call that asks for a worker."""

    limits: CallTimes
    key: object = None  # which of a pool's models it needs
    client: Hashable = None  # whose call it is: clients take turns
    tell: Callable[[bool], object] | None = None  # hears whether it waits for a load or in line, when that changes
    blocks: bool = False  # it has a thread that waits with it
    admitted: bool = False  # there was room for it, so that none refuses it where it goes on to wait
    loading: bool = False  # it waits for a load
    followed: Any = None  # of one that waits without a thread, what goes on with it


class Waiter(Future[Worker | None]):
    """A call in line. It gets its worker, or an error; None, if it is to ask again: for the next mold, perhaps."""

    def __init__(self, claim: Claim, holder: Holder | None = None) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self.claim = claim
        self.holder = holder


class WaitingLine:
    """Clients take turns, each with its oldest call: one with many calls does not hold up one with few.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._by_client: OrderedDict[Hashable, list[Waiter]] = OrderedDict()

    def __len__(self) -> int:
        # Counted anew: an exception from a signal handler may come between two steps.
        return sum(map(len, self._by_client.values()))

    def __iter__(self) -> Iterator[Waiter]:
        """All, of which the first is the one whose turn it is."""
        for waiters in self._by_client.values():
            yield from waiters

    def append(self, waiter: Waiter) -> None:
        """Add a call behind those of its client that were made before."""
        insort(self._by_client.setdefault(waiter.claim.client, []), waiter, key=attrgetter("claim.limits.arrived"))

    def popleft(self) -> Waiter:
        """Take the call whose turn it is. Its client is the last one from now on."""
        client, waiters = self._by_client.popitem(last=False)
        waiter = waiters.pop(0)
        if waiters:
            self._by_client[client] = waiters
        return waiter

    def remove(self, waiter: Waiter) -> bool:
        waiters = self._by_client.get(waiter.claim.client)
        if waiters is None or waiter not in waiters:
            return False
        waiters.remove(waiter)
        if not waiters:
            del self._by_client[waiter.claim.client]
        return True


# Who hands them out.


class MoldOrders:
    """What the workers ask of their mold, none of which blocks; by itself that of a mold that has ended."""

    def start_worker(self, worker: Worker) -> None:
        pass

    def give_up(self) -> None:
        """No worker of this mold comes up: make another mold. Once, and again when no other is left either."""

    def look_again_later(self, seconds: float) -> None:
        """Call :meth:`Workers.look_again` after so many seconds."""


#: Seconds of ``retry_after`` where no rate is known.
RETRY_AFTER = 1.0


class Workers:
    """Hands out the workers of a mold, and decides which are started, replaced and ended. Thread-safe.

    A worn worker takes calls until another one can take its place, and replacements start one at a time, so capacity
    never falls below ``size``. From the first worn or dead worker on, a spare one is kept, so the next is replaced
    without a delay: a sound model needs none, and it holds memory. After several deaths in a row, a new worker starts
    after a backoff, and then the breaker opens. While the function is paused, worn workers stay, and only those that
    have ended are replaced. All workers can be ended until the next call.
    """

    def __init__(
        self,
        options: IsolationOptions,
        mold: MoldOrders,
        *,
        generation: int,
        backoff: Backoff,
        spare: int = 0,
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._name = options.name
        self._mold = mold
        self._size = options.workers
        self._spare = spare
        self._generation = generation
        self._max_queue = options.bounds.queue
        self._backoff = backoff
        self._is_paused = is_paused
        # Reentrant: the garbage collector may close a dropped generator at any point, also under this lock.
        self._lock = threading.RLock()
        self._members: OrderedDict[int, Worker] = OrderedDict()  # the last one has ended its call last
        self._last = 0
        self._keeps_spare = False
        self._circuit = Circuit(options.breaker)
        self._failures = self._failed_starts = 0
        self._start_at = 0.0
        self._waiters = WaitingLine()
        self.presence: Presence = "present"
        self.gone = False
        self._gave_up: int | None = None  # how many workers were up then
        self._answers: list[tuple[Waiter, Worker | Exception | None]] = []
        self._events: list[Event] = []
        self._postponed: dict[int, tuple[Reason, ...]] = {}
        self._reported: set[Reason] = set()
        self.counts: dict[WorkerEndCause, int] = dict.fromkeys(get_args(WorkerEndCause), 0)

    # Calls

    def take_now(self, holder: Holder | None = None, *, again: bool = False) -> Worker | None:
        """Take a free worker, if there is one and nobody waits for it. Does not block."""
        with self._lock:
            if not again and self._circuit.state != "closed" and (refusal := self._refusal()) is not None:
                raise refusal
            return None if self._waiters else self._take(holder)

    def request(self, waiter: Waiter) -> Worker | None:
        """Take a free worker, or have ``waiter`` get one when there is one. Does not block.

        In the line of a mold that is gone they wait for the next one, see :meth:`send_on`.
        """
        again = waiter.claim.limits.again
        with self._lock:
            if (worker := self.take_now(waiter.holder, again=again)) is not None:
                return worker
            if not self.gone and len(self._waiters) >= self._max_queue and not waiter.claim.admitted:
                raise QueueFull(self._name, queued=len(self._waiters), retry_after=RETRY_AFTER)
            self._waiters.append(waiter)
            self._start_at = 0.0 if again else self._start_at
        if self.presence == "ended" or again:
            self.call_back()
        return None

    def send_on(self) -> None:
        """New calls get another mold: have those that wait ask for it."""
        with self._lock:
            waiters, self._waiters = list(self._waiters), WaitingLine()
        for waiter in waiters:
            waiter.set_result(None)

    def withdraw(self, waiter: Waiter) -> bool:
        """Stop waiting; false if ``waiter`` has its worker or its error already."""
        with self._lock:
            return self._waiters.remove(waiter)

    def release(self, worker: Worker, *, worn: tuple[Reason, ...], counts: bool = True) -> None:
        """A worker has ended its call, and can take another one; ``worn``: why it asked for its replacement, if it did.

        It ``counts`` if this shows that the model works; an abandoned call does not.
        """
        with self._lock:
            troubled = self._circuit.state != "closed"
            if worn and self._is_paused():
                self._postpone(worker, worn)
            ended = worker.number not in self._members
            if not ended:
                self._judge(worker, counts=counts)
                worker.calls += 1
                worker.worn = worker.worn or bool(worn)
                ended = worker.state == "retiring" or self.gone
            if ended:
                self._members.pop(worker.number, None)
                self._dismiss(worker)
            else:
                self._make_idle(worker)
            if worn or ended or troubled:
                self._start_missing_and_end_worn(time.monotonic())
            if self._waiters:
                self._hand_over()
        if self._events or self._answers:
            self._emit_all()

    def end_worker(self, worker: Worker, cause: WorkerEndCause, *, blame: bool = True) -> str:
        """Record that a worker has ended in its call, or end it; returns how it ended, for people.

        Without ``blame`` it counts as no failure, as of one that was ended because its caller is gone.
        """
        if cause != "crashed":
            worker.kill()
        how = worker.how_it_ended() if cause == "crashed" else cause
        with self._change() as now:
            self._take_out(worker, cause, how, now, blame=blame and cause != "cancelled")
        worker.channel.close()
        return how

    # Reports of the mold

    def ready(self, worker: Worker) -> None:
        with self._change() as now:
            if self.gone or worker.number not in self._members:
                self._members.pop(worker.number, None)
                worker.channel.close()
                return
            self._failed_starts = 0
            self.presence = "present"
            self._make_idle(worker)
            self._note(telemetry.WorkerStarted, worker, seconds=now - worker.born)

    def exited(self, worker: Worker, how: str) -> None:
        """A worker's process has ended. If it runs a call, its caller finds out by itself."""
        worker.channel.hang_up()  # a program that the model has started may hold the other end open
        if self.lost(worker, how):
            worker.channel.close()

    def lost(self, worker: Worker, how: str) -> bool:
        """The same where there may be no channel; false if it runs a call."""
        worker.has_exited(how)
        with self._change() as now:  # one look: no call may take it in between
            if worker.number not in self._members or worker.state not in {"starting", "idle"}:
                return False
            self._take_out(worker, "crashed", how, now, blame=True)
        if worker.state == "starting" and not self.gone:
            logger.warning("%s: a new worker has ended before it could take a call: %s", self._name, how)
        return True

    def mold_ended(self, how: str) -> None:
        with self._change():
            self.gone, workers = True, list(self._members.values())
        self.send_on()
        for worker in workers:
            worker.has_exited(how)

    def end_until_next_call(self) -> list[int] | None:
        """End all workers until the next call; their numbers. None, and nothing ends, if one has something to do."""
        with self._lock:
            workers = list(self._members.values())
            if self.gone or self._gave_up is not None or self._waiters or self.presence != "present":
                return None
            if any(worker.state != "idle" for worker in workers):
                return None
            self.presence = "ended"
            self._end(workers)
        self._emit_all()
        return [worker.number for worker in workers]

    def call_back(self) -> None:
        """Start the workers that are missing, also those that have ended until the next call."""
        with self._change():
            if self.presence == "ended":
                self.presence = "returning"

    def retire_all(self) -> None:
        """Start no more workers, and end those that are idle; the others end after their calls."""
        with self._change():
            self.gone = True

    def look_again(self) -> None:
        """Do what has become due; also what a pause has held back until now."""
        with self._change():
            if not self._is_paused():
                self._postponed.clear()

    def detach(self) -> None:
        """The mold has been ended: refer to it no more."""
        self._mold = MoldOrders()

    # What there is

    @property
    def is_ready(self) -> bool:
        """Whether a worker can take calls, now or after the call that it runs."""
        with self._lock:
            return bool(self._up()) and not self.gone and self._circuit.state == "closed"

    @property
    def is_complete(self) -> bool:
        """Whether as many workers have come up as may have calls at a time."""
        with self._lock:
            return sum(worker.state != "starting" for worker in self._members.values()) >= self._size

    def is_starting(self, worker: Worker) -> bool:
        with self._lock:
            return worker.number in self._members and worker.state == "starting"

    @property
    def postponed(self) -> tuple[Reason, ...]:
        """Why workers are to be replaced that must stay, because the function is paused."""
        with self._lock:
            if not self._is_paused():
                return ()
            waiting = [reasons for number, reasons in self._postponed.items() if number in self._members]
            return tuple(dict.fromkeys(reason for reasons in waiting for reason in reasons))

    def pids(self) -> list[int]:
        """Those of the workers that take calls now and have had one: in its first one, a library counts its CPUs."""
        with self._lock:
            return [worker.pid for worker in self._up() if worker.calls][: self._size]

    def listed(self) -> list[tuple[Worker, WorkerState, bool, int]]:
        with self._lock:
            return [(one, one.state, one.worn, one.calls) for _, one in sorted(self._members.items())]

    # Under the lock: who gets a worker

    def _take(self, holder: Holder | None = None) -> Worker | None:
        """Take an idle worker for a call, the one that was used last: its caches are warm. None if there is none.

        The holder has it from that moment on. Between two calls of functions no signal handler runs, whose exception
        would leave a worker taken that nobody has.
        """
        members = self._members.values()
        if len(members) > self._size and sum(worker.state in _BUSY for worker in members) >= self._size:
            return None
        for worker in reversed(members):
            if worker.state == "idle":
                if holder is not None:
                    holder.worker, holder.held = worker, True
                worker.state = "busy"
                if self._circuit.state == "open":
                    self._circuit.admitted(worker)
                return worker
        return None

    def _make_idle(self, worker: Worker) -> None:
        self._members.move_to_end(worker.number)
        worker.state = "idle"

    def _hand_over(self) -> None:
        while self._waiters:
            if self._circuit.state != "closed" and (refusal := self._refusal()) is not None:
                refused = [waiter for waiter in self._waiters if not waiter.claim.limits.again]
                self._answers.extend((waiter, copy.copy(refusal)) for waiter in refused if self._waiters.remove(waiter))
            worker = self._take(next(iter(self._waiters)).holder) if self._waiters else None
            if worker is None:
                return
            self._answers.append((self._waiters.popleft(), worker))

    def _refusal(self) -> CircuitOpen | None:
        left = None if self.gone else self._circuit.retry_after(time.monotonic())
        return None if left is None else CircuitOpen(self._name, failures=self._circuit.failures, retry_after=left)

    def _judge(self, worker: Worker, *, counts: bool) -> None:
        """Note what an answer says about the model."""
        if counts:
            self._failures = 0
        if self._circuit.state == "closed" and not self._circuit.failures:
            return  # as after almost every call
        verdict: Verdict = "succeeded" if counts else "inconclusive"
        if self._circuit.ended((worker,), verdict, time.monotonic()) == "closed":
            self._events.append(telemetry.CircuitClosed(guard=self._name))

    # Under the lock: which are started and ended

    @contextmanager
    def _change(self) -> Iterator[float]:
        """Take the lock to change something; then see to what follows from it."""
        with self._lock:
            now = time.monotonic()
            yield now
            self._start_missing_and_end_worn(now)
            self._hand_over()
        self._emit_all()

    def _up(self) -> list[Worker]:
        return [worker for worker in self._members.values() if worker.state in {"idle", "busy"}]

    def _start_missing_and_end_worn(self, now: float) -> None:
        """Start the workers that are missing and end those that have been replaced, as far as it is time for it.

        Of a mold that is gone none is started, and all end.
        """
        if self.gone:
            self._end(list(self._members.values()))
        if self.gone or self.presence == "ended":
            return
        up, replaces = self._up(), not self._is_paused()
        if replaces and len(up) > self._size:
            self._end([worker for worker in up if worker.worn][: len(up) - self._size])
        if self._failed_starts >= FAILED_STARTS:
            self._give_up()
            return
        workers = self._members.values()
        to_replace = [worker for worker in workers if worker.worn] if replaces else []
        self._keeps_spare = self._keeps_spare or bool(to_replace)
        spare = self._spare if self._keeps_spare else 0
        # While workers keep dying, one is enough: for the probe.
        wanted = self._size + spare if self._circuit.state == "closed" else 1
        # Never more than one above the size, so a worn worker's last call may delay the start of the next spare one.
        staying = len(workers) - len(to_replace)
        missing = min(wanted - staying, self._size + 1 - len(workers))
        if missing <= 0:
            return
        if now < self._start_at:
            self._mold.look_again_later(self._start_at - now)
            return
        if to_replace:
            missing = 0 if any(worker.state == "starting" for worker in workers) else 1
        for _ in range(missing):
            self._last += 1
            worker = self._members[self._last] = Worker(self._last)
            self._mold.start_worker(worker)

    def _give_up(self) -> None:
        """Tell the mold: once, and again when no worker is left."""
        up = len(self._up())
        if self._gave_up is None or self._gave_up > up == 0:
            self._gave_up = up
            self._mold.give_up()

    def _end(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            if worker.state == "busy":
                worker.state = "retiring"
            elif worker.state == "idle":
                del self._members[worker.number]
                self._dismiss(worker)

    def _dismiss(self, worker: Worker) -> None:
        """Let an idle worker end: it reads the end of its channel."""
        cause: WorkerEndCause = "idle" if self.presence == "ended" else "recycled"
        if self.gone:
            cause = "closed"
        worker.channel.close()
        self._count(worker, cause, "")

    def _take_out(self, worker: Worker, cause: WorkerEndCause, how: str, now: float, *, blame: bool) -> None:
        """Forget a worker that has ended. Others are started: now, or after the backoff."""
        if self._members.pop(worker.number, None) is None:
            return
        self._keeps_spare = True
        if worker.state == "starting":
            self._failed_starts += 1
            self.presence = "present"
        else:  # else its start was not reported either
            self._count(worker, cause, how)
        if not blame:
            self._circuit.forget(worker)
            return
        self._failures += 1
        if self._failures > 1:
            self._start_at = now + self._backoff.seconds(self._failures - 1, random.random())  # noqa: S311 - jitter
        circuit = self._circuit
        if worker.state in _BUSY and circuit.ended((worker,), "failed", now) == "opened":
            retry = circuit.retry_after(now) or 0.0
            self._events.append(
                telemetry.CircuitOpened(guard=self._name, failures=circuit.failures, retry_after=retry, error=how)
            )

    # Under the lock: what is reported

    def _postpone(self, worker: Worker, reasons: tuple[Reason, ...]) -> None:
        """Remember why a worker is to be replaced, and report each reason once."""
        self._postponed[worker.number] = reasons
        if fresh := tuple(reason for reason in reasons if reason not in self._reported):
            self._reported.update(fresh)
            self._note(telemetry.ReloadPostponed, worker, reasons=fresh, cause="paused", seconds=None)

    def _count(self, worker: Worker, cause: WorkerEndCause, how: str) -> None:
        self.counts[cause] += 1
        self._note(telemetry.WorkerEnded, worker, cause=cause, detail=how, age=time.monotonic() - worker.born)

    def _note(self, kind: Callable[..., Event], worker: Worker, **details: Any) -> None:
        """Report an event of a worker, once the lock is free."""
        self._events.append(kind(guard=self._name, generation=self._generation, worker=worker.pid, **details))

    # Outside of it

    def _emit_all(self) -> None:
        """Answer who waits, and emit what has happened: what that brings about never runs while the lock is held."""
        with self._lock:
            answers, self._answers = self._answers, []
            events, self._events = self._events, []
        for waiter, answer in answers:
            if isinstance(answer, Exception):
                waiter.set_exception(answer)
            else:
                waiter.set_result(answer)
        for event in events:
            telemetry.emit(event)
