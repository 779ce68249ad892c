"""``batched``: the door through which options come in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Protocol, TypeVar, overload

from modelguard import _units
from modelguard.errors import InvalidOption
from modelguard.serving.batches import Limits
from modelguard.serving.breaker import Breaker
from modelguard.serving.doors import Batched
from modelguard.serving.settings import OnError, Settings, check_count, check_function, check_weight

S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)
X = TypeVar("X")
Y = TypeVar("Y")


class BatchedMethod(Protocol[S_contra, X, Y]):
    """A batched function in a class, as type checkers see it: each instance has a queue of its own."""

    @overload
    def __get__(self, instance: None, owner: type | None = ...) -> BatchedMethod[S_contra, X, Y]: ...
    @overload
    def __get__(self, instance: S_contra, owner: type | None = ...) -> Batched[X, Y]: ...


class Decorator(Protocol):
    """What ``batched(...)`` returns."""

    @overload
    def __call__(self, function: Callable[Concatenate[list[X], ...], Sequence[Y]], /) -> Batched[X, Y]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[S, list[X], ...], Sequence[Y]], /) -> BatchedMethod[S, X, Y]: ...


def batched(
    *,
    max_size: int,
    max_wait: _units.Duration = 0.0,
    max_queue: int = 256,
    deadline: _units.Duration | None = None,
    workers: int = 1,
    weight: Callable[[Any], float] | None = None,
    max_weight: float | None = None,
    on_error: OnError = "isolate",
    breaker: Breaker | None = None,
    name: str | None = None,
) -> Decorator:
    """Make a function of a list, ``f(items) -> results``, a function of one item that is computed in batches.

    A free worker takes everything that waits, up to the size of a batch: a lone request never waits for company, and
    load makes batches by itself. The function runs on a thread of its own, so no event loop is blocked by it.

    * The queue is bounded: when it is full, a call is refused at once with ``QueueFull`` and a ``retry_after`` by the
      measured rate.
    * Deadlines are absolute, from arrival, the time in the queue included. What has expired, or was called off, is not
      computed. What by the measured rate could not be answered in time is refused at once with
      ``DeadlineUnreachable``; without a measurement at that size of batch nothing is refused on a guess.
    * Nobody pays for a neighbour: an exception among the results is that item's own; a batch that raises is run again
      in halves until the item at fault is found; a result of the wrong length fails that batch alone.
    * On a guarded function, each batch runs on one generation of the model.
    * It survives a fork (the child begins with an empty queue), several event loops, and several threads.

    Decorated functions, and methods, of any thread-safe kind will do: the function is called by one thread at a time
    unless ``workers`` says otherwise.

    Args:
        max_size: Items of a batch at most.
        max_wait: How long the oldest item may wait for a fuller batch while a worker is free, cut where a deadline
            asks for it. Default: not at all, which is right unless a batch costs much more than its items.
        max_queue: Items that may wait at most, beside those that are being computed; at least ``max_size``.
        deadline: How long every item has from its arrival. Default: as long as it takes. A call's ``timeout=``, the
            :func:`deadline` context and the web middleware can only shorten it.
        workers: Threads that compute batches side by side.
        weight: What an item counts for against ``max_weight``: a function of the item, such as ``len``. A batch is
            handed over with the heaviest item first, as saves padding where the function works in portions.
        max_weight: What the items of a batch may weigh together. Default: anything.
        on_error: ``"isolate"``: run a batch that raised again in halves, so that only the items at fault fail; the
            function must bear being called twice with an item. ``"fail"``: all its items fail with ``BatchFailed``.
        breaker: When to leave a failing model alone. Default: never.
        name: For events and errors. Default: the function's name.

    Returns:
        A decorator that makes a :class:`Batched`.

    Raises:
        InvalidOption: An option cannot be meant; the message names it, its value and the fix.
    """
    size = check_count("max_size", max_size)
    queue = check_count("max_queue", max_queue)
    if queue < size:
        why = f"no batch would ever be full, with max_size={size}"
        raise InvalidOption("max_queue", queue, why=why, fix=f"Give max_queue={4 * size}, four batches.")
    if on_error not in ("isolate", "fail"):
        raise InvalidOption("on_error", on_error, why="there is no such way", fix="Write 'isolate' or 'fail'.")
    if breaker is not None and not isinstance(breaker, Breaker):
        why = f"a Breaker is needed, and this is a {type(breaker).__name__}"
        raise InvalidOption("breaker", breaker, why=why, fix="Write breaker=Breaker(failures=5, cooldown='10s').")
    wait = _units.seconds(max_wait, "max_wait", zero=True)
    bound = math.inf if deadline is None else _units.seconds(deadline, "deadline")
    heaviest = check_weight(max_weight, weight)
    crew = check_count("workers", workers)

    def decorate(function: Any) -> Any:
        check_function(function)
        limits = Limits(
            name=_name(function) if name is None else name,
            max_size=size,
            max_queue=queue,
            max_wait=wait,
            max_weight=heaviest,
            workers=crew,
            sort=weight is not None,
        )
        return Batched(
            function, Settings(limits=limits, deadline=bound, weight=weight, on_error=on_error, breaker=breaker)
        )

    return decorate


def _name(function: Any) -> str:
    plain = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{getattr(function, '__module__', None) or '?'}.{plain.replace('<locals>.', '')}"
