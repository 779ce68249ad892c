"""Options of the middlewares that do not exist: an error that names them, and what was probably meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from modelguard.errors import InvalidOption

__all__ = ["check_names"]

F = TypeVar("F", bound=Callable[..., Any])


def check_names(function: F) -> F:
    """Have a function reject unknown options, and options by position, with ``InvalidOption`` instead of ``TypeError``.

    Its signature stays what it is, so that type checkers find them before.
    """
    parameters = inspect.signature(function).parameters.values()
    by_position = sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    allowed = {parameter.name for parameter in parameters}

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        _check(args[by_position:], {name: options[name] for name in options if name not in allowed}, names)
        return function(*args, **options)

    return cast("F", checked)


def _check(others: Sequence[object], unknown: Mapping[str, object], known: Sequence[str]) -> None:
    for value in others:
        why, fix = "takes its options by keyword only", "Write for example deadline='2s'."
        raise InvalidOption("ModelGuardMiddleware", value, why=why, fix=fix)
    for name, value in unknown.items():
        raise InvalidOption(name, value, why="is not an option of ModelGuardMiddleware", fix=_fix(name, known))


def _fix(name: str, known: Sequence[str]) -> str:
    import difflib

    options = f"its options are {', '.join(known)}."
    similar = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f"Write {similar[0]}=...; {options}" if similar else options.capitalize()
