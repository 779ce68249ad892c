"""``batched()`` and ``Batched``: a function of a list becomes a function of one item, computed in batches."""

from __future__ import annotations

import asyncio
import copy
import functools
import sys
from asyncio import get_running_loop
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from types import MethodType, TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Never, Protocol, Self, TypeVar, overload

from modelguard import _units
from modelguard.errors import GuardClosed, InvalidOption, Overloaded, WouldDeadlock
from modelguard.serving import _trio
from modelguard.serving._arguments import Arguments
from modelguard.serving._batcher import Batcher
from modelguard.serving._batches import Limits
from modelguard.serving._bound_methods import BoundMethods
from modelguard.serving._functions import NotAHandler, call_signature, check_function, function_name
from modelguard.serving._options import BatchOptions, OnError, check_options
from modelguard.serving._requests import FutureRequest, LoopRequest, Request, ThreadRequest
from modelguard.serving.breaker import Breaker
from modelguard.serving.status import BatchStatus

__all__ = ["Batched", "BatchedMethod", "Decorator", "batched"]

S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)
X = TypeVar("X")
Y = TypeVar("Y")

_CLOSE_TIMEOUT = 30.0

_NO_ITEM: Any = object()


class Batched(Generic[X, Y]):
    """A function of one item that is computed in batches. Made by :func:`batched`; see there for the options.

    ``f(x)`` blocks the thread, ``await f.aio(x)`` does not block the event loop, ``f.submit(x)`` returns a future, and
    ``f.map(xs)`` keeps the batches full. Extra keyword arguments go to the batch function; items with different keyword
    arguments do not share a batch. In a class it is a method, with a queue for each instance.

    It is a context manager, for ``with`` and ``async with``, and closes on exit.
    """

    def __init__(self, function: Callable[..., Any], options: BatchOptions, *, instance: object = None) -> None:
        functools.update_wrapper(self, function)
        self.__signature__ = call_signature(function, options.limits.name)
        self._function = function
        self._options = options
        self._batcher = Batcher(function, options, shared=instance is not None)
        self._arguments = Arguments(function, options)
        self._always_checked = self._arguments.always_checked
        self._methods: BoundMethods[Batched[X, Y]] | None = None
        self._method_of: tuple[Any, str] | None = None

    # Calls

    if TYPE_CHECKING:

        def __call__(self, item: X, /, *, timeout: _units.Duration | None = None, **extras: Any) -> Y: ...  # noqa: D102

    else:  # accepts what type checkers reject, to say what is wrong with it

        def __call__(
            self, item: X = _NO_ITEM, /, *others: Never, timeout: _units.Duration | None = None, **extras: Any
        ) -> Y:
            """Compute one item, as part of whichever batch is next. Blocks.

            Args:
                item: An element of the list that the batch function gets.
                others: None; everything else is passed by keyword.
                timeout: The longest this call may take; it can only shorten ``deadline``.
                extras: Further keyword arguments of the batch function.

            Raises:
                QueueFull, DeadlineUnreachable, CircuitOpen: Refused at once; ``retry_after`` gives when to try again.
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
            self._put(request, timeout, extras)
            try:
                return request.wait()
            except BaseException:
                self._batcher.cancel(request)  # for Ctrl-C during the wait; nothing if this is the answer
                raise
            finally:
                del request  # the error's traceback refers to this frame

    async def aio(self, item: X, /, *others: Never, timeout: _units.Duration | None = None, **extras: Any) -> Y:
        """Compute one item without blocking the event loop. Cancelling the task takes the item out of the queue.

        It works on asyncio and on Trio. Arguments and errors are those of a call.
        """
        try:
            loop = get_running_loop()
        except RuntimeError:
            put = functools.partial(self._put, timeout=timeout, extras=extras, others=others)
            return await _trio.call(_trio.TrioRequest(item), put, self._batcher.cancel)  # type: ignore[no-any-return]
        request = LoopRequest(item, loop)
        if extras or others or timeout is not None or self._always_checked or type(item) is list:
            self._put(request, timeout, extras, others)
        else:  # what _put would do, without its call
            self._batcher.put(request)
        try:
            return await request.future  # type: ignore[no-any-return]
        except (asyncio.CancelledError, GeneratorExit):  # the task was cancelled, or the coroutine closed
            self._batcher.cancel(request)
            raise
        finally:
            del request  # as above

    def submit(self, item: X, /, *others: Never, timeout: _units.Duration | None = None, **extras: Any) -> Future[Y]:
        """Queue one item and return at once. Cancelling the future takes the item out of the queue.

        Arguments and errors are those of a call. Refusals are raised here, all other errors by the future.
        """
        request = FutureRequest(item)
        request.future.on_cancel = functools.partial(self._batcher.cancel, request)
        self._put(request, timeout, extras, others)
        return request.future

    def map(
        self, items: Iterable[X], /, *others: Never, timeout: _units.Duration | None = None, **extras: Any
    ) -> Iterator[Y]:
        """Compute many items, and yield the results in the order of the items. Blocks.

        It queues as many items as keep the batches full, and takes no more from ``items``, which may be endless. When
        other callers have filled the queue, it waits for its own items instead of failing.

        Args:
            items: The items.
            others: None; everything else is passed by keyword.
            timeout: For each item, from when it is queued.
            extras: Further keyword arguments of the batch function.

        Raises:
            Exception: What an item failed with, in its place; items that are queued then are dropped.
            ItemRefused: ``items`` is a text, whose characters would be the items.
        """
        if others:
            raise self._arguments.wrong_count(1 + len(others))
        self._arguments.check_items(items)
        self._refuse_on_loop("map() would block", "await f.aio(item) for each item")
        return self._map(items, timeout, extras)

    def _map(self, items: Iterable[X], timeout: _units.Duration | None, extras: dict[str, Any]) -> Iterator[Y]:
        limits = self.limits
        window = min(limits.max_size * (limits.threads + 1), limits.max_queue)
        queued: deque[Future[Y]] = deque()
        try:
            for item in items:
                while len(queued) >= window:
                    yield queued.popleft().result()
                while True:
                    try:
                        queued.append(self.submit(item, timeout=timeout, **extras))
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

    def _refuse_on_loop(self, why: str, instead: str) -> None:
        if asyncio._get_running_loop() is not None:  # noqa: SLF001 - the public one raises where there is none
            raise WouldDeadlock(self.name, why=f"{why} the running event loop", fix=f"Write: {instead}.")

    def _put(
        self,
        request: Request,
        timeout: _units.Duration | None,
        extras: dict[str, Any],
        others: tuple[object, ...] = (),
    ) -> None:
        if others:
            raise self._arguments.wrong_count(1 + len(others))
        if extras or self._always_checked or type(request.item) is list:
            self._arguments.fill_in(request, extras)
        self._batcher.put(request, None if timeout is None else _units.seconds(timeout, "timeout", zero=True))

    # Its state

    @property
    def name(self) -> str:
        """Its name in events and errors."""
        return self._options.limits.name

    @property
    def limits(self) -> Limits:
        """The bounds it was made with, in items and seconds."""
        return self._options.limits

    @property
    def ready(self) -> bool:
        """Whether it admits items: false once it is being closed, and while a batch hangs.

        It is ready while the circuit is open: without traffic there would be no probe to close it.
        """
        return self._batcher.ready

    def status(self) -> BatchStatus:
        """Its state, counts and times."""
        return self._batcher.status()

    def __repr__(self) -> str:
        return f"<Batched {self.name!r}>"

    # Closing

    def close(self, timeout: _units.Duration = _CLOSE_TIMEOUT) -> None:
        """Admit nothing more, compute what waits, then end. Blocks. Closing twice does nothing.

        Args:
            timeout: How long that may take, 30 seconds by default; what still waits then is refused with
                ``GuardClosed``.

        Raises:
            WouldDeadlock: On a running event loop (use :meth:`aclose`), or from inside the batch function.
        """
        self._refuse_on_loop("close() would block", "await f.aclose()")
        self._batcher.close(_units.seconds(timeout, "timeout", zero=True))

    async def aclose(self, timeout: _units.Duration = _CLOSE_TIMEOUT) -> None:
        """:meth:`close` for coroutines; does not block the event loop."""
        close = functools.partial(self._batcher.close, _units.seconds(timeout, "timeout", zero=True))
        await (_trio.run_in_thread(close) if asyncio._get_running_loop() is None else asyncio.to_thread(close))  # noqa: SLF001 - as above

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
        await self.aclose()

    # As a method

    def __set_name__(self, owner: type, name: str) -> None:
        written = getattr(self._function, "__qualname__", "")
        if written != f"{owner.__qualname__}.{name}":
            return  # a function from elsewhere that is kept in a class
        self._methods = BoundMethods(self._function, written, functools.partial(self._bind, name))
        self._arguments.refuse_all(f"it is a method of {owner.__name__}: call it on an instance")
        self._always_checked = True

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None or self._methods is None:
            return self
        return self._methods.get(instance)

    def _bind(self, name: str, instance: Any) -> Batched[X, Y]:
        method = self._function.__get__(instance, type(instance))
        bound: Batched[X, Y] = Batched(method, self._options, instance=instance)
        bound._method_of = instance, name
        return bound

    # Functions are pickled by reference; so is this, and a method by its instance.
    def __reduce__(self) -> Any:
        if self._method_of is not None:
            return getattr, self._method_of
        return str(self.__qualname__)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: Any) -> Any:
        if self._method_of is None:
            return self
        instance, name = self._method_of
        return getattr(copy.deepcopy(instance, memo), name)


class BatchedMethod(Protocol[S_contra, X, Y]):
    """A batched function in a class, for type checkers: each instance has its own :class:`Batched`."""

    @overload
    def __get__(self, instance: None, owner: type | None = ...) -> BatchedMethod[S_contra, X, Y]: ...
    @overload
    def __get__(self, instance: S_contra, owner: type | None = ...) -> Batched[X, Y]: ...


class Decorator(Protocol):
    """What ``batched(...)`` returns."""

    @overload
    def __call__(self, function: Callable[Concatenate[list[X], ...], Sequence[Y]], /) -> Batched[X, Y]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[S, list[X], ...], Sequence[Y]], /) -> BatchedMethod[S, X, Y]: ...


def batched(
    *others: Never,
    max_size: int,
    max_wait: _units.Duration = 0.0,
    max_queue: int = 256,
    deadline: _units.Duration | None = None,
    threads: int = 1,
    weight: Callable[[Any], float] | None = None,
    max_weight: float | None = None,
    on_error: OnError = "isolate",
    breaker: Breaker | None = None,
    hang_after: _units.Duration | None = None,
    name: str | None = None,
) -> Decorator:
    """Turn a function of a list, ``f(items) -> results``, into a function of one item that is computed in batches.

    A free thread takes everything that waits, up to the size of a batch. A single request never waits for others, and
    batches grow with the load. The function runs on a thread of its own, so no event loop is blocked.

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
        max_size: Most items in a batch.
        max_wait: How long the oldest item may wait for a fuller batch while a thread is free; less where a deadline
            requires it. Default: not at all, which is right unless a batch costs much more than its items.
        max_queue: Most items that wait, without those that are being computed; at least ``max_size``.
        deadline: The time that every item has from its arrival. Default: no bound. A call's ``timeout=``, the
            :func:`deadline` context and the web middleware can only shorten it.
        threads: Threads that compute batches side by side.
        weight: What an item counts for against ``max_weight``: a function of the item, such as ``len``. The function
            gets the heaviest item first, which saves padding if it works in portions.
        max_weight: Most weight in a batch. Default: no bound.
        on_error: ``"isolate"``: run a batch that raised again in parts, so that only the items at fault fail; the
            function may then be called twice with the same item. ``"fail"``: all its items fail with ``BatchFailed``.
        breaker: When to stop calling a failing model. Default: never.
        hang_after: How long a batch may run. After that the function is not ready, its state is ``"hung"``, a
            ``BatchErrored`` is emitted, and a breaker opens; the batch itself cannot be stopped. Default: ten times
            ``deadline``, at least a minute; never without a deadline.
        name: For events and errors. Default: the function's module and name.

    Returns:
        A decorator that makes a :class:`Batched`.

    Raises:
        InvalidOption: An option is invalid, or the function cannot be batched; the message gives the fix.
    """
    if others:
        raise InvalidOption(
            "batched", others[0], why="takes keyword arguments only", fix="Write @batched(max_size=32)."
        )
    options = check_options(
        max_size=max_size,
        max_wait=max_wait,
        max_queue=max_queue,
        deadline=deadline,
        threads=threads,
        weight=weight,
        max_weight=max_weight,
        on_error=on_error,
        breaker=breaker,
        hang_after=hang_after,
        name=name,
    )

    def decorate(function: Any) -> Any:
        if isinstance(function, Batched):
            fix = "Use @batched(...) once, with all its options."
            raise InvalidOption("function", function, why="it is batched already", fix=fix)
        check_function(function, sys._getframe(1).f_locals)  # noqa: SLF001 - the public one may return None
        made: Any = Batched(function, options.named(function_name(function) if name is None else name))
        made.__call__ = MethodType(NotAHandler(made.name), made)  # for frameworks; calls look it up in the class
        return made

    return decorate
