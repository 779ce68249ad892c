"""Where an isolated function gets its model: from its guard, from a pool, or from none."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from modelguard._function_kinds import FunctionKind, kind_of
from modelguard.environment._mappings import MODEL_LIBRARIES
from modelguard.errors import InvalidOption, NotSupported
from modelguard.isolation import _role
from modelguard.isolation._options import check_source
from modelguard.isolation._target import Reference, Stub, find_target, place_of
from modelguard.lifecycle import runtime
from modelguard.lifecycle._engine import engines
from modelguard.lifecycle._options import GuardOptions
from modelguard.lifecycle._pool_leases import PooledFunction
from modelguard.lifecycle._wrappers import owner_of
from modelguard.lifecycle.guard import guard
from modelguard.lifecycle.model_guard import ModelGuard, hide
from modelguard.telemetry import logger

if TYPE_CHECKING:
    from modelguard.isolation._options import StartMethod
    from modelguard.lifecycle.policies import Policy

__all__ = ["PoolSource", "Source", "source_of", "source_of_stub", "warn_of_other_loaders"]

#: The modules of which it was logged what their molds import for nothing.
_told: set[str] = set()


class Source(NamedTuple):
    """What runs in a worker.

    Attributes:
        function: The function, as its callers see it.
        guard: Lends it the model, and counts its calls.
    """

    function: Callable[..., Any]
    guard: ModelGuard[Any]

    def for_key(self, key: Any) -> Source:
        """It has one model, which needs no key."""
        del key
        return self


class PoolSource(NamedTuple):
    """What runs in the workers of a pool's keys.

    Attributes:
        function: The function, as its callers see it.
        pooled: What its pool knows of it.
        recycle_on: When a worker is replaced.
    """

    function: Callable[..., Any]
    pooled: PooledFunction
    recycle_on: Policy | None

    def options_for(self, key: Any) -> GuardOptions[Any]:
        """The options of the guard that lends the model of one key."""
        return replace(self.pooled.options_for(key), reload_on=self.recycle_on)

    def for_key(self, key: Any) -> Source:
        """What runs in the workers of one key: the same function, on one model that is not a pool's."""
        model: ModelGuard[Any] = ModelGuard(self.options_for(key), runtime.default())
        hide(model)
        keyed: Callable[..., Any] = model(self.pooled.function)
        key_of, name = self.pooled.key_of, self.pooled.options.name

        def call(*args: Any, **kwargs: Any) -> Any:
            if key_of(args, kwargs) != key:  # the function calls itself, else its owner has looked
                reason = f"this worker has the model of key {key!r} of pool {name!r} alone"
                raise NotSupported("a call with another key inside an isolated function", reason=reason)
            return keyed(*args, **kwargs)

        return Source(call, model)


class _NoModel:
    """The model of functions that have none."""


def source_of(function: Any, name: str, kind: FunctionKind, recycle_on: Policy | None) -> Source | PoolSource:
    """Find the guard or the pool of a function. One without gets a guard that only counts."""
    owner = owner_of(function)
    if isinstance(owner, PooledFunction):
        return PoolSource(function, owner, recycle_on)
    if isinstance(owner, ModelGuard):
        hide(owner)
        return Source(function, owner)
    counting: ModelGuard[_NoModel] = guard(_NoModel, reload_on=recycle_on, name=name)
    hide(counting)
    return Source(counting(_with_model(function, kind)), counting)


