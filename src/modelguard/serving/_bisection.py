"""A batch raised: find the items at fault with few runs, and answer the others."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol

from modelguard import _units
from modelguard.errors import BatchFailed, ModelGuardError, Overloaded, WrongResults
from modelguard.serving._requests import Failure

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
class Known:
    """What is known of a bad item.

    Attributes:
        error: A copy of what it failed with; None if that cannot be copied.
        text: What it failed with, in one line.
        times: How often it has failed.
        until: Up to when it is not computed again, in seconds on the batcher's clock.
    """

    error: Exception | None
    text: str
    times: int
    until: float

    def certain(self, now: float) -> bool:
        """Whether it has failed so often that it is not computed again now."""
        return self.times >= _CERTAIN and now < self.until


class Suspects:
    """What one batch function has learned about bad items. Thread-safe."""

    def __init__(self) -> None:
        self.renew_lock()
        self._known: OrderedDict[Hashable, Known] = OrderedDict()
        self._trust = 1.0

    def renew_lock(self) -> None:
        """In a forked child: a thread of the parent may have held the lock."""
        self._lock = threading.RLock()  # reentrant: items compare by code of their own

    def __bool__(self) -> bool:
        return bool(self._known)

    def find(self, item: Any, group: Hashable) -> Known | None:
        """What is known of an item, if it has failed with these keyword arguments."""
        try:
            return self._known.get(_key(item, group))
        except Exception:  # noqa: BLE001 - items need not be hashable, nor comparable
            return None

    def failed(self, item: Any, group: Hashable, error: Exception, text: str, now: float) -> None:
        """Remember that an item failed by itself."""
        try:
            key = _key(item, group)
            with self._lock:
                before = self._known.pop(key, None)
                times = 1 if before is None else before.times + 1
                pause = min(_SECONDS * 2.0 ** max(times - _CERTAIN, 0), _LONGEST)
                self._known[key] = Known(_copied(error), text, times, now + pause)
                if len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)
        except Exception:  # noqa: BLE001 - as above
            return

    def succeeded(self, item: Any, group: Hashable) -> None:
        """Forget an item that did not fail."""
        try:
            with self._lock:
                self._known.pop(_key(item, group), None)
        except Exception:  # noqa: BLE001 - as above
            return

    @property
    def trusts_tracebacks(self) -> bool:
        """Whether the items that tracebacks named were mostly the bad ones."""
        return self._trust >= _TRUSTED

    def traceback_was(self, *, right: bool) -> None:
        """Note whether a batch succeeded without the items that tracebacks named."""
        self._trust += _STEP * (right - self._trust)


def named_by(error: BaseException, items: Sequence[Any]) -> list[int]:
    """Which of the items the innermost function in an error's traceback worked on; none if it says nothing.

    A function that works on one item at a time has it among its local variables.
    """
    places = {id(item): at for at, item in enumerate(items) if not isinstance(item, _SHARED)}
    frames: list[TracebackType] = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    for frame in reversed(frames):
        found = {places[id(value)] for value in frame.tb_frame.f_locals.values() if id(value) in places}
        if found:
            return sorted(found) if len(found) < len(items) else []
    return []


def _key(item: Any, group: Hashable) -> Hashable:
    kind = type(item)
    if isinstance(item, str | bytes) and len(item) > _LONG:
        return kind, len(item), hash(item), group
    hash(item)
    return kind, item, group


def _copied(error: Exception) -> Exception | None:
    try:
        again = copy.copy(error)
    except Exception:  # noqa: BLE001 - an error whose class does not take its own arguments
        return None
    return again if type(again) is type(error) else None


#: Of so many items that were found bad, one run tests about as many that it succeeds every second time: ln 2.
_EVEN = 0.7


class Run(Protocol):
    """Runs the batch function on some items of the batch, by their numbers."""

    def __call__(self, part: list[int]) -> BaseException | None:
        """Run it, and keep the results. Returns what it raised."""


class Isolation:
    """Runs parts of a batch that raised, until each error belongs to one item or the model turns out to be at fault.

    * The innermost function in the traceback often works on a single item. The others run without it first: if they
      succeed, one run was enough.
    * Otherwise halves: of a part that raised, one half runs. If it succeeds, the other half holds the item at fault,
      and is halved without a run of its own. If it raises, nothing is known of the other half any more, and it runs
      later, with all others like it.
    * If nothing has succeeded after ``2 log2(n) + 1`` runs, the model is at fault. There are never more than
      ``4 log2(n) + 4`` runs: with more bad items than can be found with these, the rest is refused.

    Args:
        run: Runs a part.
        live: Whether an item's caller still waits.
        items: All items.
        trust: Whether to believe tracebacks.
        breaks: Whether an error concerns the whole batch, so that every other part would get it as well.
    """

    def __init__(
        self,
        run: Run,
        live: Callable[[int], bool],
        items: list[Any],
        *,
        trust: bool,
        breaks: Callable[[BaseException], bool],
    ) -> None:
        self._run = run
        self._live = live
        self._items = items
        self._trust = trust
        self._breaks = breaks
        self.bad: dict[int, BaseException] = {}
        self.unfound: list[int] = []
        self.broken: dict[int, BaseException] = {}
        self.succeeded = False
        self.named_right: bool | None = None
        self.reruns = 0
        self._parts_failed = 0

    def find(self, part: list[int], error: BaseException) -> None:
        """Answer all items of a part that raised this error.

        Afterwards ``bad`` has the items at fault with their errors, ``broken`` those that failed with all others, and
        ``unfound`` those that were not told apart.
        """
        bits = (len(part) - 1).bit_length()
        self._first, self._most, self._most_failures = error, 4 * bits + 4, 2 * bits + 1
        if self._trust:
            part, error = self._leave_out_named(part, error)
        suspected, raised, rest = part, 1, list[int]()
        while suspected or rest:
            if not self.succeeded and self.reruns >= self._most_failures:
                self._all_fail([*suspected, *rest])
                return
            if self.reruns >= self._most:
                self.unfound = [at for at in (*suspected, *rest) if self._live(at)]
                return
            living = [at for at in suspected if self._live(at)]
            if len(living) < len(suspected):  # the item at fault may be among those that are gone
                suspected, rest = [], living + rest
                continue
            rest = [at for at in rest if self._live(at)]
            if not suspected:
                size = self._even_size(len(rest))
                suspected, rest, raised = rest[:size], rest[size:], 1
                failed = self._try(suspected) if suspected else None
                if failed is None:
                    suspected = []
                else:
                    error = failed
                continue
            if len(suspected) == 1:
                self._judge(suspected[0], error, certain=raised > 1)
                suspected = []
                continue
            half = suspected[: len(suspected) // 2]
            failed = self._try(half)
            if failed is None:
                suspected = suspected[len(half) :]
            else:
                suspected, rest, raised, error = half, suspected[len(half) :] + rest, raised + 1, failed

    def _leave_out_named(self, part: list[int], error: BaseException) -> tuple[list[int], BaseException]:
        """Run the part without what the traceback names, again and again. Returns a part that still raises, if any."""
        named: dict[int, BaseException] = {}
        while part and len(named) <= 2 + len(self._items) // 8:
            found = [part[at] for at in named_by(error, [self._items[at] for at in part])]
            if len(found) != 1:
                break
            named[found[0]] = error
            part = [at for at in part if at not in named and self._live(at)]
            failed = self._try(part) if part else None
            if failed is None:
                self.named_right = True
                self.bad.update(named)
                return [], error
            error = failed
        if named:
            self.named_right = False
            for at, its_error in named.items():
                if self._live(at):
                    self._judge(at, its_error, certain=False)
        return part, error

    def _judge(self, at: int, error: BaseException, *, certain: bool) -> None:
        """The item at fault, if the run that raised was not an accident: it fails by itself too."""
        failed: BaseException | None = error if certain else self._try([at])
        if failed is not None and at not in self.broken:
            self.bad[at] = failed

    def _try(self, part: list[int]) -> BaseException | None:
        self.reruns += 1
        failed = self._run(part)
        if failed is None:
            self.succeeded = True
            return None
        self._parts_failed += 1
        if self._breaks(failed):
            self.broken.update(dict.fromkeys(part, failed))
            return None
        return failed

    def _all_fail(self, part: list[int]) -> None:
        self.broken.update(dict.fromkeys([at for at in part if self._live(at)], self._first))

    def _even_size(self, count: int) -> int:
        """How many items, about which nothing is known, run together."""
        found = len(self.bad)
        if found <= 1:
            return count
        tested = max(len(self._items) - count, 1)
        return max(1, min(count, int(_EVEN * tested / found)))


# What a batch function returned or raised, as outcomes of its items: results are checked, errors are made for each.


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
