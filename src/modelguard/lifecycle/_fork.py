"""Guards across ``os.fork``: the child keeps the current generation; threads, locks and counters are its own."""

from __future__ import annotations

import os
import threading
from typing import Protocol

from modelguard._weak_registry import WeakRegistry
from modelguard.lifecycle import _deadlocks, _host_lock, _threads, _ticker


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


def _before() -> None:
    # No thread is inside a guard while the process forks, so the child finds every guard in a whole state.
    _forking.acquire()
    _ticker.TICKER.before_fork()
    _locked.extend(sorted(_participants, key=lambda one: one.fork_rank))
    for participant in _locked:
        participant.before_fork()


def _after_in_parent() -> None:
    for participant in reversed(_locked):
        participant.after_fork_in_parent()
    _locked.clear()
    _ticker.TICKER.after_fork_in_parent()
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
