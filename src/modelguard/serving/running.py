"""One batch through the function: its results checked, its errors given to whom they belong.

The seam between batching and where a batch runs: whatever is called with a list of items, and returns one result for
each, can be batched. It may be a plain function, a guarded one (one lease for each batch), or one that runs elsewhere.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

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
from modelguard.serving.entries import DONE, Entry, Failure

if TYPE_CHECKING:
    from modelguard.serving.batches import Verdict

#: Errors that say nothing of the model.
_BLAMELESS = (Overloaded, ItemRefused)
#: Errors that no part of the batch would be spared.
_UNDIVIDED = (Overloaded, LoadFailed, GuardClosed, WouldDeadlock, NotSupported, WrongResults)
#: Have a length, and are no list of results all the same.
_NO_LISTS = (Mapping, AbstractSet, str, bytes, bytearray, memoryview)


class Run(Protocol):
    """Where batches are computed."""

    def __call__(self, items: list[Any], /, **extras: Any) -> Any:
        """Compute one result for each item, in the order of the items."""


@dataclass(frozen=True, kw_only=True)
class Function:
    """A batch function, and what is to be known of it.

    Attributes:
        run: The function itself.
        name: Its name, for errors.
        isolate: Whether to run a batch that raised again in halves, to find the items at fault.
        ignore: Errors that the breaker does not count.
    """

    run: Run
    name: str
    isolate: bool
    ignore: tuple[type[BaseException], ...] = ()

    def __call__(self, items: list[Any], extras: dict[str, Any]) -> list[Any]:
        """One result for each item.

        Raises:
            BaseException: Whatever the function raises.
            WrongResults: It returned something else.
        """
        count = len(items)  # the list is the function's own, and it may change it
        return _checked(self.run(items, **extras), self.name, count)


@dataclass(slots=True)
class Computed:
    """What became of a batch.

    Attributes:
        outcomes: For each entry a result or a :class:`Failure`.
        failed: How many are failures.
        verdict: Whether the model is to blame for what failed.
        error: What the batch was bisected for, or failed with; None if the function returned.
        reruns: How often the function was called again.
    """

    outcomes: list[Any]
    failed: int = 0
    verdict: Verdict = "good"
    error: BaseException | None = None
    reruns: int = 0


def compute(function: Function, entries: list[Entry], extras: dict[str, Any]) -> Computed:
    """Run a batch. Never raises: whatever the function does is the outcome of some entry.

    Args:
        function: What computes it.
        entries: What to compute.
        extras: Keyword arguments that all entries share.
    """
    try:
        return _compute(function, entries, extras)
    except BaseException as error:  # noqa: BLE001 - what it raised or returned cannot even be looked at
        failures = [Failure(_failed(error, function.name, len(entries))) for _ in entries]
        return Computed(failures, len(entries), "bad", error)


def _compute(function: Function, entries: list[Entry], extras: dict[str, Any]) -> Computed:
    items = [entry.item for entry in entries]
    try:
        results = function(list(items), extras)
    except BaseException as error:  # noqa: BLE001 - not even sys.exit() in a model may end the loop
        if function.isolate and len(entries) > 1 and not isinstance(error, _UNDIVIDED):
            return _Bisection(function, entries, items, extras).run_all(error)
        failures = [Failure(_for_one(error, function.name, len(entries))) for _ in entries]
        return Computed(failures, len(entries), _verdict([error], function.ignore), error)
    if any(issubclass(kind, BaseException) for kind in {*map(type, results)}):
        results = _with_failures(results, function.name)
        failed = _failures(results)
        return Computed(results, failed, "good" if failed < len(results) else "neither")
    return Computed(results)


class _Bisection:
    """Halves of a batch that raised, until each error is pinned on an item or the model is found to be at fault.

    Breadth first, so that one good half is found early. If nothing has succeeded after ``2 log2(n) + 1`` runs, which
    is where three of 64 items, or seven if they are spread, would have been told apart, it is the model: it would take
    ``2 n`` runs to fail each item by itself.
    """

    def __init__(self, function: Function, entries: list[Entry], items: list[Any], extras: dict[str, Any]) -> None:
        self._function = function
        self._entries = entries
        self._items = items
        self._extras = extras
        self._outcomes: list[Any] = [None] * len(entries)
        self._errors: list[BaseException] = []
        self._pieces = deque(_halves(list(range(len(entries)))))
        self._succeeded = False
        self._reruns = 0

    def run_all(self, first: BaseException) -> Computed:
        patience = 2 * (len(self._entries) - 1).bit_length() + 1
        while self._pieces:
            # Those that expired or were called off meanwhile have their answers.
            piece = [at for at in self._pieces.popleft() if self._entries[at].place != DONE]
            if not piece:
                continue
            if not self._succeeded and self._reruns >= patience:
                self._fail(piece, first)
            else:
                self._rerun(piece)
        verdict: Verdict = "good" if self._succeeded else _verdict(self._errors or [first], self._function.ignore)
        return Computed(self._outcomes, _failures(self._outcomes), verdict, first, self._reruns)

    def _rerun(self, piece: list[int]) -> None:
        self._reruns += 1
        try:
            results = self._function([self._items[at] for at in piece], self._extras)
        except BaseException as error:  # noqa: BLE001 - as for the whole batch
            if len(piece) > 1 and not isinstance(error, _UNDIVIDED):
                self._pieces.extend(_halves(piece))
            else:
                self._fail(piece, error)
            return
        for at, result in zip(piece, _with_failures(results, self._function.name), strict=True):
            self._outcomes[at] = result
        self._succeeded = True

    def _fail(self, piece: list[int], error: BaseException) -> None:
        self._errors.append(error)
        for at in piece:
            self._outcomes[at] = Failure(_for_one(error, self._function.name, len(piece)))


def _halves(piece: list[int]) -> tuple[list[int], list[int]]:
    middle = len(piece) // 2
    return piece[:middle], piece[middle:]


def _checked(results: Any, name: str, count: int) -> list[Any]:
    """The results as a list.

    Raises:
        WrongResults: They are not one for each item.
    """
    kind = type(results)
    if kind is list and len(results) == count:
        return list(results)  # the function may keep its own, and change it
    wanted = f"a list of {count} results is needed, one for each item in their order"
    if results is None:
        raise WrongResults(name, f"it returned None, and {wanted}: is its return missing?", size=count)
    if isinstance(results, _NO_LISTS) or not (isinstance(results, Sequence) or _like_a_list(results)):
        raise WrongResults(name, f"it returned a {kind.__name__}, and {wanted}", size=count)
    values = list(results)
    if len(values) != count:
        raise WrongResults(name, f"it returned {len(values)} results, and {wanted}", size=count)
    return values


def _like_a_list(results: Any) -> bool:
    """Whether it is something like an array or a tensor with a first axis."""
    if not hasattr(results, "__getitem__") or not hasattr(results, "__iter__") or hasattr(results, "columns"):
        return False  # a data frame would give the names of its columns
    with contextlib.suppress(TypeError):
        return len(results) >= 0
    return False  # without an axis


def _with_failures(results: list[Any], name: str) -> list[Any]:
    """The same, where exceptions among them are failures of their items."""
    wrapped, seen = [], set()
    for result in results:
        if not issubclass(type(result), BaseException):
            wrapped.append(result)
        elif id(result) in seen or result.__traceback__ is not None:  # it belongs to others, too
            wrapped.append(Failure(_failed(result, name, 1)))
        else:
            seen.add(id(result))
            wrapped.append(Failure(_for_one(result, name, 1)))
    return wrapped


def _failures(outcomes: list[Any]) -> int:
    return sum(type(outcome) is Failure for outcome in outcomes)


def _for_one(error: BaseException, name: str, size: int) -> Exception:
    """The error as one of several callers gets it.

    What belongs to one item is raised as it is. What several share is made anew for each of them: an exception object
    that is raised in several threads mixes up their tracebacks.
    """
    if isinstance(error, ModelGuardError):
        with contextlib.suppress(Exception):  # a subclass that cannot be copied
            again: ModelGuardError = copy.copy(error)
            again.__cause__ = error.__cause__
            return again
    # Futures refuse StopIteration; CancelledError and SystemExit would be taken for the caller's own.
    if size == 1 and isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return _failed(error, name, size)


def _failed(error: BaseException, name: str, size: int) -> BatchFailed:
    failed = BatchFailed(name, one_line(error), size=size)
    failed.__cause__ = error
    return failed


def one_line(error: BaseException) -> str:
    """Type and text of an error; the type alone where it cannot tell its text."""
    text = ""
    with contextlib.suppress(Exception):
        text = f": {error}".partition("\n")[0]
    return f"{type(error).__name__}{text}"


def _verdict(errors: list[BaseException], ignore: tuple[type[BaseException], ...]) -> Verdict:
    return "neither" if all(isinstance(error, (*_BLAMELESS, *ignore)) for error in errors) else "bad"
