"""What this process is: the one that calls isolated functions, a mold, or a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

__all__ = ["current", "enter", "here", "target"]

Role = Literal["owner", "importing", "mold", "worker"]

_role: Role = "owner"
_target: object = None
_here: Callable[..., Any] | None = None


def current() -> Role:
    """This process's role. ``"importing"``: a mold that imports the module of its function."""
    return _role


def target() -> object:
    """In a mold or worker, the function that it isolates, below ``@isolate``."""
    return _target


def here() -> Callable[..., Any]:
    """In a mold or worker, what computes a call of its function here."""
    assert _here is not None  # noqa: S101 - it has a target
    return _here


def enter(role: Role, isolates: object = None, here: Callable[..., Any] | None = None) -> None:
    """Set this process's role."""
    global _role, _target, _here
    _role = role
    _target = isolates if isolates is not None else _target
    _here = here if here is not None else _here
