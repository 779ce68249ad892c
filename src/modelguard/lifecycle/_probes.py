"""Asks the probes of one guard's policy in threads of their own, and keeps what they return."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from modelguard import telemetry
from modelguard.lifecycle._policy import Policy, ProbeAnswers
from modelguard.lifecycle._probed_source import UNKNOWN, ProbedSource
from modelguard.lifecycle._resolve import resolve
from modelguard.lifecycle.policies import Changed

if TYPE_CHECKING:
    from modelguard.lifecycle.runtime import Runtime

__all__ = ["Probe", "Probes"]

#: How many calls of one probe may hang at a time. A thread cannot be stopped, and each has one.
MOST_HANGING = 3
#: The part of ``every`` after which a change is confirmed, and seconds that this takes at least.
_CONFIRM, _SOONEST = 0.1, 1.0
#: So many answers in a row make an error new again.
_SOUND = 10


class Probe:
    """One probe of one guard: when it is asked, what it returned, and how it fails.

    Args:
        guard: The guard's name.
        policy: The probe, and how it is asked.
    """

    def __init__(self, guard: str, policy: Changed) -> None:
        self._guard = guard
        self._policy = policy
        self._source = ProbedSource()
        self._start()

    def _start(self) -> None:
        self._lock = threading.RLock()  # reentrant: values compare by code of their own, and signal handlers interrupt
        self._next = math.inf  # until a model is loaded
        self._asked = 0
        self._newest = 0  # of the calls that have returned, the one that was made last
        self._running: dict[int, float] = {}  # calls that are awaited, and when they were made
        self._hanging: set[int] = set()
        self._sound = 0
        self._reported: set[str] = set()

    def after_fork_in_child(self, runtime: Runtime) -> None:
        """The parent's threads do not exist here. What is known of the source stays true."""
        plan = self._next < math.inf
        self._start()
        if plan:
            self._next = runtime.clock() + self._pause(runtime)

    @property
    def answers(self) -> ProbeAnswers:
        """What is known of its answers."""
        with self._lock:
            return ProbeAnswers(changed=self._source.changed, unsteady=self._source.unsteady)

    def loaded(self, value: object, runtime: Runtime) -> None:
        """A model was loaded; ``value`` is what the probe returned just before."""
        with self._lock:
            self._source.loaded(value)
            self._next = runtime.clock() + self._pause(runtime)

    def poll(self, runtime: Runtime) -> None:
        """Ask, if it is time. Does not wait for the answer."""
        now = runtime.clock()
        with self._lock:
            late = [call for call, since in self._running.items() if now - since >= self._policy.timeout]
            for call in late:
                self._give_up(call)
            ask = now >= self._next and not self._running and len(self._hanging) < MOST_HANGING
            if ask:
                self._next = now + self._pause(runtime)
        if late:
            self._report_late()
        if ask:
            self.ask(runtime)

    def ask(self, runtime: Runtime) -> tuple[int, Future[object]]:
        """Ask now, in a thread; returns the number of the call, and what becomes its value, ``UNKNOWN`` if it fails."""
        future: Future[object] = Future()
        with self._lock:
            self._asked += 1
            call = self._asked
            self._running[call] = runtime.clock()
        try:
            runtime.start_once(partial(self._call, call, future, runtime), f"modelguard-probe-{self._guard}")
        except RuntimeError as error:  # the system gives no thread, or the interpreter is shutting down
            self._failed(call, error)
            future.set_result(UNKNOWN)
        return call, future

    def wait(self, call: int, future: Future[object]) -> object:
        """Wait for a call up to the probe's ``timeout``; returns its value, ``UNKNOWN`` if there is none by then."""
        try:
            return future.result(self._policy.timeout)
        except TimeoutError:
            with self._lock:
                if future.done():  # in this very moment
                    return future.result()
                self._give_up(call)
            self._report_late()
            return UNKNOWN

    def _call(self, call: int, future: Future[object], runtime: Runtime) -> None:
        value: object = UNKNOWN
        try:
            value = resolve(self._policy.probe())
            if value is None:
                raise TypeError("it returned None; return a value that changes with the model, such as an ETag")  # noqa: TRY301 - reported as what it raises is
            self._answered(call, value, runtime)
        except BaseException as error:  # noqa: BLE001 - whatever a probe raises, it only does not answer
            value = UNKNOWN
            self._failed(call, error)
        finally:
            future.set_result(value)

    def _answered(self, call: int, value: object, runtime: Runtime) -> None:
        with self._lock:
            self._running.pop(call, None)
            if call in self._hanging:  # too late: the value may be an old one
                self._hanging.discard(call)
                return
            if call < self._newest:
                return
            self._source.answered(value)
            self._newest = call
            self._sound += 1
            if self._sound >= _SOUND:
                self._reported.clear()
            if self._source.expects_confirmation:
                soon = max(_SOONEST, self._policy.every * _CONFIRM)
                self._next = min(self._next, runtime.clock() + min(soon, self._policy.every))

    def _failed(self, call: int, error: BaseException) -> None:
        with self._lock:
            self._running.pop(call, None)
            was_given_up = call in self._hanging
            self._hanging.discard(call)
        if not was_given_up:
            self._report(type(error).__name__, f"{type(error).__name__}: {error}")

    def _give_up(self, call: int) -> None:
        if self._running.pop(call, None) is not None:
            self._hanging.add(call)

    def _report_late(self) -> None:
        self._report("late", f"TimeoutError: no answer within {self._policy.timeout:g} s")

    def _report(self, kind: str, error: str) -> None:
        with self._lock:
            self._sound = 0
            if kind in self._reported:
                return
            self._reported.add(kind)
        where = f"{error} (in {self._policy!r})"
        telemetry.emit(telemetry.CallbackErrored(guard=self._guard, callback="probe", error=where))

    def _pause(self, runtime: Runtime) -> float:
        return self._policy.every * (1 - self._policy.jitter * runtime.random())


