"""Workers of a gunicorn are replaced one at a time: first a fresh one that serves, then the end of the old one."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Arbiter", "Rolling"]

#: A replacement that failed is tried again after so many seconds: long enough to harm nobody, short enough to notice.
PAUSE = 60.0


class Arbiter(Protocol):
    """What is needed of gunicorn's master."""

    WORKERS: dict[int, Any]
    num_workers: int
    log: Any

    def spawn_worker(self) -> int:
        """Fork a worker; returns its process id, and in the worker itself never."""
        ...

    def kill_worker(self, pid: int, sig: int) -> None:
        """Send a signal to a worker."""
        ...

    def manage_workers(self) -> None:
        """Start workers that are missing and end the oldest that are too many; called at least once a second."""
        ...


class Rolling:
    """Whose turn it is. :meth:`step` is called from the master's main loop, and never waits.

    Args:
        arbiter: Whose workers.
        patience: Seconds that a fresh worker may take until it serves.
        clock: Monotonic seconds, as gunicorn's workers use for their signs of life.
    """

    def __init__(self, arbiter: Arbiter, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.spawning = False
        self._arbiter = arbiter
        self._patience = patience
        self._clock = clock
        self._due: dict[int, str] = {}
        self._old = 0
        self._fresh = 0
        self._started = 0.0
        self._told = -math.inf
        self._not_before = 0.0

    def ask(self, pid: int, why: str) -> None:
        """Have a worker replaced when its turn comes."""
        self._due.setdefault(pid, why)

    @property
    def surplus(self) -> bool:
        """Whether there is one worker more than there should be, and rightly so."""
        return bool(self._old) and len(self._arbiter.WORKERS) == self._arbiter.num_workers + 1

    def step(self, *, may_fork: bool = True) -> None:
        """See how the replacement under way is doing, and begin the next one if there is none."""
        self._due = {pid: why for pid, why in self._due.items() if pid in self._arbiter.WORKERS}
        if self._old:
            self._go_on()
        if not self._old and self._due and may_fork and self._clock() >= self._not_before:
            self._begin()

    def _begin(self) -> None:
        old, why = next(iter(self._due.items()))
        self._arbiter.log.info("modelguard: worker %s is replaced: %s", old, why)
        self.spawning = True
        try:
            fresh = self._arbiter.spawn_worker()  # in the worker it does not return
        except OSError as error:
            self._give_up(f"no process could be started: {error}")
            return
        finally:
            # In the worker this is passed too, when it ends: nobody reads it then.
            self.spawning = False
        self._old, self._fresh, self._started, self._told = old, fresh, self._clock(), -math.inf

    def _go_on(self) -> None:
        workers, now = self._arbiter.WORKERS, self._clock()
        if self._old not in workers:
            self._old = 0
        elif self._fresh not in workers:
            self._give_up(f"the fresh worker {self._fresh} has ended before it could take over")
        elif serves(workers[self._fresh], now):
            self._end_old(now)
        elif now - self._started > self._patience:
            self._arbiter.kill_worker(self._fresh, signal.SIGKILL)
            self._give_up(f"the fresh worker {self._fresh} did not serve after {self._patience:g} s")

    def _end_old(self, now: float) -> None:
        """It ends when its requests are done. Told again after a while, as one that is still starting loses it."""
        if now - self._told >= self._patience:
            self._told = now
            self._arbiter.kill_worker(self._old, signal.SIGTERM)

    def _give_up(self, why: str) -> None:
        self._old = 0
        self._not_before = self._clock() + PAUSE
        self._arbiter.log.error("modelguard: %s; the old one serves on, next attempt in %g s", why, PAUSE)


def serves(worker: Any, now: float) -> bool:
    """Whether a worker has reached its main loop, the application's own start included.

    It then gives a first sign of life: it sets the time of its file to monotonic seconds. Until then the file has the
    time at which it was made, in seconds since 1970.
    """
    try:
        return bool(os.fstat(worker.tmp.fileno()).st_mtime <= now)
    except (OSError, ValueError):  # it has ended, and its file is closed
        return False
