"""What a call of a function gives: a result, a coroutine, or a generator of either kind."""

from __future__ import annotations

import inspect
from typing import Any, Literal, get_args

__all__ = ["FunctionKind", "kind_of"]

FunctionKind = Literal["function", "coroutine", "generator", "async generator"]


def kind_of(function: Any) -> FunctionKind:
    """The kind of a function, a method, or an object that can be called.

    Args:
        function: Any callable. One whose calls give something else than its code says has a ``function_kind``.
    """
    declared = getattr(function, "function_kind", None)
    if isinstance(declared, str) and declared in get_args(FunctionKind):
        return declared  # type: ignore[return-value] # narrowed by the line above
    for called in (function, type(function).__call__):
        if inspect.isasyncgenfunction(called):
            return "async generator"
        if inspect.iscoroutinefunction(called):
            return "coroutine"
        if inspect.isgeneratorfunction(called):
            return "generator"
    return "function"
