"""``batched()`` and ``Batched``: a function of a list becomes a function of one item, computed in batches."""

from __future__ import annotations

import asyncio
import functools
import sys
from asyncio import get_running_loop
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Never, Protocol, TypeAlias, TypeVar, overload

from modelguard import _units
from modelguard.errors import GuardClosed, InvalidOption, ItemRefused, Overloaded
from modelguard.serving._batch_options import (
    BatchOptions,
    Buffer,
    Changes,
    Fair,
    LoopChoice,
    OnError,
    Size,
    Weight,
    read_buffer,
    read_fair,
    read_weight,
)
from modelguard.serving._functions import Decorated, NotAHandler, check_function, function_name
from modelguard.serving._requests import FutureRequest, LoopRequest, ThreadRequest, TrioWaiter
from modelguard.serving.breaker import Breaker
from modelguard.serving.streams import BatchedStream

__all__ = ["Batched", "BatchedMethod", "BatchedStreamMethod", "Decorator", "batched"]

S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)
X = TypeVar("X")
Y = TypeVar("Y")

#: What a generator function yields for an item that has ended.
End: TypeAlias = type[StopIteration] | type[StopAsyncIteration]

_NO_ITEM: Any = object()


class Batched(Decorated, Generic[X, Y]):
    """A function of one item that is computed in batches. Made by :func:`batched`; see there for the options.

    ``f(x)`` blocks the thread, ``await f.aio(x)`` does not block the event loop, ``f.submit(x)`` returns a future,
    ``f.map(xs)`` keeps the batches full, and ``await f.amap(xs)`` takes all items of a request or none. Extra keyword
    arguments go to the batch function; items with different keyword arguments do not share a batch. In a class it is a
    method, with a queue for each instance.

    It is a context manager, for ``with`` and ``async with``, and closes on exit. Entering it again reopens it.
    """

    # Calls

    if TYPE_CHECKING:

        def __call__(  # noqa: D102
            self, item: X, /, *, timeout: _units.Duration | None = None, priority: int = 0, **extras: Any
        ) -> Y: ...

    else:  # accepts what type checkers reject, to say what is wrong with it

        def __call__(
            self,
            item: X = _NO_ITEM,
            /,
            *others: Never,
            timeout: _units.Duration | None = None,
            priority: int = 0,
            **extras: Any,
        ) -> Y:
            """Compute one item, as part of whichever batch is next. Blocks.

            Args:
                item: An element of the list that the batch function gets.
                others: None; everything else is passed by keyword.
                timeout: The longest this call may take; it can only shorten ``deadline``.
                priority: How urgent it is, compared with other calls under the same key: a whole number from 0 to
                    1,000. One of priority 2 goes before those that came up to twice ``ageing`` earlier.
                extras: Further keyword arguments of the batch function.

            Raises:
                QueueFull, QuotaExceeded, DeadlineUnreachable, CircuitOpen: Refused; ``retry_after`` gives when to try
                    again. At once, except for a ``QueueFull`` that gives a place to a caller below its share.
                DeadlineExceeded: The time ran out.
                ItemRefused: The item cannot be put into a batch.
                BatchFailed: The batch failed, and no single item was at fault.
                WouldDeadlock: On a running event loop (use :meth:`aio`), or from inside the batch function.
                GuardClosed: After :meth:`close`.
                TypeError: There is not exactly one positional argument, or the keyword arguments do not fit.
                Exception: What the function raised, or returned, for this item.
            """
            if item is _NO_ITEM or others:
                raise self._arguments.wrong_count(len(others) + (item is not _NO_ITEM))
            self._refuse_on_loop("the call would block", "await f.aio(item)")
            if sys.is_finalizing():  # called by a finalizer, when threads do not run any more
                raise GuardClosed(self.name)
            request = ThreadRequest(item)
            self._put(request, timeout, priority, extras)
            try:
                return request.wait()
            except BaseException:
                self._batcher.cancel(request)  # for Ctrl-C during the wait; nothing if this is the answer
                raise
            finally:
                del request  # the error's traceback refers to this frame

    async def aio(
        self, item: X, /, *others: Never, timeout: _units.Duration | None = None, priority: int = 0, **extras: Any
    ) -> Y:
        """Compute one item without blocking the event loop. Cancelling the task takes the item out of the queue.

        It works on asyncio and on Trio. Arguments and errors are those of a call.
        """
        try:
            loop = get_running_loop()
        except RuntimeError:
            waiter = TrioWaiter()
            future = self.submit(item, *others, timeout=timeout, priority=priority, **extras)
            return await waiter.result(future)  # type: ignore[no-any-return]
        call = loop.create_future()
        if extras or others or timeout is not None or priority or self._always_checked or type(item) is list:
            self._put(LoopRequest(item, loop, call), timeout, priority, extras, others)
        else:
            self._batcher.put_plain(item, call, loop, 1 if self._weigh is None else self._weigh(item))
        try:
            return await call  # type: ignore[no-any-return]
        except (asyncio.CancelledError, GeneratorExit):  # the task was cancelled, or the coroutine closed
            self._batcher.cancel(call)
            raise
        finally:
            del call  # as above

    def submit(
        self, item: X, /, *others: Never, timeout: _units.Duration | None = None, priority: int = 0, **extras: Any
    ) -> Future[Y]:
        """Queue one item and return at once. Cancelling the future takes the item out of the queue.

        Arguments and errors are those of a call. Refusals are raised here, all other errors by the future.
        """
        request = FutureRequest(item)
        request.future.on_cancel = functools.partial(self._batcher.cancel, request, notify=True)
        self._put(request, timeout, priority, extras, others)
        return request.future

    def map(
        self,
        items: Iterable[X],
        /,
        *others: Never,
        timeout: _units.Duration | None = None,
        priority: int = 0,
        **extras: Any,
    ) -> Iterator[Y]:
        """Compute many items, and yield the results in the order of the items. Blocks.

        It queues as many items as keep the batches full, and takes no more from ``items``, which may be endless. When
        other callers have filled the queue, it waits for its own items instead of failing.

        Args:
            items: The items.
            others: None; everything else is passed by keyword.
            timeout: For each item, from when it is queued.
            priority: As for a call.
            extras: Further keyword arguments of the batch function.

        Raises:
            Exception: What an item failed with, in its place; items that are queued then are dropped.
            ItemRefused: ``items`` is a text, whose characters would be the items.
        """
        if others:
            raise self._arguments.wrong_count(1 + len(others))
        self._arguments.check_items(items)
        self._refuse_on_loop("map() would block", "await f.amap(items)")
        return self._map(items, {"timeout": timeout, "priority": priority, **extras})

    async def amap(
        self,
        items: Iterable[X],
        /,
        *others: Never,
        timeout: _units.Duration | None = None,
        priority: int = 0,
        **extras: Any,
    ) -> list[Y]:
        """Compute the items of one request, and return their results in order. Does not block the event loop.

        All of them are queued, or none: a request with ten texts is refused at once if there is room for nine, or if
        the tenth answer would be late. They take the place of nobody who waits. The first error ends the call, and
        what of it still waits is dropped. It works on asyncio and on Trio.

        Args:
            items: The items, at most ``max_queue``.
            others: None; everything else is passed by keyword.
            timeout: For all of them together, as for a call.
            priority: As for a call.
            extras: Further keyword arguments of the batch function.

        Raises:
            QueueFull, QuotaExceeded, DeadlineUnreachable, CircuitOpen: Refused, all of them.
            ItemRefused: ``items`` is a text, or has more items than ``max_queue``.
            Exception: What an item failed with, as for a call.
        """
        self._arguments.check_items(items)
        listed = list(items)
        if len(listed) > (most := self.limits.max_queue):
            why = f"{len(listed)} items never fit into a queue of max_queue={most}; pass fewer at a time"
            raise ItemRefused(self.name, why=why)
        waiters: list[TrioWaiter] = []
        try:
            loop = get_running_loop()
            requests: list[Any] = [LoopRequest(item, loop) for item in listed]
        except RuntimeError:
            waiters = [TrioWaiter() for _ in listed]
            requests = [FutureRequest(item) for item in listed]
        for request in requests:
            self._prepare(request, timeout, priority, extras, others)
        self._batcher.put(*requests, together=True)
        try:
            if waiters:
                return [await one.result(request.future) for one, request in zip(waiters, requests, strict=True)]
            return list(await asyncio.gather(*(request.future for request in requests)))
        except BaseException:
            for request in requests:
                self._batcher.cancel(request)  # nothing for those that have their answers
            raise
        finally:
            request = None
            del requests  # as above

    if not TYPE_CHECKING:  # as above

        def stream(self, *_args: object, **_extras: object) -> Never:
            """Reject the call: only a generator function yields parts."""
            why = f"{self.name}() returns one result for each item, and yields no parts"
            raise TypeError(f"{why}. Write: f(item), or await f.aio(item)")

    def _map(self, items: Iterable[X], how: dict[str, Any]) -> Iterator[Y]:
        limits = self.limits
        window = min(limits.max_size * (limits.threads + 1), limits.max_queue)
        queued: deque[Future[Y]] = deque()
        try:
            for item in items:
                while len(queued) >= window:
                    yield queued.popleft().result()
                while True:
                    try:
                        queued.append(self.submit(item, **how))
                        break
                    except Overloaded:
                        if not queued:
                            raise
                    yield queued.popleft().result()
            while queued:
                yield queued.popleft().result()
        finally:
            for future in queued:
                future.cancel()


