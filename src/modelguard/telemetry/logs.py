"""The logging hook: one line per event on the logger ``modelguard``, with every field in ``extra``.

modelguard sets no level and no handler; what is shown is the application's business.
"""

from __future__ import annotations

import dataclasses
import logging

from modelguard import _units
from modelguard.telemetry import events
from modelguard.telemetry.hooks import logger

_WARNINGS = (
    events.LoadErrored,
    events.GenerationAbandoned,
    events.PolicyFutile,
    events.CallbackErrored,
    events.BatchErrored,
    events.RequestsRefused,
    events.CircuitOpened,
)


def log_event(event: events.Event) -> None:
    """Log one event: a warning if somebody should look at it, else at level INFO; what comes often, at level DEBUG."""
    troubled = isinstance(event, _WARNINGS) or (isinstance(event, events.GenerationReleased) and bool(event.alive))
    level = logging.WARNING if troubled else logging.INFO
    if isinstance(event, events.BatchFinished):
        level = logging.DEBUG
    if logger.isEnabledFor(level):
        fields = {f"modelguard_{name}": value for name, value in dataclasses.asdict(event).items()}
        logger.log(level, "%s: %s", event.guard, describe(event), extra=fields)


def describe(event: events.Event) -> str:
    """One line of plain English about an event."""
    return _of_a_batch(event) or _of_a_guard(event)


def _of_a_guard(event: events.Event) -> str:
    match event:
        case events.GenerationReleased(alive=True):
            held_by = "; ".join(event.holders) or "unknown"
            return f"generation {event.generation} was dropped but is still alive, held by: {held_by}"
        case events.GenerationReleased() | events.MemoryTrimmed():
            what = "trimmed" if isinstance(event, events.MemoryTrimmed) else f"generation {event.generation} released"
            return f"{what}, {_units.format_bytes(event.freed)} given back"
        case events.LoadFinished():
            return (
                f"generation {event.generation} serves after {event.seconds:.2f} s "
                f"({_units.format_bytes(event.model_bytes)}, longest stall {event.stall_seconds * 1e3:.0f} ms)"
            )
        case events.LoadErrored():
            kept = "no generation serves" if event.serving is None else f"generation {event.serving} serves on"
            again = f"next attempt in {event.retry_after:.1f} s"
            return f"load failed (attempt {event.attempt}): {event.error}; {kept}, {again}"
        case events.ReloadDue() | events.RecycleAsked():
            what = "reload due" if isinstance(event, events.ReloadDue) else "asked the server for a fresh worker"
            return f"{what} after generation {event.generation}: {', '.join(event.reasons)}"
        case _:
            own = {f.name for f in dataclasses.fields(event)} - {f.name for f in dataclasses.fields(events.Event)}
            told = ", ".join(f"{name}={getattr(event, name)!r}" for name in sorted(own))
            return f"{type(event).__name__} {told}".rstrip()


def _of_a_batch(event: events.Event) -> str | None:
    match event:
        case events.BatchErrored():
            kept = f"{event.size - event.failed} of {event.size} items succeeded when they were run again"
            return f"a batch failed with {event.error}; " + (kept if event.reruns else f"all {event.size} items fail")
        case events.RequestsRefused():
            counts = {
                "queue full": event.full,
                "too late": event.late,
                "circuit open": event.open,
                "expired": event.expired,
                "cancelled": event.cancelled,
            }
            told = ", ".join(f"{count} {why}" for why, count in counts.items() if count)
            return f"requests without a result: {told}; {event.waiting} wait"
        case events.CircuitOpened():
            return (
                f"circuit open after {event.failures} failed batches, next try in {event.retry_after:.1f} s: "
                f"{event.error}"
            )
        case _:
            return None
