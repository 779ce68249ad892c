"""``watch``: names the cause of growth inside a service that runs, at 1 % of its CPU time at most."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from modelguard import _units, telemetry
from modelguard.diagnosis import _census, _holders
from modelguard.diagnosis._attribution import attribute
from modelguard.diagnosis._compiled import compiled
from modelguard.diagnosis._growth import Measured, Unit
from modelguard.diagnosis._holders import Held
from modelguard.diagnosis._observed import Calls, Look, Observed
from modelguard.environment import _allocator, _memory
from modelguard.errors import InvalidOption, ModelGuardError
from modelguard.isolation import _role
from modelguard.lifecycle import _growth
from modelguard.telemetry import GrowthFound

__all__ = ["Watch", "World", "watch"]

#: The share of the time that the watch may compute.
_SHARE = 0.01
#: Readings more often than this decide nothing sooner, in seconds.
_SHORTEST = 0.05


def _look() -> Look:
    libraries = tuple(name for name in _census.LIBRARIES if name in sys.modules)
    return Look(*_census.look(), compiled(), libraries, _free(), _census.moment())


def _held(first: Look, calls: int) -> tuple[Held, ...]:
    """What holds what has become more. Nothing is collected here, so what has no way from a root may be garbage."""
    return (
        ()
        if first.moment is None
        else tuple(one for one in _holders.named(_census.grown(first.moment, calls)) if one.path)
    )


def _free() -> int | None:
    with contextlib.suppress(ModelGuardError):
        return _allocator.stats().retained
    return None


def _trim() -> int:
    with contextlib.suppress(ModelGuardError):
        return _allocator.trim()
    return 0


@dataclass(frozen=True, kw_only=True)
class World:
    """The process that is watched, as the watch reaches it. Tests replace it.

    Attributes:
        clock: Monotonic seconds.
        cpu: CPU seconds of the calling thread.
        private: Private memory in bytes.
        look: Takes a closer look.
        held: Finds what holds that which has become more since a look, after so many calls.
        trim: Returns free memory to the system, and says how many bytes.
    """

    clock: Callable[[], float] = time.monotonic
    cpu: Callable[[], float] = time.thread_time
    private: Callable[[], int] = lambda: _memory.private(fresh=True)
    look: Callable[[], Look] = _look
    held: Callable[[Look, int], tuple[Held, ...]] = _held
    trim: Callable[[], int] = _trim


class Watch:
    """Watches this process until it is stopped. Made by :func:`watch`; a context manager that stops at its end.

    Attributes:
        found: What was found last; None if memory does not grow, or if that is not decided yet.
    """

    def __init__(self, name: str, every: float, calls: Callable[[], int] | None, world: World) -> None:
        self.found: GrowthFound | None = None
        self._name = name
        self._every = every
        self._given = calls
        self._world = world
        self._begin()

    def _begin(self) -> None:
        """Begin anew, as a forked child does."""
        self._stopped = threading.Event()
        self._observed = Observed()
        self._first: Look | None = None
        self._calls = Calls()
        self._began = self._world.clock()
        self.found = None

    def start(self) -> None:
        """Start the thread that watches."""
        threading.Thread(target=self._run, name="modelguard-watch", daemon=True).start()

    def stop(self) -> None:
        """Stop watching; guards no longer show what was found."""
        self._stopped.set()
        _running.discard(self)
        if self.found is not None and _growth.found() is self.found:
            _growth.note(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        stopped, rest = self._stopped, self._every
        while not stopped.wait(rest):
            try:
                rest = self.step()
            except Exception:  # noqa: BLE001 - a watch never harms what it watches
                telemetry.logger.exception("modelguard could not look at the growth of this process")
                rest = 60 * self._every

    def step(self) -> float:
        """Look once; returns the seconds to wait until the next look."""
        began = self._world.cpu()
        if self._first is None:
            self._first = self._world.look()
        if self._observed.add(self._count(), self._world.private()):
            verdict = self._observed.verdict()
            if verdict == "grows":
                self._decide(self._first)
            elif verdict == "steady" and self.found is not None:
                self._forget()
        return max(self._every, (self._world.cpu() - began) / _SHARE)

    def _decide(self, first: Look) -> None:
        """Name the cause, and begin again: the next decision is about what comes then."""
        unit = self._unit()
        held = self._world.held(first, self._observed.calls if unit == "calls" else 0)
        last, trimmed = self._world.look(), self._world.trim()
        measured = self._observed.measured(first, last, trimmed, unit, held)
        event = self._event(measured)
        if self.found is None or event.cause != self.found.cause:
            telemetry.emit(event)
        self.found = event
        if not self._stopped.is_set():
            _growth.note(event)
        self._observed, self._first = Observed(), last

    def _event(self, measured: Measured) -> GrowthFound:
        causes, _ = attribute(measured)
        main = causes[0] if causes else None
        return GrowthFound(
            guard=self._name,
            cause=None if main is None else main.name,
            share=0.0 if main is None else main.share,
            seen="" if main is None else main.seen,
            fix="" if main is None else main.fix,
            growth=measured.growth,
            calls=measured.calls[-1],
        )

    def _forget(self) -> None:
        self.found = None
        _growth.note(None)

    def _unit(self) -> Unit:
        return "calls" if self._given is not None or self._calls.known else "milliseconds"

    def _count(self) -> int:
        if self._given is not None:
            return self._given()
        total = self._calls.total(_census.guard_uses())
        return total if self._calls.known else int(1000 * (self._world.clock() - self._began))

    def after_fork_in_child(self) -> None:
        """Watch the child too: the parent's thread does not exist there."""
        self._begin()
        self.start()


