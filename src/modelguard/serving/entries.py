"""One item on its way through a batcher, and how its caller gets the answer: one kind for each door."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from modelguard.errors import CallerGone
from modelguard.telemetry import logger

__all__ = ["Entry", "Failure", "FutureEntry", "LoopEntry", "Submitted", "ThreadEntry", "answer"]

#: Where an entry is. DONE: it has its answer, or needs none any more.
WAITING, RUNNING, DONE = range(3)


class Failure:
    """An answer that is an error."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Entry:
    """One item.

    What most entries have in common are attributes of the class: an entry is made for every call.

    Attributes:
        item: What the caller gave.
        arrived: Seconds on the batcher's clock.
        deadline: Seconds on the same clock; infinity for none.
        weight: What it counts for against ``max_weight``; 1 if nothing is weighed.
        group: Entries of one group may share a batch: their keyword arguments as ``(name, type, value)``, None if
            there are none.
        place: ``WAITING``, ``RUNNING`` or ``DONE``; changed by the core alone.
        inside: The batchers that wait for this one, if it was asked for by a batch function.
        loop: The event loop on which its caller waits, None if it is a thread.
    """

    arrived = 0.0
    deadline = math.inf
    weight: float = 1
    group: tuple[tuple[str, type, Any], ...] | None = None
    place = WAITING
    inside: frozenset[object] = frozenset()
    loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, item: Any) -> None:
        self.item = item

    def answer(self, outcome: Any) -> None:
        """Hand the outcome over, a result or a :class:`Failure`. Called once, outside of every lock."""
        raise NotImplementedError


class ThreadEntry(Entry):
    """A thread waits for it."""

    _outcome: Any

    def __init__(self, item: Any) -> None:
        self.item = item
        self._arrival = threading.Lock()
        self._arrival.acquire()

    def answer(self, outcome: Any) -> None:
        """Wake the thread."""
        self._outcome = outcome
        self._arrival.release()

    def wait(self) -> Any:
        """Block until the answer is there.

        Raises:
            BaseException: What the item failed with.
        """
        self._arrival.acquire()
        outcome = self._outcome
        if type(outcome) is Failure:
            try:
                raise outcome.error
            finally:
                del self, outcome  # the error's traceback refers to this frame
        return outcome


class LoopEntry(Entry):
    """A coroutine waits for it, on whichever loop."""

    def __init__(self, item: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.item = item
        self.loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()


class Submitted(Future[Any]):
    """A future whose ``cancel`` takes the item out of its batcher, too."""

    call_off: Callable[[], object] | None = None

    def cancel(self) -> bool:
        """Drop the item if it waits, and its result if it is being computed; false if there is an answer already."""
        cancelled = super().cancel()
        if cancelled and self.call_off is not None:
            self.call_off()
        return cancelled


class FutureEntry(Entry):
    """A future was given for it."""

    def __init__(self, item: Any) -> None:
        self.item = item
        self.future = Submitted()

    def answer(self, outcome: Any) -> None:
        """Complete the future, unless it was cancelled."""
        self.future.call_off = None  # it refers to this entry, which refers to the future
        if not self.future.set_running_or_notify_cancel():
            return
        if type(outcome) is Failure:
            self.future.set_exception(outcome.error)
        else:
            self.future.set_result(outcome)


def answer(entries: list[Entry], outcomes: list[Any]) -> None:
    """Hand each entry its outcome; those of one event loop in one wake-up. Never raises.

    Futures come last: their callbacks are foreign code, for which nobody else should wait.
    """
    homes = {entry.loop for entry in entries}
    if len(homes) == 1 and (loop := homes.pop()) is not None:
        _wake(loop, entries, outcomes)
        return
    loops: dict[Any, tuple[list[Entry], list[Any]]] = {}
    futures: list[tuple[Entry, Any]] = []
    for entry, outcome in zip(entries, outcomes, strict=True):
        if isinstance(entry, FutureEntry):
            futures.append((entry, outcome))
        elif entry.loop is None:
            entry.answer(outcome)
        else:
            theirs, answers = loops.setdefault(entry.loop, ([], []))
            theirs.append(entry)
            answers.append(outcome)
    for loop, (theirs, answers) in loops.items():
        _wake(loop, theirs, answers)
    for entry, outcome in futures:
        try:
            entry.answer(outcome)
        except BaseException:  # noqa: BLE001 - whatever a callback raises, the others get their answers
            with contextlib.suppress(BaseException):  # a log that raises is not their fault either
                logger.exception("modelguard: a callback of a submitted call failed")


def _wake(loop: asyncio.AbstractEventLoop, entries: list[Any], outcomes: Iterable[Any]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits there any more
        loop.call_soon_threadsafe(_settle, entries, outcomes)


def _settle(entries: list[LoopEntry], outcomes: Iterable[Any]) -> None:
    """On the loop."""
    for entry, outcome in zip(entries, outcomes, strict=True):
        try:
            if type(outcome) is Failure:
                entry.future.set_exception(outcome.error)
            else:
                entry.future.set_result(outcome)
        except asyncio.InvalidStateError:
            pass


def gone(function: str) -> Failure:
    """The answer for one whose client has hung up."""
    return Failure(CallerGone(function))
