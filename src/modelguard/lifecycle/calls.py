"""Decorated functions: the model goes in as the first parameter, and a lease is held as long as the work lasts."""

from __future__ import annotations

import inspect
import types
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import wrapt

from modelguard.errors import InvalidOption
from modelguard.lifecycle import lazy
from modelguard.lifecycle.leases import Lease

if TYPE_CHECKING:
    from modelguard.lifecycle.guard import ModelGuard

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]


#: Results of these types cannot be lazy; one look at this set saves two failed attribute look-ups on most calls.
_EAGER = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset})


if TYPE_CHECKING:  # generic for the checkers only
    _FunctionWrapper = wrapt.FunctionWrapper[..., Any]
    _BoundFunctionWrapper = wrapt.BoundFunctionWrapper[..., Any]
    _CallableProxy = wrapt.CallableObjectProxy[Any]
else:
    _FunctionWrapper, _BoundFunctionWrapper = wrapt.FunctionWrapper, wrapt.BoundFunctionWrapper
    _CallableProxy = wrapt.CallableObjectProxy


class _BoundGuarded(_BoundFunctionWrapper):
    @property
    def __func__(self) -> Any:
        method: Any = self.__wrapped__
        return _Taken(method.__func__)

    @property
    def __signature__(self) -> inspect.Signature:
        bound = isinstance(self.__wrapped__, types.MethodType) or self._self_binding == "staticmethod"
        return _without_model(self.__wrapped__, at=0 if bound else _receivers(self.__wrapped__))

    def __reduce__(self) -> Any:
        if isinstance(self.__wrapped__, types.MethodType):
            return getattr, (self.__wrapped__.__self__, self.__name__)
        from pkgutil import resolve_name

        # By reference, and not by name alone: each look through the class makes a new one of these.
        return resolve_name, (f"{self.__module__}:{self.__qualname__}",)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()


class Guarded(_FunctionWrapper):
    """A decorated function: the same name, documentation and signature, less the model."""

    __bound_function_wrapper__ = _BoundGuarded

    def __init__(self, wrapped: Any, wrapper: Wrapper, guard: ModelGuard[Any] | None) -> None:
        super().__init__(wrapped, wrapper)
        self._self_guard = guard
        method = _receivers(wrapped) and not isinstance(wrapped, classmethod)
        function = cast("Callable[..., Any]", wrapped)
        self._self_call = partial(_unbound, wrapper, function) if method else partial(wrapper, function, None)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function with the model.

        wrapt's own way looks for an instance first. What is called without being bound to one has none, and the look
        costs a quarter of a microsecond.
        """
        return self._self_call(args, kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return _without_model(plain_function(self.__wrapped__), at=_receivers(self.__wrapped__))

    # By reference, as functions are pickled and copied, so that spawned workers find it by its name.
    def __reduce__(self) -> Any:
        return str(self.__qualname__)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class _Taken(_CallableProxy):
    """The function inside a bound method, as ``inspect.signature`` asks for it."""

    @property
    def __signature__(self) -> inspect.Signature:
        return _without_model(self.__wrapped__, at=1)


def decorate(guard: ModelGuard[Any], function: Any) -> Guarded:
    """Wrap ``function`` so that it runs on the model of ``guard``."""
    return wrap(
        function,
        call=_function(guard),
        take=lambda _args, _kwargs: Lease.take(guard),
        atake=lambda _args, _kwargs: Lease.atake(guard),
        guard=guard,
    )


def wrap(
    function: Any,
    *,
    call: Wrapper,
    take: Callable[[tuple[Any, ...], dict[str, Any]], Lease[Any]],
    atake: Callable[[tuple[Any, ...], dict[str, Any]], Awaitable[Lease[Any]]],
    guard: ModelGuard[Any] | None,
) -> Guarded:
    """Wrap ``function`` by what it is: ``call`` for plain functions, and for the rest ways to take a lease."""
    plain = plain_function(function)
    _check(plain)
    if inspect.iscoroutinefunction(plain):
        call = _coroutine(atake)
    elif inspect.isasyncgenfunction(plain):
        call = _async_generator(atake)
    elif inspect.isgeneratorfunction(plain):
        call = _generator(take)
    return Guarded(function, call, guard)


def guard_of(function: Callable[..., object]) -> ModelGuard[Any]:
    """The guard of a decorated function, for its ``status()``, ``reload()`` and the rest.

    Raises:
        InvalidOption: ``function`` is not decorated by a guard.
    """
    parent = getattr(function, "_self_parent", None)  # of what is bound to an instance
    guard: ModelGuard[Any] | None = getattr(function if parent is None else parent, "_self_guard", None)
    if guard is None:
        raise InvalidOption("function", function, why="no guard decorates it", fix="Decorate it, or keep its guard.")
    return guard


def _unbound(wrapper: Wrapper, wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call what is written as a method and was not bound by wrapt.

    Since Python 3.13 a ``classmethod`` around it calls it like this, with its class as the first argument.
    """
    if not (args and isinstance(args[0], type)):  # what is named self is the model, as in guard(Model.predict)
        return wrapper(wrapped, None, args, kwargs)
    return wrapper(types.MethodType(wrapped, args[0]), args[0], args[1:], kwargs)


