"""Run one batch: call the function, check its results, and find the items that made it fail.

Anything can be batched that takes a list of items and returns one result for each: a plain function, a guarded one
(each batch is then one call of the guard), or one that computes elsewhere.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Protocol

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
)
from modelguard.serving._batches import Verdict
from modelguard.serving._requests import Failure, Request

__all__ = ["BatchCallable", "BatchFunction", "Computed", "compute", "compute_one", "one_line"]

#: Errors that say nothing about the model.
_NOT_THE_MODEL = (Overloaded, ItemRefused)
#: Errors that every part of the batch would get as well, so the batch is not bisected.
_WHOLE_BATCH = (Overloaded, LoadFailed, GuardClosed, WouldDeadlock, NotSupported, WrongResults)
#: These have a length, and still are not lists of results.
_NOT_LISTS = (Mapping, AbstractSet, str, bytes, bytearray, memoryview)

_LIST_ITEM = "The item of this call is a list. If many items were meant, write f.map(items)."


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
    """

    run: BatchCallable
    name: str
    isolate: bool
    ignore: tuple[type[BaseException], ...] = ()

    def __call__(self, items: list[Any], extras: dict[str, Any]) -> list[Any]:
        """One result for each item.

        Raises:
            BaseException: Whatever the function raises.
            WrongResults: It returned something else.
        """
        count = len(items)  # before the call: the list is the function's own, and it may change it
        return _check_results(self.run(items, **extras), self.name, count)


@dataclass(slots=True)
class Computed:
    """The outcome of a batch.

    Attributes:
        outcomes: For each request a result or a :class:`Failure`.
        failed: How many are failures.
        verdict: Whether the model is at fault.
        error: What the batch failed with, or was bisected for; None if the function returned.
        reruns: How often the function was called again.
    """

    outcomes: list[Any]
    failed: int = 0
    verdict: Verdict = "succeeded"
    error: BaseException | None = None
    reruns: int = 0


def compute(function: BatchFunction, requests: list[Request], extras: dict[str, Any]) -> Computed:
    """Run a batch. Never raises: whatever the function does becomes outcomes.

    Args:
        function: What computes it.
        requests: Whose items to compute.
        extras: Keyword arguments that all requests share.
    """
    try:
        return _compute(function, requests, extras)
    except BaseException as error:  # noqa: BLE001 - an error or a result that cannot be copied, compared or printed
        failures = [Failure(_batch_failed(error, function.name, len(requests))) for _ in requests]
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
        return Failure(_batch_failed(result, function.name, 1))
    if isinstance(result, Exception):
        _explain_list_item(result, request.item)
        return Failure(result)
    raise result


def _compute(function: BatchFunction, requests: list[Request], extras: dict[str, Any]) -> Computed:
    items = [request.item for request in requests]
    try:
        results = function(list(items), extras)
    except BaseException as error:  # noqa: BLE001 - not even sys.exit() in a model may end the thread
        if function.isolate and len(requests) > 1 and not isinstance(error, _WHOLE_BATCH):
            return _Bisection(function, requests, items, extras).run_all(error)
        failures = [Failure(_error_for_caller(error, function.name, items)) for _ in requests]
        return Computed(failures, len(requests), _verdict([error], function.ignore), error)
    if any(issubclass(kind, BaseException) for kind in {*map(type, results)}):
        results = _wrap_errors(results, function.name, items)
        failed = _count_failures(results)
        return Computed(results, failed, "succeeded" if failed < len(results) else "inconclusive")
    return Computed(results)


class _Bisection:
    """Runs a batch that raised in halves, until each error belongs to one item or the model turns out to be at fault.

    Breadth first, so that a half without bad items is found early. If nothing has succeeded after ``2 log2(n) + 1``
    runs, the model is at fault: by then three bad items of 64 would have been found, or seven if they are spread.
    Failing each item by itself would take ``2 n`` runs.
    """

    def __init__(
        self, function: BatchFunction, requests: list[Request], items: list[Any], extras: dict[str, Any]
    ) -> None:
        self._function = function
        self._requests = requests
        self._items = items
        self._extras = extras
        self._outcomes: list[Any] = [None] * len(requests)
        self._errors: list[BaseException] = []
        self._parts = deque(_halves(list(range(len(requests)))))
        self._succeeded = False
        self._reruns = 0

    def run_all(self, first: BaseException) -> Computed:
        most_failures = 2 * (len(self._requests) - 1).bit_length() + 1
        while self._parts:
            # Requests that expired or were cancelled meanwhile have their answers.
            part = [at for at in self._parts.popleft() if self._requests[at].state != "done"]
            if not part:
                continue
            if not self._succeeded and self._reruns >= most_failures:
                self._fail(part, first)
            else:
                self._rerun(part)
        verdict: Verdict = "succeeded" if self._succeeded else _verdict(self._errors or [first], self._function.ignore)
        return Computed(self._outcomes, _count_failures(self._outcomes), verdict, first, self._reruns)

    def _rerun(self, part: list[int]) -> None:
        self._reruns += 1
        items = self._items_of(part)
        try:
            results = self._function(list(items), self._extras)
        except BaseException as error:  # noqa: BLE001 - as for the whole batch
            if len(part) > 1 and not isinstance(error, _WHOLE_BATCH):
                self._parts.extend(_halves(part))
            else:
                self._fail(part, error)
            return
        for at, result in zip(part, _wrap_errors(results, self._function.name, items), strict=True):
            self._outcomes[at] = result
        self._succeeded = True

    def _fail(self, part: list[int], error: BaseException) -> None:
        self._errors.append(error)
        for at in part:
            self._outcomes[at] = Failure(_error_for_caller(error, self._function.name, self._items_of(part)))

    def _items_of(self, part: list[int]) -> list[Any]:
        return [self._items[at] for at in part]


