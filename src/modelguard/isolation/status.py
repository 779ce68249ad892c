"""What isolated functions report about themselves, and the list of those of this process."""

from __future__ import annotations

import atexit
import functools
from dataclasses import dataclass
from typing import Any, Literal

from modelguard import _public
from modelguard.lifecycle.status import PoolStatus, Postponed, State
from modelguard.runtime import fork_hooks
from modelguard.runtime.fork_hooks import WeakRegistry

__all__ = ["IsolationStatus", "WorkerStatus"]

#: ``starting``: it is being forked or loads; ``retiring``: its call is its last one.
WorkerState = Literal["starting", "idle", "busy", "retiring"]


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """One worker process at one moment.

    Attributes:
        pid: Its process id; 0 while its mold has not forked it yet, so look before you send it a signal.
        state: ``starting``, ``idle``, ``busy``, or ``retiring`` (its call is its last one).
        worn: Whether a policy asked for its replacement, which has not come up yet.
        calls: Calls that it has answered.
        age: Seconds since it was started.
    """

    pid: int
    state: WorkerState
    worn: bool
    calls: int
    age: float


@dataclass(frozen=True, kw_only=True)
class IsolationStatus:
    """An isolated function at one moment.

    Attributes:
        name: Its name.
        state: The state of its molds, in the words of a guard's status: ``new``, ``loading``, ``ready``,
            ``reloading``, ``draining``, ``degraded``, ``idle`` (the mold or, with ``Idle(keep="mold")``, its workers
            were ended until the next call), ``failed``, ``closed``.
        ready: Whether a worker can answer, or the next call starts one after ``idle``.
        generation: Number of the current mold, 0 if there is none.
        age: Seconds since it took its first call.
        mold: Its process id; None if there is none.
        workers: The workers of the current mold.
        in_flight: Calls that run now or wait for a worker.
        queued: Calls of this process that wait for a worker or for a load.
        reloads: Molds that have replaced another one.
        failures: Consecutive molds that failed to load.
        last_error: The latest of these failures in one line.
        recycled: Workers of the current mold that a policy has replaced.
        crashed: Those that have ended by themselves.
        timed_out: Those that were killed at the timeout.
        broker: With ``scope="host"``, the process id of the broker, which owns the mold; None if there is none.
        clients: The processes that the broker serves.
        version: Version of the current mold's model, as its loader gave it with ``Loaded``; None if it gave none.
        previous: Number of the mold that ``rollback()`` would make current again; 0 if none is kept.
        pinned: Whether ``rollback()`` has made the current mold current, and its source has not changed since.
        pool: Over a pool, its figures: a mold with its workers counts as the model of its key. ``mold`` is None then,
            and ``workers`` are those of all keys.
        paused: Whether ``pause()`` holds back the policies.
        postponed: A new mold or new workers that policies ask for, and that must wait; None if there are none.
    """

    name: str
    state: State
    ready: bool = False
    generation: int = 0
    age: float = 0.0
    mold: int | None = None
    workers: tuple[WorkerStatus, ...] = ()
    in_flight: int = 0
    queued: int = 0
    reloads: int = 0
    failures: int = 0
    last_error: str | None = None
    recycled: int = 0
    crashed: int = 0
    timed_out: int = 0
    broker: int | None = None
    clients: tuple[int, ...] = ()
    version: str | None = None
    previous: int = 0
    pinned: bool = False
    pool: PoolStatus[Any] | None = None
    paused: bool = False
    postponed: Postponed | None = None


# The isolated functions of this process: for readiness probes, for commands, and for forks.


functions: WeakRegistry[Any] = WeakRegistry()  # of Isolated, whose module imports this one


@functools.cache
def refuse_calls_at_exit() -> None:
    """Have no call wait for processes that the exit of this one has ended: exit handlers that come later may call."""
    atexit.register(refuse_calls)


def refuse_calls() -> None:
    """Raise ``GuardClosed`` from now on. Once more does nothing."""
    for function in functions:
        function.refuse_calls()


def _renew() -> None:
    for function in functions:
        function.renew_in_child()


fork_hooks.at_fork(fork_hooks.Rank.ISOLATION, in_child=_renew)


_public.set_module(globals())
