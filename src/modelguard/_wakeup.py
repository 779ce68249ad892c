"""``Wakeup``: how one thread waits for another."""

from __future__ import annotations

import contextlib
import threading


class Wakeup:
    """An event for one thread, cleared by ``wait``. A plain lock, which costs less than ``threading.Event``.

    The garbage collector may set it at any point. An ``Event`` has a lock inside that is not reentrant: set in the
    middle of its own ``set()`` or ``wait()``, it would wait there for ever.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Wake the thread that waits, or that will wait next. Setting twice wakes once."""
        with contextlib.suppress(RuntimeError):  # set already
            self._lock.release()

    def wait(self, timeout: float) -> bool:
        """Wait at most so many seconds; returns whether it was set."""
        return self._lock.acquire(timeout=max(timeout, 0.0))