def _halves(part: list[int]) -> tuple[list[int], list[int]]:
    middle = len(part) // 2
    return part[:middle], part[middle:]


def _check_results(results: Any, name: str, count: int) -> list[Any]:
    """The results as a list.

    Raises:
        WrongResults: There is not one for each item.
    """
    kind = type(results)
    if kind is list and len(results) == count:
        return list(results)  # the function may keep its own list and change it
    wanted = f"{count} result{'' if count == 1 else 's'}, one for each item in order"
    if results is None:
        why = f"it returned None instead of a list of {wanted}; is its return statement missing?"
        raise WrongResults(name, why, size=count)
    if isinstance(results, _NOT_LISTS) or not (isinstance(results, Sequence) or _is_list_like(results)):
        raise WrongResults(name, f"it returned {_units.kind_of(results)} instead of a list of {wanted}", size=count)
    values = list(results)
    if len(values) != count:
        raise WrongResults(name, f"it returned a list of {len(values)} instead of {wanted}", size=count)
    return values


def _is_list_like(results: Any) -> bool:
    """Whether it is something like an array or a tensor with a first axis."""
    if not hasattr(results, "__getitem__") or not hasattr(results, "__iter__") or hasattr(results, "columns"):
        return False  # iterating over a data frame gives the names of its columns
    with contextlib.suppress(TypeError):
        return len(results) >= 0
    return False  # an array without axes


def _wrap_errors(results: list[Any], name: str, items: list[Any]) -> list[Any]:
    """The same results, with the exceptions among them wrapped as failures."""
    wrapped: list[Any] = []
    seen: set[int] = set()
    for result, item in zip(results, items, strict=True):
        if not issubclass(type(result), BaseException):
            wrapped.append(result)
        elif id(result) in seen or result.__traceback__ is not None:  # another caller gets it as well
            wrapped.append(Failure(_batch_failed(result, name, 1)))
        else:
            seen.add(id(result))
            wrapped.append(Failure(_error_for_caller(result, name, [item])))
    return wrapped


def _count_failures(outcomes: list[Any]) -> int:
    return sum(type(outcome) is Failure for outcome in outcomes)


def _error_for_caller(error: BaseException, name: str, items: list[Any]) -> Exception:
    """The error as one caller gets it.

    An error of one item is raised as it is. An error that several share is made again for each of them: one exception
    object raised in several threads mixes up their tracebacks.
    """
    if isinstance(error, ModelGuardError):
        with contextlib.suppress(Exception):  # a subclass that cannot be copied
            again: ModelGuardError = copy.copy(error)
            again.__cause__ = error.__cause__
            return again
    # Futures reject StopIteration. CancelledError and SystemExit would be taken for the caller's own.
    if len(items) == 1 and isinstance(error, Exception) and not isinstance(error, StopIteration):
        _explain_list_item(error, items[0])
        return error
    return _batch_failed(error, name, len(items))


def _explain_list_item(error: Exception, item: Any) -> None:
    """Add a note where a list was probably passed by mistake for many items."""
    if type(item) is not list or not isinstance(error, AttributeError | TypeError):
        return
    if _LIST_ITEM not in getattr(error, "__notes__", ()):  # the function may raise the same object again
        error.add_note(_LIST_ITEM)


def _batch_failed(error: BaseException, name: str, size: int) -> BatchFailed:
    failed = BatchFailed(name, one_line(error), size=size)
    failed.__cause__ = error
    return failed


def one_line(error: BaseException) -> str:
    """Type and text of an error in one line; the type alone if its ``__str__`` fails."""
    text = ""
    with contextlib.suppress(Exception):
        text = f": {error}".partition("\n")[0]
    return f"{type(error).__name__}{text}"


def _verdict(errors: list[BaseException], ignore: tuple[type[BaseException], ...]) -> Verdict:
    blameless = all(isinstance(error, (*_NOT_THE_MODEL, *ignore)) for error in errors)
    return "inconclusive" if blameless else "failed"
