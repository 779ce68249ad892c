"""Run one batch: call the function, check its results, and find the items that made it fail.

Anything can be batched that takes a list of items and returns one result for each: a plain function, a guarded one
(each batch is then one call of the guard), or one that computes elsewhere.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

from modelguard.errors import (
    GuardClosed,
    ItemRefused,
    LoadFailed,
    NotSupported,
    Overloaded,
    WouldDeadlock,
    WrongResults,
)
from modelguard.facts._gpu import TORCH_CUDA, free_after
from modelguard.runtime import own_thread
from modelguard.serving._bisection import (
    Isolation,
    Known,
    Suspects,
    batch_failed,
    check_results,
    count_failures,
    error_for_caller,
    explain_list_item,
    failed_again,
    not_told_apart,
    one_line,
    wrap_errors,
)
from modelguard.serving._requests import AllLeft, Failure, LoopEnded, Request
from modelguard.serving.status import Verdict

__all__ = [
    "Answer",
    "BatchCallable",
    "BatchFunction",
    "Computed",
    "Part",
    "compute",
    "compute_one",
    "joined",
    "verdict_of",
]

#: Errors that say nothing about the model.
_NOT_THE_MODEL = (Overloaded, ItemRefused, AllLeft, LoopEnded)
#: Errors that every part of the batch would get as well, so the batch is not bisected.
_WHOLE_BATCH = (Overloaded, LoadFailed, GuardClosed, WouldDeadlock, NotSupported, WrongResults, AllLeft, LoopEnded)


class BatchCallable(Protocol):
    """What computes a batch."""

    def __call__(self, items: list[Any], /, **extras: Any) -> Any:
        """Compute one result for each item, in the order of the items."""


@dataclass(frozen=True, kw_only=True)
class BatchFunction:
    """A batch function and how to treat its errors.

    Attributes:
        run: The function itself.
        name: Its name, for errors.
        isolate: Whether to run a batch that raised again in halves, to find the items at fault.
        ignore: Errors that the breaker does not count.
        clock: Returns the time in seconds.
        suspects: What it has learned about bad items.
    """

    run: BatchCallable
    name: str
    isolate: bool
    ignore: tuple[type[BaseException], ...] = ()
    clock: Callable[[], float] = time.monotonic
    suspects: Suspects = field(default_factory=Suspects)

    def __call__(self, items: list[Any], extras: dict[str, Any]) -> list[Any]:
        """One result for each item.

        Raises:
            BaseException: Whatever the function raises.
            WrongResults: It returned something else.
        """
        count = len(items)  # before the call: the list is the function's own, and it may change it
        return check_results(self.run(items, **extras), self.name, count)


@dataclass(slots=True)
class Computed:
    """The outcome of a batch.

    Attributes:
        outcomes: For each request a result or a :class:`Failure`.
        failed: How many are failures.
        verdict: Whether the model is at fault.
        error: What the batch failed with, or was bisected for; None if the function returned.
        reruns: How often the function was called again.
        parts: Count, weight and seconds of each run of a part that succeeded.
        bad: The share of items that made the batch raise, of those that were told apart.
        whole: Whether the first run was of all its items.
        stalled: Seconds in which it waited for its callers, of which the model knows nothing.
    """

    outcomes: list[Any]
    failed: int = 0
    verdict: Verdict = "succeeded"
    error: BaseException | None = None
    reruns: int = 0
    parts: list[tuple[int, float, float]] = field(default_factory=list)
    bad: float = 0.0
    whole: bool = True
    stalled: float = 0.0


class Part(NamedTuple):
    """A part of a batch that was computed by itself, and for how many seconds."""

    requests: list[Request]
    computed: Computed
    seconds: float


def joined(requests: list[Request], parts: list[Part]) -> Computed:
    """The outcome of a batch that was computed in parts.

    Args:
        requests: All of its requests.
        parts: The parts; each request is in one of them.
    """
    if len(parts) == 1:
        return parts[0].computed
    outcomes: dict[int, Any] = {}
    runs: list[tuple[int, float, float]] = []
    for part, computed, seconds in parts:
        outcomes.update(zip(map(id, part), computed.outcomes, strict=True))
        if computed.whole and computed.error is None:
            runs.append((len(part), math.fsum(request.weight for request in part), seconds - computed.stalled))
        runs += computed.parts
    all_of_them = [part.computed for part in parts]
    verdicts = {computed.verdict for computed in all_of_them}
    best: tuple[Verdict, ...] = ("succeeded", "failed", "inconclusive")
    return Computed(
        [outcomes[id(request)] for request in requests],
        sum(computed.failed for computed in all_of_them),
        next(verdict for verdict in best if verdict in verdicts),
        next((computed.error for computed in all_of_them if computed.error is not None), None),
        sum(computed.reruns for computed in all_of_them),
        runs,
        max(computed.bad for computed in all_of_them),
        whole=False,
        stalled=math.fsum(computed.stalled for computed in all_of_them),
    )


#: Called with requests of a batch that is still being computed, and their outcomes.
Answer: TypeAlias = Callable[[list[Request], list[Any]], object]


def compute(
    function: BatchFunction, requests: list[Request], extras: dict[str, Any], answer: Answer | None = None
) -> Computed:
    """Run a batch. Never raises: whatever the function does becomes outcomes.

    Args:
        function: What computes it.
        requests: Whose items to compute.
        extras: Keyword arguments that all requests share.
        answer: Called with what has its result already while other items of the batch are run again.
    """
    try:
        return _compute(function, requests, extras, answer)
    except BaseException as error:  # noqa: BLE001 - an error or a result that cannot be copied, compared or printed
        failures = [Failure(batch_failed(error, function.name, len(requests))) for _ in requests]
        return Computed(failures, len(requests), "failed", error)


def compute_one(function: BatchFunction, request: Request) -> Any:
    """Run one request by itself; returns a result or a :class:`Failure`.

    Raises:
        BaseException: What the function raised or returned, if it is not an ``Exception``.
    """
    try:
        (result,) = function([request.item], request.extras)
    except Exception as error:  # noqa: BLE001 - the caller raises it
        result = error
    if not isinstance(result, BaseException):
        return result
    if isinstance(result, StopIteration):  # futures reject it
        return Failure(batch_failed(result, function.name, 1))
    if isinstance(result, Exception):
        explain_list_item(result, request.item)
        return Failure(result)
    raise result


def _compute(
    function: BatchFunction, requests: list[Request], extras: dict[str, Any], answer: Answer | None
) -> Computed:
    if function.suspects:
        known = [function.suspects.find(request.item, request.group) for request in requests]
        if any(known):
            return _compute_suspicious(function, _Items(function, requests, extras, answer), known)
    items = [request.item for request in requests]
    try:
        results = function(list(items), extras)
    except AllLeft:
        return Computed([None] * len(requests), 0, "inconclusive", whole=False)
    except BaseException as error:  # noqa: BLE001 - not even sys.exit() in a model may end the thread
        free_after(TORCH_CUDA, error)
        if function.isolate and len(requests) > 1 and not isinstance(error, _WHOLE_BATCH):
            batch = _Items(function, requests, extras, answer)
            return batch.computed(error, _isolate(function, batch, [*range(len(requests))], error))
        failures = [Failure(error_for_caller(error, function.name, items)) for _ in requests]
        return Computed(failures, len(requests), verdict_of([error], function.ignore), error)
    if any(issubclass(kind, BaseException) for kind in {*map(type, results)}):
        results = wrap_errors(results, function.name, items)
        failed = count_failures(results)
        return Computed(results, failed, "succeeded" if failed < len(results) else "inconclusive")
    return Computed(results)


def _compute_suspicious(function: BatchFunction, batch: _Items, known: list[Known | None]) -> Computed:
    """Run a batch; items that failed before run alone and last, or not at all if they have failed repeatedly."""
    now = function.clock()
    healthy: list[int] = []
    alone: list[int] = []
    for at, one in enumerate(known):
        if one is None:
            healthy.append(at)
        elif one.certain(now):
            batch.outcomes[at] = Failure(failed_again(function.name, one))
        else:
            alone.append(at)
    error = batch.run(healthy) if healthy else None
    errors: list[BaseException] = []
    if error is not None:
        if function.isolate and len(healthy) > 1 and not isinstance(error, _WHOLE_BATCH):
            errors = _isolate(function, batch, healthy, error)
        else:
            batch.fail(healthy, error)
            errors = [error]
    for at in alone:
        with own_thread.reruns():
            failed = batch.run([at]) if batch.live(at) else None
        if failed is not None:
            errors.append(failed)
            batch.blame(at, failed)
        elif batch.live(at):
            function.suspects.succeeded(batch.items[at], batch.requests[at].group)
    return batch.computed(error, errors, reruns=len(alone))


def _isolate(function: BatchFunction, batch: _Items, part: list[int], first: BaseException) -> list[BaseException]:
    """Find the items at fault in a part that raised. Returns what they failed with."""
    if TORCH_CUDA.is_out_of_memory(first):
        return _halve(batch, part)
    isolation = Isolation(
        batch.run,
        batch.live,
        batch.items,
        trust=function.suspects.trusts_tracebacks,
        breaks=lambda error: isinstance(error, _WHOLE_BATCH) or free_after(TORCH_CUDA, error),
    )
    with own_thread.reruns():
        isolation.find(part, first)
    if isolation.named_right is not None:
        function.suspects.traceback_was(right=isolation.named_right)
    for at, error in isolation.bad.items():
        batch.blame(at, error)
    for error in {id(error): error for error in isolation.broken.values()}.values():
        batch.fail([at for at, one in isolation.broken.items() if one is error], error)
    for at in isolation.unfound:
        batch.outcomes[at] = Failure(not_told_apart(function.name, isolation.reruns, first))
    batch.bad += len(isolation.bad) + len(isolation.unfound) if batch.succeeded else 0
    batch.reruns += isolation.reruns
    return [*isolation.bad.values(), *isolation.broken.values()]


def _halve(batch: _Items, part: list[int]) -> list[BaseException]:
    """Run both halves of a part that ran out of GPU memory. No single item is at fault, so there is none to find."""
    errors: list[BaseException] = []
    middle = len(part) // 2
    with own_thread.reruns():
        for half in (part[:middle], part[middle:]):
            live = [at for at in half if batch.live(at)]
            error = batch.run(live) if live else None
            batch.reruns += bool(live)
            if error is not None:
                free_after(TORCH_CUDA, error)
                batch.fail(live, error)
                errors.append(error)
    return errors


class _Items:
    """The items of a batch of which parts are run."""

    def __init__(
        self, function: BatchFunction, requests: list[Request], extras: dict[str, Any], answer: Answer | None
    ) -> None:
        self._function = function
        self._extras = extras
        self._answer = answer
        self.requests = requests
        self.items = [request.item for request in requests]
        self.outcomes: list[Any] = [None] * len(requests)
        self.parts: list[tuple[int, float, float]] = []
        self.succeeded = False
        self.bad = self.reruns = 0

    def live(self, at: int) -> bool:
        """Whether the caller of an item still waits."""
        return self.requests[at].state != "done"

    def run(self, part: list[int]) -> BaseException | None:
        """Run some items, and keep their results. Returns what the function raised."""
        items = [self.items[at] for at in part]
        started = self._function.clock()
        try:
            results = self._function(list(items), self._extras)
        except BaseException as error:  # noqa: BLE001 - not even sys.exit() in a model may end the thread
            return error
        weight = math.fsum(self.requests[at].weight for at in part)
        self.parts.append((len(part), weight, self._function.clock() - started))
        for at, result in zip(part, wrap_errors(results, self._function.name, items), strict=True):
            self.outcomes[at] = result
        self.succeeded = True
        self._answer_now(part)
        return None

    def blame(self, at: int, error: BaseException) -> None:
        """An item failed by itself. It is remembered if others succeeded: else the model may be at fault."""
        self.fail([at], error)
        if self.succeeded and isinstance(error, Exception) and not isinstance(error, (*_NOT_THE_MODEL, *_WHOLE_BATCH)):
            suspects, now = self._function.suspects, self._function.clock()
            suspects.failed(self.items[at], self.requests[at].group, error, one_line(error), now)

    def fail(self, part: list[int], error: BaseException) -> None:
        """Some items failed together."""
        items = [self.items[at] for at in part]
        for at in part:
            self.outcomes[at] = Failure(error_for_caller(error, self._function.name, items))

    def _answer_now(self, part: list[int]) -> None:
        """Nobody waits for the runs that find somebody else's bad item."""
        if self._answer is not None:
            self._answer([self.requests[at] for at in part], [self.outcomes[at] for at in part])

    def computed(self, first: BaseException | None, errors: list[BaseException], *, reruns: int = 0) -> Computed:
        """The outcome of the whole batch.

        Args:
            first: What the first run raised.
            errors: What items failed with.
            reruns: Runs beyond those of the isolation.
        """
        verdict: Verdict = "succeeded"
        if not self.succeeded and (first is not None or errors):
            verdict = verdict_of(errors or [cast("BaseException", first)], self._function.ignore)
        elif not self.succeeded:
            verdict = "inconclusive"
        failed = count_failures(self.outcomes)
        total = self.reruns + reruns
        told_apart = self.bad + sum(count for count, _, _ in self.parts)
        bad = max(self.bad, 1) / max(told_apart, 1) if self.succeeded and first is not None else 0.0
        return Computed(self.outcomes, failed, verdict, first, total, self.parts, bad, whole=False)


def verdict_of(errors: list[BaseException], ignore: tuple[type[BaseException], ...]) -> Verdict:
    """What errors say about the model."""
    blameless = all(isinstance(error, (*_NOT_THE_MODEL, *ignore)) for error in errors)
    return "inconclusive" if blameless else "failed"
