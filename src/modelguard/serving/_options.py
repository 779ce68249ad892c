"""The options of a batched function, checked."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypedDict, cast, get_args

from modelguard import _units
from modelguard._function_kinds import FunctionKind, kind_of
from modelguard.errors import InvalidOption
from modelguard.serving._loops import OwnLoop
from modelguard.serving.breaker import Breaker
from modelguard.serving.status import Limits

# The options that depend on the kind of a batch function: coroutines and generators have some of their own.


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


OnError = Literal["isolate", "fail"]
Size: TypeAlias = int | Literal["auto"]

#: A batch counts as hung after so many times the deadline, but not before a minute.
_HANG = 10
_SHORTEST_HANG = 60.0


class Changes(TypedDict, total=False):
    """What :meth:`modelguard.Batched.configure` can change; see :func:`~modelguard.batched` for their meaning."""

    max_size: Size
    slo: _units.Duration | None
    max_wait: _units.Duration
    max_queue: int
    deadline: _units.Duration | None
    hang_after: _units.Duration | None


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
        written: The options that can be changed, as they were given.
    """

    limits: Limits
    weight: Callable[[Any], float] | None = None
    fair_by: Callable[[Any], Hashable] | None = None
    on_error: OnError = "isolate"
    breaker: Breaker | None = None
    function: FunctionOptions = field(default_factory=FunctionOptions)
    own_loop: OwnLoop | None = None
    written: Changes = field(default_factory=Changes, repr=False, compare=False)

    def of(self, function: FunctionOptions, name: str) -> BatchOptions:
        """The same options for such a function of this name."""
        own_loop = OwnLoop(name) if function.is_async and function.loop == "own" else None
        return replace(self, limits=replace(self.limits, name=name), function=function, own_loop=own_loop)

    def changed(self, changes: Changes) -> BatchOptions:
        """The same options with some of them changed. A ``max_size`` that is a number ends the choice by ``slo``.

        Raises:
            InvalidOption: One of them cannot be changed, is invalid, or does not fit the others.
        """
        for option, value in changes.items():
            if option not in Changes.__annotations__:
                known = ", ".join(Changes.__annotations__)
                why = "cannot be changed while the function serves"
                raise InvalidOption(option, value, why=why, fix=f"Write it in @batched(...), or change {known}.")
        written = self.written | changes
        if "max_size" in changes and changes["max_size"] != "auto" and "slo" not in changes:
            written["slo"] = None
        bounds = _check_bounds(written)
        _check_quota(self.limits.quota, bounds["max_queue"])
        return replace(self, limits=replace(self.limits, **bounds), written=written)


def check_options(
    *,
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
    name: str | None,
    written: Changes,
) -> BatchOptions:
    """Check all options; see :func:`~modelguard.batched`. Without a ``name`` the function gives it later.

    Raises:
        InvalidOption: One of them is invalid.
    """
    bounds = _check_bounds(written)
    if on_error not in ("isolate", "fail"):
        raise InvalidOption("on_error", on_error, why="is not a known value", fix="Write 'isolate' or 'fail'.")
    if breaker is not None and not isinstance(breaker, Breaker):
        why = f"must be a Breaker, not {_units.kind_of(breaker)}"
        raise InvalidOption("breaker", breaker, why=why, fix="Write breaker=Breaker(failures=5, cooldown='10s').")
    limits = Limits(
        name="" if name is None else _units.name(name),
        max_weight=_check_weight(max_weight, weight),
        threads=_units.whole_number(threads, "threads"),
        weighed=weight is not None,
        padded=_check_padded(padded, weight),
        fair=fair_by is not None,
        shares=_check_shares(shares),
        quota=_check_quota(quota, bounds["max_queue"]),
        ageing=_units.seconds(ageing, "ageing"),
        **bounds,
    )
    if fair_by is not None and not callable(fair_by):
        why = f"must be a function of one item, not {_units.kind_of(fair_by)}"
        fix = "Write fair_by=lambda item: item.tenant, or leave it out and name the header in the middleware."
        raise InvalidOption("fair_by", fair_by, why=why, fix=fix)
    return BatchOptions(
        limits=limits, weight=weight, fair_by=fair_by, on_error=on_error, breaker=breaker, written=written
    )


def _check_bounds(written: Mapping[str, Any]) -> dict[str, Any]:
    """The options that can be changed as fields of :class:`Limits`."""
    auto = isinstance(written["max_size"], str) and written["max_size"] == "auto"
    queue = _units.whole_number(written["max_queue"], "max_queue")
    size = queue if auto else _check_size(written["max_size"])
    if queue < size:
        why = f"must not be less than max_size={size}, or no batch would ever be full"
        raise InvalidOption("max_queue", queue, why=why, fix=f"Give max_queue={4 * size}, four batches.")
    bound = math.inf if written["deadline"] is None else _units.seconds(written["deadline"], "deadline")
    wait = _units.seconds(written["max_wait"], "max_wait", zero=True)
    hang = written["hang_after"]
    return {
        "max_size": size,
        "max_queue": queue,
        "max_wait": wait,
        "deadline": bound,
        "hang_after": max(_HANG * bound, _SHORTEST_HANG) if hang is None else _units.seconds(hang, "hang_after"),
        "slo": _check_slo(written["slo"], auto=auto, wait=wait, deadline=bound),
    }


def _check_size(value: object) -> int:
    if isinstance(value, str):
        why = "must be a whole number of at least 1, or 'auto'"
        raise InvalidOption("max_size", value, why=why, fix="Write max_size=8, or max_size='auto' with slo='100ms'.")
    return _units.whole_number(cast("int", value), "max_size")


def _check_slo(value: _units.Duration | None, *, auto: bool, wait: float, deadline: float) -> float:
    """The latency goal in seconds; infinity for none."""
    if value is None:
        if auto:
            why = "needs slo= as well, the time from arrival to answer that batches are made for"
            raise InvalidOption("max_size", "auto", why=why, fix="Write for example max_size='auto', slo='100ms'.")
        return math.inf
    slo = _units.seconds(value, "slo")
    if not auto:
        why = "has an effect only with max_size='auto', which chooses the size of batches by it"
        raise InvalidOption("slo", value, why=why, fix="Write max_size='auto', or leave slo out.")
    if slo <= wait:
        why = f"must be longer than max_wait, which is {_units.format_seconds(wait)}"
        raise InvalidOption("slo", value, why=why, fix="Leave max_wait out: a batch never waits for items then.")
    if slo > deadline:
        why = f"must not be longer than deadline, which is {_units.format_seconds(deadline)}"
        raise InvalidOption(
            "slo", value, why=why, fix="Give the goal for most items as slo, the end of waiting as deadline."
        )
    return slo


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
