"""``deadline``; and requests, which bound the batched calls made for them and may have them called off."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Protocol

from modelguard import _units

__all__ = ["Call", "Request", "Scope", "current", "deadline", "left", "serving"]

clock = time.monotonic

#: A request that makes more calls than that has those forgotten that have their answers.
_MANY = 64


class Call(Protocol):
    """A call under way."""

    @property
    def done(self) -> bool:
        """Whether it has its answer."""
        ...

    def hang_up(self) -> object:
        """Nobody waits for its answer any more."""


class Request:
    """One request of a web service: bounds its batched calls, and calls them off once its client is gone.

    When it has been answered it does neither any more: what it has left behind, such as a background task, lives on in
    its context. Safe from any thread.

    Args:
        bound: Seconds that it has from now; None for no bound.
        begin: Called when the first call is made that could be called off: from now on it is worth watching the client.
    """

    def __init__(self, bound: float | None = None, begin: Callable[[], object] | None = None) -> None:
        self._lock = threading.Lock()
        self._deadline = math.inf if bound is None else clock() + bound
        self._begin = begin
        self._calls: list[Call] = []
        self._answered = False
        self.gone = False

    @property
    def deadline(self) -> float:
        """On the monotonic clock; infinity for none."""
        return math.inf if self._answered else self._deadline

    @property
    def called_off(self) -> bool:
        """Whether the client is gone without its answer: nothing more is to be computed for it."""
        return self.gone and not self._answered

    def add(self, call: Call) -> None:
        """Call this one off when the client is gone; at once if it is gone already."""
        with self._lock:
            if self._answered:
                return
            gone = self.gone
            if len(self._calls) >= _MANY:
                self._calls = [call for call in self._calls if not call.done]
            self._calls.append(call)
            begin, self._begin = self._begin, None
        if gone:
            call.hang_up()
        elif begin is not None:
            with contextlib.suppress(RuntimeError):  # its event loop is closed
                begin()

    def hang_up(self) -> None:
        """The client is gone: call off what it waits for, and what it may still ask for."""
        with self._lock:
            if self._answered:
                return
            self.gone = True
            calls, self._calls = self._calls, []
        for call in calls:
            call.hang_up()

    def end(self) -> None:
        """The client has its answer."""
        with self._lock:
            self._answered = True
            self._calls, self._begin = [], None


@dataclass(frozen=True, slots=True)
class Scope:
    """What holds for the calls made in this context.

    Attributes:
        deadline: Seconds on the monotonic clock by which they must have their answers; infinity for no bound.
        request: The request for which they are made.
        inside: The batchers whose batch functions run here, or wait for what runs here.
    """

    deadline: float = math.inf
    request: Request | None = None
    inside: frozenset[object] = frozenset()

    @property
    def until(self) -> float:
        """The nearest deadline."""
        return self.deadline if self.request is None else min(self.deadline, self.request.deadline)


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
def serving(request: Request) -> Iterator[None]:
    """Make the batched calls inside the block for ``request``."""
    token = current.set(replace(current.get() or _OPEN, request=request))
    try:
        yield
    finally:
        current.reset(token)


def left() -> float | None:
    """Seconds until the deadline of this context, negative once it has passed; None where there is none.

    For what the batched call is only a part of: the timeout of a query that comes before it, say.
    """
    scope = current.get()
    return None if scope is None or scope.until == math.inf else scope.until - clock()
