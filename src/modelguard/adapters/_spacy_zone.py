"""Exclusive access to a pipeline's memory zone: one call at a time, each in its own zone.

Calls do not share a zone for this reason: spaCy makes a lexeme by running Python code, so two threads in one zone can
make the same lexeme twice. At the end of the zone it is cleared twice, and each time this uses up one empty cell of
spaCy's hash table without counting it. When no cell is left, the next look-up of a new word never ends, and it holds
the GIL: four threads with the same 400 new words in shared zones froze the whole process after four minutes (spaCy
3.8.18, preshed 3.0.15). A separate zone for each call costs 17 microseconds per call.
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
from modelguard.lifecycle import _in_thread

if TYPE_CHECKING:
    from types import TracebackType

    from spacy.language import Language


class Waiter:
    """A call that waits for the zone.

    Attributes:
        admitted: Done when the call may enter.
        thread: The thread of the event loop that the call needs before it can enter; None if it blocks its own thread.
    """

    __slots__ = ("admitted", "thread")

    def __init__(self, thread: int | None) -> None:
        self.thread = thread
        self.renew()

    def renew(self) -> None:
        """Begin to wait, or wait again."""
        self.admitted: Future[None] = Future()
        self.admitted.set_running_or_notify_cancel()  # so that a cancelled task cannot cancel it


class ZoneLock:
    """Admits one call after the other to the zone of a pipeline. It refers to the pipeline only while a call is inside.

    Attributes:
        epoch: The number of forks between the process that made this object and the current process.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._opened: tuple[Language, AbstractContextManager[Any]] | None = None
        self._renew()

    def _renew(self) -> None:
        # Reentrant, because the garbage collector may end a coroutine inside the zone in any thread at any time.
        self._lock = threading.RLock()
        self._waiting: deque[Waiter] = deque()
        self._admitted: Waiter | None = None
        self._inside = 0
        self._thread: int | None = None

    def enqueue(self, *, blocks: bool) -> Waiter:
        """Queue for the zone. The caller may open the zone when it is admitted.

        Args:
            blocks: Whether the caller blocks its thread. If so, it goes before the coroutines of that thread's event
                loop: they cannot enter while the loop is blocked.
        """
        me = threading.get_ident()
        waiter = Waiter(None if blocks else me)
        with self._lock:
            if blocks and self._admitted is not None and self._admitted.thread == me and not self._inside:
                self._admitted.renew()
                self._waiting.appendleft(self._admitted)
                self._admitted = None
            place = next((at for at, other in enumerate(self._waiting) if blocks and other.thread == me), None)
            self._waiting.insert(len(self._waiting) if place is None else place, waiter)
            self._admit_next()
        return waiter

    def is_admitted(self, waiter: Waiter) -> bool:
        """Whether the waiter may open the zone now."""
        return self._admitted is waiter

    def join(self, *, waits: bool) -> bool:
        """Enter together with the call that is inside, if the caller is a part of that call.

        Args:
            waits: Whether the caller would block its thread. If so, it may also join on the thread of the event loop
                whose coroutine is inside: that coroutine is suspended, and could not leave before the caller is done.
        """
        with self._lock:
            if not self._inside:
                return False
            part = any(context.zone is self for context in _entered())
            part = part or (waits and self._thread == threading.get_ident() and _on_event_loop())
            self._inside += part
            return part

    def open(self, language: Language) -> Any:
        """Open the zone, for the admitted waiter; returns the pool that holds its lexemes and strings."""
        manager = language.memory_zone()
        self._opened = language, manager
        pool = manager.__enter__()
        with self._lock:
            self._inside, self._thread = 1, threading.get_ident()
        return pool

    def leave(self) -> None:
        """Leave the zone; the last one to leave closes it."""
        with self._lock:
            self._inside -= 1
            if self._inside:
                return
        self._close()

    def withdraw(self, waiter: Waiter) -> None:
        """Remove a waiter that has not opened the zone, whether it was admitted or not."""
        with self._lock:
            if self._admitted is not waiter:
                with suppress(ValueError):  # a child that was forked in the meantime has its own queue
                    self._waiting.remove(waiter)
                return
        self._close()

    def _close(self) -> None:
        try:
            if self._opened is not None:
                self._opened[1].__exit__(None, None, None)
        finally:
            self._opened = None
            with self._lock:
                self._inside, self._admitted = 0, None
                self._admit_next()

    def _admit_next(self) -> None:
        if self._admitted is None and self._waiting:
            self._admitted = self._waiting.popleft()
            self._admitted.admitted.set_result(None)

    def after_fork_in_child(self) -> None:
        """Keep the zone open if the forking thread is inside; close it if another thread was."""
        self._renew()
        self.epoch += 1
        mine = [context for context in _entered() if context.zone is self]
        for context in mine:
            context.epoch = self.epoch
        if mine:
            self._inside, self._thread, self._admitted = len(mine), threading.get_ident(), Waiter(None)
        elif self._opened is not None:
            language, manager = self._opened
            self._opened = None
            with suppress(Exception):  # the other thread may have been in the middle of opening or closing it
                manager.__exit__(None, None, None)
            with language.memory_zone():
                pass  # its end clears all transient entries, whoever made them


