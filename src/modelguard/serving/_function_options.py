"""The options that depend on the kind of a batch function: coroutines and generators have some of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from modelguard import _units
from modelguard._function_kinds import FunctionKind, kind_of
from modelguard.errors import InvalidOption

__all__ = ["FunctionOptions", "LoopChoice", "check_function_options"]

#: Where a batch function that is ``async`` runs.
LoopChoice = Literal["own", "caller"]

_MAX_BUFFER = 64
_SLOW_AFTER = 1.0


@dataclass(frozen=True, kw_only=True)
class FunctionOptions:
    """What a batch function is, and what only functions of its kind need.

    Attributes:
        kind: What a call of it gives.
        loop: Where it runs if it is ``async``.
        max_buffer: Most parts of a stream that wait for their consumer.
        slow_after: Seconds that one consumer of a stream may keep others waiting.
    """

    kind: FunctionKind = "function"
    loop: LoopChoice = "own"
    max_buffer: int = _MAX_BUFFER
    slow_after: float = _SLOW_AFTER

    @property
    def streams(self) -> bool:
        """Whether it yields parts of results."""
        return self.kind in ("generator", "async generator")

    @property
    def is_async(self) -> bool:
        """Whether it needs an event loop."""
        return self.kind in ("coroutine", "async generator")


def check_function_options(
    *, loop: LoopChoice | None, max_buffer: int | None, slow_after: _units.Duration | None
) -> Callable[[Any], FunctionOptions]:
    """Check options that were given, None for those that were not.

    Returns:
        A function that checks whether they suit a batch function.

    Raises:
        InvalidOption: One of them is invalid.
    """
    if loop is not None and loop not in get_args(LoopChoice):
        raise InvalidOption("loop", loop, why="is not a known value", fix="Write 'own' or 'caller'.")
    buffer = _MAX_BUFFER if max_buffer is None else _units.whole_number(max_buffer, "max_buffer")
    patience = _SLOW_AFTER if slow_after is None else _units.seconds(slow_after, "slow_after", zero=True)

    def suit(function: Any) -> FunctionOptions:
        options = FunctionOptions(
            kind=kind_of(function), loop="own" if loop is None else loop, max_buffer=buffer, slow_after=patience
        )
        if loop is not None and not options.is_async:
            why = "only an async function runs on an event loop, and this one runs on a thread"
            raise InvalidOption("loop", loop, why=why, fix="Leave it out, or write: async def predict(items): ...")
        for name, value in (("max_buffer", max_buffer), ("slow_after", slow_after)):
            if value is not None and not options.streams:
                why = "only a generator function has a stream to buffer"
                fix = f"Leave it out, or yield parts: def {_example(function)}(items): yield [...]"
                raise InvalidOption(name, value, why=why, fix=fix)
        return options

    return suit


def _example(function: Any) -> str:
    name = getattr(function, "__name__", "generate")
    return name if name.isidentifier() else "generate"
