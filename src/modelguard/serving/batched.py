"""``batched()`` and ``Batched``: a function of a list becomes a function of one item, computed in batches."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import sys
import threading
import time
import warnings
import weakref
from asyncio import get_running_loop
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from types import MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    Never,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from modelguard import _public, _units
from modelguard._entered import Entered
from modelguard.errors import (
    GuardClosed,
    InvalidOption,
    ItemTooHeavy,
    ModelGuardWarning,
    NotSupported,
    Overloaded,
    WouldDeadlock,
)
from modelguard.runtime import fork_hooks, waiting
from modelguard.runtime.background import SHARED
from modelguard.serving._batch_options import (
    Arguments,
    AutoSize,
    BatchOptions,
    Buffer,
    Changes,
    Execution,
    Fair,
    NotARoute,
    Weight,
    call_signature,
    check_function,
    function_name,
    read_buffer,
    read_fair,
    read_weight,
)
from modelguard.serving._batcher import Batcher
from modelguard.serving._requests import CancellableFuture, Request, on_loop
from modelguard.serving.breaker import Breaker
from modelguard.serving.deadlines import check_priority
from modelguard.serving.status import BatchStatus, Limits
from modelguard.serving.streams import Stream, StreamRequest

__all__ = ["Batched", "BatchedMethod", "BatchedStream", "Decorator", "batched"]

S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)
B_co = TypeVar("B_co", covariant=True)
X = TypeVar("X")
Y = TypeVar("Y")

#: What a generator function yields for an item that has ended.
End: TypeAlias = type[StopIteration] | type[StopAsyncIteration]
#: What calls of batch functions give.
Parts: TypeAlias = AsyncIterator[Sequence[Y | End]] | Iterator[Sequence[Y | End]]
Results: TypeAlias = Awaitable[Sequence[Y]] | Sequence[Y]

_NO_ITEM: Any = object()
_new = object.__new__


# A queue for each instance: what a batched method keeps among an instance's attributes.


#: So many instances that came within so many seconds are short-lived if half of them are gone.
_MANY = 100
_SOON = 60.0


class BoundMethods:
    """Makes and keeps one batched function for each instance of a class. Warns if they are made for each request."""

    def __init__(self, function: Callable[..., Any], make: Callable[[Any], Any]) -> None:
        self._function = function
        # Not by its plain name, which a subclass may use for a method of its own.
        self._attribute = f"_modelguard_batched_{function.__qualname__}"
        self._make = make
        self._began = time.monotonic()
        self._recent: list[weakref.ref[object]] = []
        self._warned = False

    def get(self, instance: Any) -> Any:
        """That of an instance, made on first use. Two threads that come first together get the same one."""
        try:
            attributes = vars(instance)
        except TypeError:
            why = f"{type(instance).__name__} has __slots__, and no room for the queue of an instance"
            fix = "Add '__dict__' to its __slots__, or batch a function at module level."
            raise InvalidOption("function", self._function, why=why, fix=fix) from None
        kept = attributes.get(self._attribute)
        if kept is None or kept.instance is not instance:  # none yet, or that of the instance this one is a copy of
            with _lock:
                kept = attributes.get(self._attribute)
                if kept is None or kept.instance is not instance:
                    kept = attributes[self._attribute] = _Kept(instance, self._make(instance))
                    if not self._warned:
                        self._recent.append(weakref.ref(kept.bound))
            if len(self._recent) >= _MANY:
                self._look_at_recent()
        return kept.bound

    def _look_at_recent(self) -> None:
        (recent, self._recent), (began, self._began) = (self._recent, []), (self._began, time.monotonic())
        self._warned = self._began - began <= _SOON and 2 * sum(one() is None for one in recent) >= _MANY
        if self._warned:
            text = (
                f"{self._function.__qualname__}(): {len(recent)} instances got a queue within a minute, and most of "
                "them are gone. Items of different instances never share a batch. Keep one instance for the process, "
                "or batch a function at module level."
            )
            warnings.warn(text, ModelGuardWarning, stacklevel=4)


@dataclass(slots=True, eq=False)
class _Kept:
    """An entry among an instance's attributes. Copies of the instance get an empty one."""

    instance: Any = None
    bound: Any = None

    def __reduce__(self) -> Any:
        return _Kept, ()


