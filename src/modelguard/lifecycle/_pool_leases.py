"""Using a pool's models: leases by key, and functions whose arguments give the key."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar, overload

from modelguard.errors import InvalidOption
from modelguard.lifecycle._engine import Wrapper
from modelguard.lifecycle._lazy_results import is_lazy, keep
from modelguard.lifecycle._signatures import call_parameters, plain_function
from modelguard.lifecycle._wrappers import check_function, wrap

if TYPE_CHECKING:
    from types import TracebackType

    from modelguard.lifecycle._leases import Lease
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
    """The decorator that calling a :class:`~modelguard.ModelPool` returns."""

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
        """Decorate ``function``: functions, methods, coroutines and generators alike."""
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
