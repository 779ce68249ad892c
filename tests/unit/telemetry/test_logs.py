"""The logging hook: one line per event."""

from __future__ import annotations

import logging

import pytest

from modelguard.telemetry import (
    BatchErrored,
    BatchFinished,
    CallbackErrored,
    CircuitClosed,
    CircuitOpened,
    Event,
    GenerationAbandoned,
    GenerationReleased,
    LoadDiscarded,
    LoadErrored,
    LoadFinished,
    LoadStarted,
    MemoryTrimmed,
    PolicyFutile,
    RecycleAsked,
    ReloadDue,
    RequestsRefused,
    SwapChosen,
    emit,
)
from modelguard.telemetry.hooks import logger

MB = 10**6


def released(*, alive: bool | None = False, holders: tuple[str, ...] = ()) -> GenerationReleased:
    return GenerationReleased(
        guard="nlp",
        generation=3,
        bytes_before=900 * MB,
        bytes_after=400 * MB,
        alive=alive,
        holders=holders,
        collected=False,
        trim="glibc",
        seconds=0.1,
        drain_seconds=0.2,
        error=None,
    )


LINES: list[tuple[Event, str, str]] = [
    (
        ReloadDue(guard="nlp", generation=3, reasons=("TTL('1h')", "Uses(5)")),
        "INFO",
        "reload due after generation 3: TTL('1h'), Uses(5)",
    ),
    (
        RecycleAsked(guard="nlp", generation=3, reasons=("Uses(5)",)),
        "INFO",
        "asked the server for a fresh worker after generation 3: Uses(5)",
    ),
    (
        SwapChosen(guard="nlp", swap="load_first", why="there is room", model_bytes=7, headroom=None),
        "INFO",
        "SwapChosen headroom=None, model_bytes=7, swap='load_first', why='there is room'",
    ),
    (
        LoadStarted(guard="nlp", generation=4, reasons=("first use",), deferred_seconds=0.5, slot="host"),
        "INFO",
        "LoadStarted deferred_seconds=0.5, generation=4, reasons=('first use',), slot='host'",
    ),
    (
        LoadFinished(
            guard="nlp",
            generation=4,
            reasons=("first use",),
            seconds=0.61,
            stall_seconds=0.12,
            model_bytes=312 * MB,
            swap="first",
            waited_seconds=0.0,
        ),
        "INFO",
        "generation 4 serves after 0.61 s (312 MB, longest stall 120 ms)",
    ),
    (
        LoadErrored(guard="nlp", attempt=2, error="OSError: no weights", retry_after=1.5, serving=3),
        "WARNING",
        "load failed (attempt 2): OSError: no weights; generation 3 serves on, next attempt in 1.5 s",
    ),
    (
        LoadErrored(guard="nlp", attempt=2, error="OSError: no weights", retry_after=1.5, serving=None),
        "WARNING",
        "load failed (attempt 2): OSError: no weights; no generation serves, next attempt in 1.5 s",
    ),
    (LoadDiscarded(guard="nlp", why="it was late"), "INFO", "LoadDiscarded why='it was late'"),
    (released(), "INFO", "generation 3 released, 500 MB given back"),
    (released(alive=None), "INFO", "generation 3 released, 500 MB given back"),
    (
        released(alive=True, holders=("a list of 3", "a closure's variable")),
        "WARNING",
        "generation 3 was dropped but is still alive, held by: a list of 3; a closure's variable",
    ),
    (released(alive=True), "WARNING", "generation 3 was dropped but is still alive, held by: unknown"),
    (
        GenerationAbandoned(guard="nlp", generation=3, in_flight=2, drain_timeout=30.0),
        "WARNING",
        "GenerationAbandoned drain_timeout=30.0, generation=3, in_flight=2",
    ),
    (
        MemoryTrimmed(guard="nlp", bytes_before=900 * MB, bytes_after=600 * MB, trim="glibc", seconds=0.012),
        "INFO",
        "trimmed, 300 MB given back",
    ),
    (
        PolicyFutile(guard="nlp", generation=3, policy="MemoryLimit('1 GB')", detail="too low"),
        "WARNING",
        "PolicyFutile detail='too low', generation=3, policy=\"MemoryLimit('1 GB')\"",
    ),
    (
        CallbackErrored(guard="nlp", callback="reload_on", error="KeyError: 'x'"),
        "WARNING",
        "CallbackErrored callback='reload_on', error=\"KeyError: 'x'\"",
    ),
    (
        BatchFinished(guard="nlp", size=8, waiting=5, wait_seconds=0.02, run_seconds=0.1, failed=2, reruns=6),
        "DEBUG",
        "BatchFinished failed=2, reruns=6, run_seconds=0.1, size=8, wait_seconds=0.02, waiting=5",
    ),
    (
        BatchErrored(guard="nlp", size=8, failed=2, error="ValueError: no", reruns=6),
        "WARNING",
        "a batch failed with ValueError: no; 6 of 8 items succeeded when they were run again",
    ),
    (
        BatchErrored(guard="nlp", size=8, failed=8, error="ValueError: no", reruns=0),
        "WARNING",
        "a batch failed with ValueError: no; all 8 items fail",
    ),
    (
        RequestsRefused(guard="nlp", full=3, late=0, open=0, expired=2, cancelled=0, waiting=7),
        "WARNING",
        "requests without a result: 3 queue full, 2 expired; 7 wait",
    ),
    (
        CircuitOpened(guard="nlp", failures=5, retry_after=1.5, error="ValueError: no"),
        "WARNING",
        "circuit open after 5 failed batches, next try in 1.5 s: ValueError: no",
    ),
    (CircuitClosed(guard="nlp"), "INFO", "CircuitClosed"),
]


@pytest.mark.parametrize(("event", "level", "line"), LINES, ids=range(len(LINES)))
def test_every_event_is_one_line(caplog: pytest.LogCaptureFixture, event: Event, level: str, line: str) -> None:
    """Each event is one line on the logger ``modelguard``, a warning where somebody should look."""
    with caplog.at_level(logging.DEBUG, "modelguard"):
        emit(event)
    assert [("modelguard", getattr(logging, level), f"nlp: {line}")] == caplog.record_tuples


def test_every_kind_of_event_is_tried_here() -> None:
    """No event is missing above."""
    assert set(Event.__subclasses__()) == {type(event) for event, _, _ in LINES}


def test_fields_travel_with_the_line(caplog: pytest.LogCaptureFixture) -> None:
    """Every field of the event is in the record, so a structured log needs no parsing."""
    with caplog.at_level(logging.INFO, "modelguard"):
        emit(released(alive=True, holders=("a list of 3",)))
    (record,) = caplog.records
    fields = {name: value for name, value in vars(record).items() if name.startswith("modelguard_")}
    assert ("nlp", 3, 900 * MB, True, ("a list of 3",)) == (
        fields["modelguard_guard"],
        fields["modelguard_generation"],
        fields["modelguard_bytes_before"],
        fields["modelguard_alive"],
        fields["modelguard_holders"],
    )


def test_what_nobody_listens_to_is_not_written(caplog: pytest.LogCaptureFixture) -> None:
    """The level is the application's business: at WARNING the everyday events cost nothing."""
    with caplog.at_level(logging.WARNING, "modelguard"):
        emit(released())
        emit(released(alive=True))
    assert 1 == len(caplog.records)


def test_logging_is_left_to_the_application() -> None:
    """No level is set, and no handler is added that writes."""
    assert (logging.NOTSET, True) == (logger.level, logger.propagate)
    assert [logging.NullHandler] == [
        type(handler) for handler in logger.handlers if type(handler).__module__ == "logging"
    ]