_lock = threading.RLock()  # reentrant: the collector may run a finalizer in here that uses another instance


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


fork_hooks.at_fork(fork_hooks.Rank.LOCKS, in_child=_renew_lock)

_CLOSE_TIMEOUT = 30.0


class Decorated(Entered):
    """A batch function behind a queue."""

    _made_by = "batched(max_size=8)(function)"
    _status = "modelguard.serving.status:BatchStatus"

    def __init__(self, options: BatchOptions, function: Callable[..., Any]) -> None:
        functools.update_wrapper(cast("Callable[..., Any]", self), function)
        super().__init__()
        self.__signature__ = call_signature(function, options.name)
        self._function = function
        self._options = options
        self._batcher = Batcher(function, options)
        self._arguments = Arguments(function, options)
        self._on_callers_loop = options.is_async and options.own_loop is None
        self._always_checked = self._on_callers_loop or self._arguments.always_checked
        self._weigh = self._arguments.weigh
        self._methods: BoundMethods | None = None
        self._method_of: tuple[Any, str] | None = None

    def _refuse_to_block(self, why: str, instead: str) -> None:
        if asyncio._get_running_loop() is not None:  # noqa: SLF001 - the public one raises where there is none
            raise WouldDeadlock(self.name, why=f"{why} the running event loop", fix=f"Write: {instead}.")
        if self._batcher.occupied:
            fix = "Call it in another thread; or f.submit(item), which does not block."
            raise WouldDeadlock(self.name, why=f"{why} its own thread, which runs this callback or hook", fix=fix)

    def _put_one(
        self,
        request: Request,
        timeout: _units.Duration | None,
        priority: int,
        extras: dict[str, Any],
        others: tuple[object, ...] = (),
    ) -> None:
        """:meth:`_put` for a single request, by the shortest way."""
        if extras or others or timeout is not None or priority or self._always_checked or type(request.item) is list:
            self._put([request], timeout, priority, extras, others)
            return
        if self._weigh is not None:
            request.weight = self._weigh(request.item)
        self._batcher.put_plain(request)

    def _put(
        self,
        requests: Sequence[Request],
        timeout: _units.Duration | None,
        priority: int,
        extras: dict[str, Any],
        others: tuple[object, ...] = (),
        *,
        together: bool = False,
    ) -> None:
        """Check the arguments of a call, and queue its requests: one, or several ``together``."""
        if others:
            raise self._arguments.wrong_count(1 + len(others))
        if priority:
            check_priority(priority)
            self._batcher.order()
        seconds = None if timeout is None else _units.seconds(timeout, "timeout", zero=True)
        for request in requests:
            request.priority = priority
            if extras or self._always_checked or self._weigh is not None or type(request.item) is list:
                self._arguments.fill_in(request, extras)
            if self._on_callers_loop:
                request.group = on_loop(request.group, request.loop or self._callers_loop())
            self._batcher.bound(request, seconds)
        if requests:
            self._batcher.put(*requests, together=together)

    def _callers_loop(self) -> asyncio.AbstractEventLoop:
        try:
            return get_running_loop()
        except RuntimeError:
            reason = "it runs on the event loop of its callers (loop='caller'); await it there, or leave out loop="
            raise NotSupported(f"{self.name}() outside of an asyncio event loop", reason=reason) from None

    # Its state

    @property
    def name(self) -> str:
        """Its name in events and errors."""
        return self._options.name

    @property
    def limits(self) -> Limits:
        """The bounds in force, in items and seconds."""
        return self._batcher.limits

    def configure(self, *others: Never, **changes: Unpack[Changes]) -> None:
        """Change options while it serves: ``f.configure(max_size=8, deadline="1s")``. All of them change, or none.

        What waits keeps its deadline, and waits no longer for a fuller batch than it would have; what runs is finished.
        A forked child starts with the options in force.

        Args:
            others: None; every option is passed by keyword.
            changes: ``max_size``, ``deadline``, ``max_wait``, ``max_queue`` and ``execution`` (but for its
                ``loop``), as in :func:`batched`.

        Raises:
            InvalidOption: One of them is invalid, does not fit the others, or cannot be changed.
            GuardClosed: After :meth:`close`.
            TypeError: It is a method, and was not called on an instance: each has a queue of its own.
            WouldDeadlock: From a signal handler or finalizer that interrupted a call.
        """
        if others:
            why = "has no name: configure() takes keywords only"
            raise InvalidOption("option", others[0], why=why, fix="Write for example f.configure(max_size=8).")
        if self._methods is not None:
            raise TypeError(f"{self.name}(): {self._arguments.incomplete}")
        self._batcher.configure(changes)

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
        return f"<{type(self).__name__} {self.name!r}>"

    # Closing

    def close(self, timeout: _units.Duration = _CLOSE_TIMEOUT) -> None:
        """Admit nothing more, compute what waits, then end. Blocks. Closing twice does nothing.

        Args:
            timeout: How long that may take, 30 seconds by default; what still waits then is refused with
                ``GuardClosed``.

        Raises:
            WouldDeadlock: On a running event loop (use :meth:`aclose`), or from inside the batch function.
        """
        self._refuse_to_block("close() would block", "await f.aclose()")
        self._batcher.close(_units.seconds(timeout, "timeout", zero=True))

    async def aclose(self, timeout: _units.Duration = _CLOSE_TIMEOUT) -> None:
        """:meth:`close` for coroutines; does not block the event loop."""
        close = functools.partial(self._batcher.close, _units.seconds(timeout, "timeout", zero=True))
        await waiting.run(close, f"modelguard-close-{self.name}", SHARED.start)

    def _reopen(self) -> None:
        self._batcher.reopen()

    # As a method

    def __set_name__(self, owner: type, name: str) -> None:
        written = getattr(self._function, "__qualname__", "")
        if written != f"{owner.__qualname__}.{name}":
            return  # a function from elsewhere that is kept in a class
        self._methods = BoundMethods(self._function, functools.partial(self._bind, name))
        self._arguments.incomplete = f"it is a method of {owner.__name__}: call it on an instance"
        self._always_checked = True

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None or self._methods is None:
            return self
        return self._methods.get(instance)

    def _bind(self, name: str, instance: Any) -> Self:
        method = self._function.__get__(instance, type(instance))
        bound = type(self)(self._options, method)
        bound._method_of = instance, name  # noqa: SLF001 - of its own class
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


