"""A request whose caller gets its result in parts: a bounded buffer between the batch and one consumer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

from modelguard.serving._requests import Failure, Request

__all__ = ["ENDED", "NOTHING_YET", "LoopWaiter", "PartSource", "StreamRequest", "Waiter", "wake"]

#: What :meth:`StreamRequest.take` returns when there is no part, and when there will be none.
NOTHING_YET: Any = object()
ENDED: Any = object()

_RUNNING: Any = object()


class LoopWaiter:
    """A coroutine that waits for a part."""

    __slots__ = ("future", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.future: asyncio.Future[None] = loop.create_future()

    def set(self) -> None:
        """Wake it, from any thread."""
        wake([self])

    async def wait(self) -> None:
        """Wait until it is woken."""
        await self.future


class Waiter(Protocol):
    """Whoever waits for a part."""

    def set(self) -> None:
        """Wake it, from any thread."""


class PartSource(Protocol):
    """What makes the parts of a request that has no batch, in the thread of its consumer."""

    def advance(self) -> None:
        """Make the next part, or end the request."""

    def close(self) -> None:
        """Make no more."""


class StreamRequest(Request):
    """One item whose result comes in parts. Each part is taken once, in order; then comes the end, or one error.

    Args:
        item: What the caller passed.
        max_buffer: Most parts that wait for the consumer.

    Attributes:
        source: Makes its parts if it is computed in its consumer's thread.
    """

    def __init__(self, item: Any, max_buffer: int) -> None:
        self.item = item
        self.source: PartSource | None = None
        self._max_buffer = max_buffer
        # Reentrant: the garbage collector may run a consumer's farewell in the middle of a change.
        self._lock = threading.RLock()
        self._parts: deque[Any] = deque()
        self._outcome: Any = _RUNNING
        self._waiter: Waiter | None = None

    # The batch's side

    @property
    def full(self) -> bool:
        """Whether the consumer has to take a part before there is room for another."""
        return len(self._parts) >= self._max_buffer

    def push(self, part: Any) -> Waiter | None:
        """Add a part, unless the stream has ended. Returns who has to be woken."""
        with self._lock:
            if self._outcome is not _RUNNING:
                return None
            self._parts.append(part)
            waiter, self._waiter = self._waiter, None
        return waiter

    def deliver(self, outcome: Any) -> None:
        """End the stream after the parts that are there: with an error if the outcome is a failure."""
        with self._lock:
            self._outcome = outcome if type(outcome) is Failure else ENDED
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            wake([waiter])

    # The consumer's side

    def take(self, waiter: Waiter | None = None) -> Any:
        """The next part, ``ENDED``, or ``NOTHING_YET``; then the waiter will be woken.

        Raises:
            BaseException: What the stream ended with. It is raised once.
        """
        if self.source is not None and not self._parts and self._outcome is _RUNNING:
            self.source.advance()
        with self._lock:
            if self._parts:
                was_full = self.full
                part = self._parts.popleft()
                if was_full and self.departure is not None:
                    self.departure.set()
                return part
            outcome = self._outcome
            if outcome is _RUNNING:
                self._waiter = waiter
                return NOTHING_YET
            self._outcome = ENDED
        if outcome is ENDED:
            return ENDED
        try:
            raise outcome.error
        finally:
            del self, outcome  # the error's traceback refers to this frame

    def drop_parts(self) -> None:
        """Forget the parts that nobody will take."""
        self._parts.clear()


def wake(waiters: Iterable[Waiter]) -> None:
    """Wake consumers. Each event loop is woken once for all that wait on it."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for waiter in waiters:
        if isinstance(waiter, LoopWaiter):
            by_loop.setdefault(waiter.loop, []).append(waiter.future)
        else:
            waiter.set()
    for loop, futures in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits there any more
            loop.call_soon_threadsafe(_set_all, futures)


def _set_all(futures: list[asyncio.Future[None]]) -> None:
    """Runs on the event loop."""
    for future in futures:
        if not future.done():
            future.set_result(None)
