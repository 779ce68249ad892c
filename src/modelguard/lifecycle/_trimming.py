"""``trim_every``: return freed memory to the system while calls run, and not only at a release."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

from modelguard import telemetry
from modelguard.lifecycle._context import GuardContext
from modelguard.lifecycle._readings import pause_after

if TYPE_CHECKING:
    from modelguard.lifecycle._options import TrimSchedule


class Trimmer:
    """Trims for one guard, in the ticker's thread, so that no call waits for it."""

    def __init__(self, schedule: TrimSchedule, guard: GuardContext[Any]) -> None:
        self._schedule = schedule
        self._guard = guard
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        """Start anew: the readings are of the parent's memory, and a thread of the parent may have held the lock."""
        self._busy = threading.Lock()
        self._uses = (0, 0)
        self._floor: int | None = None
        self._next = self._guard.runtime.clock() + (
            self._schedule.seconds if self._schedule.growth == math.inf else pause_after(0)
        )

    @property
    def interval(self) -> float:
        """Seconds until the next check is useful."""
        return max(0.0, self._next - self._guard.runtime.clock())

    def check(self, uses: tuple[int, int]) -> None:
        """Trim if it is time and there were calls since the last time.

        Args:
            uses: The current generation's number, and how many calls have ended on it; an idle process frees nothing.
        """
        if self._guard.runtime.clock() < self._next or not self._busy.acquire(blocking=False):
            return
        try:
            if self._schedule.growth < math.inf:
                self._check_growth(uses)
            else:
                self._next = self._guard.runtime.clock() + self._schedule.seconds
                if uses != self._uses:
                    self._trim(uses)
        finally:
            self._busy.release()

    def _check_growth(self, uses: tuple[int, int]) -> None:
        started = self._guard.runtime.clock()
        held = self._slack()
        now = self._guard.runtime.clock()
        self._next = now + pause_after(now - started)
        if self._floor is not None:
            self._floor = min(self._floor, held)
        # The first time too: only a trim shows how much is in use, and growth counts from there.
        if uses != self._uses and (self._floor is None or held - self._floor >= self._schedule.growth):
            self._trim(uses)

    def _slack(self) -> int:
        """Bytes that are held but not in use, and those that malloc does not know about: growth here can be returned.

        Private memory alone does not work: the memory that a long call uses now would count as the floor.
        """
        return self._guard.runtime.private() - (self._guard.runtime.in_use() or 0)

    def _trim(self, uses: tuple[int, int]) -> None:
        runtime = self._guard.runtime
        before, in_use = runtime.private(), runtime.in_use() or 0
        started = runtime.clock()
        trim = runtime.try_trim()
        seconds = runtime.clock() - started
        after = runtime.private()
        # Calls go on meanwhile. What they free during the trim must not count as the floor, or it would never be
        # returned; so of the two figures the one that gives the lower floor counts.
        self._uses, self._floor = uses, after - max(in_use, runtime.in_use() or 0)
        telemetry.emit(
            telemetry.MemoryTrimmed(
                guard=self._guard.name,
                bytes_before=before,
                bytes_after=after,
                trimmed_by=trim.allocator,
                trim_error=trim.error,
                seconds=seconds,
                in_use=runtime.in_use(),
                held=runtime.held(),
            )
        )