async def _results(futures: list[Future[Y]]) -> list[Y]:
    """What these get, as soon as all of them have it, or one of them an error."""
    ended, left = waiting.promise(), iter(range(len(futures) - 1, -1, -1))

    def end(future: Future[Y]) -> None:
        if future.exception() is not None or next(left) == 0:
            with contextlib.suppress(InvalidStateError):  # another one has failed before
                ended.set_result(None)

    future: Future[Y] | None = None
    results: list[Y] = []
    try:
        for future in futures:
            future.add_done_callback(end)
        if futures:
            await waiting.result(ended)
        for future in futures:
            if future.done():  # all are, or one of them raises
                results.append(future.result())
        return results
    finally:
        del future, futures  # the error's traceback refers to this frame


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
                WouldDeadlock: On a running event loop (use :meth:`aio`), from inside the batch function, or from a
                    callback or hook that its thread runs.
                GuardClosed: After :meth:`close`.
                TypeError: There is not exactly one positional argument, or the keyword arguments do not fit.
                Exception: What the function raised, or returned, for this item.
            """
            if item is _NO_ITEM or others:
                raise self._arguments.wrong_count(len(others) + (item is not _NO_ITEM))
            self._refuse_to_block("the call would block", "await f.aio(item)")
            if sys.is_finalizing():  # called by a finalizer, when threads do not run any more
                raise GuardClosed(self.name)
            request = Request(item)
            request.answered = threading.Lock()
            request.answered.acquire()
            self._put_one(request, timeout, priority, extras)
            try:
                return request.wait()
            except BaseException:
                self._batcher.cancel(request)  # for Ctrl-C during the wait; nothing if this is the answer
                raise
            finally:
                del request, item  # the error's traceback refers to this frame

    async def aio(
        self, item: X, /, *others: Never, timeout: _units.Duration | None = None, priority: int = 0, **extras: Any
    ) -> Y:
        """Compute one item without blocking the event loop. Cancelling the task takes the item out of the queue.

        It works on asyncio and on Trio. Arguments and errors are those of a call.
        """
        try:
            loop = get_running_loop()
        except RuntimeError:
            waiting.require_loop("await f.aio(item)", "Call the function without .aio, in a thread")
            return await waiting.result(self.submit(item, *others, timeout=timeout, priority=priority, **extras))
        call: asyncio.Future[Y] = asyncio.Future(loop=loop)  # what loop.create_future() does, in half the time
        request: Request = _new(Request)  # its __init__ would take as long as everything else here
        request.item, request.future, request.loop = item, call, loop
        self._put_one(request, timeout, priority, extras, others)
        try:
            return await call
        except (asyncio.CancelledError, GeneratorExit) as error:  # the task was cancelled, or the coroutine closed
            self._leave(error, [request])
            raise
        finally:
            del call, request, item  # as above

    def submit(
        self, item: X, /, *others: Never, timeout: _units.Duration | None = None, priority: int = 0, **extras: Any
    ) -> Future[Y]:
        """Queue one item and return at once. Cancelling the future takes the item out of the queue.

        Arguments and errors are those of a call. Refusals are raised here, all other errors by the future.
        """
        future = CancellableFuture()
        request = Request(item, future)
        future.on_cancel = functools.partial(self._batcher.cancel, request, notify=True)
        self._put_one(request, timeout, priority, extras, others)
        return future

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
        self._refuse_to_block("map() would block", "await f.amap(items)")
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
            ItemTooHeavy: There are more of them than ``max_queue``, or one weighs more than a batch may.
            ItemRefused: ``items`` is a text, or one cannot be put into a batch.
            Exception: What an item failed with, as for a call.
        """
        self._arguments.check_items(items)
        listed = list(items)
        if len(listed) > (most := self.limits.max_queue):
            why = f"{len(listed)} items never fit into a queue of max_queue={most}; pass fewer at a time"
            raise ItemTooHeavy(self.name, weight=len(listed), max_weight=most, why=why)
        try:
            loop = get_running_loop()
            requests = [Request(item, loop.create_future(), loop) for item in listed]
        except RuntimeError:
            waiting.require_loop("await f.amap(items)", "Call f.map(items), in a thread")
            loop = None
            requests = [Request(item, CancellableFuture()) for item in listed]
        self._put(requests, timeout, priority, extras, others, together=True)
        try:
            if loop is None:
                return await _results([request.future for request in requests])
            return list(await asyncio.gather(*(request.future for request in requests)))
        except BaseException as error:
            self._leave(error, requests)  # nothing for those that have their answers
            raise
        finally:
            del requests, listed, items  # as above

    def _leave(self, error: BaseException, requests: list[Request]) -> None:
        """Nobody awaits these any more. A coroutine may be closed by the garbage collector, which waits for no lock."""
        closed = isinstance(error, GeneratorExit)
        while requests:
            request = requests.pop()
            (self._batcher.drop if closed else self._batcher.cancel)(request)
            if not closed:
                request.future.cancel()  # which gather() keeps, with its error, until they end

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


