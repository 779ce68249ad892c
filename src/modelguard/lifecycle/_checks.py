"""Asks the policies of one guard, and starts what is due: a reload, a release, or the request for a fresh process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from modelguard import telemetry
from modelguard.lifecycle import _inline
from modelguard.lifecycle._context import GuardContext
from modelguard.lifecycle._evaluator import Due, Evaluator
from modelguard.lifecycle._fingerprints import Fingerprint
from modelguard.lifecycle._generation import Generation
from modelguard.lifecycle._load_job import LoadJob
from modelguard.lifecycle._policy import Policy, subset
from modelguard.lifecycle._postponing import Postponing
from modelguard.lifecycle._readings import Readings
from modelguard.lifecycle._recycling import Ask, Recycling
from modelguard.lifecycle._trimming import Trimmer
from modelguard.telemetry import logger
from modelguard.telemetry.reasons import Reason

M = TypeVar("M")


class Checks(Generic[M]):
    """The checks of one guard, in the background and at the ends of calls.

    Args:
        guard: Whose policies are asked.
        start: Starts a load or a release; returns whether there was one to start.
    """

    def __init__(self, guard: GuardContext[M], start: Callable[[LoadJob | None], bool]) -> None:
        self._guard = guard
        self._start = start
        schedule = guard.options.trim_schedule
        self._evaluator = Evaluator(guard)
        self._trimmer = None if schedule is None else Trimmer(schedule, guard)
        self._recycling = Recycling(guard)
        self._postponing = Postponing(guard)
        self._ticking = threading.Lock()

    @property
    def readings(self) -> Readings:
        """What the policies read."""
        return self._evaluator.readings

    @property
    def needed(self) -> bool:
        """Whether anything can become due by itself, without calls."""
        return self._guard.options.reload_on is not None or self._trimmer is not None

    @property
    def interval(self) -> float:
        """Seconds until the next check is useful; infinity if only the ends of calls matter."""
        interval = self._evaluator.interval
        if self._guard.state.postponed is not None:
            interval = self._postponing.interval
        return interval if self._trimmer is None else min(interval, self._trimmer.check_interval())

    def check(self) -> bool:
        """Ask the policies now, and trim if it is time; true if a reload was started."""
        if self._trimmer is not None and self._guard.state.current is not None:
            self._trimmer.tick()
        return self.ask(sample=True)

    def tick(self) -> None:
        """:meth:`check`, as the ticker calls it: a policy of the author's, which may block, has a thread of its own."""
        policy = self._guard.options.reload_on
        if policy is None or all(part.kind != "custom" for part in policy.parts()):
            self.check()
        elif self._ticking.acquire(blocking=False):  # else the last check has not ended yet
            try:
                self._guard.runtime.start_thread(self._tick_aside, f"modelguard-check-{self._guard.name}")
            except BaseException:  # the system gives no thread; the next tick tries again
                self._ticking.release()
                raise

    def _tick_aside(self) -> None:
        try:
            self.check()
        finally:
            self._ticking.release()

    def ask(self, *, sample: bool, insist: bool = False) -> bool:
        """Ask the policies, and start what is due; true if that is a reload.

        Args:
            sample: Whether there is time to read memory and files, which the end of a call does not have.
            insist: Whether a thread that is asking at this moment has to ask again.
        """
        if _inline.active():
            return False
        due = self._evaluator.evaluate(sample=sample, insist=insist)
        if due is None:
            return False
        over = due.generation
        if over is None:
            return self._retry(due)
        if self._postponing.postpones(due):
            return False
        return self._act(due, over, sample=sample)

    def demand(self, reasons: tuple[Reason, ...], over: Generation[M]) -> None:
        """Replace a generation at the end of a call, for reasons that no policy has."""
        due = Due(reasons, over)
        if not _inline.active() and not self._postponing.postpones(due):
            self._act(due, over, sample=False)

    def _retry(self, due: Due[M]) -> bool:
        state = self._guard.state
        without_model = state.current is None
        job = state.request_if_idle(due.reasons, urgent=without_model, by_policy=not without_model)
        return self._start(job)

    def _act(self, due: Due[M], over: Generation[M], *, sample: bool) -> bool:
        state = self._guard.state
        if due.action == "unload":
            self._start(state.request_unload(due.reasons, instead_of=over, by_policy=True))
            return False
        if due.action == "end_workers":
            if self._guard.options.workers is not None:
                self._guard.options.workers.end(due.reasons)
            return False
        if self._recycling.here:
            try:
                self._recycling.request(due, over.number)
            except Exception as error:  # noqa: BLE001 - the process serves on; the event reports it
                self._evaluator.report_error("recycle", error)
            return False
        # Where no calls run there is no pause between calls to wait for.
        urgent = not self._recycling.takes_calls
        job = state.request_if_idle(due.reasons, urgent=urgent, after_call=not sample, instead_of=over, by_policy=True)
        if job is not None:
            telemetry.emit(telemetry.ReloadDue(guard=self._guard.name, generation=over.number, reasons=due.reasons))
        return self._start(job)

    # What changes the checks

    def set_paused(self, *, paused: bool) -> None:
        """Hold back what policies ask for, or no longer; then what is due starts with the next check."""
        guard = self._guard
        with guard.state.lock:  # so that what is shown is what is set
            changed = guard.state.set_paused(paused=paused)
            guard.shown_pause.show(paused=paused)
        if changed:
            telemetry.emit((telemetry.GuardPaused if paused else telemetry.GuardResumed)(guard=guard.name))

    @property
    def renew(self) -> Callable[[], object] | None:
        """What asks another process for new weights, instead of a reload in this one."""
        return self._recycling.renew

    def recycle_in_children(self, ask: Ask, *, takes_calls: bool, renew: Callable[[], object] | None) -> None:
        """Have children that are forked from now on ask for a fresh process instead of reloading."""
        self._recycling.in_children(ask, takes_calls=takes_calls, renew=renew)
        self._evaluator.decide_by(self._recycling.policy)

    def recycle_here(self, ask: Ask, *, renews: bool) -> None:
        """Ask for a fresh process instead of reloading, from now on; without ``renews`` not for new weights."""
        self._recycling.in_this_process(ask)
        if not renews:
            self._evaluator.decide_by(subset(self._guard.options.reload_on, renews=False))

    def follow(self, policy: Policy | None, files: Mapping[Path, Fingerprint | None]) -> None:
        """Ask another policy from the end of the load on that is under way; ``files`` were so before it."""
        self._evaluator.decide_by(policy)
        self.readings.follow(policy, files)

    def after_load(self) -> None:
        """Set the policies' alarm for a generation that was just installed. Never raises."""
        try:
            self._evaluator.after_load()
        except Exception:  # noqa: BLE001 - a fault here must not lose the next job, for which others wait
            logger.exception("modelguard could not ask the policies of guard %r", self._guard.name)

    def after_fork_in_child(self) -> None:
        """Start with own locks, jitter and readings; ask for recycling where that was prepared."""
        self._ticking = threading.Lock()
        self._recycling.after_fork_in_child()
        self._evaluator.decide_by(self._recycling.policy)
        self._evaluator.after_fork_in_child()
        if self._trimmer is not None:
            self._trimmer.after_fork_in_child()
