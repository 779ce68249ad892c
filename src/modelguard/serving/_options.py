"""The options of a batched function, checked."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from modelguard import _units
from modelguard.errors import InvalidOption
from modelguard.serving._batches import Limits
from modelguard.serving._function_options import FunctionOptions
from modelguard.serving._loops import OwnLoop
from modelguard.serving.breaker import Breaker

OnError = Literal["isolate", "fail"]


#: A batch counts as hung after so many times the deadline, but not before a minute.
_HANG = 10
_SHORTEST_HANG = 60.0


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The options of :func:`~modelguard.batched`, in base units.

    Attributes:
        limits: What bounds batches, queue and calls.
        weight: What an item counts for against ``limits.max_weight``; None if every item counts the same.
        on_error: Whether a batch that raised is bisected, or fails as a whole.
        breaker: When to stop calling a failing model.
        function: What depends on the kind of the function.
        own_loop: The event loop on which it runs, if it is ``async`` and has one of its own. Methods share it.
    """

    limits: Limits
    weight: Callable[[Any], float] | None = None
    on_error: OnError = "isolate"
    breaker: Breaker | None = None
    function: FunctionOptions = field(default_factory=FunctionOptions)
    own_loop: OwnLoop | None = None

    def of(self, function: FunctionOptions, name: str) -> BatchOptions:
        """The same options for such a function of this name."""
        own_loop = OwnLoop(name) if function.is_async and function.loop == "own" else None
        return replace(self, limits=replace(self.limits, name=name), function=function, own_loop=own_loop)


def check_options(
    *,
    max_size: int,
    max_wait: _units.Duration,
    max_queue: int,
    deadline: _units.Duration | None,
    threads: int,
    weight: Callable[[Any], float] | None,
    max_weight: float | None,
    on_error: OnError,
    breaker: Breaker | None,
    hang_after: _units.Duration | None,
    name: str | None,
) -> BatchOptions:
    """Check all options; see :func:`~modelguard.batched`. Without a ``name`` the function gives it later.

    Raises:
        InvalidOption: One of them is invalid.
    """
    size = _units.whole_number(max_size, "max_size")
    queue = _units.whole_number(max_queue, "max_queue")
    if queue < size:
        why = f"must not be less than max_size={size}, or no batch would ever be full"
        raise InvalidOption("max_queue", queue, why=why, fix=f"Give max_queue={4 * size}, four batches.")
    if on_error not in ("isolate", "fail"):
        raise InvalidOption("on_error", on_error, why="is not a known value", fix="Write 'isolate' or 'fail'.")
    if breaker is not None and not isinstance(breaker, Breaker):
        why = f"must be a Breaker, not {_units.kind_of(breaker)}"
        raise InvalidOption("breaker", breaker, why=why, fix="Write breaker=Breaker(failures=5, cooldown='10s').")
    bound = math.inf if deadline is None else _units.seconds(deadline, "deadline")
    limits = Limits(
        name=_check_name(name),
        max_size=size,
        max_queue=queue,
        max_wait=_units.seconds(max_wait, "max_wait", zero=True),
        max_weight=_check_weight(max_weight, weight),
        deadline=bound,
        threads=_units.whole_number(threads, "threads"),
        hang_after=max(_HANG * bound, _SHORTEST_HANG)
        if hang_after is None
        else _units.seconds(hang_after, "hang_after"),
        weighed=weight is not None,
    )
    return BatchOptions(limits=limits, weight=weight, on_error=on_error, breaker=breaker)


def _check_name(name: str | None) -> str:
    if name is not None and (not isinstance(name, str) or not name.strip()):
        why = "must be text that is not empty"
        raise InvalidOption("name", name, why=why, fix="Give a short name, or leave it out.")
    return name or ""


def _check_weight(max_weight: float | None, weight: Callable[[Any], float] | None) -> float:
    """The most weight in a batch; infinity for no bound."""
    if weight is not None and not callable(weight):
        why = "must be a function of one item"
        raise InvalidOption("weight", weight, why=why, fix="Write weight=len, for the length of a text.")
    if max_weight is None:
        return math.inf
    if weight is None:
        why = "needs weight= as well, which gives the weight of an item"
        raise InvalidOption("max_weight", max_weight, why=why, fix="Add for example weight=len.")
    number = isinstance(max_weight, int | float) and not isinstance(max_weight, bool)
    if not number or not 0 < max_weight <= sys.float_info.max:
        why = "must be a number above 0"
        raise InvalidOption("max_weight", max_weight, why=why, fix="Give the total weight of a full batch.")
    return float(max_weight)
