"""A thread that looks after time: deadlines that pass and batches that overstay, whatever the model is doing."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable

from modelguard._wakeup import Wakeup
from modelguard.serving import deadlines
from modelguard.telemetry import logger

__all__ = ["Watch"]

#: Seconds after which the thread looks again, or ends if there is nothing to wait for.
_LINGER = 10.0


class Watch:
    """Calls ``check`` when something is due. Its thread ends when nothing is due any more.

    Args:
        name: Of the batched function.
        lock: Held for :meth:`schedule` and while ``check`` runs.
        check: Does what is due at a time, and returns when something is due next; infinity for never.
        after: Called after each check, without the lock.
    """

    def __init__(
        self,
        name: str,
        lock: threading.RLock,
        check: Callable[[float], float],
        after: Callable[[float], object],
    ) -> None:
        self._name = name
        self._lock = lock
        self._check = check
        self._after = after
        self._wakeup: Wakeup | None = None
        self.due = math.inf  # when the thread wakes up

    def schedule(self, at: float) -> None:
        """Check at this time, which is before :attr:`due`. Called with the lock held."""
        self.due = at
        if self._wakeup is not None:
            self._wakeup.set()
            return
        self._wakeup = Wakeup()
        name = f"modelguard-deadlines-{self._name}"
        try:
            threading.Thread(target=self._run, args=(self._wakeup,), name=name, daemon=True).start()
        except RuntimeError:  # no thread can be started: the others look at the deadlines whenever they are free
            self._wakeup, self.due = None, math.inf

    def _run(self, wakeup: Wakeup) -> None:
        try:
            self._keep_time(wakeup)
        except BaseException:  # noqa: BLE001 - a fault in this library; the next deadline starts another thread
            with self._lock:
                self._wakeup, self.due = None, math.inf
            with contextlib.suppress(BaseException):  # a log handler that raises
                logger.exception("modelguard: the deadlines of %s() are late", self._name)

    def _keep_time(self, wakeup: Wakeup) -> None:
        woken = True
        while True:
            now = deadlines.clock()
            with self._lock:
                due = self.due = self._check(now)
                ends = due == math.inf and not woken
                if ends:
                    self._wakeup = None
            self._after(now)
            if ends:
                return
            woken = wakeup.wait(min(due - now, _LINGER)) or due != math.inf
