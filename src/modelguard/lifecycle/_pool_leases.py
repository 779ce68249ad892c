"""Using a pool's models: leases by key, and functions whose arguments give the key."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar, overload

from modelguard.errors import InvalidOption, LoadFailed, ModelGuardError, Overloaded
from modelguard.lifecycle._engine import Wrapper
from modelguard.lifecycle._leases import Lease
from modelguard.lifecycle._misuse import call_parameters, plain_function
from modelguard.lifecycle._wrappers import check_function, is_lazy, keep, wrap
from modelguard.runtime import waiting

if TYPE_CHECKING:
    from types import TracebackType

    from modelguard.lifecycle._options import GuardOptions, PoolOptions

M = TypeVar("M")
S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


class PoolLease(Generic[M]):
    """One use of a pool's model: ``with pool.lease(key) as model:`` or ``async with``. It can be used once."""

    def __init__(self, take: Callable[[], Lease[M]], atake: Callable[[], Awaitable[Lease[M]]]) -> None:
        self.take = take
        self.atake = atake
        self._lease: Lease[M] | None = None
        self._entered = False

    def __enter__(self) -> M:
        self._raise_on_second_use()
        self._lease = self.take()
        return self._lease.enter_taken()

    async def __aenter__(self) -> M:
        self._raise_on_second_use()
        self._lease = await self.atake()
        return self._lease.enter_taken()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lease is not None:
            self._lease.end_with(error)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def _raise_on_second_use(self) -> None:
        if self._entered:
            raise RuntimeError("a lease of a pool can be used once; call lease(key) again for another")
        self._entered = True


class PooledFunction(NamedTuple):
    """What there is to know of a function that a pool decorates, for who runs it elsewhere.

    Attributes:
        function: What was decorated: it takes the model as its first argument.
        options: The pool's.
        options_for: The options of the guard of one key's model.
        key_of: The key that a call with these arguments needs.
    """

    function: Callable[..., Any]
    options: PoolOptions
    options_for: Callable[[Any], GuardOptions[Any]]
    key_of: Callable[[tuple[Any, ...], dict[str, Any]], Any]


