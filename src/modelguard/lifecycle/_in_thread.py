"""Blocking work for coroutines, in a thread of its own and in the caller's context.

``asyncio.to_thread`` shares its few threads with the whole application. When they all wait for a model, whatever would
end their wait queues behind them.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from modelguard.errors import NotSupported

T = TypeVar("T")

StartThread = Callable[[Callable[[], None], str], None]


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
