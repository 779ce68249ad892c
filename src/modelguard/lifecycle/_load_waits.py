"""How callers wait for a load: for how long at most, and how the wait ends."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

from modelguard.errors import GuardClosed, LoadFailed, Reloading, WouldDeadlock
from modelguard.lifecycle._state import GuardState, LoadJob, Outcome
from modelguard.runtime import fork
from modelguard.runtime.waiting import Steps, Timeout, Wait

# Loads that wait for themselves, directly or through others: found before anybody waits.


#: For each thread that waits for loads: whose loads. The tasks of one event loop may wait for several.
_waiting: dict[int, list[GuardState[Any]]] = {}
fork.at_fork(fork.Rank.LOCKS, in_child=_waiting.clear)  # the parent's threads do not exist there


@contextmanager
def waiting_for(state: GuardState[Any]) -> Iterator[None]:
    """Wait for a load of the guard with this ``state`` inside the block.

    Raises:
        WouldDeadlock: That load waits for this thread: its loader waits here, or for a load whose loader does.
    """
    me = threading.get_ident()
    mine = _waiting.setdefault(me, [])
    mine.append(state)  # recorded first: if two threads close a circle at once, the second one sees it
    try:
        _raise_on_circle(state, me)
        yield
    finally:
        mine.remove(state)
        if not mine:
            _waiting.pop(me, None)


def search(states: Iterable[GuardState[Any]]) -> None:
    """Check that no load under way waits for work that this thread does for it.

    A warm-up that calls the guarded function by way of an executor waits for a thread that waits for the new model.
    Which thread that is can be read off the stacks only, so this is for those who have waited for some time.

    Raises:
        WouldDeadlock: One of them does.
    """
    loads = [(state.name, list(job.threads)) for state in states if (job := state.job) is not None]
    frames = sys._current_frames() if loads else {}  # noqa: SLF001 - there is no public way to the stacks
    for name, threads in loads:
        if any(_is_done_here(frame) for thread in threads for frame in _stack(frames.get(thread))):
            raise WouldDeadlock(
                name,
                why="the warm-up of its new model waits for this thread, which waits for that model",
                fix="Call the function in the warm-up itself, or submit contextvars.copy_context().run(...).",
            )


def _is_done_here(frame: FrameType) -> bool:
    """Whether a frame waits for a future of an executor that this thread computes, or for this thread's end.

    An event loop waits for the futures that it has a callback on, as ``loop.run_in_executor`` leaves one.
    """
    waits_for = frame.f_locals.get("self") if frame.f_code in _WAITS else None
    if waits_for is None:
        return False
    if isinstance(waits_for, threading.Thread):
        return waits_for.ident == threading.get_ident()
    own = [future for item in _own_work() if (future := getattr(item, "future", None)) is not None]
    if frame.f_code is _RUN_LOOP:
        return any(_calls_back(future, waits_for) for future in own)
    return any(future is waits_for for future in own)


def _own_work() -> Iterator[object]:
    """What executors have given this thread to compute."""
    for frame in _stack(sys._getframe()):  # noqa: SLF001 - as above
        if frame.f_code.co_qualname == "_WorkItem.run":
            yield frame.f_locals.get("self")


def _calls_back(future: object, loop: object) -> bool:
    callbacks = tuple(getattr(future, "_done_callbacks", ()))
    cells = (cell for callback in callbacks for cell in getattr(callback, "__closure__", None) or ())
    with suppress(ValueError):  # a cell is empty
        return any(cell.cell_contents is loop for cell in cells)
    return False


_RUN_LOOP = asyncio.BaseEventLoop.run_forever.__code__
_WAITS = {Future.result.__code__, Future.exception.__code__, threading.Thread.join.__code__, _RUN_LOOP}


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _raise_on_circle(state: GuardState[Any], me: int) -> None:
    pending, seen = [state], {state}
    while pending:
        job = pending.pop().job
        for thread in list(job.threads) if job is not None else ():
            if thread == me:
                raise WouldDeadlock(
                    state.name,
                    why="its loader waits for the very model that it is loading",
                    fix="Use the model itself inside the loader, or move the call to warmup: it runs on the new model.",
                )
            following = [other for other in _waiting.get(thread, ()) if other not in seen]
            seen.update(following)
            pending.extend(following)


def until_loaded(state: GuardState[Any], future: Future[Outcome], timeout: Timeout) -> Steps[None]:
    """Wait until there is a current generation.

    Raises:
        LoadFailed, GuardClosed: The wait ended without one.
        Reloading: ``timeout`` has passed.
        WouldDeadlock: The load waits for this thread.
    """
    try:
        with waiting_for(state):
            yield Wait(future, timeout, search=partial(search, [state]))
    finally:
        state.stop_waiting(future)
    if not future.done():
        raise Reloading(state.name, waited=timeout.waited(), current=state.number)
    raise_outcome(future.result())


def until_ended(state: GuardState[Any], job: LoadJob | None, timeout: Timeout) -> Steps[None]:
    """Wait until a job has ended, if there is one.

    Raises:
        Reloading: ``timeout`` has passed.
        GuardClosed: The guard was closed meanwhile.
    """
    if job is not None:
        yield Wait(job.ended, timeout)
        if not job.ended.done():
            command = "the load or release under way"
            raise Reloading(state.name, waited=timeout.waited(), command=command, current=state.number)
    state.raise_if_closed()


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
