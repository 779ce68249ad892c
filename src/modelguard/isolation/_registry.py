"""The isolated functions of this process: for readiness probes, for commands, and for forks."""

from __future__ import annotations

import atexit
import os
import threading
from typing import TYPE_CHECKING, Protocol

from modelguard import _units
from modelguard._weak_registry import WeakRegistry
from modelguard.serving import _shared_threads

if TYPE_CHECKING:
    from modelguard.isolation.status import IsolationStatus

__all__ = ["Registered", "add", "live", "refuse_calls", "refuse_calls_at_exit"]


class Registered(Protocol):
    """An isolated function, as the rest of the process uses it."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def ready(self) -> bool:
        """Whether one of its workers can answer."""
        ...

    def status(self) -> IsolationStatus:
        """Its state, its processes and its counts."""
        ...

    def reload(self, *, wait: bool = True, timeout: _units.Duration | None = None) -> None:
        """Make a new mold."""
        ...

    def unload(self, timeout: _units.Duration | None = None) -> None:
        """End the mold and its workers until the next call."""
        ...

    def pause(self) -> None:
        """Let policies replace nothing."""
        ...

    def resume(self) -> None:
        """Let them again."""
        ...

    def refuse_calls(self) -> None:
        """This process exits: raise ``GuardClosed`` from now on."""
        ...

    def renew_in_child(self) -> None:
        """Start again without molds: those of the parent answer the parent."""


_functions: WeakRegistry[Registered] = WeakRegistry()
_first = threading.Lock()  # taken by the first function, and never released
_first_use = threading.Lock()  # the same, when processes are first started


def add(function: Registered) -> None:
    """Add an isolated function. The first one registers the hook for forks."""
    _functions.add(function)
    if _first.acquire(blocking=False) and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_renew)


def live() -> tuple[Registered, ...]:
    """The isolated functions of this process."""
    return tuple(_functions)


def refuse_calls_at_exit() -> None:
    """Have no call wait for processes that the exit of this one has ended: exit handlers that come later may call."""
    if _first_use.acquire(blocking=False):
        atexit.register(refuse_calls)


def refuse_calls() -> None:
    """Raise ``GuardClosed`` from now on. Once more does nothing."""
    for function in live():
        function.refuse_calls()


def _renew() -> None:
    _shared_threads.renew_in_child()  # before a call needs one
    for function in live():
        function.renew_in_child()
