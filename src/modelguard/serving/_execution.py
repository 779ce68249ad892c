"""Run one batch: call the function, check its results, and find the items that made it fail.

Anything can be batched that takes a list of items and returns one result for each: a plain function, a guarded one
(each batch is then one call of the guard), or one that computes elsewhere.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import time
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from modelguard import _units
from modelguard.errors import (
    BatchFailed,
    GuardClosed,
    ItemRefused,
    LoadFailed,
    ModelGuardError,
    NotSupported,
    Overloaded,
    WouldDeadlock,
    WrongResults,
    told,
)
from modelguard.facts._gpu import TORCH_CUDA, free_after
from modelguard.runtime import call_context
from modelguard.runtime.event_loops import AllLeft, LoopEnded
from modelguard.serving._requests import Batch, Failure, Request, count_failures
from modelguard.serving.status import Verdict

# Which items made their batch raise: found in the traceback, or remembered from the last time.


#: So many bad items are remembered. One that has failed repeatedly is tried again after ten seconds, and after twice as
#: long each time that it fails, up to ten minutes.
_REMEMBERED = 256
_SECONDS = 10.0
_LONGEST = 600.0
#: An item that has failed so often is not computed again for a while.
_CERTAIN = 2
#: Texts and byte strings that are longer are remembered by their hash, so that they do not stay in memory.
_LONG = 1000
#: Values of these types say nothing by their identity: all zeros are one object.
_SHARED = (int, float, bool, type(None))
#: How far the trust in tracebacks follows each batch, and below which trust they are not used.
_STEP = 0.25
_TRUSTED = 0.4


@dataclass(slots=True)
class BadItem:
    """What is known of a bad item."""

    error: Exception | None  # a copy of what it failed with; None if that cannot be copied, or given to callers
    text: str
    times: int
    until: float  # up to when it is not computed again, on the batcher's clock


class Suspects:
    """What one batch function has learned about bad items. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[Hashable, BadItem] = {}  # changed in single steps, so it needs no lock
        self._trust = 1.0

    def __bool__(self) -> bool:
        return bool(self._known)

    # Items need not be hashable, nor comparable: those are not remembered.

    def find(self, item: Any, group: Hashable) -> BadItem | None:
        with contextlib.suppress(Exception):
            return self._known.get(_key(item, group))
        return None

    def failed(self, item: Any, group: Hashable, error: Exception, text: str, now: float) -> None:
        with contextlib.suppress(Exception):
            key = _key(item, group)
            before = self._known.pop(key, None)
            times = 1 if before is None else before.times + 1
            pause = min(_SECONDS * 2.0 ** max(times - _CERTAIN, 0), _LONGEST)
            self._known[key] = BadItem(_copied(error), text, times, now + pause)
            if len(self._known) > _REMEMBERED:
                self._known.pop(next(iter(self._known)), None)

    def succeeded(self, item: Any, group: Hashable) -> None:
        with contextlib.suppress(Exception):
            self._known.pop(_key(item, group), None)

    @property
    def trusts_tracebacks(self) -> bool:
        return self._trust >= _TRUSTED

    def traceback_was(self, *, right: bool) -> None:
        """Note whether a batch succeeded without the items that tracebacks named."""
        self._trust += _STEP * (right - self._trust)


def named_by(error: BaseException, items: Sequence[Any]) -> list[int]:
    """Which of the items the innermost function in an error's traceback worked on; none if it says nothing.

    A function that works on one item at a time has it among its local variables.
    """
    places = {id(item): at for at, item in enumerate(items) if not isinstance(item, _SHARED)}
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        if found := {places[id(value)] for value in frame.f_locals.values() if id(value) in places}:
            return sorted(found) if len(found) < len(items) else []
    return []


def _key(item: Any, group: Hashable) -> Hashable:
    kind = type(item)
    if isinstance(item, str | bytes) and len(item) > _LONG:
        return kind, len(item), hash(item), group
    if hash(item) in {id(item), object.__hash__(item)} and item is not None:
        raise TypeError("no other item is equal to it: it would stay in memory, and not come again")
    return kind, item, group


#: Futures reject the one, and in the loop of who iterates over a stream either would be its end.
_ENDS = (StopIteration, StopAsyncIteration)


def _copied(error: Exception) -> Exception | None:
    if isinstance(error, _ENDS):
        return None
    try:
        again = copy.copy(error)
        again.args = error.args  # its __init__ may have made a text of the text
    except Exception:  # noqa: BLE001 - an error whose class does not take its own arguments
        return None
    return again if type(again) is type(error) else None


