"""``deadline``: what bounds the calls made inside a block, and who can call them off."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Protocol

from modelguard import _units

__all__ = ["Call", "Hangup", "Scope", "current", "deadline", "hangup", "left"]

clock = time.monotonic

#: A request that makes more calls than that has those forgotten that have their answers.
_MANY = 64


class Call(Protocol):
    """A call under way."""

    @property
    def done(self) -> bool:
        """Whether it has its answer."""

    def hang_up(self) -> object:
        """Nobody waits for its answer any more."""


class Hangup:
    """Calls off the batched calls of one request, once its client is gone. Safe from any thread.

    Args:
        begin: Called when the first call is made that could be called off: from now on it is worth watching the client.
    """

    def __init__(self, begin: Callable[[], object] | None = None) -> None:
        self._lock = threading.Lock()
        self._begin = begin
        self._calls: list[Call] = []
        self.gone = False

    def add(self, call: Call) -> None:
        """Call this one off when the client is gone; at once if it is gone already."""
        with self._lock:
            gone = self.gone
            if len(self._calls) >= _MANY:
                self._calls = [call for call in self._calls if not call.done]
            self._calls.append(call)
            begin, self._begin = self._begin, None
        if gone:
            call.hang_up()
        elif begin is not None:
            begin()

    def hang_up(self) -> None:
        """The client is gone: call off what it waits for, and what it may still ask for."""
        with self._lock:
            self.gone = True
            calls, self._calls = self._calls, []
        for call in calls:
            call.hang_up()


@dataclass(frozen=True, slots=True)
class Scope:
    """What holds for the calls made in this context.

    Attributes:
        deadline: Seconds on the monotonic clock by which they must have their answers; infinity for no bound.
        hangup: Who can call them off.
        inside: The batcher whose batch function runs in this context.
    """

    deadline: float = math.inf
    hangup: Hangup | None = None
    inside: object = None


_OPEN = Scope()

#: None outside of every block: one cheap look for the calls that are not bounded.
current: ContextVar[Scope | None] = ContextVar("modelguard scope", default=None)


@contextmanager
def deadline(timeout: _units.Duration) -> Iterator[None]:
    """Bound the batched calls inside the block: they must have their answers within ``timeout`` from now.

    Blocks nest, and an inner one can only shorten. The bound follows the context into tasks and into threads that were
    started with it (``asyncio.to_thread``, Starlette's thread pool), not into other threads.

    Args:
        timeout: From the entry of the block; zero lets nothing through.

    Raises:
        InvalidOption: It is negative, not a number, or cannot be read.
        DeadlineExceeded: From the calls inside, when the time is over.
    """
    outer = current.get() or _OPEN
    until = min(outer.deadline, clock() + _units.seconds(timeout, "timeout", zero=True))
    token = current.set(replace(outer, deadline=until))
    try:
        yield
    finally:
        current.reset(token)


@contextmanager
def hangup(wire: Hangup) -> Iterator[None]:
    """Have ``wire`` call off the batched calls inside the block."""
    token = current.set(replace(current.get() or _OPEN, hangup=wire))
    try:
        yield
    finally:
        current.reset(token)


def left() -> float | None:
    """Seconds until the deadline of this context, negative once it has passed; None where there is none.

    For what the batched call is only a part of: the timeout of a query that comes before it, say.
    """
    scope = current.get()
    return None if scope is None or scope.deadline == math.inf else scope.deadline - clock()
