"""Calls whose caller does not block: a few threads make them, one for each worker."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from modelguard.errors import DeadlineExceeded, GuardClosed, QueueFull
from modelguard.telemetry import logger

__all__ = ["Submitted"]

#: Seconds of ``retry_after`` where no rate is known.
_RETRY = 1.0

#: Seconds after which a thread without work ends.
_IDLE = 60.0


class Submitted:
    """A queue of calls, and the threads that make them.

    Args:
        name: The isolated function's name.
        threads: How many calls run at a time.
        max_queue: How many calls may wait.
    """

    def __init__(self, name: str, *, threads: int, max_queue: int) -> None:
        self._name = name
        self._most = threads
        self._max_queue = max_queue
        self._lock = threading.Lock()
        self._filled = threading.Condition(self._lock)
        self._queue: deque[tuple[Future[Any], Callable[[], Any], float]] = deque()
        self._threads = 0
        self._idle = 0
        self._closed = False

    def submit(self, work: Callable[[], Any], until: float) -> Future[Any]:
        """Run ``work`` in one of the threads, unless ``until`` (monotonic) comes first.

        Raises:
            QueueFull: Too many calls wait.
            GuardClosed: After :meth:`close`.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise GuardClosed(self._name)
            if len(self._queue) >= self._max_queue:
                raise QueueFull(self._name, queued=len(self._queue), retry_after=_RETRY)
            self._queue.append((future, work, until))
            self._filled.notify()
            # Threads are idle until they have taken a call: one that was woken for another call does not count.
            if len(self._queue) > self._idle and self._threads < self._most:
                self._start_thread()
        return future

    def _start_thread(self) -> None:
        self._threads += 1
        try:
            threading.Thread(target=self._run, name="modelguard-isolated-call", daemon=True).start()
        except RuntimeError:  # the system gives no thread now
            self._threads -= 1
            if not self._threads:  # nobody would make the call
                self._queue.pop()
                raise

    def close(self) -> None:
        """Admit nothing more. What waits is refused with ``GuardClosed``."""
        with self._lock:
            self._closed = True
            waiting, self._queue = list(self._queue), deque()
            self._filled.notify_all()
        for future, _, _ in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(GuardClosed(self._name))

    def reopen(self) -> None:
        """Admit calls again."""
        with self._lock:
            self._closed = False

    @property
    def waiting(self) -> int:
        """Calls that no thread has begun."""
        return len(self._queue)

    def _run(self) -> None:
        while (one := self._next()) is not None:
            try:
                self._make(*one)
            except BaseException:  # noqa: BLE001 - whatever a callback of a future raises, the next call is made
                with suppress(BaseException):  # also if a log handler raises
                    logger.exception("modelguard: a callback of a submitted call failed")
            del one  # results must not live until the next call

    def _next(self) -> tuple[Future[Any], Callable[[], Any], float] | None:
        with self._lock:
            self._idle += 1
            self._filled.wait_for(lambda: self._queue or self._closed, _IDLE)  # another thread may have been quicker
            self._idle -= 1
            if self._queue:
                return self._queue.popleft()
            self._threads -= 1
            return None

    def _make(self, future: Future[Any], work: Callable[[], Any], until: float) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            if time.monotonic() > until:
                raise DeadlineExceeded(self._name, waited=0.0)  # noqa: TRY301 - like any other failure
            result = work()
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            future.set_exception(error)
        else:
            future.set_result(result)
