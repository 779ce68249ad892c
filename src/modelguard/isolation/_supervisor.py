"""One thread per process that starts molds, waits for what they report, and keeps their timers.

It lives as long as the process, which the parent-death signal of the molds needs: the kernel sends that when the thread
that started them ends.
"""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from modelguard.telemetry import logger

__all__ = ["Supervisor", "supervisor"]

Work = Callable[[], object]


class Supervisor:
    """Runs work in its thread: at once, later, or when a descriptor can be read."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.RLock()  # reentrant: the garbage collector may call in, for a function that was dropped
        self._running = False
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)  # noqa: FBT003 - its only parameter
        self._wake.setblocking(False)  # noqa: FBT003 - its only parameter
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain)
        self._work: deque[Work] = deque()
        self._timers: list[tuple[float, int, Work]] = []
        self._count = itertools.count()

    def call(self, work: Work) -> None:
        """Run ``work`` in the thread, after what was given to it before."""
        self._work.append(work)
        if not self._running:
            with self._lock:
                if not self._running:
                    self._start(work)
        with suppress(BlockingIOError):
            self._wake.send(b"\0")

    def _start(self, work: Work) -> None:
        self._running = True
        try:
            threading.Thread(target=self._run, name="modelguard-isolation", daemon=True).start()
        except BaseException:  # the system gives no thread now; the next call tries again
            self._running = False
            with suppress(ValueError):
                self._work.remove(work)
            raise

    def later(self, seconds: float, work: Work) -> None:
        """Run ``work`` after so many seconds."""
        self.call(lambda: heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._count), work)))

    def flush(self, timeout: float) -> None:
        """Wait until it has done what was given to it before, at most so many seconds."""
        done = threading.Event()
        self.call(done.set)
        done.wait(timeout)

    # In its thread

    def watch(self, fd: int, work: Work) -> None:
        """Run ``work`` whenever ``fd`` can be read. Only in its thread."""
        self.forget(fd)  # an earlier descriptor of that number, which was closed while it was watched
        self._selector.register(fd, selectors.EVENT_READ, work)

    def forget(self, fd: int) -> None:
        """Watch ``fd`` no more; before it is closed. Only in its thread."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            self._woken.recv(4096)

    def _run(self) -> None:
        while True:
            left = None if not self._timers else max(0.0, self._timers[0][0] - time.monotonic())
            for key, _ in self._selector.select(left):
                if self._selector.get_map().get(key.fd) is key:  # else the work before has closed it
                    self._attempt(key.data)
                del key  # while it waits, the thread keeps nothing alive
            while self._timers and self._timers[0][0] <= time.monotonic():
                self._attempt(heapq.heappop(self._timers)[2])
            while self._work:
                self._attempt(self._work.popleft())

    @staticmethod
    def _attempt(work: Work) -> None:
        try:
            work()
        except BaseException:  # noqa: BLE001 - the fault of one mold must not stop the supervision of the others
            with suppress(BaseException):  # nor may a log handler that raises
                logger.exception("modelguard could not supervise an isolated function")

    def abandon(self) -> None:
        """In a forked child: close the copies of the parent's descriptors. The thread does not exist there."""
        self._selector.close()
        self._woken.close()
        self._wake.close()


_supervisor: Supervisor | None = None
_making = threading.RLock()  # reentrant, as above


def supervisor() -> Supervisor:
    """The supervisor of this process."""
    global _supervisor
    with _making:
        if _supervisor is None or _supervisor.pid != os.getpid():
            made = Supervisor()
            if _supervisor is not None and _supervisor.pid == os.getpid():  # the collector has asked for one meanwhile
                made.abandon()
                return _supervisor
            if _supervisor is not None:
                _supervisor.abandon()
            _supervisor = made
        return _supervisor


def _after_fork_in_child() -> None:
    global _making
    _making = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
