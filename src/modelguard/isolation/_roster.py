"""The workers of one mold, as the threads of the owner use them: who gets which worker, and who waits."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol, get_args

from modelguard import telemetry
from modelguard.errors import CircuitOpen, QueueFull
from modelguard.isolation import _processes
from modelguard.isolation._channel import Channel
from modelguard.isolation._claims import Waiter, WaitingLine
from modelguard.isolation._crew import Crew, End, Order, Presence, Start, WorkerState
from modelguard.telemetry import Event, Reason, WorkerEndCause

# One worker process, as its owner sees it.


#: Seconds that a call waits for the mold's report of how its worker ended.
_REPORT = 1.0


class Worker:
    """One worker process.

    Attributes:
        number: Its number.
        channel: To the worker. Whoever has taken the worker may use it.
        pid: Its process id; 0 until the mold has reported it.
        pidfd: A descriptor of the process; None if the system has none.
        born: When it was started, on the monotonic clock.
        exit: How it ended, for people; None until that is known.
    """

    def __init__(self, number: int, channel: Channel) -> None:
        self.number = number
        self.channel = channel
        self.pid = 0
        self.pidfd: int | None = None
        self.born = time.monotonic()
        self.exit: str | None = None
        self._exited = threading.Event()
        # Held while the descriptor is used: the next one that is opened gets its number, and may be another process's.
        # Reentrant: the garbage collector may end a dropped stream, and with it this process, at any point.
        self._lock = threading.RLock()

    def kill(self) -> None:
        """End it now, whatever it does."""
        with self._lock:
            if self.pidfd is not None:
                _processes.send_kill(self.pidfd)
            elif self.pid and self.exit is None:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)

    def has_exited(self, how: str) -> None:
        """Record how it ended."""
        with self._lock:
            self.exit = self.exit or how
            pidfd, self.pidfd = self.pidfd, None
            if pidfd is not None:
                os.close(pidfd)
        self._exited.set()

    def how_it_ended(self) -> str:
        """Wait shortly for the report of how it ended."""
        self._exited.wait(_REPORT)
        return self.exit or "unknown"


# What the roster of a mold's workers asks of the mold.


class MoldOrders(Protocol):
    """What the roster asks of its mold."""

    def start_worker(self, number: int) -> None:
        """Start a worker. Does not block."""
        ...

    def give_up(self) -> None:
        """No worker of this mold comes up: make another mold. Does not block."""
        ...

    def settle_later(self, seconds: float) -> None:
        """Call :meth:`Roster.settle` after so many seconds."""
        ...


class NoMold:
    """Starts nothing."""

    def start_worker(self, number: int) -> None:
        pass

    def give_up(self) -> None:
        pass

    def settle_later(self, seconds: float) -> None:
        pass


#: Seconds of ``retry_after`` where no rate is known.
_RETRY = 1.0


class MoldGone(Exception):
    """The mold has ended, and with it all of its workers."""


class Roster:
    """Hands out workers. Thread-safe.

    Args:
        name: The isolated function's name.
        crew: Decides.
        mold: Carries out.
        generation: The mold's number, for events.
        max_queue: How many calls may wait for a worker.
    """

    def __init__(self, name: str, crew: Crew, mold: MoldOrders, *, generation: int, max_queue: int) -> None:
        self._name = name
        self._crew = crew
        self._mold = mold
        self._generation = generation
        self._max_queue = max_queue
        # Reentrant: the garbage collector may close a dropped generator at any point, also under this lock.
        self._lock = threading.RLock()
        self._workers: dict[int, Worker] = {}
        self._waiters = WaitingLine[Worker]()
        self._gone = False
        self._events: list[Event] = []
        self._postponed: dict[int, tuple[Reason, ...]] = {}
        self._reported: set[Reason] = set()
        self.counts: dict[WorkerEndCause, int] = dict.fromkeys(get_args(WorkerEndCause), 0)

    # Calls

    def take_now(self) -> Worker | None:
        """Take a free worker, if there is one and nobody waits for it. Does not block.

        Raises:
            MoldGone: Ask the next mold.
            CircuitOpen: There is no worker for this call.
        """
        with self._lock:
            if self._gone or self._crew.troubled:
                self._raise_if_refusing()
            member = None if self._waiters else self._crew.take()
            return None if member is None else self._workers[member.number]

    def request(self, waiter: Waiter[Worker]) -> Worker | None:
        """Take a free worker, or have ``waiter`` woken when there is one. Does not block.

        Raises:
            MoldGone: Ask the next mold.
            QueueFull, CircuitOpen: There is no worker for this call.
        """
        with self._lock:
            worker = self.take_now()
            if worker is not None:
                return worker
            if len(self._waiters) >= self._max_queue and not waiter.admitted:
                raise QueueFull(self._name, queued=len(self._waiters), retry_after=_RETRY)
            self._waiters.append(waiter)
            if self._crew.presence == "ended":
                self._call_back()
            return None

    def withdraw(self, waiter: Waiter[Worker]) -> bool:
        """Stop waiting; false if ``waiter`` has its worker or its error already."""
        with self._lock:
            return self._waiters.remove(waiter)

    def release(self, worker: Worker, *, worn: tuple[Reason, ...], counts: bool = True) -> None:
        """Give a worker back after its call.

        Args:
            worker: The worker.
            worn: Why it asked for its replacement; empty if it did not.
            counts: Whether this shows that the model works; an abandoned call does not.
        """
        with self._lock:
            crew = self._crew
            troubled = crew.troubled
            if worn and crew.paused:
                self._postpone(worker, worn)
            ended = crew.answered(worker.number, worn=bool(worn), counts=counts)
            if ended:
                self._dismiss(worker)
            if troubled and crew.circuit.state == "closed":
                self._events.append(telemetry.CircuitClosed(guard=self._name))
            if worn or ended or troubled:
                self._act(crew.settle(time.monotonic()))
            if self._waiters:
                self._hand_over()
        if self._events:
            self._emit_all()

    def lose(self, worker: Worker, cause: WorkerEndCause, *, blame: bool = True) -> str:
        """Record that a worker has ended in its call, or end it; returns how it ended, for people.

        Args:
            worker: The worker.
            cause: ``"crashed"`` if it has ended by itself; anything else ends it.
            blame: Whether it may have been the call's fault.
        """
        if cause != "crashed":
            worker.kill()
        how = worker.how_it_ended() if cause == "crashed" else cause
        self._remove(worker.number, worker, cause, how, blame=blame and cause != "cancelled")
        worker.channel.close()
        return how

    # Reports of the mold

    def add(self, worker: Worker) -> None:
        """A worker is being started."""
        with self._lock:
            self._workers[worker.number] = worker

    def ready(self, worker: Worker) -> None:
        """A worker can take calls."""
        with self._lock:
            if self._crew.started(worker.number):
                self._workers.pop(worker.number, None)
                worker.channel.close()
                return
            seconds = time.monotonic() - worker.born
            self._events.append(
                telemetry.WorkerStarted(
                    guard=self._name, generation=self._generation, worker=worker.pid, seconds=seconds
                )
            )
            self._act(self._crew.settle(time.monotonic()))
            self._hand_over()
        self._emit_all()

    def not_started(self, number: int, how: str) -> None:
        """A worker could not be forked."""
        worker = self._workers.get(number)
        if worker is not None:
            worker.has_exited(how)
            worker.channel.close()
        self._remove(number, worker, "crashed", how, blame=True)

    def exited(self, worker: Worker, how: str) -> None:
        """A worker's process has ended. If it runs a call, its caller finds out by itself."""
        worker.channel.hang_up()  # a program that the model has started may hold the other end open
        worker.has_exited(how)
        with self._lock:  # one look: no call may take it in between
            member = self._crew.members.get(worker.number)
            if member is None or member.state not in {"starting", "idle"}:
                return
            delay = self._take_out(worker.number, worker, "crashed", how, blame=True)
            worker.channel.close()
        self._emit_all(then_settle_in=delay)

    def mold_ended(self, how: str) -> None:
        """The mold has ended. Its workers end with it."""
        with self._lock:
            self._gone = True
            waiters, self._waiters = list(self._waiters), WaitingLine[Worker]()
            workers = list(self._workers.values())
            for order in self._crew.close():
                if isinstance(order, End):
                    self._workers.pop(order.number).channel.close()
        for waiter in waiters:
            waiter.error = MoldGone()
            waiter.wake()
        for worker in workers:
            worker.has_exited(how)

    def end_until_next_call(self) -> list[int] | None:
        """End all workers until the next call; their numbers. None, and nothing ends, if one has something to do."""
        with self._lock:
            if self._gone or self._waiters or self._crew.presence != "present":
                return None
            orders = self._crew.end_until_next_call()
            if orders is None:
                return None
            self._act(orders)
        self._emit_all()
        return [order.number for order in orders]

    def call_back(self) -> None:
        """Start the workers that have ended until the next call."""
        with self._lock:
            if self._crew.presence == "ended":
                self._call_back()

    def close(self) -> None:
        """End the idle workers, and each of the others after its call."""
        with self._lock:
            self._gone = True
            self._act(self._crew.close())
        self._emit_all()

    def settle(self) -> None:
        """Do what has become due; also what a pause has held back until now."""
        with self._lock:
            if not self._crew.paused:
                self._postponed.clear()
            self._act(self._crew.settle(time.monotonic()))
            self._hand_over()
        self._emit_all()

    def detach(self) -> None:
        """The mold has been ended: refer to it no more."""
        self._mold = NoMold()

    # What there is

    @property
    def is_ready(self) -> bool:
        """Whether a worker can take calls."""
        with self._lock:
            return self._crew.ready and not self._gone

    @property
    def presence(self) -> Presence:
        """Whether there are workers, or there will be for the next call."""
        return self._crew.presence

    @property
    def is_complete(self) -> bool:
        """Whether all workers have come up."""
        with self._lock:
            return self._crew.complete

    def is_starting(self, worker: Worker) -> bool:
        """Whether a worker has not come up yet."""
        with self._lock:
            member = self._crew.members.get(worker.number)
            return member is not None and member.state == "starting"

    @property
    def postponed(self) -> tuple[Reason, ...]:
        """Why workers are to be replaced that must stay, because the function is paused."""
        with self._lock:
            if not self._crew.paused:
                return ()
            waiting = [reasons for number, reasons in self._postponed.items() if number in self._workers]
            return tuple(dict.fromkeys(reason for reasons in waiting for reason in reasons))

    def listed(self) -> list[tuple[Worker, WorkerState, bool, int]]:
        """Each worker, what it does, whether it is to be replaced, and its calls."""
        with self._lock:
            members = [(self._workers.get(one.number), one) for one in self._crew.members.values()]
            return [(worker, one.state, one.worn, one.calls) for worker, one in members if worker is not None]

    # Under the lock

    def _call_back(self) -> None:
        now = time.monotonic()
        self._crew.call_back()
        self._act(self._crew.settle(now))
        if self._crew.start_at > now:
            self._mold.settle_later(self._crew.start_at - now)

    def _postpone(self, worker: Worker, reasons: tuple[Reason, ...]) -> None:
        """Remember why a worker is to be replaced, and report each reason once."""
        self._postponed[worker.number] = reasons
        fresh = tuple(reason for reason in reasons if reason not in self._reported)
        if fresh:
            self._reported.update(fresh)
            self._events.append(
                telemetry.ReloadPostponed(
                    guard=self._name,
                    generation=self._generation,
                    reasons=fresh,
                    cause="paused",
                    seconds=None,
                    worker=worker.pid,
                )
            )

    def _raise_if_refusing(self) -> None:
        if self._gone:
            raise MoldGone
        left = self._crew.refusal(time.monotonic())
        if left is not None:
            raise CircuitOpen(self._name, failures=self._crew.circuit.failures, retry_after=left)

    def _hand_over(self) -> None:
        while self._waiters:
            left = self._crew.refusal(time.monotonic()) if self._crew.troubled else None
            member = None if left is not None else self._crew.take()
            if left is None and member is None:
                return
            waiter = self._waiters.popleft()
            if left is not None:
                waiter.error = CircuitOpen(self._name, failures=self._crew.circuit.failures, retry_after=left)
            else:
                assert member is not None  # noqa: S101 - for the checkers
                waiter.worker = self._workers[member.number]
            waiter.wake()

    def _act(self, orders: Iterable[Order]) -> None:
        for order in orders:
            if isinstance(order, Start):
                self._mold.start_worker(order.number)
            elif isinstance(order, End):
                self._dismiss(self._workers[order.number])
            else:
                self._mold.give_up()

    def _dismiss(self, worker: Worker) -> None:
        """Let an idle worker end: it reads the end of its channel."""
        cause: WorkerEndCause = "idle" if self._crew.presence == "ended" else "recycled"
        if self._gone:
            cause = "closed"
        self._workers.pop(worker.number, None)
        worker.channel.close()
        self._count(worker, cause, "")

    def _take_out(self, number: int, worker: Worker | None, cause: WorkerEndCause, how: str, *, blame: bool) -> float:
        """Forget a worker that has ended, and start others; returns after how many seconds to look again."""
        now = time.monotonic()
        was_open = self._crew.circuit.state == "open"
        if self._workers.pop(number, None) is not None and worker is not None:
            self._count(worker, cause, how)
        self._crew.lost(number, now, draw=random.random(), blame=blame)  # noqa: S311 - jitter
        circuit = self._crew.circuit
        if circuit.state == "open" and not was_open:
            retry = circuit.retry_after(now) or 0.0
            self._events.append(
                telemetry.CircuitOpened(guard=self._name, failures=circuit.failures, retry_after=retry, error=how)
            )
        self._act(self._crew.settle(now))
        self._hand_over()
        return self._crew.start_at - now

    def _count(self, worker: Worker, cause: WorkerEndCause, how: str) -> None:
        self.counts[cause] += 1
        age = time.monotonic() - worker.born
        self._events.append(
            telemetry.WorkerEnded(
                guard=self._name, generation=self._generation, worker=worker.pid, cause=cause, detail=how, age=age
            )
        )

    # Outside of it

    def _remove(self, number: int, worker: Worker | None, cause: WorkerEndCause, how: str, *, blame: bool) -> None:
        with self._lock:
            delay = self._take_out(number, worker, cause, how, blame=blame)
        self._emit_all(then_settle_in=delay)

    def _emit_all(self, then_settle_in: float = 0.0) -> None:
        """Emit what has happened: hooks never run while the lock is held."""
        with self._lock:
            events, self._events = self._events, []
        for event in events:
            telemetry.emit(event)
        if then_settle_in > 0:
            self._mold.settle_later(then_settle_in)
