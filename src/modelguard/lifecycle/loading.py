"""Calling a loader: in time, on few threads, watched for stalls."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Self, TypeVar

T = TypeVar("T")

#: How often the stall meter asks for its turn. Python's own switch interval is 5 ms.
_BEAT = 0.005


def finished(result: Any) -> Any:
    """The result of a callable that may be ``async``: run to its end on an event loop of its own."""
    # Coroutines only: a model may have an __await__ of its own.
    return asyncio.run(result) if inspect.iscoroutine(result) else result


class Late(Exception):
    """The work was not done in time; it goes on in its thread, and its result goes to ``when_late``."""


def within(
    timeout: float | None,
    work: Callable[[], T],
    *,
    start_thread: Callable[[Callable[[], None], str], None],
    name: str,
    when_late: Callable[[T], None],
) -> T:
    """Run ``work``, in a thread of its own if its time is limited (a thread cannot be stopped, only left behind).

    Raises:
        Late: ``timeout`` seconds have passed. Should the work end after all, ``when_late`` disposes of its result.
    """
    if timeout is None:
        return work()
    outcome: Future[T] = Future()
    lock = threading.Lock()
    left_behind = False

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
            outcome.set_exception(error)
            return
        with lock:
            if not left_behind:
                outcome.set_result(result)
                return
        when_late(result)

    start_thread(run, name)
    try:
        return outcome.result(timeout)
    except TimeoutError:
        with lock:
            if outcome.done():  # it ended in this very moment, or raised a TimeoutError of its own
                return outcome.result()
            left_behind = True
    raise Late


class StallMeter:
    """How long, at most, no other Python thread could run: the longest a call beside the load had to stand still."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._beat, name="modelguard-stall-meter", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        last = time.perf_counter()
        while not self._over.wait(_BEAT):
            now = time.perf_counter()
            self.longest = max(self.longest, now - last - _BEAT)
            last = now
        self.longest = max(self.longest, time.perf_counter() - last - _BEAT)
