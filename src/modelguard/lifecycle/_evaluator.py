"""Asks the policy of one guard whether its current generation is over."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypeVar

from modelguard import telemetry
from modelguard.lifecycle import _growth
from modelguard.lifecycle._context import GuardContext
from modelguard.lifecycle._generation import Generation
from modelguard.lifecycle._gpu_cache import GpuCache
from modelguard.lifecycle._policy import Policy, Snapshot, alternatives, source_part
from modelguard.lifecycle._readings import Readings
from modelguard.telemetry.reasons import Reason

if TYPE_CHECKING:
    from modelguard.telemetry import Callback

M = TypeVar("M")

#: What a policy may raise without harming the call that ends: its sys.exit() is no reason to end the service.
_POLICY_ERRORS = (Exception, SystemExit)

#: Seconds between two checks of an idle guard, whose memory does not grow by itself.
_IDLE = 1.0


#: What a policy asks for: another model, the release until the next use, or the end of an isolated function's workers.
Action = Literal["load", "unload", "end_workers"]


class Due(NamedTuple, Generic[M]):
    """A load or a release that is due.

    Attributes:
        reasons: Why.
        generation: The generation that is over; None for the retry of a failed load.
        action: What is to be done.
    """

    reasons: tuple[Reason, ...]
    generation: Generation[M] | None
    action: Action = "load"


class Evaluator(Generic[M]):
    """Takes the readings, asks the policy, and remembers when it must be asked again.

    Attributes:
        readings: What the policy reads.
        interval: Seconds until the next evaluation is useful; infinity if only the ends of calls matter.
    """

    def __init__(self, guard: GuardContext[M]) -> None:
        self.readings = Readings(guard)
        self._gpu_cache = GpuCache(guard)
        self.interval = math.inf
        self._guard = guard
        self._members = alternatives(guard.options.reload_on)
        self._members_if_pinned = alternatives(source_part(guard.options.reload_on))
        self._lock = threading.Lock()
        self._again = False
        self._reported: set[str] = set()
        self._uses_seen = -1

    def decide_by(self, policy: Policy | None) -> None:
        """Ask only this part of the guard's policy from now on."""
        self._members = alternatives(policy)
        self._members_if_pinned = alternatives(source_part(policy))
        self.readings.decide_by(policy)

    def evaluate(self, *, sample: bool, insist: bool = False) -> Due[M] | None:
        """Ask the policy whether a load is due.

        Args:
            sample: Whether there is time to read memory and files, which the end of a call does not have.
            insist: Whether what another thread finds at this moment may be out of date, so that it has to look again.
        """
        if insist:
            self._again = True  # before the lock is tried: who holds it looks at this after its release
        while self._lock.acquire(blocking=False):  # else another thread gets the same answer
            self._again = False
            try:
                due = self._evaluate(sample=sample)
            finally:
                self._lock.release()
            if due is not None or not self._again:
                return due
        return None

    def after_load(self) -> None:
        """Set the alarm of a generation that was just installed."""
        generation = self._guard.state.current
        if generation is not None:
            self._reported.clear()
            snapshot = self.readings.snapshot(generation, settled=False, sample=False)
            self._set_alarm(generation, snapshot)
            if snapshot.uses:  # calls have ended since the installation, without an alarm
                self._guard.state.set_alarm(generation, snapshot.uses)

    def after_fork_in_child(self) -> None:
        """Start the child's own readings."""
        self._lock = threading.Lock()
        self._reported.clear()
        self._uses_seen = -1
        self.readings.after_fork_in_child(self._guard.state.current)
        self.after_load()

    def report_error(self, callback: Callback, error: BaseException, *, about: str = "") -> None:
        """Report a callable of the author's that raised; once per generation and type of error."""
        if self._first_report(f"{callback} {about} {type(error)}"):
            where = f" (in {about})" if about else ""
            telemetry.emit(
                telemetry.CallbackErrored(
                    guard=self._guard.name, callback=callback, error=f"{type(error).__name__}: {error}{where}"
                )
            )

    def _evaluate(self, *, sample: bool) -> Due[M] | None:
        state = self._guard.state
        if state.closed or state.job is not None:
            self.interval = _IDLE
            return None
        if state.failures:
            return self._retry()
        generation = state.current
        if generation is None:
            self.interval = math.inf
            return None
        if self.readings.generation != generation.number:  # after a rollback
            self._reported.clear()
            self.readings.start(generation)
        snapshot = self.readings.snapshot(generation, settled=state.draining <= state.abandoned, sample=sample)
        reasons = self._ask(snapshot)
        if sample:
            self._gpu_cache.check(snapshot)
        self._set_alarm(generation, snapshot)
        if not reasons:
            state.postpone(None)
            return None
        state.set_alarm(generation, math.inf)
        return Due(tuple(reasons), generation, _chosen(set(reasons.values())))

    def _retry(self) -> Due[M] | None:
        state = self._guard.state
        if state.paused and state.current is not None:
            self.interval = _IDLE
            return None
        self.interval = max(0.0, state.retry_at - self._guard.runtime.clock())
        return None if self.interval > 0 else Due((Reason("retry", f"retry after failure {state.failures}"),), None)

    def _ask(self, snapshot: Snapshot) -> dict[Reason, Action]:
        """The reasons of the members that are due, and what each asks for.

        A member that raises is reported, and the others still count.
        """
        reasons: dict[Reason, Action] = {}
        for member in self._asked():
            try:
                self._report_futile_parts(member, snapshot)
                reasons |= dict.fromkeys(member.reasons(snapshot), _asked_by(member))
            except _POLICY_ERRORS as error:
                self.report_error("reload_on", error, about=_name(member))
        return reasons

    def _report_futile_parts(self, policy: Policy, snapshot: Snapshot) -> None:
        for part in policy.parts():
            detail = part.futile(snapshot)
            if detail is not None and self._first_report(f"futile {part!r}"):
                telemetry.emit(
                    telemetry.PolicyFutile(
                        guard=self._guard.name,
                        generation=snapshot.generation,
                        policy=repr(part),
                        detail=detail,
                        cause=_growth.cause() if part.reads_memory else None,
                    )
                )

    def _set_alarm(self, generation: Generation[M], snapshot: Snapshot) -> None:
        """Let calls end on the fast path until the policy's answer may change."""
        members = self._asked()
        if not members:
            self.interval = _IDLE if self._members else math.inf
            self._guard.state.set_alarm(generation, math.inf)
            return
        uses, seconds = math.inf, math.inf
        for member in members:
            try:
                horizon = member.horizon(snapshot)
            except _POLICY_ERRORS as error:
                self.report_error("reload_on", error, about=_name(member))
                continue
            uses, seconds = min(uses, horizon.uses), min(seconds, horizon.seconds)
        idle = snapshot.uses == self._uses_seen
        self._uses_seen = snapshot.uses
        until_reading = self.readings.interval
        self.interval = min(seconds, max(until_reading, _IDLE) if idle else until_reading)
        self._guard.state.set_alarm(generation, snapshot.uses + uses)

    def _asked(self) -> tuple[Policy, ...]:
        """What decides now. After a rollback that is only a new change of the source."""
        members = self._members_if_pinned if self._guard.state.pinned else self._members
        workers = self._guard.options.workers
        if workers is None or not workers.ended:
            return members
        return tuple(member for member in members if not member.ends_workers)

    def _first_report(self, about: str) -> bool:
        if about in self._reported:
            return False
        self._reported.add(about)
        return True


def _asked_by(member: Policy) -> Action:
    if member.unloads:
        return "unload"
    return "end_workers" if member.ends_workers else "load"


def _chosen(asked: set[Action]) -> Action:
    """What to do where members ask for different things.

    What nobody uses is not loaded afresh, unless a mold is kept for the next call: that one is to be as new as others.
    """
    if "unload" in asked:
        return "unload"
    return "load" if "load" in asked else "end_workers"


def _name(policy: Policy) -> str:
    return type(policy).__name__ if policy.kind == "custom" else repr(policy)
