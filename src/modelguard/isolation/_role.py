"""What this process is: the one that calls isolated functions, a mold, or a worker."""

from __future__ import annotations

from typing import Literal

__all__ = ["current", "enter", "target"]

Role = Literal["owner", "importing", "mold", "worker"]

_role: Role = "owner"
_target: object = None


def current() -> Role:
    """This process's role. ``"importing"``: a mold that imports the module of its function."""
    return _role


def target() -> object:
    """In a mold or worker, the function that it isolates, below ``@isolate``."""
    return _target


def enter(role: Role, isolates: object = None) -> None:
    """Set this process's role."""
    global _role, _target
    _role = role
    _target = isolates if isolates is not None else _target
