"""Everything that modelguard does when this process forks, in one order, and when it exits; and lists for any thread.

Before a fork the outermost acts first: it takes its locks in the order in which normal use takes them, so no other
thread is in the middle of a change, and the child finds everything in a whole state. After it the innermost acts first:
the locks that all others need are new before those others are renewed.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - it has fork hooks of its own, and must not come in the middle of a fork
import importlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from enum import IntEnum
from importlib import _bootstrap
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

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
        try:  # noqa: SIM105 - contextlib.suppress takes four times as long as the release
            self._lock.release()
        except RuntimeError:  # set already
            pass

    def wait(self, timeout: float | None) -> bool:
        """Wait at most so many seconds; returns whether it was set."""
        return self._lock.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))


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


def weakly(method: Callable[..., object], *details: object) -> Callable[[], None]:
    """Call a method of an object that lives until then."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := reference()) is not None:
            alive(*details)

    return call


# Forks.


@runtime_checkable
class Descriptor(Protocol):
    def fileno(self) -> int: ...


#: Queues and connections that modelguard itself closes in each forked child: they are no hazard to it.
closed_in_child: WeakRegistry[Descriptor] = WeakRegistry()


class Rank(IntEnum):
    """Who acts when, from the outermost to the innermost.

    The first two come after all that the application registers until then with ``os.register_at_fork``: a warm-up in
    the child may need it.
    """

    RENEWAL = 0
    REPAIR = 1
    IMPORTS = 2
    SERVER = 3
    CONTROL = 4
    THREADS = 5
    BATCHERS = 6
    ISOLATION = 7
    POOL = 8
    GUARD = 9
    REPLICAS = 10
    TICKER = 11
    METRICS = 12
    LOCKS = 13


class Forkable:
    """What takes part in a fork. Who keeps nothing of the parent's state has nothing to do before it."""

    fork_rank: Rank  # its place in the order

    def before_fork(self) -> None:
        """Take the locks, so that no other thread is in the middle of a change."""

    def after_fork_in_parent(self) -> None:
        """Release them."""

    def after_fork_in_child(self) -> None:
        """Start with new locks."""


Action = Callable[[], object]


def _nothing() -> None: ...


class _Actions(NamedTuple):
    """What takes part in each fork, as a :class:`Forkable`."""

    fork_rank: Rank
    before_fork: Action
    after_fork_in_parent: Action
    after_fork_in_child: Action


class _Hooks:
    """One entry in the interpreter's list, for all of a range of ranks. Made with the first that takes part.

    It holds no lock over a fork: another thread may fork too, or add what takes part, inside what this fork waits for.
    """

    def __init__(self) -> None:
        self._objects: WeakRegistry[Forkable] = WeakRegistry()
        self._actions: list[_Actions] = []
        self._lock = threading.RLock()  # reentrant: the garbage collector may end a batcher, which makes another
        self._here = threading.local()  # what takes part in the fork of this thread
        self._registered = False

    def add(self, participant: Forkable | _Actions) -> None:
        with self._lock:
            if isinstance(participant, _Actions):
                self._actions.append(participant)
            else:
                self._objects.add(participant)
            if not self._registered and hasattr(os, "register_at_fork"):
                self._registered = True
                os.register_at_fork(before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child)

    def _before(self) -> None:
        acting = self._here.acting = self._in_order(self._actions)
        for one in acting:
            one.before_fork()

    def _in_parent(self) -> None:
        _do_all(one.after_fork_in_parent for one in reversed(self._here.__dict__.pop("acting", [])))

    def _in_child(self) -> None:
        self._lock = threading.RLock()  # before the last of them, which may fork again
        acted = [one for one in self._here.__dict__.pop("acting", []) if isinstance(one, _Actions)]
        # Objects that another thread has made since then are here too, as it has left them.
        _do_all(one.after_fork_in_child for one in reversed(self._in_order(acted)))

    def _in_order(self, actions: list[_Actions]) -> list[Forkable | _Actions]:
        # Objects of one rank in the same order in all threads, since each takes the locks of all.
        return sorted([*actions, *sorted(self._objects, key=id)], key=lambda one: one.fork_rank)


def _do_all(actions: Iterable[Action]) -> None:
    """What one of them raises, as where a child gets no thread, keeps no other from its part."""
    for act in actions:
        try:
            act()
        except Exception:
            with suppress(Exception):  # nor does a log handler that raises
                logging.getLogger("modelguard").exception("modelguard could not do all that a fork needs")


_EARLY, _LATE = _Hooks(), _Hooks()


def register(participant: Forkable) -> None:
    """Carry an object over forks, for as long as somebody else refers to it."""
    _EARLY.add(participant)


def at_fork(
    rank: Rank, *, before: Action = _nothing, in_parent: Action = _nothing, in_child: Action = _nothing
) -> None:
    """Call these at each fork from now on.

    Args:
        rank: Their place in the order.
        before: Called before the fork.
        in_parent: Called after it in the process that has forked.
        in_child: Called after it in the new process.
    """
    hooks = _LATE if rank <= Rank.REPAIR else _EARLY
    hooks.add(_Actions(rank, before, in_parent, in_child))


#: What is imported when an event, a reading or a trim first needs it, which may be at any moment.
_LAZY = (
    "ctypes",
    "modelguard.environment._allocator",
    "modelguard.environment._allocator_problems",
    "modelguard.environment._allocator_files",
    "modelguard.environment._linker",
    "modelguard.telemetry._events",
    "tempfile",
)
#: Packages whose modules are imported within milliseconds.
_SHORT = sys.stdlib_module_names | {"modelguard", "psutil", "wrapt"}


def finish_imports() -> None:
    """Import what loads need, and wait for what other threads are importing.

    A child finds an import that was under way unfinished: nobody ends it there.
    """
    for name in (*_LAZY, *_unfinished()):
        with suppress(Exception):  # it fails again where it is needed
            importlib.import_module(name)


def _unfinished() -> list[str]:
    """Modules that are being imported. Not those of others, such as torch: that may take long.

    The import system has a lock for each of them and for no other module. To look through all modules instead would
    write to each one's reference count, on pages that parent and children share: 1.8 MB for every child.
    """
    return [name for name in tuple(vars(_bootstrap).get("_module_locks", ())) if name.partition(".")[0] in _SHORT]


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

_exiting = False


def exiting() -> bool:
    """Whether this process waits for what runs before it exits: policies start nothing more."""
    return _exiting


def _stay() -> None:
    global _exiting
    _exiting = False


at_fork(Rank.LOCKS, in_child=_stay)  # an application that exits may fork a process that serves on


def before_exit(what: Literal["batches", "loads", "models"], wait: Callable[[float], object]) -> None:
    """Call ``wait`` at interpreter exit, with the seconds that it may take."""
    _waits[what] = wait


@atexit.register
def _wait() -> None:
    global _exiting
    _exiting = True
    try:
        until = time.monotonic() + GRACE
        for what in _ORDER:
            if what in _waits:
                _waits[what](max(0.0, until - time.monotonic()))
    finally:
        _exiting = False
