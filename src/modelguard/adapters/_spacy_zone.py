"""Turns in a pipeline's memory zone: one call at a time, each in a zone of its own.

Why calls do not share a zone: spaCy makes a lexeme by running Python code, so two threads in one zone can make the
same lexeme twice. At the zone's end it is cleared twice, and each time that uses up one empty cell of spaCy's hash
table without counting it. When no cell is left, the next look-up of a new word never ends, and it holds the GIL: four
threads with the same 400 new words in shared zones froze the whole process after four minutes (spaCy 3.8.18,
preshed 3.0.15). A zone of its own costs a call 17 microseconds.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from modelguard.errors import Overloaded

if TYPE_CHECKING:
    from types import TracebackType

    from spacy.language import Language

Turn = Future[None]


class Zone:
    """The turns of one pipeline. It keeps the pipeline alive only while a call is inside.

    Attributes:
        epoch: How often this process was born by a fork since the zone was made.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._opened: tuple[Language, AbstractContextManager[Any]] | None = None
        self._renew()

    def _renew(self) -> None:
        # Reentrant, because a coroutine that the garbage collector finds dropped leaves from wherever it runs.
        self._lock = threading.RLock()
        self._waiting: deque[Turn] = deque()
        self._turn: Turn | None = None
        self._inside = 0
        self._thread: int | None = None

    def line_up(self) -> Turn:
        """Queue for a turn. It is the caller's when it is done."""
        turn: Turn = Future()
        turn.set_running_or_notify_cancel()  # so that a cancelled waiter cannot cancel it
        with self._lock:
            self._waiting.append(turn)
            self._call_next()
        return turn

    def join(self, *, waits: bool) -> bool:
        """Go inside beside the call that has the turn, if this is a part of it.

        Args:
            waits: Whether the caller would block its thread. On the thread of the event loop whose coroutine is inside
                it may join as well: that coroutine stands still, and could not leave before the caller is done.
        """
        with self._lock:
            if not self._inside:
                return False
            part = any(stay.zone is self for stay in _stays())
            part = part or (waits and self._thread == threading.get_ident() and _on_event_loop())
            self._inside += part
            return part

    def open(self, language: Language) -> Any:
        """Open the zone, for the one whose turn it is; returns the pool that its lexemes and strings live in."""
        manager = language.memory_zone()
        self._opened = language, manager
        pool = manager.__enter__()
        with self._lock:
            self._inside, self._thread = 1, threading.get_ident()
        return pool

    def leave(self) -> None:
        """Go outside; the last to do so closes the zone."""
        with self._lock:
            self._inside -= 1
            if self._inside:
                return
        self._close()

    def give_up(self, turn: Turn) -> None:
        """Return a turn that was not used, whether it has come or not."""
        with self._lock:
            if self._turn is not turn:
                with suppress(ValueError):  # a child that was forked meanwhile has a queue of its own
                    self._waiting.remove(turn)
                return
        self._close()

    def _close(self) -> None:
        try:
            if self._opened is not None:
                self._opened[1].__exit__(None, None, None)
        finally:
            self._opened = None
            with self._lock:
                self._inside, self._turn = 0, None
                self._call_next()

    def _call_next(self) -> None:
        if self._turn is None and self._waiting:
            self._turn = self._waiting.popleft()
            self._turn.set_result(None)

    def after_fork_in_child(self) -> None:
        """Only the forking thread lives on: what it is inside of stays open, and what others had open is closed."""
        self._renew()
        self.epoch += 1
        mine = [stay for stay in _stays() if stay.zone is self]
        for stay in mine:
            stay.epoch = self.epoch
        if mine:
            self._inside, self._thread, self._turn = len(mine), threading.get_ident(), Future()
        elif self._opened is not None:
            language, manager = self._opened
            self._opened = None
            with suppress(Exception):  # the other thread may have been in the middle of opening or closing it
                manager.__exit__(None, None, None)
            with language.memory_zone():
                pass  # its end clears all that is transient, whoever made it


class Stay:
    """One call's time inside a pipeline's zone. Serves once, for ``with`` or ``async with``.

    Attributes:
        zone: The zone.
        outer: The stay that it is nested in, of whatever zone.
        inside: Whether it has begun and not ended.
        epoch: The zone's epoch in which it began.
    """

    def __init__(self, language: Language, *, timeout: float, guard: str) -> None:
        self.zone = _zone_of(language)
        self.outer: Stay | None = None
        self.inside = False
        self.epoch = 0
        self._language = language
        self._timeout = timeout
        self._guard = guard
        self._pool: Any = None

    def __enter__(self) -> None:
        if not self.zone.join(waits=True):
            turn = self.zone.line_up()
            try:
                turn.result(self._timeout)
                self._pool = self.zone.open(self._language)
            except BaseException as error:
                self._give_up(turn, error)
                raise
        self._begin()

    async def __aenter__(self) -> None:
        if not self.zone.join(waits=False):
            turn = self.zone.line_up()
            try:
                if not turn.done():
                    await asyncio.wait_for(asyncio.wrap_future(turn), self._timeout)
                self._pool = self.zone.open(self._language)
            except BaseException as error:
                self._give_up(turn, error)
                raise
        self._begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The frames of a traceback hold on to documents, and error reporters print what frames hold. As long as such
        # a frame lives, so does this stay, and with it the memory that the documents point into.
        if error is None:
            self._pool = None
        self._end()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def _give_up(self, turn: Turn, error: BaseException) -> None:
        self.zone.give_up(turn)
        if isinstance(error, TimeoutError):
            raise Overloaded(
                f"guard {self._guard!r}: other calls were in the pipeline's memory zone for {self._timeout:g} s, "
                "and one call runs there at a time"
            ) from None

    def _begin(self) -> None:
        del self._language  # a context that was copied inside keeps this stay, and must not keep the pipeline
        self.outer = _current.get()
        self.epoch = self.zone.epoch
        self.inside = True
        self._token: Token[Stay | None] = _current.set(self)

    def _end(self) -> None:
        self.inside = False
        with suppress(ValueError):  # ended in another context than it began in, as dependency injectors do
            _current.reset(self._token)
        if self.epoch == self.zone.epoch:
            self.zone.leave()


_current: ContextVar[Stay | None] = ContextVar("modelguard stay", default=None)

_zones: WeakKeyDictionary[Language, Zone] = WeakKeyDictionary()


def _stays() -> Iterator[Stay]:
    """The stays that the running code is inside of. A task that was started inside may have outlived some."""
    stay = _current.get()
    while stay is not None:
        if stay.inside:
            yield stay
        stay = stay.outer


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _zone_of(language: Language) -> Zone:
    zone = _zones.get(language)
    return _zones.setdefault(language, Zone()) if zone is None else zone


def _after_fork_in_child() -> None:
    for zone in list(_zones.values()):
        zone.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
