"""The threads that compute the batches of a queue: when one starts, waits for work, and ends.

A thread that has had no work for a while ends, and the next item starts another one. So an idle batcher costs nothing,
and one that nobody refers to any more can be collected.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import TypeAlias

from modelguard._wakeup import Wakeup
from modelguard.errors import Overloaded
from modelguard.serving._batches import Batch
from modelguard.serving._locked_queue import LockedQueue
from modelguard.serving._shared_threads import SharedThread
from modelguard.telemetry import logger

__all__ = ["BatchThreads", "Work"]

#: Seconds after which a thread without work ends.
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
        shared: Whether they go to other queues as soon as this one has no work, as for a method's instance.

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
        shared: bool,
    ) -> None:
        self._name = name
        self._locked = locked
        self._queue = locked.queue
        self._take = take
        self._compute = compute
        self._shared = shared
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
        thread: threading.Thread | SharedThread
        if self._shared:
            thread = SharedThread(self._run, name)
        else:
            thread = threading.Thread(target=self._run, name=name, daemon=True)
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
            elif found is None and (queue.closed or self._shared):
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
