"""The options of a batched function, checked."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from modelguard.errors import InvalidOption
from modelguard.serving.batcher import Batcher
from modelguard.serving.batches import Limits
from modelguard.serving.breaker import Breaker

OnError = Literal["isolate", "fail"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What :func:`~modelguard.serving.making.batched` was told, in base units."""

    limits: Limits
    deadline: float
    weight: Callable[[Any], float] | None
    on_error: OnError
    breaker: Breaker | None

    def batcher(self, function: Any) -> Batcher:
        """A queue of its own for a function."""
        return Batcher(
            function,
            self.limits,
            deadline=self.deadline,
            isolate=self.on_error == "isolate",
            breaker=self.breaker,
        )


def check_count(argument: str, value: object, *, least: int = 1) -> int:
    """A whole number.

    Raises:
        InvalidOption: It is none, or below ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidOption(
            argument,
            value,
            why=f"a whole number of {least} or more is needed",
            fix=f"Write {argument}={max(least, 8)}.",
        )
    return value


def check_weight(max_weight: float | None, weight: Callable[[Any], float] | None) -> float:
    """What a batch may weigh; infinity for anything."""
    if weight is not None and not callable(weight):
        raise InvalidOption(
            "weight", weight, why="a function of one item is needed", fix="Write weight=len, for the length of a text."
        )
    if max_weight is None:
        return math.inf
    if weight is None:
        why = "nothing tells what an item weighs"
        raise InvalidOption("max_weight", max_weight, why=why, fix="Give weight= as well, such as weight=len.")
    if (
        isinstance(max_weight, bool)
        or not isinstance(max_weight, int | float)
        or not 0 < max_weight <= sys.float_info.max
    ):
        raise InvalidOption(
            "max_weight", max_weight, why="a number above 0 is needed", fix="Give what a full batch weighs, in all."
        )
    return float(max_weight)


def check_function(function: Any) -> None:
    """Refuse what cannot be called with a list of items on a thread of its own."""
    if isinstance(function, classmethod | staticmethod) or not callable(function) or isinstance(function, type):
        raise InvalidOption(
            "function",
            function,
            why=f"a function or a method is batched, and this is a {type(function).__name__}",
            fix="Put @batched(...) under @staticmethod, next to the def."
            if isinstance(function, classmethod | staticmethod)
            else "Decorate: def predict(items): return [...]",
        )
    lazy = {
        "a coroutine function": inspect.iscoroutinefunction(function),
        "a generator function": inspect.isgeneratorfunction(function),
        "an asynchronous generator function": inspect.isasyncgenfunction(function),
    }
    for kind, found in lazy.items():
        if found:
            raise InvalidOption(
                "function",
                function,
                why=f"it is {kind}, and batches run on a thread of their own",
                fix="Write: def predict(items): return [...]; callers on an event loop use await predict.aio(item).",
            )
    _check_parameters(function)


def _check_parameters(function: Any) -> None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # many built-in functions have none
        return
    if not any(one.kind in _POSITIONAL for one in parameters):
        raise InvalidOption(
            "function",
            function,
            why="it has no positional parameter to take the items",
            fix="Let its first parameter (after self) be the list of items: def predict(items): ...",
        )
    if any(one.name == "timeout" for one in parameters):
        raise InvalidOption(
            "function",
            function,
            why="its parameter 'timeout' would never be reached: f(item, timeout=...) bounds the call",
            fix="Give that parameter another name.",
        )


_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)
