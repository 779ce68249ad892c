"""Guards across ``os.fork``: the child keeps the current generation; threads, locks and counters are its own."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from contextlib import suppress
from importlib import _bootstrap
from typing import Protocol

from modelguard._threads import Wakeup, WeakRegistry
from modelguard.lifecycle import _waiting, runtime
from modelguard.telemetry import logger

# One thread per process that asks the policies of all guards, so that time passes for idle guards too.


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

#: What is imported when an event, a reading or a trim first needs it, which may be at any moment.
_LAZY = (
    "ctypes",
    "modelguard.environment._allocator",
    "modelguard.environment._allocator_problems",
    "modelguard.environment._elf",
    "modelguard.environment._linker",
    "modelguard.telemetry._events",
    "tempfile",
)
#: Packages whose modules are imported within milliseconds.
_SHORT = sys.stdlib_module_names | {"cachetools", "modelguard", "psutil", "wrapt"}


class Forkable(Protocol):
    """What takes part in a fork.

    Attributes:
        fork_rank: Participants with a lower rank take their locks first, as they do in normal use.
    """

    fork_rank: int

    def before_fork(self) -> None:
        """Take the locks, so that no other thread is in the middle of a change."""
        ...

    def after_fork_in_parent(self) -> None:
        """Release them."""
        ...

    def after_fork_in_child(self) -> None:
        """Start with new locks."""
        ...


_participants: WeakRegistry[Forkable] = WeakRegistry()
_forking = threading.Lock()
_locked: list[Forkable] = []
_registered = False


def register(participant: Forkable) -> None:
    """Carry a guard or a pool over forks. The first call registers the hooks; the import does not."""
    global _registered
    with _forking:
        _participants.add(participant)
        if not _registered and hasattr(os, "register_at_fork"):
            os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
            _registered = True


def _finish_imports() -> None:
    """Import what loads need, and wait for what other threads are importing.

    A child finds an import that was under way unfinished: nobody ends it there.
    """
    for name in (*_LAZY, *_unfinished()):
        with suppress(Exception):  # it fails again where it is needed
            importlib.import_module(name)


def _unfinished() -> list[str]:
    """Modules that are being imported. Not those of others, such as torch: that may take long.

    The import system has a lock for each of them and for no other module. To look through all modules instead would
    write to each one's reference count, on pages that parent and children share: 1.8 MB for every child.
    """
    return [name for name in tuple(vars(_bootstrap).get("_module_locks", ())) if name.partition(".")[0] in _SHORT]


def _before() -> None:
    _finish_imports()
    # No thread is inside a guard while the process forks, so the child finds every guard in a whole state.
    _forking.acquire()
    _locked.extend(sorted(_participants, key=lambda one: one.fork_rank))
    for participant in _locked:
        participant.before_fork()
    TICKER.before_fork()  # last: a pool that holds its own lock may ask for checks


def _after_in_parent() -> None:
    TICKER.after_fork_in_parent()
    for participant in reversed(_locked):
        participant.after_fork_in_parent()
    _locked.clear()
    _forking.release()


def _after_in_child() -> None:
    global _forking
    _forking = threading.Lock()
    participants, _locked[:] = list(_participants), []
    runtime.HOST_LOCK.after_fork_in_child()
    _waiting.after_fork_in_child()
    runtime.THREADS.after_fork_in_child()
    for participant in participants:
        participant.after_fork_in_child()
    TICKER.after_fork_in_child()
