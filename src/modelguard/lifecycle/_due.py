"""What is due for one guard: asks its policies, and starts the reload, the release or the recycling that follows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from modelguard import telemetry
from modelguard.lifecycle import _inline
from modelguard.lifecycle._context import GuardContext
from modelguard.lifecycle._evaluator import Evaluator
from modelguard.lifecycle._load_job import LoadJob
from modelguard.lifecycle._policy import subset
from modelguard.lifecycle._recycling import Ask, Recycling
from modelguard.lifecycle._trimming import Trimmer

__all__ = ["DueWork"]

M = TypeVar("M")

#: Starts a job, and returns whether there was one to start.
Start = Callable[[LoadJob | None], bool]


class DueWork(Generic[M]):
    """Asks the policies of one guard, in the background and at the ends of calls.

    Args:
        guard: Whose policies.

    Attributes:
        evaluator: Takes the readings and asks.
        trims: Whether freed memory is returned now and then.
    """

    def __init__(self, guard: GuardContext[M]) -> None:
        schedule = guard.options.trim_schedule
        self.evaluator = Evaluator(guard)
        self.trims = schedule is not None
        self._guard = guard
        self._trimmer = None if schedule is None else Trimmer(schedule, guard)
        self._recycling = Recycling(guard)
        self._ticking = threading.Lock()

    def check(self, start: Start) -> bool:
        """Ask the policies now, and trim if it is time; true if a reload was started."""
        current = self._guard.state.current
        if self._trimmer is not None and current is not None:
            self._trimmer.check((current.number, current.uses))
        return self.check_policy(start, sample=True)

    def tick(self, start: Start) -> None:
        """:meth:`check`, as the ticker calls it: a policy of the author's, which may block, has a thread of its own."""
        policy = self._guard.options.reload_on
        if policy is None or all(part.kind != "custom" for part in policy.parts()):
            self.check(start)
        elif self._ticking.acquire(blocking=False):  # else the last check has not ended yet
            self._guard.runtime.start_thread(partial(self._tick_aside, start), f"modelguard-check-{self._guard.name}")

    def _tick_aside(self, start: Start) -> None:
        try:
            self.check(start)
        finally:
            self._ticking.release()

    @property
    def interval(self) -> float:
        """Seconds until :meth:`check` should be called again; infinity if only the ends of calls matter."""
        interval = self.evaluator.interval
        return interval if self._trimmer is None else min(interval, self._trimmer.interval)

    def recycle_in_children(self, ask: Ask, *, takes_calls: bool) -> None:
        """Have children that are forked from now on ask for a fresh process instead of reloading."""
        self._recycling.in_children(ask, takes_calls=takes_calls)
        self.evaluator.decide_by(self._recycling.policy)

    def recycle_here(self, ask: Ask, *, renews: bool) -> None:
        """Ask for a fresh process instead of reloading, from now on; without ``renews`` not for new weights."""
        self._recycling.in_this_process(ask)
        if not renews:
            self.evaluator.decide_by(subset(self._guard.options.reload_on, renews=False))

    def check_policy(self, start: Start, *, sample: bool) -> bool:
        """Ask the policy, and start what is due; true if that is a reload.

        Args:
            start: Starts a job.
            sample: Whether there is time for readings, which the end of a call does not have.
        """
        due = None if _inline.active() else self.evaluator.evaluate(sample=sample)
        if due is None:
            return False
        state, over = self._guard.state, due.generation
        if over is None:
            return start(state.request_if_idle(due.reasons, urgent=state.current is None))
        if due.unload:
            start(state.request_unload(due.reasons, instead_of=over))
            return False
        if self._recycling.here:
            try:
                self._recycling.request(due, over.number)
            except Exception as error:  # noqa: BLE001 - the process serves on; the event reports it
                self.evaluator.report_error("recycle", error)
            return False
        # Where no calls run there is no pause between calls to wait for.
        urgent = not self._recycling.takes_calls
        job = state.request_if_idle(due.reasons, urgent=urgent, after_call=not sample, instead_of=over)
        if job is not None:
            telemetry.emit(telemetry.ReloadDue(guard=self._guard.name, generation=over.number, reasons=due.reasons))
        return start(job)

    def after_fork_in_child(self) -> None:
        """Start with own readings; ask for recycling where that was prepared."""
        self._ticking = threading.Lock()
        self._recycling.after_fork_in_child()
        self.evaluator.decide_by(self._recycling.policy)
        self.evaluator.after_fork_in_child()
        if self._trimmer is not None:
            self._trimmer.after_fork_in_child()
