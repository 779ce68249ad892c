"""The options of a batched function, checked."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Mapping
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
        fair_by: The key of an item; None for that of the context.
        on_error: Whether a batch that raised is bisected, or fails as a whole.
        breaker: When to stop calling a failing model.
        function: What depends on the kind of the function.
        own_loop: The event loop on which it runs, if it is ``async`` and has one of its own. Methods share it.
    """

    limits: Limits
    weight: Callable[[Any], float] | None = None
    fair_by: Callable[[Any], Hashable] | None = None
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
    padded: bool,
    fair_by: Callable[[Any], Hashable] | None,
    shares: Mapping[Hashable, float] | None,
    quota: int | None,
    ageing: _units.Duration,
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
        padded=_check_padded(padded, weight),
        fair=fair_by is not None,
        shares=_check_shares(shares),
        quota=_check_quota(quota, queue),
        ageing=_units.seconds(ageing, "ageing"),
    )
    if fair_by is not None and not callable(fair_by):
        why = f"must be a function of one item, not {_units.kind_of(fair_by)}"
        fix = "Write fair_by=lambda item: item.tenant, or leave it out and name the header in the middleware."
        raise InvalidOption("fair_by", fair_by, why=why, fix=fix)
    return BatchOptions(limits=limits, weight=weight, fair_by=fair_by, on_error=on_error, breaker=breaker)


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
    if not _is_positive(max_weight):
        why = "must be a number above 0"
        raise InvalidOption("max_weight", max_weight, why=why, fix="Give the total weight of a full batch.")
    return float(max_weight)


def _check_padded(padded: bool, weight: Callable[[Any], float] | None) -> bool:  # noqa: FBT001 - the value to check
    if not isinstance(padded, bool):
        raise InvalidOption("padded", padded, why="must be True or False", fix="Write padded=True.")
    if padded and weight is None:
        why = "needs weight= as well, which gives the length of an item"
        raise InvalidOption("padded", padded, why=why, fix="Add for example weight=len.")
    return padded


def _check_shares(shares: Mapping[Hashable, float] | None) -> dict[Hashable, float]:
    """The shares of keys, which share fairly."""
    if shares is None:
        return {}
    if not isinstance(shares, Mapping):
        why = f"must be a dict of keys and their shares, not {_units.kind_of(shares)}"
        raise InvalidOption("shares", shares, why=why, fix='Write shares={"gold": 4}; all other keys have 1.')
    for key, share in shares.items():
        if not _is_positive(share):
            why = f"the share of {key!r} must be a number above 0, not {share!r}"
            raise InvalidOption("shares", shares, why=why, fix='Write shares={"gold": 4}; all other keys have 1.')
    return dict(shares)


def _check_quota(quota: int | None, max_queue: int) -> int | None:
    """The most items of one key that wait."""
    if quota is None:
        return None
    if _units.whole_number(quota, "quota") > max_queue:
        why = f"must not be more than max_queue={max_queue}, or it would never be reached"
        raise InvalidOption(
            "quota", quota, why=why, fix=f"Give quota={max(max_queue // 8, 1)}, an eighth of the queue."
        )
    return quota


def _is_positive(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value <= sys.float_info.max  # type: ignore[operator]
