"""The options of a batched function, checked."""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeAlias, TypedDict, cast, get_args

from modelguard import _units
from modelguard._function_kinds import FunctionKind, kind_of
from modelguard.errors import InvalidOption
from modelguard.serving._runners import OwnLoop
from modelguard.serving.breaker import Breaker
from modelguard.serving.status import Limits

# Without `from __future__ import annotations`: some of these classes are public under another module's name, where
# typing.get_type_hints() could not resolve text.


@dataclass(frozen=True, kw_only=True)
class Weight:
    """What items count for in a batch.

    Args:
        of: The weight of an item, such as ``len``. The function gets the heaviest item first, which saves padding if it
            works in portions.
        most: Most weight in a batch. Default: no bound.
        padded: Whether the function pads all items of a batch to the heaviest one, so that each costs as much. Batches
            are then made of items of like weight from all that waits, around the one whose turn it is, and ``most``
            bounds the heaviest weight times the number of items.

    Raises:
        InvalidOption: One of these is invalid.
    """

    of: Callable[[Any], float]
    most: float | None = None
    padded: bool = False

    def __post_init__(self) -> None:
        _units.function(self.of, "of", "one item", fix="Write Weight(of=len), for the length of a text.")
        if self.most is not None:
            _units.number(self.most, "most", fix="Give the total weight of a full batch.")
        _units.flag(self.padded, "padded")


@dataclass(frozen=True, kw_only=True)
class Fair:
    """Whose turn it is: how keys share what is computed, and the queue.

    Args:
        by: Whose an item is: a function of the item that gives a key, anything hashable. Keys get equal shares of what
            is computed, however much each of them sends; an item costs its weight, at least 1. When the queue is full,
            an item whose turn is earlier takes the place of the last one. Default: the key of the context, which the
            web middleware or ``serving.caller`` sets; calls without any key share one.
        shares: The shares of keys, such as ``{"gold": 4}``; 1 for all others.
        quota: Most items of one key that wait; further ones get ``QuotaExceeded``. Default: no bound.
        ageing: How much waiting counts as much as one step of a call's ``priority=``, so that nothing stays in the
            queue for ever. A full queue keeps the highest priorities all the same. Default: ten seconds.

    Raises:
        InvalidOption: One of these is invalid.
    """

    by: Callable[[Any], Hashable] | None = None
    shares: Mapping[Hashable, float] = field(default_factory=dict, hash=False)
    quota: int | None = None
    ageing: _units.Duration = 10.0

    def __post_init__(self) -> None:
        if self.by is not None:
            fix = "Write Fair(by=lambda item: item.tenant), or leave it out and name the header in the middleware."
            _units.function(self.by, "by", "one item", fix=fix)
        fix = 'Write shares={"gold": 4}; all other keys have 1.'
        _units.instance(self.shares, "shares", Mapping, "a dict of keys and their shares", fix=fix)  # type: ignore[type-abstract]
        for key, share in self.shares.items():
            try:
                _units.number(share, "shares", fix=fix)
            except InvalidOption:
                why = f"the share of {key!r} must be a number above 0, not {share!r}"
                raise InvalidOption("shares", self.shares, why=why, fix=fix) from None
        if self.quota is not None:
            _units.whole_number(self.quota, "quota")
        _units.seconds(self.ageing, "ageing")


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """How far the consumers of streams may fall behind.

    Args:
        parts: Most parts of an item that wait for its consumer.
        slow_after: How long, in all, the consumer of one item may keep others waiting, because its parts fill its
            buffer, before it gets ``ConsumerTooSlow``; each part gives a hundredth of it back. Default: one second.

    Raises:
        InvalidOption: One of these is invalid.
    """

    parts: int = 64
    slow_after: _units.Duration = 1.0

    def __post_init__(self) -> None:
        _units.whole_number(self.parts, "parts")
        _units.seconds(self.slow_after, "slow_after", zero=True)


