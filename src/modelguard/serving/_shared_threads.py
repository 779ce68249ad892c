"""Threads and a timer that all queues and isolated functions of a process share, and the list of its batchers.

If each queue kept threads of its own, a service that makes an instance for each request would have the idle threads of
ten seconds: 1,600 at 160 requests a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeAlias

from modelguard.errors import Overloaded
from modelguard.runtime import fork
from modelguard.runtime.background import start_thread
from modelguard.runtime.fork import Wakeup, WeakRegistry
from modelguard.serving import deadlines
from modelguard.serving._queue import BatchQueue
from modelguard.serving._requests import FutureRequest, Request, deliver
from modelguard.serving.status import Batch
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
_lock = threading.Lock()
_registered = False


def add(batcher: Registered) -> None:
    """Reset a batcher in forked children, and close it at the end of the process.

    The hooks are installed with the first batcher, not on import.
    """
    global _registered
    _batchers.add(batcher)
    if _registered:
        return
    with _lock:
        if _registered:
            return
        _registered = True
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
_LINGER = 10.0
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
        return inbox.get(timeout=_LINGER)
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
            woken = wakeup.wait(min(pause, _LINGER)) or pause != math.inf

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


# The queue behind its lock: what may interrupt it is deferred, and what it decided is delivered without the lock.


class LockedQueue:
    """A queue that several threads use. The garbage collector and signal handlers may call in at any point.

    Args:
        queue: The queue.
        on_drained: Called with the lock held when it is closed, and nothing waits or runs any more.

    Attributes:
        queue: Used with the lock held, except where its own attributes say otherwise.
        lock: Reentrant, because a finalizer may want it in a thread that holds it. What that asks for is deferred until
            the state is consistent again; see :meth:`cancel`.
        deferred: Requests and plain calls to cancel, and whether to notify their callers.
    """

    def __init__(self, queue: BatchQueue, on_drained: Callable[[], object]) -> None:
        self.queue = queue
        self.lock = threading.RLock()
        self.deferred: deque[tuple[Request | asyncio.Future[Any], bool]] = deque()
        self._on_drained = on_drained

    @property
    def interrupted(self) -> bool:
        """Whether this thread holds the lock: then a finalizer or signal handler asks, in the middle of a change."""
        owned: bool = self.lock._is_owned()  # type: ignore[attr-defined]  # noqa: SLF001 - as threading.Condition does
        return owned

    def cancel(self, request: Request | asyncio.Future[Any], *, notify: bool = False) -> None:
        """Drop a request, or a plain call. With ``notify`` its caller still waits, and gets ``CallerGone``."""
        self.deferred.append((request, notify))
        if not self.interrupted:  # else the change ends first
            self.settle()

    def drop(self, request: Request) -> None:
        """:meth:`cancel` for the garbage collector, which may interrupt code that holds a lock: it waits for none.

        Who holds this one looks for what is deferred when it lets go.
        """
        self.deferred.append((request, False))
        if self.interrupted or not self.lock.acquire(blocking=False):
            return
        try:
            self._cancel_deferred()
        finally:
            self.lock.release()
        if self.queue.undelivered or self.queue.closed:
            self.settle()

    def _cancel_deferred(self) -> None:
        while self.deferred:
            one, notify = self.deferred.popleft()
            request = one if isinstance(one, Request) else self.queue.request_of(one)
            if request is not None:
                self.queue.cancel(request, notify=notify)

    def settle(self, *, callbacks_elsewhere: bool = False) -> None:
        """Do what was deferred, and deliver the failures that the queue decided on. Called without the lock.

        Args:
            callbacks_elsewhere: Whether to run callbacks of futures in another thread, so that this one is on time.
        """
        queue = self.queue
        with self.lock:
            self._cancel_deferred()
            pairs, queue.undelivered = queue.undelivered, []
            drained = queue.closed and queue.idle
        if callbacks_elsewhere:
            futures = [pair for pair in pairs if isinstance(pair[0], FutureRequest)]
            with contextlib.suppress(RuntimeError):  # no thread can be started: deliver them here
                if futures:
                    start_thread(partial(deliver, *_columns(futures)), "modelguard-deliver")
                    pairs = [pair for pair in pairs if not isinstance(pair[0], FutureRequest)]
        if pairs:
            deliver(*_columns(pairs))
        if drained:
            with self.lock:
                if queue.closed and queue.idle:  # not reopened meanwhile
                    self._on_drained()


def _columns(pairs: list[tuple[Request, Any]]) -> tuple[list[Request], list[Any]]:
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


#: A batch; or seconds after which to ask again; or None until there is something to do.
Work: TypeAlias = Batch | float | None


class BatchThreads:
    """Starts threads when there is work, at most so many.

    Args:
        name: Of the batched function.
        locked: What waits.
        take: Gives the next batch to a free thread. Called with the lock held.
        compute: Computes a batch, without the lock. Never raises.
        most: Most threads.
        lingers: Whether a thread without work waits for some, before it goes to other queues.

    Attributes:
        idle: Wakeups of the threads without work. Who takes one out sets it afterwards, without the lock.
        count: How many threads there are.
        most: Most threads.
    """

    def __init__(
        self,
        name: str,
        locked: LockedQueue,
        take: Callable[[], Work],
        compute: Callable[[Batch], object],
        *,
        most: int,
        lingers: bool,
    ) -> None:
        self._name = name
        self._locked = locked
        self._queue = locked.queue
        self._take = take
        self._compute = compute
        self._lingers = lingers
        self.most = most
        self.idle: list[Wakeup] = []
        self.count = 0
        self._wakeups: set[Wakeup] = set()  # of all threads

    def find(self) -> Wakeup | None:
        """The wakeup of a thread without work. If there is none, start a thread, if more are allowed. With the lock."""
        if self.idle:
            return self.idle.pop()
        if self.count < self.most:
            self.start()
        return None

    def start(self) -> None:
        """Start a thread. Called with the lock held, and only if there are not too many."""
        name = f"modelguard-batch-{self._name}"
        thread = SharedThread(self._run, name)
        self.count += 1
        try:
            if sys.is_finalizing():  # start() would wait for a thread that never runs
                raise RuntimeError("the interpreter is shutting down")  # noqa: TRY301
            thread.start()
        except RuntimeError as error:
            self.count -= 1
            if not self.count:
                self._queue.refuse_waiting(Overloaded(f"{self._name}(): cannot start a thread: {error}"))
        except BaseException:
            self.count -= thread.ident is None
            raise

    def take_idle(self) -> list[Wakeup]:
        """The wakeups of all threads without work, to be set without the lock. Called with the lock held."""
        idle, self.idle = self.idle, []
        return idle

    def wake_all(self) -> None:
        """Have every thread look for work, also one that was chosen and whose wakeup was never set."""
        for wakeup in tuple(self._wakeups):
            wakeup.set()

    # In each thread

    def _run(self) -> None:
        wakeup = Wakeup()
        self._wakeups.add(wakeup)
        try:
            while self._run_once(wakeup):
                pass
        except BaseException:  # noqa: BLE001 - a fault in this library; another thread takes over
            with contextlib.suppress(BaseException):
                logger.exception("modelguard: a thread of %s() failed", self._name)
            with self._locked.lock:
                self.count -= 1
                if wakeup in self.idle:
                    self.idle.remove(wakeup)
                other = None if self._queue.idle else self.find()
            if other is not None:
                other.set()
        finally:
            self._wakeups.discard(wakeup)

    def _run_once(self, wakeup: Wakeup) -> bool:
        """Compute a batch, or wait for one; false if this thread has to end."""
        locked, queue = self._locked, self._queue
        other, ends = None, False
        with locked.lock:
            found = self._take()
            if isinstance(found, Batch):
                if queue.waiting or queue.inbox:  # the rest may be due before this batch has ended
                    other = self.find()
            elif found is None and (queue.closed or not self._lingers):
                self.count -= 1
                ends = True
            else:
                self.idle.append(wakeup)
            if queue.inbox and not isinstance(found, Batch):  # since it was emptied, by a call that saw this one work
                if ends:
                    self.count += 1
                else:
                    self.idle.remove(wakeup)
                return True
        if other is not None:
            other.set()
        if queue.undelivered or locked.deferred:
            locked.settle()
        if not isinstance(found, Batch):
            return not ends and self._wait_for_work(wakeup, found)
        self._compute(found)
        return True

    def _wait_for_work(self, wakeup: Wakeup, seconds: float | None) -> bool:
        """Wait until there is work, or a batch is due; false if none came and the thread has to end."""
        woken = wakeup.wait(_LINGER if seconds is None else min(seconds, _LINGER))
        with self._locked.lock:
            if wakeup in self.idle:
                self.idle.remove(wakeup)
            if woken or seconds is not None or self._queue.waiting:
                return True
            self.count -= 1
            if not self._queue.inbox:  # looked at once, after the count: a call that comes later misses a thread
                return False
            self.count += 1
            return True