# What a batch function returned or raised, as outcomes of its items: results are checked, errors are made for each.


#: These have a length, and still are not lists of results.
_NOT_LISTS = (Mapping, AbstractSet, str, bytes, bytearray, memoryview)


def check_results(results: Any, name: str, count: int, how: Literal["returned", "yielded"] = "returned") -> list[Any]:
    """The results, or the parts of results that were yielded, as a list."""
    kind = type(results)
    if kind is list and len(results) == count:
        return list(results)  # the function may keep its own list and change it
    noun = "result" if how == "returned" else "part"
    wanted = f"{count} {noun}{'' if count == 1 else 's'}, one for each item in order"
    if results is None:
        hint = "; is its return statement missing?" if how == "returned" else ""
        raise WrongResults(name, f"it {how} None instead of a list of {wanted}{hint}", size=count)
    if isinstance(results, _NOT_LISTS) or not (isinstance(results, Sequence) or _is_list_like(results)):
        raise WrongResults(name, f"it {how} {_units.kind_of(results)} instead of a list of {wanted}", size=count)
    values = list(results)
    if len(values) != count:
        raise WrongResults(name, f"it {how} a list of {len(values)} instead of {wanted}", size=count)
    return values


def _is_list_like(results: Any) -> bool:
    """Whether it is something like an array or a tensor with a first axis."""
    if not hasattr(results, "__getitem__") or not hasattr(results, "__iter__") or hasattr(results, "columns"):
        return False  # iterating over a data frame gives the names of its columns
    with contextlib.suppress(TypeError):
        return len(results) >= 0
    return False  # an array without axes


def wrap_errors(results: list[Any], name: str) -> list[Any]:
    wrapped: list[Any] = []
    seen: set[int] = set()
    for result in results:
        if not issubclass(type(result), BaseException):
            wrapped.append(result)
        elif id(result) in seen or result.__traceback__ is not None:  # another caller gets it as well
            wrapped.append(Failure(batch_failed(result, name, 1)))
        else:
            seen.add(id(result))
            wrapped.append(Failure(error_for_caller(result, name, 1)))
    return wrapped


def error_for_caller(error: BaseException, name: str, count: int) -> Exception:
    """The error of so many items, as the caller of one of them gets it.

    An error of one item is raised as it is. An error that several share is made again for each of them: one exception
    object raised in several threads mixes up their tracebacks.
    """
    if isinstance(error, ModelGuardError):
        with contextlib.suppress(Exception):  # a subclass that cannot be copied
            again: ModelGuardError = copy.copy(error)
            again.__cause__ = error.__cause__
            return again
    # CancelledError and SystemExit would be taken for the caller's own.
    if count == 1 and isinstance(error, Exception) and not isinstance(error, _ENDS):
        return error
    return batch_failed(error, name, count)


def failed_again(name: str, known: BadItem) -> Exception:
    """The error for an item that has just failed by itself, and is not computed again."""
    why = "This item has failed before. It was not computed again."
    if known.error is not None and (again := _copied(known.error)) is not None:
        again.add_note(why)
        return again
    return BatchFailed(name, f"{known.text}. {why}", size=1)


def batch_failed(error: BaseException, name: str, size: int) -> BatchFailed:
    failed = BatchFailed(name, one_line(error), size=size)
    failed.__cause__ = error
    return failed


def one_line(error: BaseException) -> str:
    """Type and text of an error in one line."""
    return _units.printable(told(error).partition("\n")[0])


def not_told_apart(name: str, runs: int, error: BaseException) -> Overloaded:
    why = f"several items of a batch fail, and {runs} more runs were not enough to tell which"
    refused = Overloaded(f"{name}(): {why}: {one_line(error)}. Try again.")
    refused.__cause__ = error
    return refused


#: Errors that say nothing about the model.
_NOT_THE_MODEL = (Overloaded, ItemRefused, AllLeft, LoopEnded)
#: Errors that every part of the batch would get as well, so the batch is not bisected.
_WHOLE_BATCH = (Overloaded, LoadFailed, GuardClosed, WouldDeadlock, NotSupported, WrongResults, AllLeft, LoopEnded)


