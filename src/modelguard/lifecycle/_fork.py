"""Guards across ``os.fork``: the child keeps the current generation; threads, locks and counters are its own."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from contextlib import suppress
from importlib import _bootstrap
from typing import Protocol

from modelguard._weak_registry import WeakRegistry
from modelguard.lifecycle import _deadlocks, _host_lock, _threads, _ticker

#: What is imported when an event, a reading or a trim first needs it, which may be at any moment.
_LAZY = (
    "ctypes",
    "modelguard.environment._allocator_figures",
    "modelguard.environment._allocator_problems",
    "modelguard.environment._elf",
    "modelguard.environment._linker",
    "modelguard.environment._python_objects",
    "modelguard.telemetry._logging",
    "modelguard.telemetry.events",
    "tempfile",
)
#: Packages whose modules are imported within milliseconds.
_SHORT = sys.stdlib_module_names | {"cachetools", "modelguard", "psutil", "wrapt"}


class Forkable(Protocol):
    """What takes part in a fork.

    Attributes:
        fork_rank: Participants with a lower rank take their locks first, as they do in normal use.
    """

    fork_rank: int

    def before_fork(self) -> None:
        """Take the locks, so that no other thread is in the middle of a change."""
        ...

    def after_fork_in_parent(self) -> None:
        """Release them."""
        ...

    def after_fork_in_child(self) -> None:
        """Start with new locks."""
        ...


_participants: WeakRegistry[Forkable] = WeakRegistry()
_forking = threading.Lock()
_locked: list[Forkable] = []
_registered = False


def register(participant: Forkable) -> None:
    """Carry a guard or a pool over forks. The first call registers the hooks; the import does not."""
    global _registered
    with _forking:
        _participants.add(participant)
        if not _registered and hasattr(os, "register_at_fork"):
            os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
            _registered = True


def _finish_imports() -> None:
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


def _before() -> None:
    _finish_imports()
    # No thread is inside a guard while the process forks, so the child finds every guard in a whole state.
    _forking.acquire()
    _locked.extend(sorted(_participants, key=lambda one: one.fork_rank))
    for participant in _locked:
        participant.before_fork()
    _ticker.TICKER.before_fork()  # last: a pool that holds its own lock may ask for checks


def _after_in_parent() -> None:
    _ticker.TICKER.after_fork_in_parent()
    for participant in reversed(_locked):
        participant.after_fork_in_parent()
    _locked.clear()
    _forking.release()


def _after_in_child() -> None:
    global _forking
    _forking = threading.Lock()
    participants, _locked[:] = list(_participants), []
    _host_lock.HOST_LOCK.after_fork_in_child()
    _deadlocks.after_fork_in_child()
    _threads.THREADS.after_fork_in_child()
    for participant in participants:
        participant.after_fork_in_child()
    _ticker.TICKER.after_fork_in_child()
