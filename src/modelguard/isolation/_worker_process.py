"""One worker process, as its owner sees it."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

from modelguard.isolation import _processes
from modelguard.isolation._channel import Channel

__all__ = ["Worker"]

#: Seconds that a call waits for the mold's report of how its worker ended.
_REPORT = 1.0


class Worker:
    """One worker process.

    Attributes:
        number: Its number.
        channel: To the worker. Whoever has taken the worker may use it.
        pid: Its process id; 0 until the mold has reported it.
        pidfd: A descriptor of the process; None if the system has none.
        born: When it was started, on the monotonic clock.
        exit: How it ended, for people; None until that is known.
    """

    def __init__(self, number: int, channel: Channel) -> None:
        self.number = number
        self.channel = channel
        self.pid = 0
        self.pidfd: int | None = None
        self.born = time.monotonic()
        self.exit: str | None = None
        self._exited = threading.Event()
        # Held while the descriptor is used: the next one that is opened gets its number, and may be another process's.
        # Reentrant: the garbage collector may end a dropped stream, and with it this process, at any point.
        self._lock = threading.RLock()

    def kill(self) -> None:
        """End it now, whatever it does."""
        with self._lock:
            if self.pidfd is not None:
                _processes.send_kill(self.pidfd)
            elif self.pid and self.exit is None:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)

    def has_exited(self, how: str) -> None:
        """Record how it ended."""
        with self._lock:
            self.exit = self.exit or how
            pidfd, self.pidfd = self.pidfd, None
            if pidfd is not None:
                os.close(pidfd)
        self._exited.set()

    def how_it_ended(self) -> str:
        """Wait shortly for the report of how it ended."""
        self._exited.wait(_REPORT)
        return self.exit or "unknown"
