"""The calls of one guard that a reload repeats: kept in memory, as copies, within bounds of number and size."""

from __future__ import annotations

import io
import pickle
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from modelguard.lifecycle._guard_options import Replay

M = TypeVar("M")

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


_Function: TypeAlias = Callable[..., Any]

#: The share of the time that may go into copying arguments, once the first calls are kept. As for readings of memory.
_SHARE = 0.01


class RecordedCall:
    """One call: its function, and a copy of its arguments without the model.

    It shows neither in its text. A method's instance is not copied and not kept alive.
    """

    __slots__ = ("_arguments", "_function")

    def __init__(self, function: _Function, arguments: bytes) -> None:
        self._function: Callable[[], _Function | None] = (
            weakref.WeakMethod(function) if isinstance(function, types.MethodType) else weakref.ref(function)
        )
        self._arguments = arguments

    @property
    def size(self) -> int:
        return len(self._arguments)

    def prepared(self) -> Callable[[Any], Any] | None:
        """What calls the function on a model with fresh arguments; None if the method's instance is gone.

        Raises:
            Exception: The arguments cannot be restored.
        """
        function = self._function()
        if function is None:
            return None
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

    Attributes:
        exclusion: Between these calls and others.
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
        self.exclusion = Exclusion(enclosing, rule.timeout)

    def __len__(self) -> int:
        return len(self._calls)

    def recording(self, call: _Wrapper) -> _Wrapper:
        """Make the body of a decorated function record its calls."""
        clock = self._clock

        def recorded(wrapped: _Function, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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

    def _record(self, function: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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


class _TooLarge(Exception):
    """The arguments are larger than all calls together may be."""


class _Bounded(io.BytesIO):
    def __init__(self, limit: int) -> None:
        super().__init__()
        self._left = limit

    def write(self, data: Any, /) -> int:
        self._left -= len(data) if isinstance(data, bytes) else memoryview(data).nbytes
        if self._left < 0:
            raise _TooLarge
        return super().write(data)


def _pickled(value: object, limit: int) -> bytes:
    """Pickle ``value``; stops at the limit, since copying gigabytes would hold up the call.

    Raises:
        Exception: It cannot be pickled, or is larger than ``limit`` bytes.
    """
    written = _Bounded(limit)
    pickle.Pickler(written, protocol=5).dump(value)
    return written.getvalue()
