"""``trim_every``: freed memory is given back in the course of traffic, and not only at a release."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from modelguard import _units, telemetry
from modelguard.lifecycle.watch import pause_after

if TYPE_CHECKING:
    from modelguard.lifecycle.runtime import Runtime


@dataclass(frozen=True)
class Rhythm:
    """When to trim: after so many seconds, or so many bytes of growth; the other one is infinite."""

    seconds: float = math.inf
    growth: float = math.inf

    @classmethod
    def parse(cls, value: _units.Duration) -> Rhythm:
        """Read ``trim_every``: a size if it is text that ends in a B, as in ``"100 MB"``, else a duration."""
        if isinstance(value, str) and value.rstrip().upper().endswith("B"):
            return cls(growth=_units.size(value, "trim_every"))
        return cls(seconds=_units.seconds(value, "trim_every"))


class Trimmer:
    """Trims for one guard, from the keeper's thread, so that no call waits for it."""

    def __init__(self, rhythm: Rhythm, name: str, runtime: Runtime) -> None:
        self._rhythm = rhythm
        self._name = name
        self._runtime = runtime
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        """Begin anew: what was read is the parent's memory, and its thread may have held the lock."""
        self._busy = threading.Lock()
        self._uses = (0, 0)
        self._floor: int | None = None
        self._next = self._runtime.clock() + (
            self._rhythm.seconds if self._rhythm.growth == math.inf else pause_after(0)
        )

    @property
    def pace(self) -> float:
        """Seconds until another look is worth while."""
        return max(0.0, self._next - self._runtime.clock())

    def check(self, uses: tuple[int, int]) -> None:
        """Trim if it is time and there were calls since the last time.

        Args:
            uses: The serving generation, and how many calls have ended on it; an idle process frees nothing.
        """
        if self._runtime.clock() < self._next or not self._busy.acquire(blocking=False):
            return
        try:
            if self._rhythm.growth < math.inf:
                self._look(uses)
            else:
                self._next = self._runtime.clock() + self._rhythm.seconds
                if uses != self._uses:
                    self._trim(uses)
        finally:
            self._busy.release()

    def _look(self, uses: tuple[int, int]) -> None:
        started = self._runtime.clock()
        held = self._slack()
        now = self._runtime.clock()
        self._next = now + pause_after(now - started)
        if self._floor is not None:
            self._floor = min(self._floor, held)
        # The first time too: only what a trim leaves is known to be in use, and growth counts from there.
        if uses != self._uses and (self._floor is None or held - self._floor >= self._rhythm.growth):
            self._trim(uses)

    def _slack(self) -> int:
        """What is held and not in use, and whatever malloc does not know of: growth of this can be given back.

        Private memory alone would not do: what a long call uses just now would count as the floor.
        """
        return self._runtime.private() - (self._runtime.in_use() or 0)

    def _trim(self, uses: tuple[int, int]) -> None:
        before = self._runtime.private()
        started = self._runtime.clock()
        by = self._runtime.trim()
        seconds = self._runtime.clock() - started
        after = self._runtime.private()
        self._uses, self._floor = uses, after - (self._runtime.in_use() or 0)
        telemetry.emit(
            telemetry.MemoryTrimmed(guard=self._name, bytes_before=before, bytes_after=after, trim=by, seconds=seconds)
        )