class BatchedStream(Decorated, Generic[X, Y]):
    """A generator function of a list as a function of one item, whose parts are computed in batches.

    Made by :func:`batched` from a function that yields lists with one part for each item; see there for the options.
    ``f.stream(x)`` gives the parts of one item. In a class it is a method, with a queue for each instance.

    It is a context manager, for ``with`` and ``async with``, and closes on exit. Entering it again reopens it.
    """

    def stream(
        self, item: X, /, *others: Never, timeout: _units.Duration | None = None, priority: int = 0, **extras: Any
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
        self._put_one(request, timeout, priority, extras, others)
        return Stream(self.name, request, self._batcher.cancel, self._batcher.drop)

    if not TYPE_CHECKING:  # checkers reject these; without a checker they need a message that says what to write

        def __call__(self, *_args: object, **_extras: object) -> Never:
            """Reject the call: there is no single result."""
            fix = "for part in f.stream(item): ...; on an event loop: async for"
            raise TypeError(f"{self.name}() yields its result in parts. Write: {fix}")

        aio = map = submit = __call__


class BatchedMethod(Protocol[S_contra, B_co]):
    """A batched function in a class, for type checkers: each instance has its own."""

    @overload
    def __get__(self, instance: None, owner: type | None = ...) -> BatchedMethod[S_contra, B_co]: ...
    @overload
    def __get__(self, instance: S_contra, owner: type | None = ...) -> B_co: ...


class Decorator(Protocol):
    """What ``batched(...)`` returns."""

    @overload
    def __call__(self, function: Callable[Concatenate[list[X], ...], Results[Y]], /) -> Batched[X, Y]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, list[X], ...], Results[Y]], /
    ) -> BatchedMethod[S, Batched[X, Y]]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[list[X], ...], Parts[Y]], /) -> BatchedStream[X, Y]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, list[X], ...], Parts[Y]], /
    ) -> BatchedMethod[S, BatchedStream[X, Y]]: ...