class ZoneContext:
    """A call's use of a pipeline's zone, for one ``with`` or ``async with``.

    Attributes:
        zone: The lock of the zone.
        outer: The context that it is nested in, of any zone.
        inside: Whether it has begun and not ended.
        epoch: The lock's epoch in which it began.
    """

    def __init__(self, language: Language, *, timeout: float, guard: str) -> None:
        self.zone = _zone_of(language)
        self.outer: ZoneContext | None = None
        self.inside = False
        self.epoch = 0
        self._language = language
        self._timeout = timeout
        self._guard = guard
        self._pool: Any = None

    def __enter__(self) -> None:
        if not self.zone.join(waits=True):
            waiter = self.zone.enqueue(blocks=True)
            try:
                waiter.admitted.result(self._timeout)
                self._pool = self.zone.open(self._language)
            except BaseException as error:
                self._withdraw(waiter, error)
                raise
        self._begin()

    async def __aenter__(self) -> None:
        if not self.zone.join(waits=False):
            _in_thread.require_asyncio("a spaCy zone in a coroutine")
            waiter = self.zone.enqueue(blocks=False)
            try:
                async with asyncio.timeout(self._timeout):
                    while not self.zone.is_admitted(waiter):  # a plain call on the loop may go first
                        await asyncio.wrap_future(waiter.admitted)
                self._pool = self.zone.open(self._language)
            except BaseException as error:
                self._withdraw(waiter, error)
                raise
        self._begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The frames of a traceback refer to documents, and error reporters print the variables of frames. As long as
        # such a frame lives, so does this object, and with it the memory that the documents point into.
        if error is None:
            self._pool = None
        self._end()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def _withdraw(self, waiter: Waiter, error: BaseException) -> None:
        self.zone.withdraw(waiter)
        if isinstance(error, TimeoutError):
            raise Overloaded(
                f"guard {self._guard!r}: other calls were in the pipeline's memory zone for {self._timeout:g} s, "
                "and only one call at a time can run there"
            ) from None

    def _begin(self) -> None:
        del self._language  # a contextvars context that is copied inside keeps this object, but not the pipeline
        self.outer = _current.get()
        self.epoch = self.zone.epoch
        self.inside = True
        self._token: Token[ZoneContext | None] = _current.set(self)

    def _end(self) -> None:
        self.inside = False
        with suppress(ValueError):  # it may end in another contextvars context than it began in (dependency injection)
            _current.reset(self._token)
        if self.epoch == self.zone.epoch:
            self.zone.leave()


_current: ContextVar[ZoneContext | None] = ContextVar("modelguard zone", default=None)

_zones: WeakKeyDictionary[Language, ZoneLock] = WeakKeyDictionary()


def _entered() -> Iterator[ZoneContext]:
    """The contexts that the running code is inside of. A task that was started inside may have outlived some."""
    context = _current.get()
    while context is not None:
        if context.inside:
            yield context
        context = context.outer


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _zone_of(language: Language) -> ZoneLock:
    zone = _zones.get(language)
    return _zones.setdefault(language, ZoneLock()) if zone is None else zone


def _after_fork_in_child() -> None:
    for zone in list(_zones.values()):
        zone.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