def source_of_stub(where: Reference, stub: Stub, name: str, start: StartMethod) -> Source:
    """In a mold: import what a stub stands for, and find its guard, which decorates it or which it uses.

    Args:
        where: What the stub's owner has named.
        stub: The stub.
        name: Of the isolated function.
        start: How workers come into being.

    Raises:
        InvalidOption: There is no such function, it cannot be isolated, or the stub does not fit it.
        BaseException: Whatever its module raises.
    """
    found = find_target(where, stub, lambda one: hasattr(one, "isolated_function"))
    function = getattr(found, "isolated_function", found)
    kind, why, fix = kind_of(found), "", ""
    owners: list[Any] = [owner_of(function)] if owner_of(function) is not None else _guards_in(function)
    if kind != stub.kind:
        why = f"does not fit: {stub.place} is a {stub.kind}, and {place_of(found)} a {kind}"
        fix = "Write def or async def in both; the stub of a generator is a def that returns Iterator or AsyncIterator."
    elif any(isinstance(one, PooledFunction) for one in owners):
        why = f"takes its models from a pool, and {stub.place} cannot tell which of them a call needs"
        fix = "Decorate it by @isolate() where it is, and import it."
    elif len(owners) > 1:
        guards = " and ".join(sorted(repr(one.name) for one in owners))
        why = f"uses the guards {guards}, and a mold has one model; {stub.place} stands for it"
        fix = "Decorate it with the guard whose model it is to have."
    if why:
        raise InvalidOption("target", ":".join(where), why=why, fix=fix)
    owner = owners[0] if owners else None
    check_source(function, owner, stub.recycle_on, start)
    if isinstance(owner, ModelGuard):
        return Source(function, owner)
    source = source_of(function, name, kind, stub.recycle_on)
    return source.for_key(None)


def _guards_in(function: Any) -> list[Any]:
    """The guards that a function names, itself or by functions of its module that it names."""
    waiting, known, found = [function], set[int](), dict[int, Any]()
    while waiting:
        one = waiting.pop()
        owner = one if isinstance(one, ModelGuard) else owner_of(one)
        if owner is not None:
            found[id(owner)] = owner
        elif isinstance(one, FunctionType) and one.__module__ == function.__module__ and id(one) not in known:
            known.add(id(one))
            waiting += [one.__globals__[name] for name in _names_in(one.__code__) if name in one.__globals__]
    return list(found.values())


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def warn_of_other_loaders(function: Any) -> None:
    """Log once for a module which libraries a mold of this function imports for the loaders of other guards alone."""
    owner, module = owner_of(function), function.__module__
    own = owner.engine.guard.options.load if isinstance(owner, ModelGuard) else None
    needed = _libraries_in(own) | _libraries_in(inspect.unwrap(function))
    loads = [(engine.name, engine.guard.options.load) for engine in engines()]
    for name, load in loads if _role.current() == "owner" else ():
        extra = _libraries_in(load) - needed if getattr(load, "__module__", None) == module else ()
        if extra and module not in _told:
            _told.add(module)
            logger.warning(
                "%s: its mold imports all of %s, and so %s, which only the loader of guard %r needs; move that guard "
                "to a module of its own, or name the function there: @isolate(target='module:function')",
                function.__qualname__,
                module,
                ", ".join(sorted(extra)),
                name,
            )


def _libraries_in(function: Any) -> set[str]:
    """The model libraries that a function names and its module has imported."""
    code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    values = [names.get(name) for name in _names_in(code)] if isinstance(code, CodeType) else []
    origins = (one.__name__ if isinstance(one, ModuleType) else getattr(one, "__module__", None) for one in values)
    return {str(origin).partition(".")[0] for origin in origins} & MODEL_LIBRARIES


def _with_model(function: Any, kind: FunctionKind) -> Any:
    """Put a parameter for the model before the others. A guard looks at the kind of the function that it decorates."""

    def call(_model: _NoModel, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    async def acall(_model: _NoModel, *args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    def items(_model: _NoModel, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from function(*args, **kwargs)

    async def aitems(_model: _NoModel, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async for item in function(*args, **kwargs):
            yield item

    kinds = {"function": call, "coroutine": acall, "generator": items, "async generator": aitems}
    chosen = kinds[kind]
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):  # no __wrapped__, which has no such parameter
        setattr(chosen, name, getattr(function, name))
    return chosen
