"""How web frameworks see an isolated function: with the hints and the kind of the function that was written."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["mark"]


def mark(isolated: Any, *, coroutine: bool) -> None:
    """Have frameworks read the function's own hints, and await it if it is a coroutine function.

    Litestar reads the hints of an instance's ``__call__`` if that is a method, so the instance gets one that is not.
    Calls look it up in the class.
    """
    isolated.__call__ = _call_of(weakref.ref(isolated), coroutine=coroutine)
    if not coroutine:
        return
    mark_function: Callable[[Any], object] | None = getattr(inspect, "markcoroutinefunction", None)
    if mark_function is not None:  # from Python 3.12 on
        mark_function(isolated)
    else:
        isolated._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]  # noqa: SLF001 - the mark


def _call_of(reference: weakref.ref[Any], *, coroutine: bool) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        isolated = reference()
        return type(isolated).__call__(isolated, *args, **kwargs)

    async def acall(*args: Any, **kwargs: Any) -> Any:
        return await call(*args, **kwargs)

    return acall if coroutine else call
