"""``Stream`` and ``BatchedStream``: results that come in parts, computed in batches."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from asyncio import get_running_loop
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Never, Self, TypeVar

from modelguard import _units
from modelguard.errors import BatchFailed, GuardClosed, WouldDeadlock
from modelguard.runtime.fork import Wakeup
from modelguard.serving._batch_options import Buffer
from modelguard.serving._functions import Decorated
from modelguard.serving._requests import ENDED, NOTHING_YET, LoopWaiter, Request, StreamRequest, TrioWaiter, Waiter

__all__ = ["BatchedStream", "Stream"]

X = TypeVar("X")
Y = TypeVar("Y")
Y_co = TypeVar("Y_co", covariant=True)


class Stream(Iterator[Y_co], AsyncIterator[Y_co]):
    """The parts of one item's result. Made by :meth:`BatchedStream.stream`.

    ``async for part in stream`` does not block the event loop, asyncio's or Trio's; ``for part in stream`` blocks the
    thread. Each part comes once, in order; then the stream ends, or raises what its item failed with, once.

    It has one consumer at a time. When that leaves, the item drops out of its batch: on :meth:`close`, at the end of a
    ``with`` or ``async with`` block, when the task that waits for a part is cancelled, and when the stream is dropped.
    """

    def __init__(
        self, name: str, request: StreamRequest, leave: Callable[[Request], object], drop: Callable[[Request], object]
    ) -> None:
        self._name = name
        self._request = request
        self._leave = leave
        self._drop = drop
        self._process = os.getpid()
        self._open = self._waited_for = False

    # Parts

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Y_co:
        """The next part. Blocks.

        Raises:
            StopIteration: There are no more.
            DeadlineExceeded: The time ran out.
            ConsumerTooSlow: This consumer took its parts so slowly that others had to wait for it.
            BatchFailed: The batch failed, and no single item was at fault.
            WouldDeadlock: On a running event loop (use ``async for``).
            Exception: What the function raised, or yielded, for this item.
        """
        if asyncio._get_running_loop() is not None:  # noqa: SLF001 - the public one raises where there is none
            why = "waiting for the next part would block the running event loop"
            raise WouldDeadlock(self._name, why=why, fix="Write: async for part in f.stream(item).")
        part = self._take(None)
        while part is NOTHING_YET:
            waiter = Wakeup()
            part = self._take(waiter)
            if part is NOTHING_YET:
                with self._waiting():
                    waiter.wait(threading.TIMEOUT_MAX)
                part = self._take(None)
        if part is ENDED:
            raise StopIteration
        return part  # type: ignore[no-any-return]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Y_co:
        """The next part, without blocking the event loop. Cancelling it closes the stream.

        Raises:
            StopAsyncIteration: There are no more.
            Exception: As for ``next(stream)``.
        """
        part = self._take(None)
        while part is NOTHING_YET:
            waiter = _waiter()
            part = self._take(waiter)
            if part is NOTHING_YET:
                with self._waiting():
                    await waiter.wait()
                part = self._take(None)
        if part is ENDED:
            raise StopAsyncIteration
        return part  # type: ignore[no-any-return]

    def _take(self, waiter: Waiter | None) -> Any:
        if not self._open:
            return ENDED
        if self._waited_for:
            raise RuntimeError(f"somebody else waits for the next part of this stream of {self._name}()")
        try:
            part = self._request.take(waiter)
        except BaseException:
            self._open = False
            raise
        if part is ENDED:
            self._open = False
        return part

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Wait for a part inside the block. Whoever is interrupted there, by Ctrl-C or as a task, has left."""
        if self._process != os.getpid():
            self._open = False
            raise BatchFailed(self._name, "the stream belongs to the process from which this one was forked", size=1)
        if sys.is_finalizing():  # the threads that would bring the part do not run any more
            raise GuardClosed(self._name)
        self._waited_for = True
        try:
            yield
        except BaseException:
            self.close()
            raise
        finally:
            self._waited_for = False

    # Its end

    def opened(self) -> None:
        """Note that the item has been queued."""
        self._open = True

    def close(self) -> None:
        """Leave: no more parts come, and those that nobody has taken are dropped. Closing twice does nothing."""
        self._end(self._leave)

    def _end(self, leave: Callable[[Request], object]) -> None:
        if not self._open:
            return
        self._open = False
        request = self._request
        if request.source is not None:
            request.source.close()
        elif self._process == os.getpid():
            leave(request)
        request.drop_parts()

    async def aclose(self) -> None:
        """:meth:`close` for coroutines. It does not wait either."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_open", False) and not sys.is_finalizing():
            self._end(self._drop)

    def __repr__(self) -> str:
        return f"<Stream of {self._name!r}, {'open' if self._open else 'ended'}>"


def _waiter() -> LoopWaiter | TrioWaiter:
    try:
        loop = get_running_loop()
    except RuntimeError:
        return TrioWaiter("async for part in f.stream(item)", "Iterate in a thread, without async")
    return LoopWaiter(loop)


class BatchedStream(Decorated, Generic[X, Y]):
    """A generator function of a list as a function of one item, whose parts are computed in batches.

    Made by :func:`batched` from a function that yields lists with one part for each item; see there for the options.
    ``f.stream(x)`` gives the parts of one item. In a class it is a method, with a queue for each instance.

    It is a context manager, for ``with`` and ``async with``, and closes on exit. Entering it again reopens it.
    """

    def stream(
        self,
        item: X,
        /,
        *others: Never,
        timeout: _units.Duration | None = None,
        priority: int = 0,
        **extras: Any,
    ) -> Stream[Y]:
        """Queue one item, and return the stream of its parts. Does not block, on an event loop or elsewhere.

        Args:
            item: An element of the list that the batch function gets.
            others: None; everything else is passed by keyword.
            timeout: The longest time from now to the end of the stream; it can only shorten ``deadline``.
            priority: As for a call of other batched functions.
            extras: Further keyword arguments of the batch function.

        Raises:
            QueueFull, QuotaExceeded, DeadlineUnreachable, CircuitOpen: Refused at once; ``retry_after`` gives when
                to try again.
            ItemRefused: The item cannot be put into a batch.
            WouldDeadlock: From inside the batch function.
            GuardClosed: After :meth:`close`.
            TypeError: There is not exactly one positional argument, or the keyword arguments do not fit.
        """
        request = StreamRequest(item, (self._options.buffer or Buffer()).parts)
        stream: Stream[Y] = Stream(self.name, request, self._batcher.cancel, self._batcher.drop)
        self._put(request, timeout, priority, extras, others)
        stream.opened()
        return stream

    if not TYPE_CHECKING:  # checkers reject these; without a checker they need a message that says what to write

        def __call__(self, *_args: object, **_extras: object) -> Never:
            """Reject the call: there is no single result."""
            fix = "for part in f.stream(item): ...; on an event loop: async for"
            raise TypeError(f"{self.name}() yields its result in parts. Write: {fix}")

        aio = map = submit = __call__
