"""``Batched``: the callable that ``batched`` makes, with its three doors."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from modelguard import _units
from modelguard.errors import GuardClosed, InvalidOption, ItemRefused, ItemTooHeavy, Overloaded, WouldDeadlock
from modelguard.serving.entries import Entry, FutureEntry, LoopEntry, ThreadEntry

if TYPE_CHECKING:
    from types import TracebackType

    from modelguard.serving.settings import Settings
    from modelguard.serving.status import BatchStatus

X = TypeVar("X")
Y = TypeVar("Y")

_DRAIN = 30.0
_MANY = 64


class Batched(Generic[X, Y]):
    """A function of one item, computed in batches. Made by :func:`batched`; see there for the options.

    ``f(x)`` blocks the thread, ``await f.aio(x)`` does not block the loop, ``f.submit(x)`` returns a future, and
    ``f.map(xs)`` keeps the batches full. Extra keyword arguments go to the batch function; items whose extras differ
    do not share a batch. In a class it is a method, with a queue for each instance.

    It is a context manager that closes on exit, for ``with`` and ``async with``.
    """

    def __init__(self, function: Any, settings: Settings) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._settings = settings
        self._method: str | None = None
        self._owner: Any = None
        self._fits: set[tuple[str, ...]] = set()
        self._batcher = settings.batcher(function)
        self._unfit = self._misfit({})
        self._dressed = self._unfit is not None or settings.weight is not None

    # The doors

    def __call__(self, item: X, /, *, timeout: _units.Duration | None = None, **extras: Any) -> Y:
        """Compute one item, in whichever batch it comes into. Blocks.

        Args:
            item: What the batch function gets one of its list from.
            timeout: How long this call may take at most; it can only shorten ``deadline``.
            extras: Further keyword arguments of the batch function.

        Raises:
            QueueFull, DeadlineUnreachable, CircuitOpen: Refused at once; ``retry_after`` tells when to try again.
            DeadlineExceeded: The time ran out.
            ItemRefused: The item cannot be put into a batch.
            BatchFailed: The batch failed, through nobody's item in particular.
            WouldDeadlock: On a running event loop (use :meth:`aio`), or from inside the batch function.
            GuardClosed: After :meth:`close`.
            Exception: What the function raised, or returned, for this item.
        """
        self._refuse_on_loop("the call would block", "await f.aio(item)")
        if sys.is_finalizing():  # a finalizer calls, and the threads do not run any more
            raise GuardClosed(self.name)
        entry = ThreadEntry(item)
        self._send(entry, timeout, extras)
        try:
            return entry.wait()  # type: ignore[no-any-return]
        except BaseException:
            self._batcher.cancel(entry)  # Ctrl-C while it waited; nothing if this is its answer
            raise
        finally:
            del entry  # the error's traceback refers to this frame

    async def aio(self, item: X, /, *, timeout: _units.Duration | None = None, **extras: Any) -> Y:
        """Compute one item without blocking the event loop; cancelling the task takes the item out of the queue.

        Arguments and errors are those of a call.
        """
        entry = LoopEntry(item, asyncio.get_running_loop())
        if extras or timeout is not None or self._dressed:  # else what _send would find out, a call earlier
            self._send(entry, timeout, extras)
        else:
            self._batcher.put(entry)
        try:
            return await entry.future  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            self._batcher.cancel(entry)
            raise
        finally:
            del entry  # as above

    def submit(self, item: X, /, *, timeout: _units.Duration | None = None, **extras: Any) -> Future[Y]:
        """Queue one item and return at once. Cancelling the future takes the item out of the queue.

        Arguments and errors are those of a call; what refuses the item is raised here, the rest by the future.
        """
        entry = FutureEntry(item)
        entry.future.call_off = functools.partial(self._batcher.cancel, entry)
        self._send(entry, timeout, extras)
        return entry.future

    def map(self, items: Iterable[X], /, *, timeout: _units.Duration | None = None, **extras: Any) -> Iterator[Y]:
        """Compute many items; yield the results in the order of the items. Blocks.

        As many items are queued as keep the batches full, and no more are taken from ``items``: it may be endless.
        When the queue is full, which others may have filled, this waits for its own items instead of failing.

        Args:
            items: What to compute.
            timeout: For each item, from when it is queued.
            extras: Further keyword arguments of the batch function.

        Raises:
            Exception: What an item failed with, in its place; the items that are queued then are dropped.
        """
        self._refuse_on_loop("map() would block", "await f.aio(item) for each item")
        return self._map(items, timeout, extras)

    def _map(self, items: Iterable[X], timeout: _units.Duration | None, extras: dict[str, Any]) -> Iterator[Y]:
        limits = self._settings.limits
        window = min(limits.max_size * (limits.workers + 1), limits.max_queue)
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

    # The rest

    @property
    def name(self) -> str:
        """Its name, as events and errors give it."""
        return self._settings.limits.name

    @property
    def ready(self) -> bool:
        """Whether it lets items in: false once it is being closed. An open circuit, which needs traffic, is ready."""
        return self._batcher.ready

    def status(self) -> BatchStatus:
        """What there is to know of it now."""
        return self._batcher.status()

    def close(self, timeout: _units.Duration = _DRAIN) -> None:
        """Admit nothing more, compute what waits, and then end. Blocks. Closing twice does nothing.

        Args:
            timeout: How long that may take; what still waits then is refused with ``GuardClosed``.

        Raises:
            WouldDeadlock: On a running event loop (use :meth:`aclose`), or from inside the batch function.
        """
        self._refuse_on_loop("close() would block", "await f.aclose()")
        self._batcher.close(timeout)

    async def aclose(self, timeout: _units.Duration = _DRAIN) -> None:
        """:meth:`close` for a coroutine; the event loop goes on meanwhile."""
        await asyncio.to_thread(self._batcher.close, timeout)

    def __enter__(self) -> Batched[X, Y]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Batched[X, Y]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<Batched {self.name!r}>"

    # As a method

    def __set_name__(self, owner: type, name: str) -> None:
        written = getattr(self._function, "__qualname__", "")
        if written != f"{owner.__qualname__}.{name}":
            return  # a function of elsewhere that is kept in a class
        self._method = name
        self._place = f"_modelguard_batched_{written}"  # not its name, which a subclass may use for its own
        self._dressed = True
        self._unfit = f"it is a method of {owner.__name__}: call it on an instance"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None or self._method is None:
            return self
        try:
            mine = vars(instance)
        except TypeError:
            raise InvalidOption(
                "function",
                self._function,
                why=f"{type(instance).__name__} has __slots__, and no place for a queue of its own",
                fix="Add '__dict__' to its __slots__, or batch a function at module level.",
            ) from None
        kept: _Kept | None = mine.get(self._place)
        if kept is None or kept.owner is not instance:  # none yet, or that of the instance which this one copies
            with _binding:
                kept = mine.get(self._place)
                if kept is None or kept.owner is not instance:
                    bound: Batched[X, Y] = Batched(self._function.__get__(instance, owner), self._settings)
                    bound._method, bound._owner = self._method, instance
                    kept = mine[self._place] = _Kept(instance, bound)
        return kept.bound

    # By reference, as functions are pickled; a method by its instance.
    def __reduce__(self) -> Any:
        if self._owner is not None:
            return getattr, (self._owner, self._method)
        return str(self.__qualname__)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: Any) -> Any:
        return self if self._owner is None else getattr(copy.deepcopy(self._owner, memo), str(self._method))

    # What the doors share

    def _refuse_on_loop(self, why: str, instead: str) -> None:
        if asyncio._get_running_loop() is not None:  # noqa: SLF001 - the public one raises where there is none
            raise WouldDeadlock(self.name, why=f"{why} the running event loop", fix=f"Write: {instead}.")

    def _send(self, entry: Entry, timeout: _units.Duration | None, extras: dict[str, Any]) -> None:
        if extras or self._unfit is not None:
            entry.group = self._group(extras)
        if self._settings.weight is not None:
            entry.weight = self._weigh(self._settings.weight, entry.item)
        self._batcher.put(entry, None if timeout is None else _units.seconds(timeout, "timeout", zero=True))

    def _group(self, extras: dict[str, Any]) -> tuple[tuple[str, type, Any], ...] | None:
        names = tuple(sorted(extras))
        if names not in self._fits:
            why = self._misfit(extras) if extras else self._unfit
            if why is not None:
                raise TypeError(f"{self.name}(): {why}")
            if len(self._fits) < _MANY:  # a function that takes any name may be given ever new ones
                self._fits.add(names)
        group = tuple((name, type(extras[name]), extras[name]) for name in names)  # True is not 1 here
        try:
            hash(group)
        except TypeError as error:
            why = f"its keyword arguments decide which items may share a batch, and {error}"
            raise ItemRefused(self.name, why=why) from None
        return group or None

    def _misfit(self, extras: dict[str, Any]) -> str | None:
        try:
            inspect.signature(self._function).bind([], **extras)
        except TypeError as error:
            return str(error)
        except ValueError:  # many built-in functions have no signature
            return None
        return None

    def _weigh(self, weigh: Callable[[Any], float], item: Any) -> float:
        try:
            weight = float(weigh(item))
        except Exception as error:
            raise ItemRefused(self.name, why=f"the item cannot be weighed: {type(error).__name__}: {error}") from error
        if not 0 <= weight < math.inf:
            raise ItemRefused(self.name, why=f"the item weighs {weight}, which is no weight")
        if weight > self._settings.limits.max_weight:
            raise ItemTooHeavy(self.name, weight=weight, max_weight=self._settings.limits.max_weight)
        return weight


#: Two threads that call a method of a new instance at once get the same queue.
_binding = threading.Lock()


class _Kept:
    """The queue of an instance, among its attributes. In copies of the instance it is empty."""

    def __init__(self, owner: Any = None, bound: Any = None) -> None:
        self.owner = owner
        self.bound = bound

    def __reduce__(self) -> Any:
        return _Kept, ()
