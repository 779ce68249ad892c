"""How callers wait for a load: for how long at most, and how the wait ends."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from modelguard import _units
from modelguard.errors import GuardClosed, LoadFailed, Reloading
from modelguard.lifecycle import _deadlocks
from modelguard.lifecycle._load_job import LoadJob
from modelguard.lifecycle._state import GuardState
from modelguard.lifecycle._waiters import Outcome


class Timeout:
    """A bound on all the attempts of one caller together. It starts at once; None means no bound."""

    def __init__(self, timeout: _units.Duration | None) -> None:
        self._started = time.monotonic()
        self._seconds = None if timeout is None else _units.seconds(timeout, "timeout", zero=True)

    def waited(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def left(self) -> float | None:
        """Remaining seconds, at least 0; None without a bound."""
        return None if self._seconds is None else max(0.0, self._seconds - self.waited())


def wait_for_load(state: GuardState[Any], future: Future[Outcome], timeout: Timeout) -> None:
    """Wait until there is a current generation.

    Raises:
        LoadFailed, GuardClosed: The wait ended without one.
        Reloading: ``timeout`` has passed.
        WouldDeadlock: The load waits for this thread.
    """
    try:
        with _deadlocks.waiting_for(state):
            outcome = _result(state, future, timeout)
    except TimeoutError:
        raise Reloading(state.name, waited=timeout.waited(), current=_number(state)) from None
    finally:
        state.stop_waiting(future)
    raise_outcome(outcome)


def wait_for_end_of_job(state: GuardState[Any], job: LoadJob | None, timeout: Timeout) -> None:
    """Wait until ``job``, or the load under way, has ended.

    Raises:
        Reloading: ``timeout`` has passed.
        GuardClosed: The guard was closed meanwhile.
    """
    if not state.wait_for_end_of_job(job, timeout.left()):
        command = "the load or release under way"
        raise Reloading(state.name, waited=timeout.waited(), command=command, current=_number(state))
    state.raise_if_closed()


def _result(state: GuardState[Any], future: Future[Outcome], timeout: Timeout) -> Outcome:
    while (left := timeout.left()) is None or left > _deadlocks.PATIENCE:
        with suppress(TimeoutError):
            return future.result(_deadlocks.PATIENCE)
        _deadlocks.raise_if_load_waits_here(state)
    return future.result(left)


async def wait_for_load_on_loop(state: GuardState[Any], future: Future[Outcome], timeout: Timeout) -> None:
    """:func:`wait_for_load` without blocking the event loop, which is asyncio's."""
    try:
        with _deadlocks.waiting_for(state):
            outcome = await asyncio.wait_for(asyncio.wrap_future(future), timeout.left())
    except TimeoutError:
        raise Reloading(state.name, waited=timeout.waited(), current=_number(state)) from None
    finally:
        state.stop_waiting(future)
    raise_outcome(outcome)


def _number(state: GuardState[Any]) -> int | None:
    current = state.current
    return None if current is None else current.number


def raise_outcome(outcome: Outcome) -> None:
    """Raise what a wait has ended with, unless that is a model.

    Raises:
        LoadFailed, GuardClosed: There is none.
    """
    # A new object for each caller: an exception that is raised in several threads mixes up their tracebacks.
    if isinstance(outcome, LoadFailed):
        raise outcome.again(outcome.retry_after, outcome.current) from outcome.__cause__
    if outcome is not None:
        raise GuardClosed(outcome.guard)
