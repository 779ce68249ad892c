"""What tells the time for everything batched, and calls when something is due. Tests move it."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from modelguard.runtime import fork_hooks
from modelguard.runtime.background import LINGER, SHARED, start_thread
from modelguard.runtime.fork_hooks import Wakeup

#: The time; in tests, :func:`advance` replaces it.
now: Callable[[], float] = time.monotonic
_ahead = 0.0
#: So many entries of the timer are looked through for what is gone.
_MANY = 256


def advance(seconds: float) -> None:
    """Let time pass for everything batched in this process, for tests. It stays ahead: no clock goes back."""
    global now, _ahead
    moved = _ahead = _ahead + seconds
    now = lambda: time.monotonic() + moved  # noqa: E731 - unmoved, it costs nothing but the call of the builtin


def ahead() -> float:
    """By how many seconds a test has moved the clock: what lives in real time adds it to share a timer."""
    return _ahead


class Watch:
    """Calls ``check`` when something is due: deadlines that pass and batches that overstay, whatever the model does.

    One timer of the process starts a shared thread at the right time. It keeps nothing that it watches alive.

    Args:
        name: Of the function.
        lock: Held for :meth:`schedule` and while ``check`` runs.
        check: Does what is due at a time, and returns when something is due next; infinity for never.
        after: Called after each check, without the lock.
    """

    def __init__(
        self, name: str, lock: threading.RLock, check: Callable[[float], float], after: Callable[[float], object]
    ) -> None:
        self._name = name
        self._lock = lock
        self._check = check
        self._after = after
        self.due = math.inf

    def schedule(self, at: float) -> None:
        """Check at this time, unless that is done before. Called with the lock held."""
        if at >= self.due:
            return
        self.due = at
        try:
            _timer.add(at, self)
        except RuntimeError:  # no thread can be started: the others look at the deadlines whenever they are free
            self.due = math.inf

    def begin(self) -> None:
        SHARED.start(self._look, f"modelguard-deadlines-{self._name}")

    def _look(self) -> None:
        at = now()
        try:
            with self._lock:
                if self.due > at:  # it was checked before, and there is another entry for what is due next
                    return
                self.due = math.inf
                self.schedule(self._check(at))
            self._after(at)
        except BaseException:
            with suppress(BaseException):  # a log handler that raises
                logging.getLogger("modelguard").exception("modelguard: the deadlines of %s() are late", self._name)


class _Timer:
    """A thread that begins checks at their times, and ends when there are none."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the garbage collector may call in at any point
        self._heap: list[tuple[float, int, weakref.ref[Watch]]] = []
        self._number = itertools.count()  # makes entries comparable
        self._sweep_at = _MANY
        self._wakeup: Wakeup | None = None

    def add(self, at: float, watch: Watch) -> None:
        """Begin a check at this time.

        Raises:
            RuntimeError: The system gives no thread.
        """
        with self._lock:
            heapq.heappush(self._heap, (at, next(self._number), weakref.ref(watch)))
            if len(self._heap) > self._sweep_at:
                self._heap = [entry for entry in self._heap if entry[2]() is not None]
                heapq.heapify(self._heap)
                self._sweep_at = max(_MANY, 2 * len(self._heap))
            if self._wakeup is None:
                wakeup = Wakeup()
                start_thread(partial(self._run, wakeup), "modelguard-deadlines")
                self._wakeup = wakeup
            elif self._heap[0][0] >= at or at <= now():  # a clock that was moved makes others due, too
                self._wakeup.set()

    def _run(self, wakeup: Wakeup) -> None:
        woken = True
        while True:
            at, due = now(), []
            with self._lock:
                while self._heap and self._heap[0][0] <= at:
                    due.append(heapq.heappop(self._heap)[2])
                pause = self._heap[0][0] - at if self._heap else math.inf
                if pause == math.inf and not due and not woken:
                    self._wakeup = None
                    return
            while due:
                self._begin(due.pop())
            woken = wakeup.wait(min(pause, LINGER)) or pause != math.inf

    def _begin(self, reference: weakref.ref[Watch]) -> None:
        if (watch := reference()) is not None:
            try:
                watch.begin()
            except RuntimeError:  # no thread can be started now
                self.add(now() + 1.0, watch)


_timer = _Timer()


def _renew_in_child() -> None:
    """The timer's thread is not in a forked child."""
    global _timer
    _timer = _Timer()


fork_hooks.at_fork(fork_hooks.Rank.LOCKS, in_child=_renew_in_child)
