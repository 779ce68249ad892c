"""Where an isolated function gets its model: from its guard, from a pool, or from none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from modelguard.errors import NotSupported
from modelguard.lifecycle import runtime
from modelguard.lifecycle._options import GuardOptions
from modelguard.lifecycle._pool_leases import PooledFunction
from modelguard.lifecycle._wrappers import owner_of
from modelguard.lifecycle.guard import guard
from modelguard.lifecycle.model_guard import ModelGuard, hide

if TYPE_CHECKING:
    from modelguard.isolation._options import IsolationOptions
    from modelguard.lifecycle.policies import Policy

__all__ = ["PoolSource", "Source", "source_of"]


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


def source_of(function: Any, options: IsolationOptions, recycle_on: Policy | None) -> Source | PoolSource:
    """Find the guard or the pool of a function. One without gets a guard that only counts."""
    owner = owner_of(function)
    if isinstance(owner, PooledFunction):
        return PoolSource(function, owner, recycle_on)
    if isinstance(owner, ModelGuard):
        hide(owner)
        return Source(function, owner)
    counting: ModelGuard[_NoModel] = guard(_NoModel, reload_on=recycle_on, name=options.name)
    hide(counting)
    return Source(counting(_with_model(function, options)), counting)


def _with_model(function: Any, options: IsolationOptions) -> Any:
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
    chosen = kinds[options.kind]
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):  # no __wrapped__, which has no such parameter
        setattr(chosen, name, getattr(function, name))
    return chosen