@dataclass(frozen=True, kw_only=True)
class BatchFunction:
    """A batch function and how to treat its errors."""

    run: Callable[..., Any]
    name: str
    isolate: bool  # whether to run a batch that raised again in halves, to find the items at fault
    ignore: tuple[type[BaseException], ...] = ()  # errors that the breaker does not count
    #: What becomes an outcome if the function raises it: on a thread of the batcher anything, since not even sys.exit()
    #: in a model may end that; in a caller's own thread no Ctrl-C.
    caught: type[BaseException] = BaseException
    clock: Callable[[], float] = time.monotonic
    suspects: Suspects = field(default_factory=Suspects)  # what it has learned about bad items

    def __call__(self, items: list[Any], extras: dict[str, Any]) -> list[Any]:
        """One result for each item, or ``WrongResults``."""
        count = len(items)  # before the call: the list is the function's own, and it may change it
        return check_results(self.run(items, **extras), self.name, count)


@dataclass(slots=True)
class Computed:
    """The outcome of a batch: for each request a result or a :class:`Failure`, and what is learned from it."""

    outcomes: list[Any]
    failed: int = 0
    verdict: Verdict = "succeeded"
    error: BaseException | None = None  # what it failed with, or was bisected for; None if the function returned
    reruns: int = 0
    parts: list[tuple[int, float, float]] = field(default_factory=list)  # count, weight, seconds of runs that succeeded
    bad: float = 0.0  # the share of items that made the batch raise, of those that were told apart
    raised: list[BaseException] = field(default_factory=list)  # by its reruns
    whole: bool = True  # whether the first run was of all its items
    stalled: float = 0.0  # seconds in which it waited for its callers, of which the model knows nothing

    def empty_frames(self) -> None:
        """Empty this package's frames that tracebacks keep: they have items, results, and errors that refer to them."""
        for error in self.raised if self.error is None else [self.error, *self.raised]:
            place = error.__traceback__
            callers = () if place is None else traceback.walk_stack(place.tb_frame)
            for frame, _ in itertools.chain(traceback.walk_tb(place), callers):
                if str(frame.f_globals.get("__name__")).startswith("modelguard."):
                    with contextlib.suppress(RuntimeError):  # it still runs
                        frame.clear()
                        _ = frame.f_locals  # up to Python 3.12 a snapshot of them stays otherwise


#: Called with requests of a batch that is still being computed, and their outcomes.
Answer: TypeAlias = Callable[[list[Request], list[Any]], object]


def compute(function: BatchFunction, batch: Batch, answer: Answer | None = None) -> Computed:
    """Run a batch. Whatever the function does becomes outcomes, but for what it must not catch.

    What has its result already is answered while other items of the batch are run again.
    """
    try:
        return _compute(function, batch, answer)
    except function.caught as error:  # an error or a result that cannot be copied, compared or printed
        return all_failed(function, batch, error)


def all_failed(function: BatchFunction, batch: Batch, error: BaseException) -> Computed:
    failures = [Failure(batch_failed(error, function.name, batch.count)) for _ in range(batch.count)]
    return Computed(failures, batch.count, "failed", error)


def _compute(function: BatchFunction, batch: Batch, answer: Answer | None) -> Computed:
    if function.suspects:
        known = [function.suspects.find(request.item, request.group) for request in batch.requests]
        if any(known):
            return _compute_suspicious(function, _BadItemSearch(function, batch, answer), known)
    try:
        results = function(batch.items, batch.extras)
    except AllLeft:
        return Computed([None] * batch.count, 0, "inconclusive", whole=False)
    except function.caught as error:
        raised = error
    else:
        for kind in {*map(type, results)}:
            if issubclass(kind, BaseException):
                results = wrap_errors(results, function.name)
                failed = count_failures(results)
                return Computed(results, failed, "succeeded" if failed < len(results) else "inconclusive")
        return Computed(results)
    parts = _BadItemSearch(function, batch, answer)  # here: what a rerun raises has nothing to do with that error
    parts.find_bad_items([*range(batch.count)], raised)
    return parts.computed(raised)


