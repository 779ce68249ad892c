"""Signatures of functions before and after they are decorated."""

from __future__ import annotations

import inspect
import sys
from typing import Any

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


def plain_function(function: Any) -> Any:
    """The function inside a ``classmethod`` or ``staticmethod``."""
    return function.__func__ if isinstance(function, classmethod | staticmethod) else function


def takes_positional(function: Any) -> bool:
    """Whether it takes a positional argument, as far as its signature is known."""
    parameters = _parameters(function)
    return parameters is None or any(one.kind in _POSITIONAL for one in parameters)


def fits(function: Any, arguments: int) -> bool:
    """Whether it can be called with so many positional arguments, as far as its signature is known."""
    try:
        inspect.signature(function).bind(*(None for _ in range(arguments)))
    except TypeError:
        return False
    except ValueError:  # many built-in functions have none
        return True
    return True


def first_name(function: Any) -> str | None:
    """The name of its first parameter, None if it has none or no signature."""
    first = next(iter(_parameters(function) or ()), None)
    return None if first is None else first.name


def receivers(function: Any) -> int:
    """How many parameters come before the model: 1 in what is written as a method, else 0.

    A method is decorated while its class is being defined, and its first parameter is called ``self``, ``cls`` or
    ``mcs``. Afterwards, as in ``guard(Model.predict)``, ``self`` is the model itself.
    """
    if isinstance(function, classmethod):
        return 1
    if isinstance(function, staticmethod) or first_name(function) not in {"self", "cls", "mcs"}:
        return 0
    return int(_is_being_defined(getattr(function, "__qualname__", "").rpartition(".")[0]))


def without_model(function: Any, *, at: int) -> inspect.Signature:
    """The signature of ``function`` less the parameter that takes the model."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if len(parameters) > at and parameters[at].kind is not inspect.Parameter.VAR_POSITIONAL:
        del parameters[at]
    return signature.replace(parameters=parameters)


def call_parameters(function: Any) -> inspect.Signature:
    """The signature that callers of a decorated function see, without ``self``."""
    signature = inspect.signature(plain_function(function))
    return signature.replace(parameters=list(signature.parameters.values())[receivers(function) + 1 :])


def _parameters(function: Any) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):  # many built-in functions have none
        return None


def _is_being_defined(name: str) -> bool:
    """Whether the body of the class of this qualified name is running further up on the stack."""
    frame = sys._getframe(1)  # noqa: SLF001 - inspect.stack() reads every source file
    while frame is not None:
        # Only bodies of classes and modules have no optimized locals, and only a class has its name among them.
        if not frame.f_code.co_flags & inspect.CO_OPTIMIZED and frame.f_locals.get("__qualname__") == name:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
