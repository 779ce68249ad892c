"""The isolated functions of this process: for readiness probes, and for forks."""

from __future__ import annotations

import os
from typing import Protocol

from modelguard._weak_registry import WeakRegistry

__all__ = ["Registered", "add", "live"]


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

    def renew_in_child(self) -> None:
        """Start again without molds: those of the parent answer the parent."""


_functions: WeakRegistry[Registered] = WeakRegistry()
_hooked = False


def add(function: Registered) -> None:
    """Add an isolated function. The first one registers the hook for forks."""
    global _hooked
    _functions.add(function)
    if not _hooked and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_renew)
        _hooked = True


def live() -> tuple[Registered, ...]:
    """The isolated functions of this process."""
    return tuple(_functions)


def _renew() -> None:
    for function in live():
        function.renew_in_child()
