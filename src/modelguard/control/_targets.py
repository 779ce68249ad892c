"""What takes commands in a process: its guards and its isolated functions, and their figures as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from modelguard.errors import InvalidOption
from modelguard.isolation import _registry
from modelguard.lifecycle.model_guard import ModelGuard, guards

if TYPE_CHECKING:
    from modelguard.isolation.status import IsolationStatus
    from modelguard.lifecycle.status import Postponed, Status

__all__ = ["Kind", "Target", "figures", "find", "kind_of"]

#: What a target is, as the answers say it.
Kind = Literal["guard", "isolated function"]

Target = ModelGuard[Any] | _registry.Registered


def find(name: str | None) -> list[Target]:
    """The guards and isolated functions of this process with this name, or all of them, in the order of their names.

    Raises:
        InvalidOption: There is none with this name.
    """
    known: list[Target] = sorted((*guards(), *_registry.live()), key=lambda target: target.name)
    found = [target for target in known if name in (None, target.name)]
    if name is not None and not found:
        listed = ", ".join(repr(target.name) for target in known) or "none"
        why = "is not a guard or an isolated function of this process"
        raise InvalidOption("name", name, why=why, fix=f"There are: {listed}.")
    return found


def kind_of(target: Target) -> Kind:
    """What it is."""
    return "guard" if isinstance(target, ModelGuard) else "isolated function"


def figures(target: Target) -> dict[str, Any]:
    """Its status as JSON can carry it."""
    if isinstance(target, ModelGuard):
        return _of_guard(target, target.status())
    return _of_isolated(target, target.status())


def _of_guard(guard: ModelGuard[Any], status: Status) -> dict[str, Any]:
    return _common(guard, status) | {
        "uses": status.uses,
        "model_bytes": status.model_bytes,
        "load_seconds": status.load_seconds,
        "reload_on": None if guard.reload_on is None else repr(guard.reload_on),
    }


def _of_isolated(function: _registry.Registered, status: IsolationStatus) -> dict[str, Any]:
    return _common(function, status) | {
        "mold": status.mold,
        "workers": [asdict(worker) for worker in status.workers],
        "queued": status.queued,
        "recycled": status.recycled,
        "crashed": status.crashed,
        "timed_out": status.timed_out,
        "broker": status.broker,
        "clients": list(status.clients),
    }


def _common(target: Target, status: Status | IsolationStatus) -> dict[str, Any]:
    return {
        "state": status.state,
        "ready": target.ready,
        "paused": status.paused,
        "postponed": _postponed(status.postponed),
        "generation": status.generation,
        "age": status.age,
        "in_flight": status.in_flight,
        "reloads": status.reloads,
        "failures": status.failures,
        "last_error": status.last_error,
    }


def _postponed(waits: Postponed | None) -> dict[str, Any] | None:
    if waits is None:
        return None
    return {"reasons": [str(reason) for reason in waits.reasons], "cause": waits.cause, "seconds": waits.seconds}
