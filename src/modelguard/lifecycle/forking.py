"""Guards across ``os.fork``: a ready generation is carried over; threads, locks and counters are the child's own."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from modelguard.lifecycle import circles, keeper, slot, workers

_guards: weakref.WeakSet[Any] = weakref.WeakSet()
_forking = threading.Lock()
_held: list[Any] = []
_registered = False


def remember(guard: Any) -> None:
    """Carry a guard or a pool over forks. The hooks are registered with the first guard, not on import."""
    global _registered
    with _forking:
        _guards.add(guard)
        if not _registered and hasattr(os, "register_at_fork"):
            os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
            _registered = True


def alive() -> tuple[Any, ...]:
    """The guards and pools of this process."""
    return tuple(_guards)


def marked() -> tuple[Any, ...]:
    """The guards of this process that were made with ``prefork=True``, by name."""
    return tuple(sorted((one for one in alive() if getattr(one, "prefork", False)), key=lambda one: one.name))


def _before() -> None:
    # Nobody is inside a guard while the process forks, so the child finds every guard whole.
    _forking.acquire()
    keeper.KEEPER.before_fork()
    _held.extend(sorted(_guards, key=lambda one: one._fork_rank))  # in the order in which they take their locks
    for guard in _held:
        guard._before_fork()


def _after_in_parent() -> None:
    for guard in reversed(_held):
        guard._after_fork_in_parent()
    _held.clear()
    keeper.KEEPER.after_fork_in_parent()
    _forking.release()


def _after_in_child() -> None:
    global _forking
    _forking = threading.Lock()
    guards, _held[:] = list(_guards), []
    slot.HOST.after_fork_in_child()
    circles.after_fork_in_child()
    workers.WORKERS.after_fork_in_child()
    for guard in guards:
        guard._after_fork_in_child()
    keeper.KEEPER.after_fork_in_child()
