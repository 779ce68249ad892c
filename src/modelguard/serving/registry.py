"""The batchers of this process: for readiness probes, and for forks, after which each of them begins anew."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelguard.serving.batcher import Batcher

_batchers: weakref.WeakSet[Batcher] = weakref.WeakSet()
_lock = threading.Lock()
_registered = False


def remember(batcher: Batcher) -> None:
    """Carry a batcher over forks. The hook is registered with the first one, not on import."""
    global _registered
    with _lock:
        _batchers.add(batcher)
        if not _registered and hasattr(os, "register_at_fork"):
            os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_after_in_child)
            _registered = True


def forget(batcher: Batcher) -> None:
    """It is closed for good: nobody waits for it to become ready."""
    with _lock:
        _batchers.discard(batcher)


def alive() -> tuple[Batcher, ...]:
    """The batchers of this process."""
    with _lock:
        return tuple(_batchers)


def _after_in_child() -> None:
    _lock.release()
    for batcher in tuple(_batchers):
        batcher.after_fork_in_child()
