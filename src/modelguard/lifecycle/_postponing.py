"""What policies ask for may have to wait: while the guard is paused, and while its model is young."""

from __future__ import annotations

from typing import Any

from modelguard import telemetry
from modelguard.lifecycle._context import GuardContext
from modelguard.lifecycle._evaluator import Due
from modelguard.lifecycle._load_job import PostponedJob
from modelguard.telemetry.reasons import Reason

#: Seconds between two checks of what waits, so that what is no longer due does not go on waiting.
_INTERVAL = 1.0


class Postponing:
    """Decides whether what is due must wait, and reports each policy that waits, once for each generation."""

    def __init__(self, guard: GuardContext[Any]) -> None:
        self._guard = guard
        self._generation = 0
        self._reported: set[tuple[str, Reason]] = set()

    @property
    def interval(self) -> float:
        """Seconds until the next check of what waits is useful."""
        waits = self._guard.state.postponed
        if waits is None or waits.until is None:
            return _INTERVAL
        return min(_INTERVAL, max(0.0, waits.until - self._guard.runtime.clock()))

    def postpones(self, due: Due[Any]) -> bool:
        """Whether it must wait, which is recorded and reported."""
        state, over = self._guard.state, due.generation
        if over is None:  # the retry of a failed load
            return False
        now, until = self._guard.runtime.clock(), over.born + self._guard.options.min_lifetime
        if state.paused:
            job = PostponedJob(due.reasons, "paused", None)
        elif now < until:
            job = PostponedJob(due.reasons, "min_lifetime", until)
        else:
            return False
        state.postpone(job)
        fresh = self._not_reported(over.number, job)
        if fresh:
            seconds = None if job.until is None else job.until - now
            telemetry.emit(
                telemetry.ReloadPostponed(
                    guard=self._guard.name, generation=over.number, reasons=fresh, cause=job.cause, seconds=seconds
                )
            )
        return True

    def _not_reported(self, generation: int, job: PostponedJob) -> tuple[Reason, ...]:
        with self._guard.state.lock:  # the end of a call and the ticker may both get here
            if generation != self._generation:
                self._generation = generation
                self._reported.clear()
            fresh = tuple(reason for reason in job.reasons if (job.cause, reason) not in self._reported)
            self._reported.update((job.cause, reason) for reason in fresh)
            return fresh