# How each kind of function holds its lease


def _function(guard: ModelGuard[Any]) -> Wrapper:
    core = guard._core
    held = core.held

    # The hot path: nothing is made here but the context's mark and token. All other kinds of functions use Lease.
    def call(wrapped: Callable[..., Any], _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        generation = core.serving
        if generation is None or held.get():
            generation = guard._enter()
            mark = core.mark(generation)
        else:
            mark = [generation, 1]
            generation.leases.append(None)
            if generation.retired:  # in this very moment
                generation = mark[0] = guard._enter_instead(generation)
        token, failed = None, False
        try:
            token = held.set(mark)
            result = wrapped(generation.model, *args, **kwargs)
            if (kind := type(result)) in _EAGER or not lazy.is_lazy(kind):
                return result
            generation.leases.append(None)  # beside the call's own, which ends now
            return lazy.keep(Lease.on(guard, generation), result)
        except Exception:
            failed = True
            raise
        finally:
            mark.clear()
            needs_a_look = core.leave(generation, failed)
            if token is not None:
                held.reset(token)
            if needs_a_look:
                guard._look(generation)

    return call


def _coroutine(atake: Callable[[tuple[Any, ...], dict[str, Any]], Awaitable[Lease[Any]]]) -> Wrapper:
    async def call(wrapped: Callable[..., Any], _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lease = await atake(args, kwargs)
        return await lazy.finish(lease, lambda model: wrapped(model, *args, **kwargs))

    return call


def _generator(take: Callable[[tuple[Any, ...], dict[str, Any]], Lease[Any]]) -> Wrapper:
    def call(wrapped: Callable[..., Any], _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return lazy.drive(lambda: take(args, kwargs), lambda model: wrapped(model, *args, **kwargs))

    return call


def _async_generator(atake: Callable[[tuple[Any, ...], dict[str, Any]], Awaitable[Lease[Any]]]) -> Wrapper:
    def call(wrapped: Callable[..., Any], _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return lazy.adrive(lambda: atake(args, kwargs), lambda model: wrapped(model, *args, **kwargs))

    return call


# What is decorated


def plain_function(function: Any) -> Any:
    """The function inside a ``classmethod`` or ``staticmethod``."""
    return function.__func__ if isinstance(function, classmethod | staticmethod) else function


def _check(plain: Any) -> None:
    if not callable(plain) or isinstance(plain, type):
        raise InvalidOption(
            "function",
            plain,
            why=f"a guard decorates functions, and this is a {type(plain).__name__}",
            fix="Decorate its methods, or use guard.lease() where the model is needed.",
        )
    parameters = _parameters(plain)
    if parameters is not None and not any(parameter.kind in _TAKES_MODEL for parameter in parameters):
        raise InvalidOption(
            "function",
            plain,
            why="it has no positional parameter to take the model",
            fix="Let its first parameter (after self) be the model: def predict(model, text): ...",
        )


_TAKES_MODEL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


def _parameters(plain: Any) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(plain).parameters.values())
    except (ValueError, TypeError):  # many built-in functions have none
        return None


def _receivers(function: Any) -> int:
    """How many parameters stand before the model: 1 for what is written as a method in a class, else 0."""
    plain = plain_function(function)
    if isinstance(function, classmethod):
        return 1
    scope = getattr(plain, "__qualname__", "").rpartition(".")[0]
    first = next(iter(_parameters(plain) or ()), None)
    in_class = bool(scope) and not scope.endswith("<locals>")
    return int(in_class and first is not None and first.name in {"self", "cls", "mcs"})


def _without_model(function: Any, *, at: int) -> inspect.Signature:
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if len(parameters) > at and parameters[at].kind is not inspect.Parameter.VAR_POSITIONAL:
        del parameters[at]
    return signature.replace(parameters=parameters)


def call_parameters(function: Any) -> inspect.Signature:
    """What a caller gives a decorated function: its signature without model and ``self``."""
    signature = inspect.signature(plain_function(function))
    return signature.replace(parameters=list(signature.parameters.values())[_receivers(function) + 1 :])
