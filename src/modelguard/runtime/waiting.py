"""How a caller waits: for how long at most, on an event loop or off it, and for work in a thread of its own."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from modelguard import _units
from modelguard.errors import NotSupported, WouldDeadlock


class Timeout:
    """A bound on all the attempts of one caller together. It starts at once; None means no bound."""

    def __init__(self, timeout: _units.Duration | None) -> None:
        self._started = time.monotonic()
        self._seconds = None if timeout is None else _units.seconds(timeout, "timeout", zero=True)

    def waited(self) -> float:
        return time.monotonic() - self._started

    def left(self) -> float | None:
        return None if self._seconds is None else max(0.0, self._seconds - self.waited())


def on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def raise_on_event_loop(name: str, action: str, instead: str) -> None:
    """Refuse to block a running event loop, which the awaited work may need.

    Args:
        name: The guard's or pool's name.
        action: What would block.
        instead: The expression to write in its place.

    Raises:
        WouldDeadlock: This thread runs an event loop.
    """
    if on_event_loop():
        raise WouldDeadlock(name, why=f"{action}() would block the running event loop", fix=f"Write: {instead}.")


# Blocking work for coroutines, in a thread of its own and in the caller's context.
#
# ``asyncio.to_thread`` shares its few threads with the whole application. When they all wait for a model, whatever
# would end their wait queues behind them.


T = TypeVar("T")

StartThread = Callable[[Callable[[], None], str], object]


def promise() -> Future[Any]:
    """Make a future that a waiter's cancellation cannot touch."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def start(work: Callable[[], T], name: str, start_thread: StartThread, future: Future[T] | None = None) -> Future[T]:
    """Begin ``work`` in a thread of that name; the future gets what it returns or raises."""
    future = promise() if future is None else future
    context = contextvars.copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
            future.set_exception(error)

    try:
        start_thread(run, name)
    except RuntimeError as error:  # the system gives no thread
        future.set_exception(error)
    return future


def require_asyncio(doing: str) -> None:
    """Check that a coroutine that is about to wait runs on an event loop of asyncio.

    Args:
        doing: What is not possible elsewhere.

    Raises:
        NotSupported: It does not.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise NotSupported(
            doing,
            reason="no asyncio event loop runs here. Under trio, load the model before the loop starts (guard.load()), "
            "or use the plain function or method in a thread: await trio.to_thread.run_sync(...)",
        ) from None


async def run(work: Callable[[], T], name: str, start_thread: StartThread) -> T:
    """Await ``work``, which is done in a thread of that name.

    Raises:
        NotSupported: The event loop is not asyncio's.
    """
    require_asyncio("waiting in a coroutine")
    return await asyncio.wrap_future(start(work, name, start_thread))


def resolve(result: Any) -> Any:
    """The result itself; of a coroutine, what it returns when it is run to its end on an event loop of its own."""
    # Coroutines only: a model may have an __await__ of its own.
    return asyncio.run(result) if inspect.iscoroutine(result) else result
