"""The batchers of this process: for readiness probes, and for forks, after which each of them begins anew."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

from modelguard import _shutdown

if TYPE_CHECKING:
    from modelguard.serving.batcher import Batcher

_batchers: weakref.WeakSet[Batcher] = weakref.WeakSet()
_lock = threading.Lock()
_registered = False


def remember(batcher: Batcher) -> None:
    """Carry a batcher over forks, and close it at the end. The hooks come with the first one, not on import."""
    global _registered
    with _lock:
        _batchers.add(batcher)
        if _registered:
            return
        _registered = True
        _shutdown.before_exit("batches", _close_all)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_after_in_child)


def forget(batcher: Batcher) -> None:
    """It is closed for good: nobody waits for it to become ready."""
    with _lock:
        _batchers.discard(batcher)


def alive() -> tuple[Batcher, ...]:
    """The batchers of this process."""
    with _lock:
        return tuple(_batchers)


def _close_all(seconds: float) -> None:
    until = time.monotonic() + seconds
    for batcher in alive():
        batcher.close(max(0.0, until - time.monotonic()))


def _after_in_child() -> None:
    _lock.release()
    for batcher in tuple(_batchers):
        batcher.after_fork_in_child()