class Keyed(Generic[M]):
    def __init__(
        self,
        lease: Callable[[Any], PoolLease[M]],
        key: str | Callable[..., Any],
        options: PoolOptions,
        options_for: Callable[[Any], GuardOptions[M]],
    ) -> None:
        if not isinstance(key, str) and not callable(key):
            raise InvalidOption(
                "key",
                key,
                why="must be a parameter's name or a function",
                fix="Name a parameter, key='voice', or give a function of the arguments.",
            )
        self._lease = lease
        self._key = key
        self._options = options
        self._options_for = options_for

    @overload
    def __call__(self, function: classmethod[S, Concatenate[M, P], R], /) -> classmethod[S, P, R]: ...
    @overload
    def __call__(self, function: staticmethod[Concatenate[M, P], R], /) -> staticmethod[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[M, P], R], /) -> Callable[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[S, M, P], R], /) -> Callable[Concatenate[S, P], R]: ...
    def __call__(self, function: Any, /) -> Any:
        check_function(plain_function(function), None)
        key_of = self._by_name(function, self._key) if isinstance(self._key, str) else self._by_call(function)

        def lease_for(args: tuple[Any, ...], kwargs: dict[str, Any]) -> PoolLease[M]:
            return self._lease(key_of(args, kwargs))

        return wrap(
            function,
            call=call_on(lambda args, kwargs: lease_for(args, kwargs).take()),
            take=lambda args, kwargs: lease_for(args, kwargs).take(),
            atake=lambda args, kwargs: lease_for(args, kwargs).atake(),
            owner=PooledFunction(function, self._options, self._options_for, key_of),
        )

    def _by_call(self, function: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        signature, key = _signature(self._key), self._key
        assert callable(key)  # noqa: S101 - names go to _by_name

        def key_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if signature is not None:
                try:
                    signature.bind(*args, **kwargs)
                except TypeError as misfit:
                    name = plain_function(function).__qualname__
                    raise TypeError(
                        f"{name}(): its pool's key function{signature} gets all of the call's arguments: {misfit}"
                    ) from None
            return key(*args, **kwargs)

        return key_of

    @staticmethod
    def _by_name(function: Any, name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        signature = call_parameters(function)
        title = plain_function(function).__qualname__
        if name not in signature.parameters:
            names = ", ".join(map(repr, signature.parameters))
            raise InvalidOption(
                "key",
                name,
                why=f"is not a parameter of {title}() besides the model",
                fix=f"Choose one of {names}, or give a function." if names else f"Give {title}() that parameter.",
            )

        def key_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as misfit:
                raise TypeError(
                    f"{title}{signature}: {misfit}. The pool passes the model as the first argument: leave it out"
                ) from None
            bound.apply_defaults()
            return bound.arguments[name]

        return key_of


def _signature(key: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(key)
    except (ValueError, TypeError):  # many built-in functions have none
        return None


def call_on(take: Callable[[tuple[Any, ...], dict[str, Any]], Lease[Any]]) -> Wrapper:
    """Make the body of a decorated plain function, which runs on the lease that ``take`` takes for its arguments."""

    def call(wrapped: Callable[..., Any], _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lease = take(args, kwargs)
        try:
            result = lease.step(partial(wrapped, lease.model, *args, **kwargs))
        except BaseException as error:
            lease.end_with(error)
            raise
        if is_lazy(type(result)):
            return keep(lease, result)
        lease.end(failed=False)
        return result

    return call


# Leases of a pool for coroutines: one thread takes one, and those who wait for the same model wait for that thread.


K = TypeVar("K", bound=Hashable)


class Fetches(Generic[K, M]):
    """The threads that take leases of one pool for coroutines.

    Args:
        pool: The pool's name.
    """

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._shared: dict[K, Future[Lease[M]]] = {}

    def begin(
        self, key: K, work: Callable[[], Lease[M]], *, start_thread: waiting.StartThread, alone: bool = False
    ) -> tuple[Future[Lease[M]], bool]:
        """Have a thread take a lease, unless one takes a lease for the same key. Does not block.

        Args:
            key: Whose model.
            work: Takes the lease.
            start_thread: Starts a thread.
            alone: The caller has a thread of its own, in its own context. One inside a lease of this pool must not wait
                for room behind others, which may wait for the end of its lease.

        Returns:
            What gets the lease, and whether the lease is the caller's own, who must end it.
        """
        future: Future[Lease[M]] = waiting.promise()
        if not alone:
            shared = self._shared.setdefault(key, future)
            if shared is not future:
                return shared, False
            future.add_done_callback(lambda _: self._shared.pop(key, None))
        return waiting.start(work, f"modelguard-{self._pool}", start_thread, future), True

    async def take(
        self,
        key: K,
        work: Callable[[], Lease[M]],
        wait: float,
        *,
        start_thread: waiting.StartThread,
        alone: bool,
    ) -> Lease[M] | None:
        """:meth:`begin`, and wait for the lease; None if it is another caller's, or ``wait`` seconds have passed."""
        future, own = self.begin(key, work, start_thread=start_thread, alone=alone)
        if own:
            return await _own(future)
        await _wait_for(future, wait)
        return None


async def _wait_for(fetch: Future[Lease[M]], wait: float) -> None:
    """Wait until another caller has its lease. Its error is this caller's too, unless only its time is over."""
    waiting = _on_this_loop(fetch)
    await asyncio.wait([waiting], timeout=wait)
    error = waiting.exception() if waiting.done() else None
    if isinstance(error, ModelGuardError) and not isinstance(error, Overloaded):
        raise afresh(error) from error.__cause__
    if error is not None and not isinstance(error, Overloaded):
        raise error


async def _own(fetch: Future[Lease[M]]) -> Lease[M]:
    """Await the lease that a thread takes; if the caller is cancelled meanwhile, end it."""
    waiting = _on_this_loop(fetch)
    try:
        await asyncio.wait([waiting])
    except asyncio.CancelledError:
        fetch.add_done_callback(_end_unwanted)
        raise
    return waiting.result()


def _on_this_loop(fetch: Future[Lease[M]]) -> asyncio.Future[Lease[M]]:
    """A future of this loop, to be waited for by ``asyncio.wait``, which leaves it alone if its caller is cancelled.

    ``asyncio.shield`` does so too, but from CPython 3.14 on it logs an error that comes after that.
    """
    waiting = asyncio.wrap_future(fetch)
    # Its waiter may be gone by then, and asyncio logs an error that nobody has looked at.
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    return waiting


def _end_unwanted(fetch: Future[Lease[M]]) -> None:
    if fetch.exception() is None:
        fetch.result().end(failed=False)


def afresh(error: Exception) -> Exception:
    """The same error for another caller: an exception object must not be raised in two threads."""
    again = error.again(error.retry_after, error.current) if isinstance(error, LoadFailed) else copy.copy(error)
    again.__cause__ = error.__cause__
    return again
