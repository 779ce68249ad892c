"""The batchers of this process: for readiness probes, for the end of the process, and for forks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from modelguard import _shutdown
from modelguard._weak_registry import WeakRegistry

__all__ = ["Registered", "add", "discard", "live", "renew_in_child"]


class Registered(Protocol):
    """A batcher, as the rest of the process uses it."""

    @property
    def name(self) -> str:
        """The batched function's name."""
        ...

    @property
    def ready(self) -> bool:
        """Whether it admits items."""
        ...

    def close(self, timeout: float, *, abandon: bool = False) -> None:
        """Admit nothing more, and compute what waits within ``timeout`` seconds."""

    def after_fork_in_child(self) -> None:
        """Start again with an empty queue."""

    def check_time(self) -> None:
        """Do what has become due because a test has moved the clock."""


#: Used without a lock: a finalizer may run at any point of :func:`live`, in its thread, and end the last request of a
#: closed batcher, which is discarded then.
_batchers: WeakRegistry[Registered] = WeakRegistry()
_lock = threading.Lock()
_registered = False
_renewals: list[Callable[[], object]] = []


def add(batcher: Registered) -> None:
    """Reset a batcher in forked children, and close it at the end of the process.

    The hooks are installed with the first batcher, not on import.
    """
    global _registered
    _batchers.add(batcher)
    if _registered:
        return
    with _lock:
        if _registered:
            return
        _registered = True
        _shutdown.before_exit("batches", _close_all)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_after_in_child)


def discard(batcher: Registered) -> None:
    """Forget a batcher that is closed for good: a readiness probe must not wait for it."""
    _batchers.discard(batcher)  # without the lock: the garbage collector may end the last stream of a closed one


def live() -> tuple[Registered, ...]:
    """The batchers of this process that are not closed for good."""
    return tuple(_batchers)


def renew_in_child(renew: Callable[[], object]) -> None:
    """Call ``renew`` in every forked child; for locks, which another thread of the parent may have held."""
    _renewals.append(renew)


def _close_all(seconds: float) -> None:
    until = time.monotonic() + seconds
    for batcher in live():
        batcher.close(max(0.0, until - time.monotonic()), abandon=True)


def _after_in_child() -> None:
    for renew in _renewals:
        renew()
    for batcher in tuple(_batchers):
        batcher.after_fork_in_child()
