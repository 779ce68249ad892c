"""The queue behind its lock: what may interrupt it is deferred, and what it decided is delivered without the lock."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from modelguard.serving._queue import BatchQueue
from modelguard.serving._requests import FutureRequest, Request, deliver

__all__ = ["LockedQueue"]


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
