"""What ``status()`` and ``repr`` of a guard say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelguard.environment._gpu import use_of
from modelguard.lifecycle import _growth
from modelguard.lifecycle.status import Postponed, State, Status

if TYPE_CHECKING:
    from modelguard.lifecycle._engine import Engine
    from modelguard.lifecycle._load_job import PostponedJob
    from modelguard.lifecycle._state import GuardState


def of(engine: Engine[Any]) -> Status:
    """The figures of a guard at this moment."""
    state, now = engine.state, engine.guard.runtime.clock()
    gpu = use_of(engine.guard.runtime.gpu)
    with state.lock:
        current = state.current
        return Status(
            name=engine.name,
            state=state_of(state),
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
            growth=_growth.found(),
            version=current.version if current is not None else None,
            previous=state.previous.number if state.previous is not None else 0,
            pinned=state.pinned,
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


def state_of(state: GuardState[Any]) -> State:
    """The word for what a guard does at this moment."""
    with state.lock:
        if state.closed:
            return "closed"
        if state.current is not None:
            replacing = state.job is not None and state.job.replaces
            return "degraded" if state.failures else "reloading" if replacing else "ready"
        if state.job is not None:
            waking = state.unloaded and not state.job.unloads
            return "draining" if state.generations and not waking else "loading"
        return "failed" if state.failures else "idle" if state.unloaded else "new"
