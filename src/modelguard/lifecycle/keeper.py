"""One thread per process that asks the policies of all guards, so that time passes for idle ones too."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from modelguard.telemetry.hooks import logger

_SHORTEST, _LONGEST = 0.05, 1.0


class Kept(Protocol):
    """What the keeper needs of a guard."""

    def check(self) -> bool:
        """Ask the policies now."""
        ...

    def pace(self) -> float:
        """Seconds until it is worth while to ask again; infinity if the guard needs no keeping."""
        ...


class Keeper:
    """Wakes at the pace of its guards, at most twenty times a second and at least once; ends when none is left."""

    def __init__(self) -> None:
        self._guards: weakref.WeakSet[Kept] = weakref.WeakSet()
        self._renew()

    def _renew(self) -> None:
        # Reentrant: a dropped lease that the garbage collector finds in here may bring a guard.
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._running = False
        self._dismissed = False
        self._thread: threading.Thread | None = None

    def keep(self, guard: Kept) -> None:
        """Ask ``guard`` from now on, as long as somebody else refers to it."""
        with self._lock:
            self._guards.add(guard)
            if self._dismissed:
                return
            start, self._running = not self._running, True
        if start:
            try:
                self._thread = threading.Thread(target=self._run, name="modelguard-keeper", daemon=True)
                self._thread.start()
            except RuntimeError:  # no thread to be had; the next to come tries again
                self._running = False
                raise
        self._wake.set()

    def forget(self, guard: Kept) -> None:
        """Ask ``guard`` no more."""
        with self._lock:
            self._guards.discard(guard)
        self._wake.set()

    def dismiss(self) -> None:
        """End the thread, and start none any more: a process that forks asks its guards itself, between two forks.

        Children that are forked from now on start their own.
        """
        with self._lock:
            self._dismissed = True
            thread = self._thread if self._running else None
        self._wake.set()
        if thread is not None and thread.is_alive():  # one that is about to start finds out by itself
            thread.join()

    def _run(self) -> None:
        pace = _SHORTEST
        while True:
            self._wake.wait(pace)
            self._wake.clear()
            with self._lock:
                if self._dismissed or not self._guards:
                    self._running = False
                    return
            pace = min(_LONGEST, max(_SHORTEST, self._ask_all()))

    def _ask_all(self) -> float:
        """Ask every guard; in a frame of its own, so that no guard is kept alive while the thread waits."""
        guards = list(self._guards)
        for guard in guards:
            try:
                guard.check()
            except BaseException:  # noqa: BLE001 - one guard's trouble must not keep the others from being asked
                logger.exception("modelguard could not ask the policies of %r", guard)
        return min((guard.pace() for guard in guards), default=_LONGEST)

    def before_fork(self) -> None:
        """Let no other thread be inside while the process forks."""
        self._lock.acquire()

    def after_fork_in_parent(self) -> None:
        """Go on."""
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """The thread is the parent's; the child starts its own when a guard asks for it."""
        guards = list(self._guards)
        self._renew()
        for guard in guards:
            self.keep(guard)


KEEPER = Keeper()
