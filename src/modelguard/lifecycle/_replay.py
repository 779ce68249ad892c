"""The calls of one guard that a reload repeats, and how a new model is compared with the current one by them.

They are kept in memory, as copies, within bounds of number and size.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import pickle
import statistics
import threading
import time
import types
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from modelguard.lifecycle._guard_options import Replay


# Keeps recorded calls and other calls on one model apart, where calls have never run at the same time.
#
# A batched function with one thread may use a model that is not thread-safe. A replay must not be the second thread.


_Wrapper: TypeAlias = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]


class Exclusion:
    """Lets plain functions and recorded calls take turns, until two calls have run at the same time.

    Args:
        enclosing: Is true in the context of a call on the same guard, which has its turn already.
        patience: The longest wait of a call, in seconds. The recorded call may wait for the very thread that waits.
    """

    def __init__(self, enclosing: ContextVar[Any], patience: float) -> None:
        self._enclosing = enclosing
        self._patience = patience
        self._overlap = False
        self._begun = self._ended = 0
        self.renew_locks()

    def renew_locks(self) -> None:
        self._turn = threading.Lock()
        self._counting = threading.Lock()
        self._ended = self._begun

    def taking_turns(self, call: _Wrapper) -> _Wrapper:
        """Make the body of a decorated plain function take its turn."""

        def in_turn(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._overlap or self._enclosing.get() or not self._take():
                return call(wrapped, instance, args, kwargs)
            turn = self._turn
            try:
                return call(wrapped, instance, args, kwargs)
            finally:
                turn.release()

        return in_turn

    @contextmanager
    def turn(self, timeout: float) -> Iterator[bool]:
        """Let no plain function run in the block, unless calls overlap anyway; false if the wait was too long."""
        if self._overlap:
            yield True
            return
        turn = self._turn
        with self._counting:
            self._begun += 1
        mine = turn.acquire(timeout=max(0.0, timeout))
        try:
            yield mine
        finally:
            if mine:
                turn.release()
            with self._counting:
                self._ended += 1

    def _take(self) -> bool:
        """Take a turn; false if there are none any more."""
        begun = self._begun  # read first, and compared again: whoever holds the turn may be gone by then
        replaying = begun != self._ended
        if self._turn.acquire(blocking=False):
            return True
        if (replaying or begun != self._begun) and self._turn.acquire(timeout=self._patience):
            return True
        self._overlap = True
        return False


#: The share of the time that may go into copying arguments, once the first calls are kept. As for readings of memory.
_SHARE = 0.01


class RecordedCall:
    """One call: its function, and a copy of its arguments without the model.

    It shows neither in its text. A method's instance is not copied and not kept alive.
    """

    __slots__ = ("_arguments", "_function")

    def __init__(self, function: Callable[..., Any], arguments: bytes) -> None:
        self._function: Callable[[], Callable[..., Any] | None] = (
            weakref.WeakMethod(function) if isinstance(function, types.MethodType) else weakref.ref(function)
        )
        self._arguments = arguments

    @property
    def size(self) -> int:
        return len(self._arguments)

    def prepared(self) -> Callable[[Any], Any]:
        """What calls the function on a model with fresh arguments.

        Raises:
            Exception: The arguments cannot be restored, or the method's instance is gone.
        """
        function = self._function()
        if function is None:
            raise ReferenceError
        args, kwargs = pickle.loads(self._arguments)  # noqa: S301 - it was pickled in this process, or in its parent
        return lambda model: function(model, *args, **kwargs)


class RecordedCalls:
    """Records calls of one guard, so that a reload can repeat them.

    The first calls are recorded one by one; after that, recording takes at most a hundredth of the time. Calls inside
    other calls, a warm-up or a replay are not recorded.

    Args:
        rule: Their bounds.
        enclosing: Is true in the context of a call on the same guard.
        clock: Seconds, to measure what recording costs.
    """

    def __init__(
        self, rule: Replay, enclosing: ContextVar[Any], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._rule = rule
        self._enclosing = enclosing
        self._clock = clock
        self._calls: deque[RecordedCall] = deque()
        self._size = 0
        self._first = rule.count  # attempts, successful or not, that are made at once
        self._next = float("-inf")
        self._lock = threading.Lock()
        self.exclusion = Exclusion(enclosing, rule.timeout)  # between these calls and others

    def __len__(self) -> int:
        return len(self._calls)

    def recording(self, call: _Wrapper) -> _Wrapper:
        """Make the body of a decorated function record its calls."""
        clock = self._clock

        def recorded(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if clock() >= self._next:
                self._record(wrapped, args, kwargs)
            return call(wrapped, instance, args, kwargs)

        return recorded

    def snapshot(self) -> tuple[RecordedCall, ...]:
        with self._lock:
            return tuple(self._calls)

    def clear(self) -> None:
        with self._lock:
            self._calls.clear()
            self._size = 0
            self._first, self._next = self._rule.count, float("-inf")

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()
        self.exclusion.renew_locks()
        self._size = sum(call.size for call in self._calls)

    def _record(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # If another thread records, this call is left out: no call waits for another one's copy.
        if self._enclosing.get() or not self._lock.acquire(blocking=False):
            return
        try:
            began = self._clock()
            with suppress(Exception):  # not every argument can be pickled, and the call itself goes on
                self._keep(RecordedCall(function, _pickled((args, kwargs), self._rule.max_memory)))
            self._first -= 1
            if self._first < 0:
                now = self._clock()
                self._next = now + (now - began) * (1 / _SHARE - 1)
        finally:
            self._lock.release()

    def _keep(self, call: RecordedCall) -> None:
        self._calls.append(call)
        self._size += call.size
        while len(self._calls) > self._rule.count or self._size > self._rule.max_memory:
            self._size -= self._calls.popleft().size


class _Bounded(io.BytesIO):
    """A file in memory that raises when more is written to it than the limit: the arguments are too large."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._left = limit

    def write(self, data: Any, /) -> int:
        self._left -= len(data) if isinstance(data, bytes) else memoryview(data).nbytes
        if self._left < 0:
            raise OverflowError
        return super().write(data)