#: Where a batch function that is ``async`` runs.
LoopChoice = Literal["own", "caller"]

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
    """The options of :func:`~modelguard.batched`, checked as they are put together. Methods share them.

    Attributes:
        limits: What bounds batches, queue and calls, in base units.
        own_loop: The event loop on which the function runs, if it is ``async`` and has one of its own.
        kind: What a call of the function gives.
        written: The options that can be changed, as they were given.
    """

    written: Changes = field(repr=False, compare=False)
    threads: int
    weight: Weight | None
    fair: Fair
    on_error: OnError
    breaker: Breaker | None
    loop: LoopChoice | None
    buffer: Buffer | None
    name: str
    kind: FunctionKind = "function"
    own_loop: OwnLoop | None = None
    limits: Limits = field(init=False)

    def __post_init__(self) -> None:
        bounds = _check_bounds(self.written)
        _units.one_of(self.on_error, "on_error", get_args(OnError), fix="Write 'isolate' or 'fail'.")
        if self.breaker is not None:
            fix = "Write breaker=Breaker(failures=5, cooldown='10s')."
            _units.instance(self.breaker, "breaker", Breaker, "a Breaker", fix=fix)
        if self.loop is not None:
            _units.one_of(self.loop, "loop", get_args(LoopChoice), fix="Write 'own' or 'caller'.")
        limits = Limits(
            name=self.name,
            max_weight=math.inf if self.weight is None or self.weight.most is None else float(self.weight.most),
            threads=_units.whole_number(self.threads, "threads"),
            weighed=self.weight is not None,
            padded=self.weight is not None and self.weight.padded,
            fair=self.fair.by is not None,
            shares=dict(self.fair.shares),
            quota=_check_quota(self.fair.quota, bounds["max_queue"]),
            ageing=_units.seconds(self.fair.ageing, "ageing"),
            **bounds,
        )
        object.__setattr__(self, "limits", limits)

    @property
    def streams(self) -> bool:
        """Whether the function yields parts of results."""
        return self.kind in ("generator", "async generator")

    @property
    def is_async(self) -> bool:
        """Whether the function needs an event loop."""
        return self.kind in ("coroutine", "async generator")

    def suited_to(self, function: Any, name: str) -> Self:
        """The same options for this function of this name.

        Raises:
            InvalidOption: One of them is not for functions of its kind.
        """
        made = replace(self, kind=kind_of(function), name=name)
        if self.loop is not None and not made.is_async:
            why = "only an async function runs on an event loop, and this one runs on a thread"
            raise InvalidOption("loop", self.loop, why=why, fix="Leave it out, or write: async def predict(items): ...")
        if self.buffer is not None and not made.streams:
            why = "only a generator function has a stream to buffer"
            fix = "Leave it out, or yield parts: def generate(items): yield [...]"
            raise InvalidOption("buffer", self.buffer, why=why, fix=fix)
        return replace(made, own_loop=OwnLoop(name)) if made.is_async and self.loop != "caller" else made

    def changed(self, changes: Changes) -> Self:
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
        return replace(self, written=written)


def read_weight(given: Callable[[Any], float] | Weight | None) -> Weight | None:
    if given is None or isinstance(given, Weight):
        return given
    _units.function(given, "weight", "one item", fix="Write weight=len, for the length of a text.")
    return Weight(of=given)


def read_fair(given: Callable[[Any], Hashable] | Fair | None) -> Fair:
    if isinstance(given, Fair):
        return given
    if given is not None:
        fix = "Write fair_by=lambda item: item.tenant, or leave it out and name the header in the middleware."
        _units.function(given, "fair_by", "one item", fix=fix)
    return Fair(by=given)


def read_buffer(given: int | Buffer | None) -> Buffer | None:
    if given is None or isinstance(given, Buffer):
        return given
    return Buffer(parts=_units.whole_number(given, "buffer"))


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


def _check_quota(quota: int | None, max_queue: int) -> int | None:
    if quota is None:
        return None
    if quota > max_queue:
        why = f"must not be more than max_queue={max_queue}, or it would never be reached"
        raise InvalidOption(
            "quota", quota, why=why, fix=f"Give quota={max(max_queue // 8, 1)}, an eighth of the queue."
        )
    return quota
