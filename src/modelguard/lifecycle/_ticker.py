"""One thread per process that asks the policies of all guards, so that time passes for idle guards too."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Protocol

from modelguard._wakeup import Wakeup
from modelguard._weak_registry import WeakRegistry
from modelguard.telemetry import logger

_SHORTEST, _LONGEST = 0.05, 1.0


class Ticked(Protocol):
    """What the ticker needs of a guard."""

    def tick(self) -> None:
        """Ask the policies now. Does not block."""
        ...

    def check_interval(self) -> float:
        """Seconds until the next check is useful; infinity if none is."""
        ...


class Ticker:
    """Checks its guards at the interval that they ask for, one to twenty times a second; ends when none is left."""

    def __init__(self) -> None:
        self._guards: WeakRegistry[Ticked] = WeakRegistry()
        self._renew()

    def _renew(self) -> None:
        # Reentrant: the garbage collector may return a dropped lease in here, which may add a guard.
        self._lock = threading.RLock()
        self._wakeup = Wakeup()  # not an Event: the garbage collector may set it in the middle of a wait
        self._running = False
        self._stopped = False
        self._thread: threading.Thread | None = None

    def add(self, guard: Ticked) -> None:
        """Check ``guard`` from now on, as long as somebody else refers to it."""
        with self._lock:
            self._guards.add(guard)
            if self._stopped:
                return
            start, self._running = not self._running, True
        if start:
            try:
                self._thread = threading.Thread(target=self._run, name="modelguard-ticker", daemon=True)
                self._thread.start()
            except RuntimeError:  # the system gives no thread; the next call tries again
                self._running = False
                raise
        self._wakeup.set()

    def remove(self, guard: Ticked) -> None:
        """Stop checking ``guard``. Takes no lock: the garbage collector may call it in any thread at any point."""
        self._guards.discard(guard)
        self._wakeup.set()

    def stop(self) -> None:
        """End the thread for good: a process that forks checks its guards itself, between two forks.

        Children that are forked from now on start their own thread.
        """
        with self._lock:
            self._stopped = True
            thread = self._thread if self._running else None
        self._wakeup.set()
        if thread is not None and thread.is_alive():  # a thread that is about to start sees it by itself
            thread.join()

    def _run(self) -> None:
        interval = _SHORTEST
        while True:
            self._wakeup.wait(interval)
            with self._lock:
                if self._stopped or not self._guards:
                    self._running = False
                    return
            interval = max(_SHORTEST, self._check_all())

    def _check_all(self) -> float:
        """Check every guard; in a frame of its own, so that no guard is kept alive while the thread waits."""
        interval = _LONGEST
        for guard in self._guards:
            try:
                guard.tick()
                interval = min(interval, guard.check_interval())
            except BaseException:  # noqa: BLE001 - one guard's failure must not keep the others from being checked
                with suppress(BaseException):  # nor may a log handler that raises
                    logger.exception("modelguard could not ask the policies of %r", guard)
        return interval

    def before_fork(self) -> None:
        """Keep other threads out while the process forks."""
        self._lock.acquire()

    def after_fork_in_parent(self) -> None:
        """Let them in again."""
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """Start a thread for the child: the parent's does not exist there."""
        guards = list(self._guards)
        self._renew()
        for guard in guards:
            self.add(guard)


TICKER = Ticker()
