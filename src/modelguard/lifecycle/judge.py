"""Whether the serving generation is over: the policy's verdict, and what is to follow from it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from modelguard import telemetry
from modelguard.lifecycle.policies import Policy, Snapshot, share
from modelguard.lifecycle.watch import Watch

if TYPE_CHECKING:
    from modelguard.lifecycle.core import Core, Ticket
    from modelguard.lifecycle.generation import Generation
    from modelguard.lifecycle.runtime import Runtime

M = TypeVar("M")

#: An idle guard's memory does not grow by itself: it is looked at this often.
_IDLE = 1.0


class Judge(Generic[M]):
    """Asks the policy of one guard, from one thread at a time."""

    def __init__(self, core: Core[M], policy: Policy | None, runtime: Runtime) -> None:
        self.watch = Watch(policy, runtime)
        self.pace = math.inf
        self._core = core
        self._policy = policy
        self._deciding = policy
        self._runtime = runtime
        self._asking = threading.Lock()
        self._complaints: set[str] = set()
        self._recycle: Callable[[tuple[str, ...]], object] | None = None
        self._shares = False
        self._serves = True
        self._uses_seen = -1

    def verdict(self, *, sample: bool) -> Ticket | None:
        """Ask the policy; returns the ticket of a reload that the caller must start.

        Args:
            sample: Whether there is time to read memory and files. At the end of a call there is none.
        """
        # Two threads would find the same answer. Whoever comes second need not wait for it.
        if not self._asking.acquire(blocking=False):
            return None
        try:
            return self._verdict(sample=sample)
        finally:
            self._asking.release()

    def verdict_after_load(self) -> None:
        """Set the alarm of a generation that was just installed."""
        generation = self._core.serving
        if generation is not None:
            self._complaints.clear()
            self._set_alarm(generation, self.watch.snapshot(generation, settled=False, sample=False))

    def recycle_in_children(self, ask: Callable[[tuple[str, ...]], object], *, serves: bool) -> None:
        """Ask for a fresh worker instead of a reload, in children forked from now on."""
        self._recycle = ask
        self._serves = serves
        self._deciding = self._policy if serves else share(self._policy, renews=True)

    def recycle_here(self, ask: Callable[[tuple[str, ...]], object]) -> None:
        """Ask for a fresh process instead of a reload, from now on."""
        self._recycle = ask
        self._shares = True

    def after_fork_in_child(self) -> None:
        """Start the child's own readings."""
        self._asking = threading.Lock()
        self._complaints.clear()
        self._shares = self._recycle is not None
        self._serves = True
        self._deciding = share(self._policy, renews=False) if self._shares else self._policy
        self._uses_seen = -1
        generation = self._core.serving
        self.watch.forget(generation)
        self.verdict_after_load()

    def _verdict(self, *, sample: bool) -> Ticket | None:
        core, now = self._core, self._runtime.clock()
        if core.closed or core.ticket is not None:
            self.pace = _IDLE
            return None
        if core.failures:
            self.pace = max(0.0, core.retry_at - now)
            if self.pace > 0:
                return None
            return core.request_if_idle((f"retry after failure {core.failures}",), urgent=core.serving is None)
        generation = core.serving
        if generation is None:
            self.pace = math.inf
            return None
        snapshot = self.watch.snapshot(generation, settled=core.draining <= core.abandoned, sample=sample)
        reasons = self._ask(snapshot)
        self._set_alarm(generation, snapshot)
        if not reasons:
            return None
        core.set_alarm(generation, math.inf)
        return self._due(generation, reasons, after_call=not sample)

    def _ask(self, snapshot: Snapshot) -> tuple[str, ...]:
        if self._deciding is None:
            return ()
        try:
            for part in self._deciding.parts():
                detail = part.futile(snapshot)
                if detail is not None and self._first_complaint(f"futile {part!r}"):
                    telemetry.emit(
                        telemetry.PolicyFutile(
                            guard=self._core.name, generation=snapshot.generation, policy=repr(part), detail=detail
                        )
                    )
            return self._deciding.reasons(snapshot)
        except Exception as error:  # noqa: BLE001 - an own policy that raises must not fail the call that ends
            self._complain("reload_on", error)
            return ()

    def _due(self, generation: Generation[M], reasons: tuple[str, ...], *, after_call: bool) -> Ticket | None:
        if self._shares and self._recycle is not None:
            if self._first_complaint("recycle"):
                telemetry.emit(
                    telemetry.RecycleAsked(guard=self._core.name, generation=generation.number, reasons=reasons)
                )
                try:
                    self._recycle(reasons)
                except Exception as error:  # noqa: BLE001 - the worker serves on; the event tells
                    self._complain("recycle", error)
            return None
        urgent = not self._serves  # where nobody calls, no pause among the calls is to be waited for
        ticket = self._core.request_if_idle(reasons, urgent=urgent, after_call=after_call, instead_of=generation)
        if ticket is not None:
            telemetry.emit(telemetry.ReloadDue(guard=self._core.name, generation=generation.number, reasons=reasons))
        return ticket

    def _set_alarm(self, generation: Generation[M], snapshot: Snapshot) -> None:
        """Let calls pass on the fast way until the answer may change."""
        if self._deciding is None:
            return
        try:
            horizon = self._deciding.horizon(snapshot)
        except Exception as error:  # noqa: BLE001 - as above
            self._complain("reload_on", error)
            return
        idle = snapshot.uses == self._uses_seen
        self._uses_seen = snapshot.uses
        self.pace = min(horizon.seconds, max(self.watch.pace, _IDLE) if idle else self.watch.pace)
        self._core.set_alarm(generation, snapshot.uses + horizon.uses)

    def _complain(self, callback: str, error: Exception) -> None:
        if self._first_complaint(f"{callback} {type(error)}"):
            telemetry.emit(
                telemetry.CallbackErrored(
                    guard=self._core.name, callback=callback, error=f"{type(error).__name__}: {error}"
                )
            )

    def _first_complaint(self, about: str) -> bool:
        if about in self._complaints:
            return False
        self._complaints.add(about)
        return True