def _compute_suspicious(function: BatchFunction, batch: _BadItemSearch, known: list[BadItem | None]) -> Computed:
    """Run a batch; items that failed before run alone and last, or not at all if they have failed repeatedly."""
    now = function.clock()
    healthy: list[int] = []
    alone: list[int] = []
    for at, one in enumerate(known):
        if one is None:
            healthy.append(at)
        elif one.times >= _CERTAIN and now < one.until:
            batch.outcomes[at] = Failure(failed_again(function.name, one))
        else:
            alone.append(at)
    error = batch.run(healthy) if healthy else None
    if error is not None:
        batch.find_bad_items(healthy, error)
    for at in alone:
        if not batch.live([at]):
            continue
        with call_context.reruns():
            failed = batch.run([at])
        if failed is not None:
            batch.blame(at, failed)
        elif batch.live([at]):
            function.suspects.succeeded(batch.items[at], batch.requests[at].group)
    batch.reruns += len(alone)
    return batch.computed(error)


#: Of so many items that were found bad, one run tests about as many that it succeeds every second time: ln 2.
_EVEN = 0.7


class _BadItemSearch:
    """Runs parts of a batch that raised, until each error belongs to one item or the model turns out to be at fault.

    * The innermost function in the traceback often works on a single item. The others run without it first: if they
      succeed, one run was enough.
    * Otherwise halves: of a part that raised, one half runs. If it succeeds, the other half holds the item at fault,
      and is halved without a run of its own. If it raises, nothing is known of the other half any more, and it runs
      later, with all others like it.
    * If nothing has succeeded after ``2 log2(n) + 1`` runs, the model is at fault. There are never more than
      ``4 log2(n) + 4`` runs: with more bad items than can be found with these, the rest is refused.
    """

    def __init__(self, function: BatchFunction, batch: Batch, answer: Answer | None) -> None:
        self._function = function
        self._extras = batch.extras
        self._answer = answer
        self.requests = batch.requests
        self.items = batch.items
        self.outcomes: list[Any] = [None] * batch.count
        self._errors: list[BaseException] = []
        self._raised: list[BaseException] = []
        self.reruns = 0
        self._runs: list[tuple[int, float, float]] = []  # that succeeded
        self._bad: dict[int, BaseException] = {}  # at fault
        self._broken: dict[int, BaseException] = {}  # failed with all others
        self._unfound: list[int] = []  # not told apart

    def live(self, part: list[int]) -> list[int]:
        """Those whose callers still wait."""
        return [at for at in part if self.requests[at].state != "done"]

    def run(self, part: list[int]) -> BaseException | None:
        """Run some items, and keep their results. Returns what the function raised."""
        items = [self.items[at] for at in part]
        started = self._function.clock()
        try:
            results = self._function(list(items), self._extras)
        except self._function.caught as error:
            self._raised.append(error)
            return error
        weight = math.fsum(self.requests[at].weight for at in part)
        self._runs.append((len(part), weight, self._function.clock() - started))
        for at, result in zip(part, wrap_errors(results, self._function.name), strict=True):
            self.outcomes[at] = result
        if self._answer is not None:  # nobody waits for the runs that find somebody else's bad item
            self._answer([self.requests[at] for at in part], [self.outcomes[at] for at in part])
        return None

    def blame(self, at: int, error: BaseException) -> None:
        """An item failed by itself. It is remembered if others succeeded: else the model may be at fault."""
        self._fail([at], error)
        if self._runs and isinstance(error, Exception) and not isinstance(error, (*_NOT_THE_MODEL, *_WHOLE_BATCH)):
            suspects, now = self._function.suspects, self._function.clock()
            suspects.failed(self.items[at], self.requests[at].group, error, one_line(error), now)

    def _fail(self, part: list[int], error: BaseException, count: int = 0) -> None:
        """These have failed in a run of so many, by default of these alone."""
        self._errors.append(error)
        for at in part:
            self.outcomes[at] = Failure(error_for_caller(error, self._function.name, count or len(part)))

    def find_bad_items(self, part: list[int], first: BaseException) -> None:
        """Find the items at fault in a part that raised this error, if it is one that tells them apart."""
        no_memory = free_after(TORCH_CUDA, first)
        if not self._function.isolate or len(part) == 1 or isinstance(first, _WHOLE_BATCH):
            self._fail(part, first)
            return
        with call_context.reruns():
            if no_memory:
                self._halve(part)
            else:
                self._find(part, first)
        for at, error in self._bad.items():
            self.blame(at, error)
        for error in {id(error): error for error in self._broken.values()}.values():
            broken = [at for at, one in self._broken.items() if one is error]
            self._fail(broken, error, len(part) if error is first else len(broken))
        for at in self._unfound:
            self.outcomes[at] = Failure(not_told_apart(self._function.name, self.reruns, first))

    def _halve(self, part: list[int]) -> None:
        """Run both halves of a part that ran out of GPU memory: no single item is at fault."""
        for half in (part[: len(part) // 2], part[len(part) // 2 :]):
            live = self.live(half)
            if live and (failed := self._try(live)) is not None:
                self._fail(live, failed)

    def _find(self, part: list[int], error: BaseException) -> None:
        bits = (len(part) - 1).bit_length()
        most, most_failures, first = 4 * bits + 4, 2 * bits + 1, error
        if self._function.suspects.trusts_tracebacks:
            part, error = self._leave_out_named(part, error)
        suspected, raised, rest = part, 1, list[int]()
        while suspected or rest:
            if not self._runs and self.reruns >= most_failures:
                self._broken.update(dict.fromkeys(self.live([*suspected, *rest]), first))
                return
            if self.reruns >= most:
                self._unfound = self.live([*suspected, *rest])
                return
            living, rest = self.live(suspected), self.live(rest)
            if len(living) < len(suspected):  # the item at fault may be among those that are gone
                suspected, rest = [], living + rest
            elif not suspected:
                size = self._even_size(len(rest))
                suspected, rest, raised = rest[:size], rest[size:], 1
                failed = self._try(suspected) if suspected else None
                suspected, error = ([], error) if failed is None else (suspected, failed)
            elif len(suspected) == 1:
                self._judge(suspected[0], error, certain=raised > 1)
                suspected = []
            else:
                half = suspected[: len(suspected) // 2]
                failed = self._try(half)
                if failed is None:
                    suspected = suspected[len(half) :]
                else:
                    suspected, rest, raised, error = half, suspected[len(half) :] + rest, raised + 1, failed

    def _leave_out_named(self, part: list[int], error: BaseException) -> tuple[list[int], BaseException]:
        """Run the part without what the traceback names, again and again. Returns a part that still raises, if any."""
        suspects = self._function.suspects
        named: dict[int, BaseException] = {}
        while part and len(named) <= 2 + len(self.items) // 8:
            found = [part[at] for at in named_by(error, [self.items[at] for at in part])]
            if len(found) != 1:
                break
            named[found[0]] = error
            part = self.live([at for at in part if at not in named])
            failed = self._try(part) if part else None
            if failed is None:
                suspects.traceback_was(right=True)
                self._bad.update(named)
                return [], error
            error = failed
        if named:
            suspects.traceback_was(right=False)
            for at in self.live([*named]):
                self._judge(at, named[at], certain=False)
        return part, error

    def _judge(self, at: int, error: BaseException, *, certain: bool) -> None:
        """The item at fault, if the run that raised was not an accident: it fails by itself too."""
        failed: BaseException | None = error if certain else self._try([at])
        if failed is not None and at not in self._broken:
            self._bad[at] = failed

    def _try(self, part: list[int]) -> BaseException | None:
        """Run a part again. Returns what it raised, unless every other part would get that as well."""
        self.reruns += 1
        failed = self.run(part)
        if failed is not None and (free_after(TORCH_CUDA, failed) or isinstance(failed, _WHOLE_BATCH)):
            self._broken.update(dict.fromkeys(part, failed))
            return None
        return failed

    def _even_size(self, count: int) -> int:
        """How many items, about which nothing is known, run together."""
        found = len(self._bad)
        if found <= 1:
            return count
        tested = max(len(self.items) - count, 1)
        return max(1, min(count, int(_EVEN * tested / found)))

    def computed(self, first: BaseException | None) -> Computed:
        """The outcome of the whole batch, whose first run raised this error."""
        verdict: Verdict = "succeeded"
        bad = float(first is not None and len(self.items) == 1)  # an item at fault, as far as anybody knows
        if not self._runs:
            errors = self._errors or ([] if first is None else [first])
            verdict = verdict_of(errors, self._function.ignore)
        elif first is not None:
            found = len(self._bad) + len(self._unfound)
            bad = max(found, 1) / max(found + sum(count for count, _, _ in self._runs), 1)
        failed = count_failures(self.outcomes)
        return Computed(self.outcomes, failed, verdict, first, self.reruns, self._runs, bad, self._raised, whole=False)


def verdict_of(errors: list[BaseException], ignore: tuple[type[BaseException], ...]) -> Verdict:
    blameless = all(isinstance(error, (*_NOT_THE_MODEL, *ignore)) for error in errors)
    return "inconclusive" if blameless else "failed"
