"""Replace gunicorn's workers one at a time: the old worker ends when its replacement serves."""

from __future__ import annotations

import math
import os
import signal
import stat
import time
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Arbiter", "RollingReplacement"]

#: Seconds until a failed replacement is tried again: long enough to cause no load, and short enough to recover soon.
RETRY_AFTER = 60.0

#: Permissions of a temporary file as ``tempfile.mkstemp`` makes it.
_NEW_FILE = 0o600


class Arbiter(Protocol):
    """The parts of gunicorn's master that are used here."""

    WORKERS: dict[int, Any]
    num_workers: int
    log: Any

    def spawn_worker(self) -> int:
        """Fork a worker, and return its process id; never returns in the worker itself."""
        ...

    def kill_worker(self, pid: int, sig: int) -> None:
        """Send a signal to a worker."""
        ...

    def manage_workers(self) -> None:
        """Start missing workers, and end the oldest surplus ones; called at least once a second."""
        ...


class RollingReplacement:
    """Replaces one worker after the other. :meth:`step` is called from the master's main loop, and never waits.

    Args:
        arbiter: The master of the workers.
        timeout: Seconds that a new worker may take until it serves.
        clock: Monotonic seconds, as gunicorn's workers use for their heartbeats.
    """

    def __init__(self, arbiter: Arbiter, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.spawning = False
        self._arbiter = arbiter
        self._timeout = timeout
        self._clock = clock
        self._due: dict[int, str] = {}
        self._old = 0
        self._new = 0
        self._started = 0.0
        self._signalled = -math.inf
        self._not_before = 0.0

    def request(self, pid: int, why: str) -> None:
        """Replace a worker after those that were requested before."""
        self._due.setdefault(pid, why)

    @property
    def surplus(self) -> bool:
        """Whether there is one worker too many because a replacement is in progress."""
        return bool(self._old) and len(self._arbiter.WORKERS) == self._arbiter.num_workers + 1

    def step(self, *, may_fork: bool = True) -> None:
        """Continue the replacement in progress, and begin the next one if there is none."""
        self._due = {pid: why for pid, why in self._due.items() if pid in self._arbiter.WORKERS}
        if self._old:
            self._continue()
        if not self._old and self._due and may_fork and self._clock() >= self._not_before:
            self._begin()

    def _begin(self) -> None:
        old, why = next(iter(self._due.items()))
        self._arbiter.log.info("modelguard: worker %s is being replaced: %s", old, why)
        self.spawning = True
        try:
            new = self._arbiter.spawn_worker()  # does not return in the worker
        except OSError as error:
            self._give_up(f"no process could be started: {error}")
            return
        finally:
            # This also runs in the worker when it ends, without any effect.
            self.spawning = False
        self._old, self._new, self._started, self._signalled = old, new, self._clock(), -math.inf

    def _continue(self) -> None:
        # Up to gunicorn 23 a signal handler removes workers, so it may do so between any two steps here.
        old, new, now = self._arbiter.WORKERS.get(self._old), self._arbiter.WORKERS.get(self._new), self._clock()
        if old is None:
            self._old = 0
        elif new is None:
            self._give_up(f"the new worker {self._new} ended before it could take over")
        elif serves(new, now):
            self._end_old(now)
        elif now - self._started > self._timeout:
            self._arbiter.kill_worker(self._new, signal.SIGKILL)
            self._give_up(f"the new worker {self._new} did not serve after {self._timeout:g} s")

    def _end_old(self, now: float) -> None:
        """End the old worker after its requests. The signal is repeated, because a starting worker would miss it."""
        if now - self._signalled >= self._timeout:
            self._signalled = now
            self._arbiter.kill_worker(self._old, signal.SIGTERM)

    def _give_up(self, why: str) -> None:
        self._old = 0
        self._not_before = self._clock() + RETRY_AFTER
        self._arbiter.log.error("modelguard: %s; the old worker stays, next attempt in %g s", why, RETRY_AFTER)


def serves(worker: Any, now: float) -> bool:
    """Whether a worker has finished starting, including the application's own start, and reached its main loop.

    It then sends a first heartbeat by its file: from gunicorn 22 on it sets the file's time to monotonic seconds, where
    until then the file has the time at which it was made, in seconds since 1970. Earlier versions change the file's
    permissions.
    """
    try:
        file = os.fstat(worker.tmp.fileno())
    except (OSError, ValueError):  # it has ended, and its file is closed
        return False
    return file.st_mtime <= now or stat.S_IMODE(file.st_mode) != _NEW_FILE
