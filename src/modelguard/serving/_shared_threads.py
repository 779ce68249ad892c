"""What all queues and isolated functions of a process share: threads for short work, a timer, the list of batchers."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

from modelguard.runtime import fork
from modelguard.runtime.background import start_thread
from modelguard.runtime.fork import Wakeup, WeakRegistry
from modelguard.serving import deadlines
from modelguard.telemetry import logger

# The batchers of this process: for readiness probes, for the end of the process, and for forks.


class Registered(Protocol):
    """A batcher, as the rest of the process uses it. Its module imports this one."""

    @property
    def name(self) -> str: ...
    @property
    def ready(self) -> bool: ...
    def close(self, timeout: float, *, abandon: bool = False) -> None: ...
    def after_fork_in_child(self) -> None: ...
    def check_time(self) -> None: ...


#: Used without a lock: a finalizer may run at any point of :func:`live`, in its thread, and end the last request of a
#: closed batcher, which is discarded then.
_batchers: WeakRegistry[Registered] = WeakRegistry()


def add(batcher: Registered) -> None:
    """Reset a batcher in forked children, and close it at the end of the process."""
    _batchers.add(batcher)
    fork.before_exit("batches", _close_all)


def discard(batcher: Registered) -> None:
    """Forget a batcher that is closed for good: a readiness probe must not wait for it."""
    _batchers.discard(batcher)  # without the lock: the garbage collector may end the last stream of a closed one


def live() -> tuple[Registered, ...]:
    """The batchers of this process that are not closed for good."""
    return tuple(_batchers)


def _close_all(seconds: float) -> None:
    until = time.monotonic() + seconds
    for batcher in live():
        batcher.close(max(0.0, until - time.monotonic()), abandon=True)


def _after_in_child() -> None:
    for batcher in tuple(_batchers):
        batcher.after_fork_in_child()


fork.at_fork(fork.Rank.BATCHERS, in_child=_after_in_child)

#: How long a thread waits for another job, in seconds, and how many wait at most.
LINGER = 10.0
_MOST_IDLE = 8
#: So many entries of the timer are looked through for what is gone.
_MANY = 256


class SharedThread:
    """A job that is started once, in a thread that waits for one, or else in a new thread. Like a daemon ``Thread``.

    Args:
        target: The job. Nothing of it is kept when it has ended.
        name: The thread's name while it runs.

    Attributes:
        ident: The thread's identifier, None before the start.
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        self._target = target
        self._name = name
        self.ident: int | None = None

    def start(self) -> None:
        """Run the job.

        Raises:
            RuntimeError: The system gives no thread.
        """
        try:
            inbox, self.ident = _idle.pop()  # one operation, so no lock is needed
        except IndexError:
            inbox = SimpleQueue()
            self.ident = start_thread(partial(_serve, inbox), self._name).ident
        inbox.put(self)

    def run(self) -> None:
        threading.current_thread().name = self._name
        self._target()


_Inbox = SimpleQueue[SharedThread]
_idle: list[tuple[_Inbox, int]] = []


def _serve(inbox: _Inbox) -> None:
    me = inbox, threading.get_ident()
    job: SharedThread | None = inbox.get()
    while job is not None:
        job.run()
        del job  # nothing of it may be kept alive while the thread waits
        job = _next_job(inbox, me)


def _next_job(inbox: _Inbox, me: tuple[_Inbox, int]) -> SharedThread | None:
    if len(_idle) >= _MOST_IDLE:
        return None
    threading.current_thread().name = "modelguard-idle"
    _idle.append(me)
    try:
        return inbox.get(timeout=LINGER)
    except Empty:
        try:
            _idle.remove(me)
        except ValueError:
            return inbox.get()  # a job was handed over in this very moment
        return None


class Watch:
    """Calls ``check`` when something is due: deadlines that pass and batches that overstay, whatever the model does.

    One timer of the process starts a shared thread at the right time. It keeps nothing that it watches alive.

    Args:
        name: Of the batched function.
        lock: Held for :meth:`schedule` and while ``check`` runs.
        check: Does what is due at a time, and returns when something is due next; infinity for never.
        after: Called after each check, without the lock.
    """

    def __init__(
        self, name: str, lock: threading.RLock, check: Callable[[float], float], after: Callable[[float], object]
    ) -> None:
        self._name = name
        self._lock = lock
        self._check = check
        self._after = after
        self.due = math.inf

    def schedule(self, at: float) -> None:
        """Check at this time, which is before :attr:`due`. Called with the lock held."""
        self.due = at
        try:
            _timer.add(at, self)
        except RuntimeError:  # no thread can be started: the others look at the deadlines whenever they are free
            self.due = math.inf

    def begin(self) -> None:
        SharedThread(self._look, f"modelguard-deadlines-{self._name}").start()

    def _look(self) -> None:
        now = deadlines.clock()
        try:
            with self._lock:
                if self.due > now:  # it was checked before, and there is another entry for what is due next
                    return
                self.due = math.inf
                due = self._check(now)
                if due != math.inf:
                    self.schedule(due)
            self._after(now)
        except BaseException:  # noqa: BLE001 - a fault in this library; the next deadline has it checked again
            with contextlib.suppress(BaseException):  # a log handler that raises
                logger.exception("modelguard: the deadlines of %s() are late", self._name)


class _Timer:
    """A thread that begins checks at their times, and ends when there are none."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the garbage collector may call in at any point
        self._heap: list[tuple[float, int, weakref.ref[Watch]]] = []
        self._number = itertools.count()  # makes entries comparable
        self._sweep_at = _MANY
        self._wakeup: Wakeup | None = None

    def add(self, at: float, watch: Watch) -> None:
        """Begin a check at this time.

        Raises:
            RuntimeError: The system gives no thread.
        """
        with self._lock:
            heapq.heappush(self._heap, (at, next(self._number), weakref.ref(watch)))
            if len(self._heap) > self._sweep_at:
                self._heap = [entry for entry in self._heap if entry[2]() is not None]
                heapq.heapify(self._heap)
                self._sweep_at = max(_MANY, 2 * len(self._heap))
            if self._wakeup is None:
                wakeup = Wakeup()
                start_thread(partial(self._run, wakeup), "modelguard-deadlines")
                self._wakeup = wakeup
            elif self._heap[0][0] >= at or at <= deadlines.clock():  # a clock that was moved makes others due, too
                self._wakeup.set()

    def _run(self, wakeup: Wakeup) -> None:
        woken = True
        while True:
            now = deadlines.clock()
            with self._lock:
                due = self._pop(now)
                pause = self._heap[0][0] - now if self._heap else math.inf
                if pause == math.inf and not due and not woken:
                    self._wakeup = None
                    return
            while due:
                self._begin(due.pop())
            woken = wakeup.wait(min(pause, LINGER)) or pause != math.inf

    def _pop(self, now: float) -> list[weakref.ref[Watch]]:
        due = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[2])
        return due

    def _begin(self, reference: weakref.ref[Watch]) -> None:
        watch = reference()
        if watch is not None:
            try:
                watch.begin()
            except RuntimeError:  # no thread can be started now
                with self._lock:
                    heapq.heappush(self._heap, (deadlines.clock() + 1.0, next(self._number), reference))


_timer = _Timer()


def _renew_in_child() -> None:
    """None of these threads is in a forked child."""
    global _timer
    _timer = _Timer()
    _idle.clear()


fork.at_fork(fork.Rank.LOCKS, in_child=_renew_in_child)
