"""Asks the policies of one guard, and starts what is due: a reload, a release, or the request for a fresh process."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypeVar

from modelguard import _units, telemetry
from modelguard.errors import told
from modelguard.facts._gpu import use_of
from modelguard.lifecycle import system
from modelguard.lifecycle._readings import Readings
from modelguard.lifecycle._state import Generation, GuardContext, LoadJob, PostponedJob
from modelguard.lifecycle.policies import Backoff, GpuPolicy, Policy, Snapshot, alternatives, source_part, subset
from modelguard.lifecycle.system import Fingerprint
from modelguard.runtime import call_context
from modelguard.telemetry import logger
from modelguard.telemetry.reasons import Reason

if TYPE_CHECKING:
    from modelguard.telemetry import Callback


#: After emptying torch's cache of GPU memory, calls ask the device for memory again, which makes it wait. So a cache
#: that grows back is emptied less and less often.
_PAUSE = Backoff("1m", "1h")

_ADVICE = (
    "The cache grows back or is fragmented. Start the service with the preset 'torch-cuda-dynamic' "
    "(PYTORCH_ALLOC_CONF=expandable_segments:True), or pad inputs to fewer shapes."
)


M = TypeVar("M")

#: Seconds between two checks of an idle guard, whose memory does not grow by itself, and of what has to wait.
_UNHURRIED = 1.0


class Due(NamedTuple, Generic[M]):
    reasons: tuple[Reason, ...]
    generation: Generation[M] | None
    members: Mapping[Reason, Policy] = MappingProxyType({})  # of the policy: which gives each reason

    @property
    def action(self) -> Literal["unload", "load", "end_workers"]:
        """The release until the next use, another model, or the end of an isolated function's workers.

        In this order where several are asked for: what nobody uses is not loaded afresh, unless a mold is kept for the
        next call, and that one is to be as new as others.
        """
        members = self.members.values()
        if any(member.unloads for member in members):
            return "unload"
        return "end_workers" if members and all(member.ends_workers for member in members) else "load"


def _reasons_of(member: Policy, snapshot: Snapshot) -> tuple[Reason, ...]:
    found = tuple(member.reasons(snapshot))
    for one in found:
        if not isinstance(one, Reason):
            raise TypeError(f"reasons() must return a tuple of Reason, not {one!r} in it")
    return tuple(Reason(_units.plain(one.kind), _units.plain(one.text)) for one in found)  # type: ignore[arg-type] # as it was


def _name(policy: Policy) -> str:
    if policy.kind != "custom":
        with suppress(Exception):  # of a policy of the author's that it joins
            return repr(policy)
    return type(policy).__name__


#: Asks the server for a fresh process.
Ask = Callable[[tuple[Reason, ...]], object]


class PolicyChecks(Generic[M]):
    """The checks of one guard, in the background and at the ends of calls.

    Takes the readings, asks the policies, and remembers when they must be asked again.

    Args:
        guard: Whose policies are asked.
        start: Starts a load or a release; returns whether there was one to start.
    """

    def __init__(self, guard: GuardContext[M], start: Callable[[LoadJob | None], bool]) -> None:
        self._guard = guard
        self._start = start
        self.readings = Readings(guard)  # what the policies read
        self.decide_by(guard.options.reload_on)
        self._pause = math.inf  # seconds until the next evaluation is useful; infinity if only the ends of calls matter
        self._again = False
        self._ask_for_process: Ask | None = None
        self._ask_for_weights: Callable[[], object] | None = None
        # Which policies decide in this process: those that mean new weights alone, if no calls run here; the others
        # alone, if it shares the model with a parent that loads new weights; or all.
        self._renews: bool | None = None
        self._recycles_here = False  # this process is to be replaced, and not only its forked children
        self._start_anew()

    def _start_anew(self) -> None:
        self._ticking, self._lock = threading.Lock(), threading.Lock()
        self._uses_seen = self._generation = -1
        self._begin(0)

    def _begin(self, generation: int) -> None:
        """Forget what another generation was told of."""
        if generation == self._generation:
            return
        self._generation = generation
        self._reported: dict[object, object] = {}
        self._emptied, self._empty_again = 0, -math.inf  # torch's cache: how often, and not before then

    @property
    def needed(self) -> bool:
        """Whether anything can become due by itself, without calls."""
        current = self._guard.state.current
        return self._guard.options.reload_on is not None or bool(current is not None and current.demanded)

    @property
    def interval(self) -> float:
        waits = self._guard.state.postponed
        if waits is None:
            return self._pause
        until = math.inf if waits.until is None else waits.until
        return min(_UNHURRIED, max(0.0, until - self._guard.system.clock()))

    def tick(self) -> None:
        """:meth:`ask`, as the ticker calls it: a policy of the author's, which may block, has a thread of its own."""
        policy = self._guard.options.reload_on
        if policy is None or all(part.kind != "custom" for part in policy.parts()):
            self.ask(sample=True)
        elif self._ticking.acquire(blocking=False):  # else the last check has not ended yet
            try:
                self._guard.system.start_thread(self._tick_aside, f"modelguard-check-{self._guard.name}")
            except BaseException:  # the system gives no thread; the next tick tries again
                self._ticking.release()
                raise

    def _tick_aside(self) -> None:
        try:
            self.ask(sample=True)
        finally:
            self._ticking.release()

    def ask(self, *, sample: bool, insist: bool = False) -> bool:
        """Ask the policies, and start what is due; true if that is a reload.

        Args:
            sample: Whether there is time to read memory and files, which the end of a call does not have.
            insist: Whether a thread that is asking at this moment has to ask again.
        """
        due = None if call_context.is_inline() else self._due(sample=sample, insist=insist)
        if due is None:
            return False
        if (over := due.generation) is None:
            return self._retry(due)
        if self._postpones(due, over):
            return False
        if due.action != "load":  # several replicas may be released at once
            return self._act(due, over, sample=sample)
        with self._guard.options.turn() as mine:
            if mine:
                return self._act(due, over, sample=sample)
        self._pause = max(self._pause, _UNHURRIED)
        self._guard.state.set_alarm(over, over.uses + 1)
        return False

    def demand(self, reasons: tuple[Reason, ...], over: Generation[M]) -> None:
        """Replace a generation for reasons that no policy has, as soon as that may be."""
        over.demanded = reasons
        self.ask(sample=False, insist=True)

    def _postpones(self, due: Due[M], over: Generation[M]) -> bool:
        """Whether it must wait: the guard is paused, or its model young. Each policy is reported once."""
        state, now = self._guard.state, self._guard.system.clock()
        until = over.born + self._guard.options.swap.min_lifetime
        if state.paused:
            job = PostponedJob(due.reasons, "paused", None)
        elif now < until:
            job = PostponedJob(due.reasons, "min_lifetime", until)
        else:
            return False
        state.postpone(job)
        # By the policy, and not by its reason, which may tell a figure that changes.
        told = [(reason, id(due.members[reason]) if reason in due.members else reason) for reason in job.reasons]
        new = {who for _, who in told if self._first_report((job.cause, who))}
        if fresh := tuple(reason for reason, who in told if who in new):
            seconds = None if job.until is None else job.until - now
            event = telemetry.ReloadPostponed(
                guard=self._guard.name, generation=over.number, reasons=fresh, cause=job.cause, seconds=seconds
            )
            telemetry.emit(event)
        return True

    def _retry(self, due: Due[M]) -> bool:
        state = self._guard.state
        without_model = state.current is None
        job = state.request_if_idle(due.reasons, urgent=without_model, by_policy=not without_model)
        return self._start(job)

    def _act(self, due: Due[M], over: Generation[M], *, sample: bool) -> bool:
        state = self._guard.state
        if due.action == "unload":
            self._start(state.request_if_idle(due.reasons, urgent=True, instead_of=over, by_policy=True, unloads=True))
            return False
        if due.action == "end_workers":
            if self._guard.options.workers is not None:
                self._guard.options.workers.end_workers(due.reasons)
            return False
        if self._recycles_here:
            self._recycle(due, over)
            return False
        # Where no calls run there is no pause between calls to wait for.
        urgent = self._renews is True
        job = state.request_if_idle(due.reasons, urgent=urgent, after_call=not sample, instead_of=over, by_policy=True)
        if job is not None:
            telemetry.emit(telemetry.ReloadDue(guard=self._guard.name, generation=over.number, reasons=due.reasons))
        return self._start(job)

    # Processes that are replaced as a whole: a due policy asks for a fresh process instead of a reload

    def _recycle(self, due: Due[M], over: Generation[M]) -> None:
        """Ask for a fresh process, once per generation."""
        if self._ask_for_process is None or not self._first_report("recycle"):
            return
        telemetry.emit(telemetry.RecycleAsked(guard=self._guard.name, generation=over.number, reasons=due.reasons))
        try:
            self._ask_for_process(due.reasons)
        except Exception as error:  # noqa: BLE001 - the process serves on; the event reports it
            self._report_error("recycle", error)

    @property
    def renew(self) -> Callable[[], object] | None:
        """What asks the parent for new weights, instead of a reload in this process; None where that is not so."""
        return self._ask_for_weights if self._renews is False else None

    def recycle_in_children(self, ask: Ask, *, takes_calls: bool, renew: Callable[[], object] | None = None) -> None:
        """Children that are forked from now on call ``ask``, and ``renew`` instead of a reload, if it is given."""
        self._guard.state.raise_if_closed()
        self._ask_for_process, self._ask_for_weights = ask, renew
        self._decide_here(renews=None if takes_calls else True)

    def recycle_here(self, ask: Ask, *, renews: bool = True) -> None:
        self._guard.state.raise_if_closed()
        self._ask_for_process, self._recycles_here = ask, True
        self._decide_here(renews=None if renews else False)

    def _decide_here(self, *, renews: bool | None) -> None:
        """Let a part of the guard's policy decide in this process.

        ``TTL``, ``Modified`` and ``Changed`` mean new weights, which a fresh child of the same parent would not have:
        they are the parent's business.
        """
        whole, self._renews = self._guard.options.reload_on, renews
        self.decide_by(whole if renews is None else subset(whole, renews=renews))

    def after_load(self) -> None:
        """Set the policies' alarm for a generation that was just installed. Never raises."""
        try:
            self._begin_with_current()
        except Exception:  # noqa: BLE001 - a fault here must not lose the next job, for which others wait
            logger.exception("modelguard could not ask the policies of guard %r", self._guard.name)

    def after_fork_in_child(self) -> None:
        """A child shares its parent's model, so it asks for a fresh process where that was prepared."""
        self._start_anew()
        self._recycles_here = self._ask_for_process is not None
        self._decide_here(renews=False if self._recycles_here else None)
        self.readings.after_fork_in_child(self._guard.state.current)
        self._begin_with_current()

    # What is due now

    def decide_by(self, policy: Policy | None, files: Mapping[Path, Fingerprint | None] = MappingProxyType({})) -> None:
        """Ask this policy from now on; its ``files`` were so before the load that is under way."""
        self._members = alternatives(policy)
        self._members_if_pinned = alternatives(source_part(policy))
        self._on_gpus = [part for member in self._members for part in member.parts() if isinstance(part, GpuPolicy)]
        self.readings.decide_by(policy, files)

    def _begin_with_current(self) -> None:
        generation = self._guard.state.current
        if generation is not None:
            self._begin(generation.number)
            snapshot = self.readings.snapshot(generation, settled=False, sample=False)
            self._set_alarm(generation, snapshot)
            if snapshot.uses:  # calls have ended since the installation, without an alarm
                self._guard.state.set_alarm(generation, snapshot.uses)

    def _due(self, *, sample: bool, insist: bool = False) -> Due[M] | None:
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
                due = self._due_now(sample=sample)
            finally:
                self._lock.release()
            if due is not None or not self._again:
                return due
        return None

    def _report_error(self, callback: Callback, error: BaseException, *, about: str = "") -> None:
        """Report a callable of the author's that raised; once per generation and type of error."""
        if self._first_report(f"{callback} {about} {type(error)}"):
            where = f" (in {about})" if about else ""
            event = telemetry.CallbackErrored(guard=self._guard.name, callback=callback, error=f"{told(error)}{where}")
            telemetry.emit(event)

    def _due_now(self, *, sample: bool) -> Due[M] | None:
        state = self._guard.state
        if state.closed or state.job is not None:
            self._pause = _UNHURRIED
            return None
        if state.failure is not None:
            return self._due_retry()
        generation = state.current
        if generation is None:
            self._pause = math.inf
            return None
        if self.readings.generation != generation.number:  # after a rollback
            self.readings.start(generation)
        snapshot = self.readings.snapshot(generation, settled=state.draining <= state.abandoned, sample=sample)
        snapshot = self._guard.options.seen(snapshot)
        self._begin(generation.number)
        reasons = self._ask(snapshot)
        if sample:
            self._check_gpu_cache(snapshot)
        self._set_alarm(generation, snapshot)
        found = (*generation.demanded, *reasons)
        if not found:
            state.postpone(None)
            return None
        state.set_alarm(generation, math.inf)
        return Due(found, generation, reasons)

    def _due_retry(self) -> Due[M] | None:
        state = self._guard.state
        if state.paused and state.current is not None:
            self._pause = _UNHURRIED
            return None
        self._pause = max(0.0, state.retry_at - self._guard.system.clock())
        return None if self._pause > 0 else Due((Reason("retry", f"retry after failure {state.failures}"),), None)

    def _ask(self, snapshot: Snapshot) -> dict[Reason, Policy]:
        """The reasons of the members that are due, and the member that gives each.

        A member that raises is reported, and the others still count.
        """
        reasons: dict[Reason, Policy] = {}
        for member in self._asked():
            try:
                self._report_ignored_parts(member, snapshot)
                reasons |= dict.fromkeys(_reasons_of(member, snapshot), member)
            except BaseException as error:  # noqa: BLE001 - it is the policy's, not the call's
                self._policy_raised(member, error)
        return reasons

    def _policy_raised(self, member: Policy, error: BaseException) -> None:
        """Report it: neither its ``sys.exit()`` nor a ``CancelledError`` is a reason to end a call, or the service.

        Only Ctrl-C is not the policy's. It reaches the main thread, wherever that is.
        """
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise error
        self._report_error("reload_on", error, about=_name(member))

    def _report_ignored_parts(self, policy: Policy, snapshot: Snapshot) -> None:
        for part in policy.parts():
            detail = part.ignored_because(snapshot)
            if detail is not None and self._first_report(f"ignored {(named := _units.plain(repr(part)))}"):
                grown = system.found() if part.reads_memory else None
                event = telemetry.PolicyIgnored(
                    guard=self._guard.name,
                    generation=snapshot.generation,
                    policy=named,
                    detail=_units.plain(detail),
                    cause=None if grown is None else grown.cause,
                )
                telemetry.emit(event)

    def _set_alarm(self, generation: Generation[M], snapshot: Snapshot) -> None:
        members = self._asked()
        if not members:
            self._pause = _UNHURRIED if self._members else math.inf
            self._guard.state.set_alarm(generation, math.inf)
            return
        uses, seconds = math.inf, math.inf
        for member in members:
            try:
                next_check = member.next_check(snapshot)
                uses, seconds = min(uses, next_check.uses), min(seconds, next_check.seconds)
            except BaseException as error:  # noqa: BLE001 - it is the policy's, not the call's
                self._policy_raised(member, error)
        idle = snapshot.uses == self._uses_seen
        self._uses_seen = snapshot.uses
        until_reading = self.readings.interval
        self._pause = min(seconds, max(until_reading, _UNHURRIED) if idle else until_reading)
        self._guard.state.set_alarm(generation, snapshot.uses + uses)

    def _asked(self) -> tuple[Policy, ...]:
        """What decides now. After a rollback that is only a new change of the source."""
        current = self._guard.state.current
        members = self._members_if_pinned if current is not None and current.pinned else self._members
        workers = self._guard.options.workers
        if workers is None or not workers.workers_ended:
            return members
        return tuple(member for member in members if not member.ends_workers)

    def _first_report(self, about: object) -> bool:
        """Whether this generation has not been told of it. In one step: ends of calls and the ticker may both ask."""
        mine = object()
        return self._reported.setdefault(about, mine) is mine

    def _check_gpu_cache(self, now: Snapshot) -> None:
        """Empty torch's cache if a policy finds it too large, and not too soon after the last time."""
        system = self._guard.system
        part = next((one for one in self._on_gpus if one.cache_too_large(now)), None)
        if part is None or system.clock() < self._empty_again:
            return
        self._emptied += 1
        self._empty_again = system.clock() + _PAUSE.seconds(self._emptied, now.jitter)
        before, started = use_of(system.gpu), system.clock()
        system.gpu.empty_cache()
        after = use_of(system.gpu)
        if before is None or after is None:  # the device has failed
            return
        event = telemetry.GpuCacheEmptied(
            guard=self._guard.name,
            generation=now.generation,
            policy=repr(part),
            reserved_before=before.reserved,
            reserved_after=after.reserved,
            allocated=after.allocated,
            seconds=system.clock() - started,
            advice=_ADVICE if self._emptied > 1 or after.reserved >= before.reserved else None,
        )
        telemetry.emit(event)
