"""The logging hook: one line per event on the logger ``modelguard``, with all fields in ``extra``.

modelguard sets no level and no handler: the application decides what is shown.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from modelguard import _units
from modelguard.telemetry import events
from modelguard.telemetry._logger import logger
from modelguard.telemetry.reasons import PROTECT_MEMORY, Reason

_WARNINGS = (
    events.LoadErrored,
    events.RolledBack,
    events.GenerationAbandoned,
    events.GpuOutOfMemory,
    events.PolicyFutile,
    events.GrowthFound,
    events.CallbackErrored,
    events.BatchErrored,
    events.RequestsRefused,
    events.CircuitOpened,
)

#: Seconds. A shorter wait for a pause would be shown as 0.0.
_WORTH_MENTIONING = 0.05

_DISCARDED: dict[events.DiscardCause, str] = {
    "closed": "the guard was closed",
    "late": "it was ready only after load_timeout",
    "rejected": "validate, warmup or replay failed",
    "rolled_back": "rollback() was called during its load",
    "stale": "a newer reload request replaced it",
}

_ENDED: dict[events.WorkerEndCause, str] = {
    "recycled": "a policy was due",
    "crashed": "it crashed",
    "timeout": "its call took longer than the timeout",
    "cancelled": "its caller was interrupted",
    "closed": "its mold ended",
    "idle": "nobody has called",
}


def level_of(event: events.Event) -> int:
    """The level of an event, as a number of ``logging``.

    WARNING if it needs attention, DEBUG for ``BatchFinished``, which comes with every batch, and INFO for all others.
    """
    if isinstance(event, events.BatchFinished):
        return logging.DEBUG
    stays = isinstance(event, events.GenerationReleased) and (event.alive or event.immortal)
    failed = isinstance(event, events.WorkerEnded) and event.cause in {"crashed", "timeout"}
    unreachable = isinstance(event, events.BatchSizeChosen) and not event.reachable
    unproven = isinstance(event, events.ReplayFinished) and not (event.accepted and event.compared)
    needs_attention = (
        isinstance(event, _WARNINGS) or stays or failed or unreachable or unproven or _leaves_memory(event)
    )
    return logging.WARNING if needs_attention else logging.INFO


def log_event(event: events.Event) -> None:
    """Log one event at its level."""
    level = level_of(event)
    if logger.isEnabledFor(level):
        fields = {f"modelguard_{name}": value for name, value in dataclasses.asdict(event).items()}
        logger.log(level, "%s: %s", event.guard, describe(event), extra=fields)


def _leaves_memory(event: events.Event) -> bool:
    """Whether a paused guard holds back a policy that protects memory."""
    if not isinstance(event, events.ReloadPostponed) or event.cause != "paused":
        return False
    return any(reason.kind in PROTECT_MEMORY for reason in event.reasons)


def describe(event: events.Event) -> str:
    """Describe an event in one line: newlines and escape sequences in it are escaped."""
    return _units.printable(_SENTENCES[type(event)](event))


def _load_started(event: events.LoadStarted) -> str:
    waited = event.deferred_seconds >= _WORTH_MENTIONING
    grown = f", in which memory grew by {_units.format_bytes(event.deferred_growth)}" if event.deferred_growth else ""
    deferred = f", after waiting {event.deferred_seconds:.1f} s for a pause{grown}" if waited else ""
    return f"loading generation {event.generation}: {_reasons(event.reasons)}{deferred}"


def _load_finished(event: events.LoadFinished) -> str:
    return (
        f"{_generation(event)} is ready after {event.seconds:.2f} s "
        f"({_units.format_bytes(event.model_bytes)}, longest stall {event.stall_seconds * 1e3:.0f} ms)"
    )


def _load_errored(event: events.LoadErrored) -> str:
    kept = "no model is loaded" if event.current is None else f"generation {event.current} stays in use"
    again = f"next attempt in {event.retry_after:.1f} s"
    return f"load failed (attempt {event.attempt}): {event.error}; {kept}, {again}"


def _released(event: events.GenerationReleased) -> str:
    if event.immortal:
        return (
            f"{_generation(event)} was dropped, but stays in memory until the process ends: "
            "prefork.prepare() made its objects immortal, and each further generation adds as much"
        )
    if event.alive:
        held_by = "; ".join(event.holders) or "unknown"
        return f"{_generation(event)} was dropped but is still alive, held by: {held_by}"
    gpu = f", {_units.format_bytes(event.gpu_freed)} to the GPU" if event.gpu_freed else ""
    kept = "" if event.kept is None else f" ({event.kept})"
    return f"{_generation(event)} released, {_units.format_bytes(event.freed)} returned to the system{gpu}{kept}"


def _abandoned(event: events.GenerationAbandoned) -> str:
    calls = f"{event.in_flight} of its calls outlasted drain_timeout={event.drain_timeout:g} s"
    return f"{_generation(event)} is abandoned: {calls}; it will be released when they end"


def _gpu_cache_emptied(event: events.GpuCacheEmptied) -> str:
    freed, left = _units.format_bytes(event.freed), _units.format_bytes(event.reserved_after)
    advice = "" if event.advice is None else f". {event.advice}"
    return f"emptied torch's cache because of {event.policy}: {freed} returned to the GPU, {left} reserved{advice}"


def _gpu_out_of_memory(event: events.GpuOutOfMemory) -> str:
    then = "is run once more" if event.retry else "failed"
    left = "" if event.allocated is None else f"; {_units.format_bytes(event.allocated)} stay allocated"
    return f"a call on generation {event.generation} ran out of GPU memory and {then}{left}"


def _futile(event: events.PolicyFutile) -> str:
    cause = "" if event.cause is None else f"; what grows in this process: {event.cause}"
    return f"{event.policy} is ignored for generation {event.generation}: {event.detail}{cause}"


def _growth(event: events.GrowthFound) -> str:
    grown = f"memory grows with the calls, by {_units.format_bytes(event.growth)} so far"
    if event.cause is None:
        return f"{grown}; the cause is not known"
    return f"{grown}, {event.share:.0%} of it by {event.cause}: {event.seen}. {event.fix}"


def _postponed(event: events.ReloadPostponed) -> str:
    until = "the guard is paused" if event.seconds is None else f"waits {event.seconds:.1f} s for min_lifetime"
    what = f"generation {event.generation}" if event.worker is None else f"worker {event.worker}"
    return f"{what} is due, but {until}: {_reasons(event.reasons)}"


def _replayed(event: events.ReplayFinished) -> str:
    which = f"{_generation(event)} against generation {event.current}"
    if event.accepted and not event.compared:
        return f"{which}: none of {event.recorded} recorded calls could be compared"
    slowdown = "" if event.slowdown is None else f", and the median call takes {event.slowdown:.2f} times as long"
    agreed = f"{event.agreed} of {event.compared} answers agree ({event.recorded} calls were recorded)"
    return f"{which}: {agreed}{slowdown}; {'accepted' if event.accepted else 'rejected'} after {event.seconds:.2f} s"


def _batch_finished(event: events.BatchFinished) -> str:
    return f"a batch of {event.size} took {event.run_seconds:.3f} s; {event.waiting} waiting"


def _batch_errored(event: events.BatchErrored) -> str:
    kept = f"{event.size - event.failed} of {event.size} items succeeded when they were run again"
    return f"a batch failed with {event.error}; " + (kept if event.reruns else f"all {event.size} items fail")


def _batch_size_chosen(event: events.BatchSizeChosen) -> str:
    if event.slo is None:
        return f"batches of at most {event.size}, as configured"
    slo = f"slo={event.slo:g} s"
    if event.reachable:
        return f"batches of at most {event.size}, for {slo}; one item alone takes {event.item_seconds:.3g} s"
    return f"{slo} is out of reach: one item alone takes {event.item_seconds:.3g} s; items run alone"


def _refused(event: events.RequestsRefused) -> str:
    counts = {
        "queue full": event.full,
        "too late": event.late,
        "circuit open": event.open,
        "over the quota of their key": event.quota,
        "expired": event.expired,
        "cancelled": event.cancelled,
    }
    listed = ", ".join(f"{count} {why}" for why, count in counts.items() if count)
    return f"requests without a result: {listed}; {event.waiting} waiting"


def _circuit_opened(event: events.CircuitOpened) -> str:
    retry = f"next try in {event.retry_after:.1f} s"
    return f"circuit open after {event.failures} failed batches, {retry}: {event.error}"


def _generation(
    event: events.LoadFinished
    | events.RolledBack
    | events.ReplayFinished
    | events.GenerationReleased
    | events.GenerationAbandoned,
) -> str:
    return f"generation {event.generation}{_version(event.version)}"


def _version(version: str | None) -> str:
    return "" if version is None else f" (version {version})"


def _reasons(reasons: tuple[Reason, ...]) -> str:
    return ", ".join(map(str, reasons))


_SENTENCES: dict[type[events.Event], Callable[[Any], str]] = {
    events.UnloadStarted: lambda event: (
        f"generation {event.generation} is released until the next use: {_reasons(event.reasons)}"
    ),
    events.RolledBack: lambda event: (
        f"rolled back to {_generation(event)}, from generation {event.replaced}{_version(event.replaced_version)}"
    ),
    events.ReplayFinished: _replayed,
    events.ReloadDue: lambda event: f"reload due after generation {event.generation}: {_reasons(event.reasons)}",
    events.ReloadPostponed: _postponed,
    events.GuardPaused: lambda _: "paused: policies start nothing until resume()",
    events.GuardResumed: lambda _: "resumed: policies decide again",
    events.RecycleAsked: lambda event: (
        f"asked the server for a new process after generation {event.generation}: {_reasons(event.reasons)}"
    ),
    events.SwapChosen: lambda event: f"replacing the model by {event.swap}: {event.why}",
    events.LoadStarted: _load_started,
    events.LoadFinished: _load_finished,
    events.LoadErrored: _load_errored,
    events.LoadDiscarded: lambda event: (
        f"a loaded model{_version(event.version)} was discarded: {_DISCARDED[event.cause]}"
    ),
    events.GenerationReleased: _released,
    events.GenerationAbandoned: _abandoned,
    events.MemoryTrimmed: lambda event: f"trimmed, {_units.format_bytes(event.freed)} returned to the system",
    events.GpuCacheEmptied: _gpu_cache_emptied,
    events.GpuOutOfMemory: _gpu_out_of_memory,
    events.PolicyFutile: _futile,
    events.GrowthFound: _growth,
    events.CallbackErrored: lambda event: f"{event.callback} raised {event.error}",
    events.BatchFinished: _batch_finished,
    events.BatchErrored: _batch_errored,
    events.BatchSizeChosen: _batch_size_chosen,
    events.RequestsRefused: _refused,
    events.CircuitOpened: _circuit_opened,
    events.CircuitClosed: lambda _: "circuit closed",
    events.WorkerStarted: lambda event: f"worker {event.worker} takes calls after {event.seconds:.3f} s",
    events.WorkerEnded: lambda event: (
        f"worker {event.worker} ended after {event.age:.1f} s: {_ENDED[event.cause]}"
        + (f" ({event.detail})" if event.cause == "crashed" else "")
    ),
    events.WorkersReleased: lambda event: (
        f"{event.workers} workers ended until the next call, "
        f"{_units.format_bytes(event.freed)} returned to the system: {_reasons(event.reasons)}"
    ),
}
