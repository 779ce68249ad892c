"""What a batch function returned or raised, as outcomes of its items: results are checked, errors are made for each."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal

from modelguard import _units
from modelguard.errors import BatchFailed, ModelGuardError, Overloaded, WrongResults
from modelguard.serving._requests import Failure
from modelguard.serving._suspects import Known

__all__ = [
    "batch_failed",
    "check_results",
    "count_failures",
    "error_for_caller",
    "explain_list_item",
    "failed_again",
    "not_told_apart",
    "one_line",
    "wrap_errors",
]

#: These have a length, and still are not lists of results.
_NOT_LISTS = (Mapping, AbstractSet, str, bytes, bytearray, memoryview)

_LIST_ITEM = "The item of this call is a list. If many items were meant, write f.map(items)."


def check_results(results: Any, name: str, count: int, how: Literal["returned", "yielded"] = "returned") -> list[Any]:
    """The results, or the parts of results that were yielded, as a list.

    Raises:
        WrongResults: There is not one for each item.
    """
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


def wrap_errors(results: list[Any], name: str, items: list[Any]) -> list[Any]:
    """The same results, with the exceptions among them wrapped as failures."""
    wrapped: list[Any] = []
    seen: set[int] = set()
    for result, item in zip(results, items, strict=True):
        if not issubclass(type(result), BaseException):
            wrapped.append(result)
        elif id(result) in seen or result.__traceback__ is not None:  # another caller gets it as well
            wrapped.append(Failure(batch_failed(result, name, 1)))
        else:
            seen.add(id(result))
            wrapped.append(Failure(error_for_caller(result, name, [item])))
    return wrapped


def count_failures(outcomes: list[Any]) -> int:
    return sum(type(outcome) is Failure for outcome in outcomes)


def error_for_caller(error: BaseException, name: str, items: list[Any]) -> Exception:
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
        explain_list_item(error, items[0])
        return error
    return batch_failed(error, name, len(items))


def explain_list_item(error: Exception, item: Any) -> None:
    """Add a note where a list was probably passed by mistake for many items."""
    if type(item) is not list or not isinstance(error, AttributeError | TypeError):
        return
    if _LIST_ITEM not in getattr(error, "__notes__", ()):  # the function may raise the same object again
        error.add_note(_LIST_ITEM)


def failed_again(name: str, known: Known) -> Exception:
    """The error for an item that has just failed by itself, and is not computed again."""
    why = "This item has failed before. It was not computed again."
    if known.error is not None:
        with contextlib.suppress(Exception):
            again = copy.copy(known.error)
            again.add_note(why)
            return again
    return BatchFailed(name, f"{known.text}. {why}", size=1)


def batch_failed(error: BaseException, name: str, size: int) -> BatchFailed:
    failed = BatchFailed(name, one_line(error), size=size)
    failed.__cause__ = error
    return failed


def one_line(error: BaseException) -> str:
    """Type and text of an error in one line; the type alone if its ``__str__`` fails."""
    text = ""
    with contextlib.suppress(BaseException):  # whatever its __str__ raises, its callers get their answers
        text = f": {error}".partition("\n")[0]
    return _units.printable(f"{type(error).__name__}{text}")


def not_told_apart(name: str, runs: int, error: BaseException) -> Overloaded:
    why = f"several items of a batch fail, and {runs} more runs were not enough to tell which"
    refused = Overloaded(f"{name}(): {why}: {one_line(error)}. Try again.")
    refused.__cause__ = error
    return refused
