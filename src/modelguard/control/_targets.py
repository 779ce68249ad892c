"""What takes commands in a process: its guards, pools and isolated functions, and their figures as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from modelguard.errors import InvalidOption
from modelguard.isolation import _registry
from modelguard.lifecycle.model_guard import ModelGuard, guards
from modelguard.lifecycle.pool import ModelPool, pools

if TYPE_CHECKING:
    from modelguard.isolation.status import IsolationStatus
    from modelguard.lifecycle.status import PoolStatus, Postponed, State, Status

__all__ = ["Kind", "Target", "figures", "find", "kind_of", "state_of"]

#: What a target is, as the answers say it.
Kind = Literal["guard", "pool", "isolated function"]

Target = ModelGuard[Any] | ModelPool[Any, Any] | _registry.Registered


def find(name: str | None) -> list[Target]:
    """The guards, pools and isolated functions of this process with this name, or all, in the order of their names.

    Raises:
        InvalidOption: There is none with this name.
    """
    known: list[Target] = sorted((*guards(), *pools(), *_registry.live()), key=lambda target: target.name)
    found = [target for target in known if name in (None, target.name)]
    if name is not None and not found:
        listed = ", ".join(repr(target.name) for target in known) or "none"
        why = "is not a guard, a pool or an isolated function of this process"
        raise InvalidOption("name", name, why=why, fix=f"There are: {listed}.")
    return found


def kind_of(target: Target) -> Kind:
    """What it is."""
    if isinstance(target, ModelGuard):
        return "guard"
    return "pool" if isinstance(target, ModelPool) else "isolated function"


def state_of(target: Target) -> State:
    """In which state it is. A pool is ready while it has models, idle if all were released until their next use."""
    if not isinstance(target, ModelPool):
        return target.status().state
    return _state_of_pool(target, target.status())


def _state_of_pool(pool: ModelPool[Any, Any], status: PoolStatus[Any]) -> State:
    if pool.closed:
        return "closed"
    if status.models:
        return "ready"
    return "idle" if status.idle else "new"


def figures(target: Target) -> dict[str, Any]:
    """Its status as JSON can carry it."""
    if isinstance(target, ModelGuard):
        return _of_guard(target, target.status())
    if isinstance(target, ModelPool):
        return _of_pool(target, target.status())
    return _of_isolated(target, target.status())


def _of_guard(guard: ModelGuard[Any], status: Status) -> dict[str, Any]:
    return _common(guard, status) | {
        "uses": status.uses,
        "model_bytes": status.model_bytes,
        "load_seconds": status.load_seconds,
        "reload_on": None if guard.reload_on is None else repr(guard.reload_on),
    }


def _of_pool(pool: ModelPool[Any, Any], status: PoolStatus[Any]) -> dict[str, Any]:
    return {
        "state": _state_of_pool(pool, status),
        "ready": not pool.closed,
        "paused": status.paused,
        "in_flight": status.in_flight,
        # Keys are what the application says, and no JSON.
        "models": {repr(key): size for key, size in status.models.items()},
        "idle": [repr(key) for key in status.idle],
        "used": status.used,
        "max_memory": status.max_memory,
        "loads": status.loads,
        "evictions": status.evictions,
        "unloads": status.unloads,
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


def _common(target: ModelGuard[Any] | _registry.Registered, status: Status | IsolationStatus) -> dict[str, Any]:
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
