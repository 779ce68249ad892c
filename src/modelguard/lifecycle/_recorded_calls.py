"""The calls of one guard that a reload repeats: kept in memory, as copies, within bounds of number and size."""

from __future__ import annotations

import io
import pickle
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias

from modelguard.lifecycle._exclusion import Exclusion

if TYPE_CHECKING:
    from modelguard.lifecycle.replay import Replay

__all__ = ["RecordedCall", "RecordedCalls"]

_Function: TypeAlias = Callable[..., Any]
_Wrapper: TypeAlias = Callable[[_Function, Any, tuple[Any, ...], dict[str, Any]], Any]

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
        """Bytes."""
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
        """The calls, from the oldest to the latest."""
        with self._lock:
            return tuple(self._calls)

    def clear(self) -> None:
        """Forget them all."""
        with self._lock:
            self._calls.clear()
            self._size = 0
            self._first, self._next = self._rule.count, float("-inf")

    def after_fork_in_child(self) -> None:
        """Start with own locks. The thread that held one does not exist here."""
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
