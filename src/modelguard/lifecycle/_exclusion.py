"""Keeps recorded calls and other calls on one model apart, where calls have never run at the same time.

A batched function with one thread may use a model that is not thread-safe. A replay must not be the second thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

__all__ = ["Exclusion"]

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
        """Start with free locks, as a child after a fork must: the thread that held one does not exist there."""
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
