"""Callers on Trio instead of asyncio, as under Hypercorn's Trio workers. Trio is never imported here."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from modelguard.errors import NotSupported
from modelguard.serving._requests import Failure, Request

__all__ = ["TrioRequest", "TrioWaiter", "call", "run_in_thread"]


class TrioRequest(Request):
    """A request whose caller is a coroutine on Trio.

    Raises:
        NotSupported: No event loop runs, or it is neither asyncio's nor Trio's.
    """

    _outcome: Any

    def __init__(self, item: Any) -> None:
        trio = _running_trio()
        self.item = item
        self._token = trio.lowlevel.current_trio_token()
        self._run_finished: type[Exception] = trio.RunFinishedError
        self._delivered = trio.Event()

    def deliver(self, outcome: Any) -> None:
        """Wake the coroutine. Called on a thread that computes."""
        self._outcome = outcome
        try:
            self._token.run_sync_soon(self._delivered.set)
        except self._run_finished:
            return  # nobody waits there any more

    async def wait(self) -> Any:
        """Wait until the outcome is there.

        Raises:
            BaseException: What the item failed with.
        """
        await self._delivered.wait()
        outcome = self._outcome
        if type(outcome) is Failure:
            try:
                raise outcome.error
            finally:
                del self, outcome  # the error's traceback refers to this frame
        return outcome


class TrioWaiter:
    """A coroutine on Trio that waits for a part of a stream.

    Raises:
        NotSupported: No event loop runs, or it is neither asyncio's nor Trio's.
    """

    def __init__(self) -> None:
        trio = _running_trio("async for part in f.stream(item)", "Iterate in a thread, without async")
        self._token = trio.lowlevel.current_trio_token()
        self._run_finished: type[Exception] = trio.RunFinishedError
        self._event = trio.Event()

    def set(self) -> None:
        """Wake the coroutine, from any thread."""
        with contextlib.suppress(self._run_finished):
            self._token.run_sync_soon(self._event.set)

    async def wait(self) -> None:
        """Wait until it is woken."""
        await self._event.wait()


async def call(request: TrioRequest, put: Callable[[Request], object], cancel: Callable[[Request], object]) -> Any:
    """Queue a request and await its outcome; nothing of it is left in the queue if that is interrupted."""
    put(request)
    try:
        return await request.wait()
    except BaseException:  # Trio's cancellation is one
        cancel(request)  # nothing if this is the answer
        raise
    finally:
        del request  # the error's traceback refers to this frame


async def run_in_thread(function: Callable[[], Any]) -> None:
    """Run a blocking function in one of Trio's threads."""
    await _running_trio().to_thread.run_sync(function)


def _running_trio(call: str = "await f.aio(item)", instead: str = "Call the function without .aio, in a thread") -> Any:
    trio: Any = sys.modules.get("trio")
    try:
        trio.lowlevel.current_trio_token()
    except (AttributeError, RuntimeError):
        raise NotSupported(call, reason=f"neither asyncio nor Trio runs here. {instead}") from None
    return trio
