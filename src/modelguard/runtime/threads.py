"""How threads end with the interpreter, how one waits for another, and lists of objects that any thread may change."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, Literal, TypeVar

# At interpreter exit: wait until none of modelguard's threads is inside native code, then unload models.
#
# Up to CPython 3.13 a daemon thread that returns from native code while the interpreter exits is ended by
# ``pthread_exit``. If there is C++ on its stack, such as torch's, that aborts the whole process: "terminate called
# without an active exception", exit status 134 (https://github.com/python/cpython/issues/87135). So the exit waits for
# running loads and batches, but only for a limited time: a hanging load must not prevent the exit.
#
# Models are unloaded after that, in the thread that exits: CPython 3.12 and later start no thread any more at this
# point.


#: Seconds that the exit waits for all running work together: half of the time that Docker gives a container to stop.
GRACE = 5.0

#: In this order: a batch may need a load, and a load may install a model.
_ORDER = ("batches", "loads", "models")

_waits: dict[str, Callable[[float], object]] = {}
#: Taken by the first call, and never released.
_first = threading.Lock()


def before_exit(what: Literal["batches", "loads", "models"], wait: Callable[[float], object]) -> None:
    """Call ``wait`` at interpreter exit, with the seconds that it may take."""
    _waits[what] = wait
    if _first.acquire(blocking=False):
        atexit.register(_wait)


def _wait() -> None:
    until = time.monotonic() + GRACE
    for what in _ORDER:
        if what in _waits:
            _waits[what](max(0.0, until - time.monotonic()))


# ``Wakeup``: how one thread waits for another.


class Wakeup:
    """An event for one thread, cleared by ``wait``. A plain lock, which costs less than ``threading.Event``.

    The garbage collector may set it at any point. An ``Event`` has a lock inside that is not reentrant: set in the
    middle of its own ``set()`` or ``wait()``, it would wait there for ever.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Wake the thread that waits, or that will wait next. Setting twice wakes once."""
        with contextlib.suppress(RuntimeError):  # set already
            self._lock.release()

    def wait(self, timeout: float) -> bool:
        """Wait at most so many seconds; returns whether it was set."""
        return self._lock.acquire(timeout=max(timeout, 0.0))


# Objects that are listed for as long as somebody else refers to them.


T = TypeVar("T")


class WeakRegistry(Generic[T]):
    """A set of weak references that any thread may change while others go through it.

    ``weakref.WeakSet`` is not made for that: a loop over it raises "Set changed size during iteration" when another
    thread adds or removes something. Here a loop goes over a copy, which CPython makes in one step.
    """

    __slots__ = ("__weakref__", "_references")

    def __init__(self) -> None:
        self._references: set[weakref.ref[T]] = set()

    def add(self, item: T) -> None:
        self._references.add(weakref.ref(item, self._references.discard))

    def discard(self, item: T) -> None:
        self._references.discard(weakref.ref(item))

    def __iter__(self) -> Iterator[T]:
        """Those that are listed now, in no order."""
        return iter([item for reference in self._references.copy() if (item := reference()) is not None])

    def __bool__(self) -> bool:
        return any(reference() is not None for reference in self._references.copy())