def _pickled(value: object, limit: int) -> bytes:
    """Pickle ``value``; stops at the limit, since copying gigabytes would hold up the call.

    Raises:
        Exception: It cannot be pickled, or is larger than ``limit`` bytes.
    """
    written = _Bounded(limit)
    pickle.Pickler(written, protocol=5).dump(value)
    return written.getvalue()


#: Pairs of times from which a median is judged.
_ENOUGH = 10
#: Seconds. No call takes less, whatever a coarse clock says.
_SHORTEST = 1e-9


class _LeftOut(Exception):
    """The answer cannot be compared: it is a future."""


class _TimeIsUp(Exception):
    """The call has not ended in time."""


class Answer(NamedTuple):
    """How one call ended on one model."""

    value: Any  # what it returned, None if it raised
    error: str | None  # the type of what it raised; its text might show an input
    seconds: float  # how long it took
    ended: bool = True  # whether it has ended in time


def _ratio(new: float, current: float) -> float:
    return max(new, _SHORTEST) / max(current, _SHORTEST)


@dataclass
class Comparison:
    """What came of the recorded calls."""

    rule: Replay  # by which they are judged
    recorded: int  # how many there were
    compared: int = 0  # how many of them have an answer of the current model
    agreed: int = 0  # on how many of these the new model agrees
    errors: Counter[str] = field(default_factory=Counter)  # what calls on the new model raised, by type, with numbers
    #: The time of each call on the new model over that on the current one.
    ratios: list[float] = field(default_factory=list)
    cut_short: bool = False  # whether time was up before all calls had ended

    def add(self, new: Answer, current: Answer) -> None:
        """Compare two answers. What the current model cannot answer says nothing about the new one."""
        if current.error is not None or not current.ended:
            return
        ratio = _ratio(new.seconds, current.seconds)
        if not new.ended:  # so it takes longer than that
            self.ratios += [ratio] if self._is_too_slow(ratio) else []
            return
        self.compared += 1
        if new.error is not None:
            self.errors[new.error] += 1
            return
        self.ratios.append(ratio)
        try:
            self.agreed += bool(self.rule.same(new.value, current.value))
        except Exception as error:  # noqa: BLE001 - the rule's author sees it in the reason
            self.errors[f"{type(error).__name__} in same()"] += 1

    @property
    def slowdown(self) -> float | None:
        """The median of the ratios; None if there are too few, though time was not up."""
        enough = 1 if self.cut_short else _ENOUGH
        return statistics.median(self.ratios) if len(self.ratios) >= enough else None

    @property
    def objection(self) -> str | None:
        """Why the new model is rejected; None if it is not."""
        rule = self.rule
        differ, allowed = self.compared - self.agreed, rule.disagreements_allowed(self.compared)
        if differ > allowed:
            raised = ", ".join(f"{kind} {count} times" for kind, count in self.errors.most_common())
            raised = f" (raised: {raised})" if raised else ""
            return (
                f"{differ} of {self.compared} recorded calls answer otherwise than before{raised}, and "
                f"min_agreement={rule.min_agreement:g} allows {allowed}"
            )
        if self.too_slow:
            return (
                f"recorded calls take {self.slowdown:.1f} times as long as before (the median of {len(self.ratios)}), "
                f"and max_slowdown={rule.max_slowdown:g}"
            )
        return None

    @property
    def too_slow(self) -> bool:
        """Whether the median is more than the rule allows."""
        return self.slowdown is not None and self._is_too_slow(self.slowdown)

    def _is_too_slow(self, ratio: float) -> bool:
        return self.rule.max_slowdown is not None and ratio > self.rule.max_slowdown


