"""Where an isolated function gets its model: from its guard, or from none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from modelguard.lifecycle._wrappers import owner_of
from modelguard.lifecycle.guard import ModelGuard, guard, hide

if TYPE_CHECKING:
    from modelguard.isolation._options import IsolationOptions
    from modelguard.lifecycle.policies import Policy

__all__ = ["Source", "source_of"]


class Source(NamedTuple):
    """What runs in a worker.

    Attributes:
        function: The function, as its callers see it.
        guard: Lends it the model, and counts its calls.
    """

    function: Callable[..., Any]
    guard: ModelGuard[Any]


class _NoModel:
    """The model of functions that have none."""


def source_of(function: Any, options: IsolationOptions, recycle_on: Policy | None) -> Source:
    """Find the guard of a function. One without a guard gets one that only counts."""
    owner = owner_of(function)
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