@_public.with_fixes(
    max_size="AutoSize", weight="Weight", fair_by="Fair", buffer="Buffer", execution="Execution", breaker="Breaker"
)
def batched(
    *others: Never,
    max_size: int | AutoSize,
    deadline: _units.Duration | None = None,
    max_wait: _units.Duration = 0.0,
    max_queue: int = 256,
    threads: int = 1,
    weight: Callable[[Any], float] | Weight | None = None,
    fair_by: Callable[[Any], Hashable] | Fair | None = None,
    on_error: Literal["isolate", "fail"] = "isolate",
    breaker: Breaker | None = None,
    buffer: int | Buffer | None = None,
    execution: Execution | None = None,
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
        max_size: Most items in a batch, or an :class:`AutoSize`, which has it chosen for a latency goal.
        deadline: The time that every item has from its arrival. Default: no bound. A call's ``timeout=``, the
            :func:`deadline` context and the web middleware can only shorten it.
        max_wait: How long the oldest item may wait for a fuller batch while a thread is free; less where a deadline
            requires it. Default: not at all, which is right unless a batch costs much more than its items.
        max_queue: Most items that wait, without those that are being computed; at least ``max_size``.
        threads: Threads that compute batches side by side.
        weight: What an item counts for: a function of the item, such as ``len``, or a :class:`Weight`, which also
            bounds the weight of a batch, or says that the function pads. The function gets the heaviest item first.
        fair_by: Whose an item is: a function of the item that gives a key, or a :class:`Fair`, which also has shares,
            a quota, and how much waiting counts. Default: the key of the context, which the web middleware or
            ``serving.caller`` sets.
        on_error: ``"isolate"``: run a batch that raised again in parts, so that only the items at fault fail; the
            function may then be called twice with the same item. ``"fail"``: all its items fail with ``BatchFailed``.
        breaker: When to stop calling a failing model. Default: never.
        buffer: For generator functions: most parts of an item that wait for its consumer (64 by default), or a
            :class:`Buffer`, which also says when a consumer is too slow.
        execution: An :class:`Execution`: on which event loop an ``async`` function runs, and when a batch counts as
            hung.
        name: For events and errors. Default: the function's module and name.

    Returns:
        A decorator that makes a :class:`Batched`, or of a generator function a :class:`BatchedStream`.

    Raises:
        InvalidOption: An option is invalid, or the function cannot be batched; the message gives the fix.
    """
    if others:
        fix = "Write @batched(max_size=32)."
        raise InvalidOption("batched", others[0], why="takes keyword arguments only", fix=fix)
    options = BatchOptions(
        max_size=max_size,
        deadline=deadline,
        max_wait=max_wait,
        max_queue=max_queue,
        threads=threads,
        weight=read_weight(weight),
        fair=read_fair(fair_by),
        on_error=on_error,
        breaker=breaker,
        buffer=read_buffer(buffer),
        execution=execution,
        name="" if name is None else _units.name(name),
    )

    def decorate(function: Any) -> Any:
        if isinstance(function, Decorated):
            fix = "Use @batched(...) once, with all its options."
            raise InvalidOption("function", function, why="it is batched already", fix=fix)
        check_function(function, sys._getframe(1).f_locals)  # noqa: SLF001 - the public one may return None
        suited = options.suited_to(function, options.name or _units.printable(function_name(function)))
        made: Any = (BatchedStream if suited.streams else Batched)(suited, function)
        # For frameworks; calls look it up in the class.
        made.__call__ = MethodType(NotARoute(function, made.name), made)
        return made

    return decorate
