"""The figures of guards and pools at one moment."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from modelguard.facts._gpu import use_of
from modelguard.lifecycle import system
from modelguard.lifecycle._state import State as State  # noqa: PLC0414 - part of this module
from modelguard.telemetry import GenerationReleased, GrowthFound, PostponeCause, Reason

if TYPE_CHECKING:
    from modelguard.lifecycle._engine import Engine
    from modelguard.lifecycle._state import PostponedJob

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Postponed:
    """What policies ask for, and must wait.

    Attributes:
        reasons: Which policies are due.
        cause: Why it waits: ``"paused"`` or ``"min_lifetime"``.
        seconds: How long it still waits; None while the guard is paused.
    """

    reasons: tuple[Reason, ...]
    cause: PostponeCause
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Status:
    """A guard at one moment.

    Attributes:
        name: The guard's name.
        state: ``new`` (never loaded), ``loading`` (for the first time, after ``idle``, or opened again), ``ready``,
            ``reloading`` (the old generation takes calls meanwhile), ``draining`` (calls wait while the model is
            replaced), ``degraded`` (the last reload failed, and the old generation takes calls), ``idle`` (the model
            was released until its next use), ``failed`` (there is no model), ``closed``.
        generation: Number of the current generation, 0 if there is none.
        age: Seconds since it began to take calls.
        uses: Calls that have ended on it.
        in_flight: Calls that run now, on it or on generations that are being drained or were abandoned.
        reloads: Loads in this process that replaced a generation.
        failures: Consecutive loads that have failed.
        last_error: The latest of these failures in one line.
        model_bytes: Size of the model in bytes: growth of private memory during a load, or what the model's library
            reports if that is more; the largest of all loads so far.
        last_release: The event of the latest release of a replaced generation.
        load_seconds: How long the load of the current generation took; 0 if there is none.
        growth: What ``modelguard.diagnosis.watch`` has found to make this process grow; None if it does not grow,
            or if nobody watches.
        version: Version of the current model, as its loader gave it with ``Loaded``; None if it gave none, or if there
            is no model.
        previous: Number of the generation that ``rollback()`` would make current again; 0 if none is kept.
        pinned: Whether ``rollback()`` has made the current generation current, and its source has not changed since.
        paused: Whether ``pause()`` holds back the policies.
        postponed: A reload or release that is due and waits; None if there is none.
        gpu_allocated: GPU memory of this process in tensors, on all devices, in bytes; None if it has not used CUDA.
        gpu_reserved: GPU memory that torch has reserved for this process, in bytes.
    """

    name: str
    state: State
    generation: int
    age: float
    uses: int
    in_flight: int
    reloads: int
    failures: int
    last_error: str | None
    model_bytes: int | None
    last_release: GenerationReleased | None
    load_seconds: float = 0.0
    growth: GrowthFound | None = None
    version: str | None = None
    previous: int = 0
    pinned: bool = False
    paused: bool = False
    postponed: Postponed | None = None
    gpu_allocated: int | None = None
    gpu_reserved: int | None = None


@dataclass(frozen=True, kw_only=True)
class PoolStatus(Generic[K]):
    """A pool at one moment.

    Attributes:
        name: The pool's name.
        state: ``ready`` while it has models, ``idle`` if all were released until their next use, ``new`` before the
            first, or ``closed``.
        models: Size in bytes of each loaded model.
        in_flight: Leases that run now.
        used: Bytes of the budget in use.
        max_memory: The budget in bytes.
        loads: Loads that have succeeded.
        evictions: Models released to make room, because of their ``TTL`` or because their source has changed.
        versions: Version of each loaded model whose loader gave one.
        unloads: Models released until their next use, because of ``Idle`` or on request.
        idle: The keys of those that were not loaded again, the latest 256.
        paused: Whether ``pause()`` holds back ``reload_on``.
    """

    name: str
    state: State
    models: dict[K, int]
    in_flight: int
    used: int
    max_memory: int
    loads: int
    evictions: int
    versions: dict[K, str] = field(default_factory=dict)
    unloads: int = 0
    idle: tuple[K, ...] = ()
    paused: bool = False


# What ``status()`` of a guard says.


def of(engine: Engine[Any]) -> Status:
    """The figures of a guard at this moment."""
    state, now = engine.state, engine.system.clock()
    gpu = use_of(engine.system.gpu)
    with state.lock:
        current = state.current
        return Status(
            name=engine.name,
            state=state.word,
            generation=current.number if current is not None else 0,
            age=now - current.born if current is not None else 0.0,
            uses=current.uses if current is not None else 0,
            in_flight=state.in_flight,
            reloads=state.reloads,
            failures=state.failures,
            last_error=state.failure.reason if state.failure is not None else None,
            model_bytes=state.model_bytes,
            last_release=state.last_release,
            load_seconds=current.load_seconds if current is not None else 0.0,
            growth=system.found(),
            version=current.version if current is not None else None,
            previous=state.previous.number if state.previous is not None else 0,
            pinned=current is not None and current.pinned,
            paused=state.paused,
            postponed=_postponed(state.postponed, now),
            gpu_allocated=None if gpu is None else gpu.allocated,
            gpu_reserved=None if gpu is None else gpu.reserved,
        )


def _postponed(job: PostponedJob | None, now: float) -> Postponed | None:
    if job is None:
        return None
    seconds = None if job.until is None else max(0.0, job.until - now)
    return Postponed(reasons=job.reasons, cause=job.cause, seconds=seconds)