_running: set[Watch] = set()
_first = threading.Lock()  # taken by the first watch, and never released


def watch(*, every: _units.Duration = "10s", calls: Callable[[], int] | None = None, name: str = "service") -> Watch:
    """Watch the memory of this process, and name the cause when it is decided that it grows with the calls.

    A background thread reads private memory, and takes at most 1 % of one CPU: after each look it rests a hundred times
    as long as it has computed. When memory grows, it emits ``GrowthFound``, ``status().growth`` of each guard shows it,
    and ``PolicyFutile`` names the cause. The attribution is that of :func:`diagnose`, without what would disturb the
    service: no cache is emptied, nothing is collected or traced. Freed memory is returned once, when it is decided.

    It needs 24 readings. They cover the whole time: the longer it runs, the farther apart they are. Forked children are
    watched for themselves.

    Args:
        every: How long to wait between two readings, at first.
        calls: Returns how many calls have ended so far. Default: those on the guards of this process; without guards,
            time is counted instead.
        name: For events and logs, which show it as the guard's name.

    Returns:
        The watch, which goes on until its ``stop()``, or the end of its ``with`` block.

    Raises:
        InvalidOption: ``every`` is not a duration, ``calls`` is not callable, or ``name`` is not text.
        NotSupported: Private memory cannot be read here.
    """
    if calls is not None and not callable(calls):
        why = f"must be a function that returns a number, not {_units.kind_of(calls)}"
        raise InvalidOption("calls", calls, why=why, fix="Write calls=lambda: counter.value.")
    if not isinstance(name, str) or not name.strip():
        raise InvalidOption(
            "name", name, why="must be text that is not empty", fix="Give a short name, or leave it out."
        )
    interval = _units.seconds(every, "every")
    if interval < _SHORTEST:
        raise InvalidOption("every", every, why=f"must be at least {_SHORTEST:g} s", fix="Write every='10s'.")
    _memory.private(fresh=True)  # raises if it cannot be read
    made = Watch(name, interval, calls, World())
    _running.add(made)
    if _first.acquire(blocking=False) and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork_in_child)
    if _role.current() == "owner":  # a mold only forks workers, which are watched
        made.start()
    return made


def _after_fork_in_child() -> None:
    for each in list(_running):
        each.after_fork_in_child()