class BatchedMethod(Protocol[S_contra, X, Y]):
    """A batched function in a class, for type checkers: each instance has its own :class:`Batched`."""

    @overload
    def __get__(self, instance: None, owner: type | None = ...) -> BatchedMethod[S_contra, X, Y]: ...
    @overload
    def __get__(self, instance: S_contra, owner: type | None = ...) -> Batched[X, Y]: ...


class BatchedStreamMethod(Protocol[S_contra, X, Y]):
    """A batched generator function in a class, for type checkers: each instance has its own :class:`BatchedStream`."""

    @overload
    def __get__(self, instance: None, owner: type | None = ...) -> BatchedStreamMethod[S_contra, X, Y]: ...
    @overload
    def __get__(self, instance: S_contra, owner: type | None = ...) -> BatchedStream[X, Y]: ...


class Decorator(Protocol):
    """What ``batched(...)`` returns."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[list[X], ...], AsyncIterator[Sequence[Y | End]]], /
    ) -> BatchedStream[X, Y]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, list[X], ...], AsyncIterator[Sequence[Y | End]]], /
    ) -> BatchedStreamMethod[S, X, Y]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[list[X], ...], Iterator[Sequence[Y | End]]], /
    ) -> BatchedStream[X, Y]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, list[X], ...], Iterator[Sequence[Y | End]]], /
    ) -> BatchedStreamMethod[S, X, Y]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[list[X], ...], Awaitable[Sequence[Y]]], /) -> Batched[X, Y]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, list[X], ...], Awaitable[Sequence[Y]]], /
    ) -> BatchedMethod[S, X, Y]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[list[X], ...], Sequence[Y]], /) -> Batched[X, Y]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[S, list[X], ...], Sequence[Y]], /) -> BatchedMethod[S, X, Y]: ...


def batched(
    *others: Never,
    max_size: Size,
    slo: _units.Duration | None = None,
    max_wait: _units.Duration = 0.0,
    max_queue: int = 256,
    deadline: _units.Duration | None = None,
    threads: int = 1,
    weight: Callable[[Any], float] | Weight | None = None,
    fair_by: Callable[[Any], Hashable] | Fair | None = None,
    on_error: OnError = "isolate",
    breaker: Breaker | None = None,
    hang_after: _units.Duration | None = None,
    loop: LoopChoice | None = None,
    buffer: int | Buffer | None = None,
    name: str | None = None,
) -> Decorator:
    """Turn a function of a list, ``f(items) -> results``, into a function of one item that is computed in batches.

    A free thread takes everything that waits, up to the size of a batch. A single request never waits for others, and
    batches grow with the load. The function runs on a thread of its own, so no event loop is blocked; an ``async``
    function runs on an event loop in a thread of its own. A generator function yields lists with one part for each
    item, and makes a :class:`BatchedStream`; ``StopIteration`` in place of a part ends that item.

    * The queue is bounded. When it is full, a call is refused at once with ``QueueFull`` and a ``retry_after`` from the
      measured rate.
    * Deadlines count from the arrival, time in the queue included. Items that expired or were cancelled are not
      computed. An item that by the measured run times cannot be answered in time is refused at once with
      ``DeadlineUnreachable``; without measurements nothing is refused on a guess.
    * Batches are cut so that deadlines hold: the time of a batch is learned from every one that runs.
    * Items do not harm each other: an exception among the results belongs to its item; a batch that raises is run again
      in parts until the items at fault are found; a list of results with the wrong length fails its batch alone.
    * On a guarded function, each batch runs on one generation of the model.
    * It works across forks (the child starts with an empty queue), with several event loops, and with several threads.

    It can decorate functions and methods. They are called by one thread at a time unless ``threads`` is more than 1.

    Args:
        others: None; every option is passed by keyword.
        max_size: Most items in a batch; ``"auto"`` to have it chosen by the measured times, so that requests have their
            answers within ``slo``. It is then never more than ``max_queue``.
        slo: The latency goal for ``max_size="auto"``: seconds from arrival to answer, as long as the load can be
            computed. Nothing is refused because of it; that is what ``deadline`` does. If one item alone takes longer,
            items run alone, and a ``BatchSizeChosen`` at level WARNING says so.
        max_wait: How long the oldest item may wait for a fuller batch while a thread is free; less where a deadline
            requires it. Default: not at all, which is right unless a batch costs much more than its items.
        max_queue: Most items that wait, without those that are being computed; at least ``max_size``.
        deadline: The time that every item has from its arrival. Default: no bound. A call's ``timeout=``, the
            :func:`deadline` context and the web middleware can only shorten it.
        threads: Threads that compute batches side by side.
        weight: What an item counts for: a function of the item, such as ``len``, or a :class:`Weight`, which also
            bounds the weight of a batch, or says that the function pads. The function gets the heaviest item first.
        fair_by: Whose an item is: a function of the item that gives a key, or a :class:`Fair`, which also has shares,
            a quota, and how much waiting counts. Default: the key of the context, which the web middleware or
            ``serving.caller`` sets.
        on_error: ``"isolate"``: run a batch that raised again in parts, so that only the items at fault fail; the
            function may then be called twice with the same item. ``"fail"``: all its items fail with ``BatchFailed``.
        breaker: When to stop calling a failing model. Default: never.
        hang_after: How long a batch may run. After that the function is not ready, its state is ``"hung"``, a
            ``BatchErrored`` is emitted, and a breaker opens; the batch itself cannot be stopped. Default: ten times
            ``deadline``, at least a minute; never without a deadline.
        loop: Where an ``async`` function runs. ``"own"``: on an event loop in a thread of its own, which stays the same
            one, so that what blocks it blocks nobody else. ``"caller"``: on that of its callers, who must be
            coroutines, for functions that use what belongs to that loop. Default: ``"own"``.
        buffer: For generator functions: most parts of an item that wait for its consumer (64 by default), or a
            :class:`Buffer`, which also says when a consumer is too slow.
        name: For events and errors. Default: the function's module and name.

    Returns:
        A decorator that makes a :class:`Batched`, or of a generator function a :class:`BatchedStream`.

    Raises:
        InvalidOption: An option is invalid, or the function cannot be batched; the message gives the fix.
    """
    if others:
        raise InvalidOption(
            "batched", others[0], why="takes keyword arguments only", fix="Write @batched(max_size=32)."
        )
    options = BatchOptions(
        threads=threads,
        weight=read_weight(weight),
        fair=read_fair(fair_by),
        on_error=on_error,
        breaker=breaker,
        loop=loop,
        buffer=read_buffer(buffer),
        name="" if name is None else _units.name(name),
        written=Changes(
            max_size=max_size,
            slo=slo,
            max_wait=max_wait,
            max_queue=max_queue,
            deadline=deadline,
            hang_after=hang_after,
        ),
    )

    def decorate(function: Any) -> Any:
        if isinstance(function, Decorated):
            fix = "Use @batched(...) once, with all its options."
            raise InvalidOption("function", function, why="it is batched already", fix=fix)
        check_function(function, sys._getframe(1).f_locals)  # noqa: SLF001 - the public one may return None
        suited = options.suited_to(function, options.name or _units.printable(function_name(function)))
        made: Any = (BatchedStream if suited.streams else Batched)(function, suited)
        # For frameworks; calls look it up in the class.
        made.__call__ = MethodType(NotAHandler(function, made.name), made)
        return made

    return decorate
