"""Public names for objects that are defined in private modules, and errors that say how to call them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar, cast

from modelguard import _units
from modelguard.errors import shortened

__all__ = ["set_module", "with_fixes"]

F = TypeVar("F", bound=Callable[..., Any])


def set_module(namespace: dict[str, Any], name: str | None = None) -> None:
    """Set ``__module__`` of all exported classes and functions to the module that users import them from.

    Tracebacks, ``repr``, pickles and the documentation then name that module instead of the private one that holds
    the code. Constants and type aliases have no ``__module__`` and are not changed. Both get :func:`with_fixes`.
    """
    for exported in namespace["__all__"]:
        value: Any = namespace[exported]
        if not isinstance(value, type | FunctionType):
            continue
        value.__module__ = name or namespace["__name__"]
        if isinstance(value, FunctionType) and not hasattr(value, "__wrapped__"):
            namespace[exported] = with_fixes()(value)
        elif isinstance(value, type) and isinstance(value.__init__, FunctionType):  # type: ignore[misc] # of the class
            value.__init__ = with_fixes(value.__name__)(value.__init__)  # type: ignore[misc] # as above


def with_fixes(name: str = "", /, **objects: str) -> Callable[[F], F]:
    """Let the error for arguments that do not fit say what to write.

    ``objects`` have options that may be given to the function by mistake, as ``swap="Swap"``.
    """

    def decorate(function: F) -> F:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except TypeError:
                said = _misfit(name or function.__name__, function, args, kwargs, objects)
                if said is None:
                    raise
                raise TypeError(said) from None

        return cast("F", call)

    return decorate


def _misfit(
    name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], objects: dict[str, str]
) -> str | None:
    """What is wrong with these arguments, and what to write; None if they fit."""
    signature: Any = _units.signature_of(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        why = str(error)
    else:
        return None
    known = {one.name: one for one in signature.parameters.values() if one.name != "others"}
    by_position = [key for key, one in known.items() if one.kind is not one.KEYWORD_ONLY]
    required = [key for key, one in known.items() if one.default is one.empty]
    missing = [key for key in required if key not in {*by_position[: len(args)], *kwargs}]
    unknown = next((key for key in kwargs if key not in known), "")
    shown = [key for key in (required if missing and not unknown else known) if key != "self"]
    fix = ", ".join(key if key in required and key in by_position else f"{key}=..." for key in shown)
    fix = f"Write {name}({fix})."
    if unknown:  # which Python names before what is missing because of it
        place = " or ".join(_places_of(unknown, objects))
        fix = f"Write {place}." if place else _units.nearest(unknown, known).strip() or fix
        return f"{name}() got an unexpected keyword argument {unknown!r}. {fix}"
    if len(args) > len(by_position):
        why = f"{shortened(args[len(by_position)])} is passed by position"
    elif missing:
        why = f"{missing[0]}= is missing"
    return f"{name}(): {why}. {fix}"


def _places_of(option: str, objects: dict[str, str]) -> Iterator[str]:
    for argument, kind in objects.items():
        signature = _units.signature_of(getattr(sys.modules["modelguard"], kind))
        if signature is not None and option in signature.parameters:
            yield f"{argument}={kind}({option}=...)"
