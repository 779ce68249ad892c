"""The threads that compute the batches of a queue: when one starts, waits for work, and ends.

A thread that has had no work for a while ends, and the next item starts another one. So an idle batcher costs nothing,
and one that nobody refers to any more can be collected.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from modelguard._threads import Wakeup
from modelguard.errors import Overloaded
from modelguard.serving._queue import BatchQueue
from modelguard.serving._requests import FutureRequest, Request, deliver
from modelguard.serving._shared_threads import SharedThread
from modelguard.serving.status import Batch
from modelguard.telemetry import logger

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
        deferred: Requests to cancel, and whether to notify their callers.
    """

    def __init__(self, queue: BatchQueue, on_drained: Callable[[], object]) -> None:
        self.queue = queue
        self.lock = threading.RLock()
        self.deferred: deque[tuple[Request, bool]] = deque()
        self._on_drained = on_drained

    @property
    def interrupted(self) -> bool:
        """Whether this thread holds the lock: then a finalizer or signal handler asks, in the middle of a change."""
        owned: bool = self.lock._is_owned()  # type: ignore[attr-defined]  # noqa: SLF001 - as threading.Condition does
        return owned

    def cancel(self, request: Request, *, notify: bool = False) -> None:
        """Drop a request. With ``notify`` its caller still waits, and gets ``CallerGone``."""
        if self.interrupted:  # the change ends first
            self.deferred.append((request, notify))
            return
        with self.lock:
            self.queue.cancel(request, notify=notify)
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
            request, notify = self.deferred.popleft()
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
                    threading.Thread(target=deliver, args=_columns(futures), daemon=True).start()
                    pairs = [pair for pair in pairs if not isinstance(pair[0], FutureRequest)]
        if pairs:
            deliver(*_columns(pairs))
        if drained:
            with self.lock:
                if queue.closed and queue.idle:  # not reopened meanwhile
                    self._on_drained()


def _columns(pairs: list[tuple[Request, Any]]) -> tuple[list[Request], list[Any]]:
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


#: Seconds for which a thread waits for work.
_LINGER = 10.0

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
        """Compute batches until there has been no work for a while."""
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
                other = self.find() if queue.waiting else None  # the rest may be due before this batch has ended
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