class Side(NamedTuple):
    """One of two models that are compared."""

    model: object
    running: Callable[[], AbstractContextManager[None]]  # guarded functions that such a block calls run on it


def compare(
    calls: RecordedCalls,
    rule: Replay,
    clock: Callable[[], float],
    *,
    new: Side,
    current: Side,
    retired: Callable[[], bool],
) -> Comparison:
    """Run the recorded calls on both models, in turn, until time is up or nobody takes calls from the current one.

    What seems slow gets as much time again: a large model would be judged by its first calls alone otherwise.
    """
    end = clock() + rule.timeout
    recorded = calls.snapshot()
    found = Comparison(rule, len(recorded))
    with asyncio.Runner() as runner:
        both = _Both(runner, clock, end, new, current, calls.exclusion)
        timed: list[tuple[RecordedCall, float]] = []  # as many as there are ratios
        for number, call in enumerate(recorded):
            if clock() >= end or retired():
                break
            seconds = both.compare(call, found, new_first=bool(number % 2))
            timed += [(call, seconds)] * (len(found.ratios) - len(timed))
        found.cut_short = clock() >= end
        if found.too_slow:
            both._replace(end=clock() + rule.timeout).time_again(timed, found, retired)
    return found


class _Both(NamedTuple):
    """Runs calls on both models to their end, whatever kind of function they are of."""

    runner: asyncio.Runner  # runs coroutines, all of them on one loop
    clock: Callable[[], float]  # measures the calls
    end: float  # when time is up, on that clock
    new: Side
    current: Side  # the one that takes calls
    exclusion: Exclusion  # between these calls and others on the current one

    def compare(self, call: RecordedCall, found: Comparison, *, new_first: bool) -> float:
        """Take turns: the second one finds the caches warm. The answers are gone when this returns.

        Returns:
            The time that the current model took, in seconds.
        """
        if new_first:
            new = self._on_new(call)
            current = None if new is None else self._on_current(call)
        else:
            current = self._on_current(call)
            new = None if current is None or current.error is not None else self._on_new(call)
        if new is not None and current is not None:
            found.add(new, current)
        return 0.0 if current is None else current.seconds

    def time_again(
        self, timed: list[tuple[RecordedCall, float]], found: Comparison, retired: Callable[[], bool]
    ) -> None:
        """Time the new model on inputs that it has met, as the current one has: what it caches is there now."""
        for number, (call, current) in enumerate(timed):
            if self.clock() >= self.end or retired():
                break
            again = self._on_new(call)
            if again is not None and again.ended and again.error is None:
                found.ratios[number] = min(found.ratios[number], _ratio(again.seconds, current))

    def _on_new(self, call: RecordedCall) -> Answer | None:
        # It needs no turn, but waits for one, as the other does, so that both are timed after a wait.
        with self.exclusion.turn(self.end - self.clock()):
            pass
        return self._answer(call, self.new)

    def _on_current(self, call: RecordedCall) -> Answer | None:
        with self.exclusion.turn(self.end - self.clock()) as free:
            return self._answer(call, self.current) if free else None

    def _answer(self, call: RecordedCall, side: Side) -> Answer | None:
        """The answer of a model; None if there is none to compare."""
        with side.running():
            try:
                prepared = call.prepared()
            except Exception:  # noqa: BLE001 - whatever an argument raises when it is restored
                return None
            began = self.clock()
            try:
                value = self._finish(prepared(side.model))
            except _LeftOut:
                return None
            except _TimeIsUp:
                return Answer(None, None, self.clock() - began, ended=False)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - an answer like any other
                return Answer(None, type(error).__name__, self.clock() - began)
            return Answer(value, None, self.clock() - began)

    def _finish(self, result: Any) -> Any:
        """What a result amounts to: lazy ones do their work here."""
        kind = type(result)
        if inspect.iscoroutine(result):
            return self._run(result)
        if hasattr(kind, "__anext__"):
            return self._run(self._listed(result))
        if hasattr(kind, "__next__"):
            return [self._in_time(item) for item in result]
        if hasattr(kind, "add_done_callback"):
            raise _LeftOut
        return result

    async def _listed(self, items: AsyncIterator[Any]) -> list[Any]:
        return [self._in_time(item) async for item in items]

    def _in_time(self, item: Any) -> Any:
        if self.clock() >= self.end:
            raise _TimeIsUp
        return item

    def _run(self, coroutine: Awaitable[Any]) -> Any:
        """Run a coroutine in the context of this call, which knows its generation."""

        async def bounded() -> Any:
            limit = asyncio.timeout(max(0.0, self.end - self.clock()))
            try:
                async with limit:
                    return await coroutine
            except TimeoutError:
                if limit.expired():
                    raise _TimeIsUp from None
                raise

        return self.runner.run(bounded(), context=copy_context())