class Probes:
    """The probes of one guard.

    Args:
        guard: The guard's name.
        policy: Of the guard.
    """

    def __init__(self, guard: str, policy: Policy | None) -> None:
        self._known: dict[Changed, Probe] = {part: Probe(guard, part) for part in _of(policy)}
        self._asked = tuple(self._known)

    def decide_by(self, policy: Policy | None) -> None:
        """Ask only those of this part of the policy from now on."""
        self._asked = tuple(_of(policy))

    def after_fork_in_child(self, runtime: Runtime) -> None:
        """Start without threads."""
        for probe in self._known.values():
            probe.after_fork_in_child(runtime)

    def before_load(self, runtime: Runtime) -> Mapping[Changed, object]:
        """Ask all of them, and wait for their answers."""
        asked = [(part, self._known[part], *self._known[part].ask(runtime)) for part in self._used(runtime)]
        return {part: probe.wait(call, future) for part, probe, call, future in asked}

    def loaded(self, values: Mapping[Changed, object], runtime: Runtime) -> None:
        """A model was loaded, just before which the probes returned these values."""
        for part, value in values.items():
            self._known[part].loaded(value, runtime)

    def poll(self, runtime: Runtime) -> None:
        """Ask those for which it is time. Does not wait for answers."""
        for part in self._used(runtime):
            self._known[part].poll(runtime)

    def answers(self) -> Mapping[Any, ProbeAnswers]:
        """What is known of each probe."""
        return MappingProxyType({part.probe: self._known[part].answers for part in self._asked})

    def _used(self, runtime: Runtime) -> tuple[Changed, ...]:
        return self._asked if runtime.probes else ()


def _of(policy: Policy | None) -> Iterable[Changed]:
    return dict.fromkeys(part for part in (policy.parts() if policy is not None else ()) if isinstance(part, Changed))
