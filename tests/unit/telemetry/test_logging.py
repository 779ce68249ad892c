"""The logging hook: one line per event."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any, Never

import pytest
from prometheus_client import CollectorRegistry

from modelguard import batched, guard, isolate, pool, replicas, telemetry
from modelguard.errors import LoadFailed
from modelguard.telemetry import (
    BatchErrored,
    BatchFinished,
    BatchSizeChosen,
    CallbackErrored,
    CircuitClosed,
    CircuitOpened,
    Event,
    GenerationAbandoned,
    GenerationReleased,
    GpuCacheEmptied,
    GpuOutOfMemory,
    GrowthFound,
    GuardPaused,
    GuardResumed,
    IdleEnded,
    LoadDiscarded,
    LoadErrored,
    LoadFinished,
    LoadStarted,
    MemoryTrimmed,
    PolicyIgnored,
    Reason,
    RecycleAsked,
    ReloadDue,
    ReloadPostponed,
    ReplayFinished,
    RequestsRefused,
    RolledBack,
    SwapChosen,
    UnloadStarted,
    WorkerEndCause,
    WorkerEnded,
    WorkersReleased,
    WorkerStarted,
    emit,
    logger,
)
from modelguard.telemetry.prometheus import prometheus

MB = 10**6
FAQ = Path(__file__).parents[3] / "docs" / "faq.md"
LIMIT = Reason("memory_limit", "MemoryLimit('1 GB')")
FIRST_USE = Reason("first_use", "first use")


def released(*, alive: bool | None = False, holders: tuple[str, ...] = ()) -> GenerationReleased:
    return GenerationReleased(
        guard="nlp",
        generation=3,
        bytes_before=900 * MB,
        bytes_after=400 * MB,
        alive=alive,
        holders=holders,
        collected=False,
        trimmed_by="glibc",
        trim_error=None,
        seconds=0.1,
        drain_seconds=0.2,
        error=None,
    )


def ended(cause: WorkerEndCause) -> WorkerEnded:
    return WorkerEnded(guard="nlp", generation=1, worker=4711, cause=cause, detail="SIGSEGV", age=2.5)


def emptied(advice: str | None) -> GpuCacheEmptied:
    """A cache that was emptied."""
    return GpuCacheEmptied(
        guard="nlp",
        generation=3,
        policy="GpuMemoryLimit('80%')",
        reserved_before=900 * MB,
        reserved_after=700 * MB,
        allocated=600 * MB,
        seconds=0.01,
        advice=advice,
    )


def replayed(*, agreed: int, slowdown: float | None, compared: int = 98) -> ReplayFinished:
    return ReplayFinished(
        guard="nlp",
        generation=3,
        version="b",
        current=2,
        recorded=100,
        compared=compared,
        agreed=agreed,
        slowdown=slowdown,
        seconds=2.5,
        accepted=agreed >= 0.9 * compared,
    )


PAIR = "generation 3 (version b) against generation 2"
SLOWER = ", and the median call takes 1.02 times as long"

LINES: list[tuple[Event, str, str]] = [
    (
        ReloadDue(guard="nlp", generation=3, reasons=(Reason("ttl", "TTL('1h')"), Reason("uses", "Uses(5)"))),
        "INFO",
        "reload due after generation 3: TTL('1h'), Uses(5)",
    ),
    (
        UnloadStarted(guard="nlp", generation=3, reasons=(Reason("idle", "Idle('10m')"),)),
        "INFO",
        "generation 3 is released until the next use: Idle('10m')",
    ),
    (
        RolledBack(guard="nlp", generation=2, version="2026-11-20", replaced=3, replaced_version="2026-11-21"),
        "WARNING",
        "rolled back to generation 2 (version 2026-11-20), from generation 3 (version 2026-11-21)",
    ),
    (
        RolledBack(guard="nlp", generation=2, version=None, replaced=3, replaced_version=None),
        "WARNING",
        "rolled back to generation 2, from generation 3",
    ),
    (
        replayed(agreed=97, slowdown=1.024),
        "INFO",
        f"{PAIR}: 97 of 98 answers agree (100 calls were recorded){SLOWER}; accepted after 2.50 s",
    ),
    (
        replayed(agreed=40, slowdown=None),
        "WARNING",
        f"{PAIR}: 40 of 98 answers agree (100 calls were recorded); rejected after 2.50 s",
    ),
    (
        replayed(agreed=0, compared=0, slowdown=None),
        "WARNING",
        f"{PAIR}: none of 100 recorded calls could be compared",
    ),
    (
        RecycleAsked(guard="nlp", generation=3, reasons=(Reason("uses", "Uses(5)"),)),
        "INFO",
        "asked the server for a new process after generation 3: Uses(5)",
    ),
    (
        SwapChosen(guard="nlp", swap="load_first", why="there is room", model_bytes=7, headroom=None),
        "INFO",
        "replacing the model by load_first: there is room",
    ),
    (
        LoadStarted(
            guard="nlp",
            generation=4,
            reasons=(FIRST_USE,),
            deferred_seconds=0.5,
            deferred_growth=5 * 10**6,
            host_lock="host",
        ),
        "INFO",
        "loading generation 4: first use, deferred by 0.5 s, in which memory grew by 5 MB",
    ),
    (
        LoadStarted(
            guard="nlp",
            generation=4,
            reasons=(FIRST_USE,),
            deferred_seconds=3e-6,
            deferred_growth=0,
            host_lock="host",
        ),
        "INFO",
        "loading generation 4: first use",
    ),
    (
        LoadFinished(
            guard="nlp",
            generation=4,
            reasons=(FIRST_USE,),
            seconds=0.61,
            stall_seconds=0.12,
            model_bytes=312 * MB,
            swap="first",
            waited_seconds=0.0,
        ),
        "INFO",
        "generation 4 is ready after 0.61 s (312 MB, longest stall 120 ms)",
    ),
    (
        LoadErrored(guard="nlp", attempt=2, error="OSError: no weights", retry_after=1.5, current=3),
        "WARNING",
        "load failed (attempt 2): OSError: no weights; generation 3 stays in use, next attempt in 1.5 s",
    ),
    (
        LoadErrored(guard="nlp", attempt=2, error="OSError: no weights", retry_after=1.5, current=None),
        "WARNING",
        "load failed (attempt 2): OSError: no weights; no model is loaded, next attempt in 1.5 s",
    ),
    (
        LoadErrored(guard="nlp", attempt=1, error="OSError: no weights", retry_after=None, current=None),
        "WARNING",
        "load failed (attempt 1): OSError: no weights; no model is loaded, the guard is closed",
    ),
    (
        ReloadPostponed(guard="nlp", generation=3, reasons=(FIRST_USE,), cause="paused", seconds=None),
        "INFO",
        "generation 3 is due, but the guard is paused: first use",
    ),
    (
        ReloadPostponed(guard="nlp", generation=3, reasons=(LIMIT,), cause="paused", seconds=None),
        "WARNING",
        "generation 3 is due, but the guard is paused: MemoryLimit('1 GB')",
    ),
    (
        ReloadPostponed(guard="nlp", generation=3, reasons=(LIMIT,), cause="paused", seconds=None, worker=4711),
        "WARNING",
        "worker 4711 is due, but the guard is paused: MemoryLimit('1 GB')",
    ),
    (
        ReloadPostponed(guard="nlp", generation=3, reasons=(LIMIT,), cause="min_lifetime", seconds=12.3),
        "INFO",
        "generation 3 is due, but waits 12.3 s for min_lifetime: MemoryLimit('1 GB')",
    ),
    (GuardPaused(guard="nlp"), "INFO", "paused: policies start nothing until resume()"),
    (GuardResumed(guard="nlp"), "INFO", "resumed: policies decide again"),
    (IdleEnded(guard="nlp"), "INFO", "closed while its model was released until the next use"),
    (
        LoadDiscarded(guard="nlp", cause="late"),
        "INFO",
        "a loaded model was discarded: it was ready only after the timeout of its load",
    ),
    (released(), "INFO", "generation 3 released, 500 MB returned to the system"),
    (released(alive=None), "INFO", "generation 3 released, 500 MB returned to the system"),
    (
        dataclasses.replace(released(), bytes_after=905 * MB),
        "INFO",
        "generation 3 released, memory grew by 5 MB meanwhile",
    ),
    (
        dataclasses.replace(released(alive=False), kept="2 kB of 20 MB came back: it is so"),
        "INFO",
        "generation 3 released, 500 MB returned to the system (2 kB of 20 MB came back: it is so)",
    ),
    (
        released(alive=True, holders=("a list of 3", "a closure's variable")),
        "WARNING",
        "generation 3 was dropped but is still alive, held by: a list of 3; a closure's variable",
    ),
    (released(alive=True), "WARNING", "generation 3 was dropped but is still alive, held by: unknown"),
    (
        GenerationAbandoned(guard="nlp", generation=3, in_flight=2, drain_timeout=30.0),
        "WARNING",
        "generation 3 is abandoned: 2 of its calls outlasted drain_timeout=30 s; it will be released when they end",
    ),
    (
        MemoryTrimmed(
            guard="nlp", bytes_before=900 * MB, bytes_after=600 * MB, trimmed_by="glibc", trim_error=None, seconds=0.012
        ),
        "INFO",
        "trimmed, 300 MB returned to the system",
    ),
    (
        dataclasses.replace(released(), gpu_reserved_before=900 * MB, gpu_reserved_after=400 * MB, gpu_allocated=0),
        "INFO",
        "generation 3 released, 500 MB returned to the system, 500 MB to the GPU",
    ),
    (
        emptied(advice=None),
        "INFO",
        "emptied torch's cache because of GpuMemoryLimit('80%'): 200 MB returned to the GPU, 700 MB reserved",
    ),
    (
        emptied(advice="Pad."),
        "INFO",
        "emptied torch's cache because of GpuMemoryLimit('80%'): 200 MB returned to the GPU, 700 MB reserved. Pad.",
    ),
    (
        GpuOutOfMemory(guard="nlp", generation=3, reserved_before=9, reserved_after=8, allocated=650 * MB, retry=True),
        "WARNING",
        "a call on generation 3 ran out of GPU memory and is run once more; 650 MB stay allocated",
    ),
    (
        GpuOutOfMemory(
            guard="nlp", generation=3, reserved_before=None, reserved_after=None, allocated=None, retry=False
        ),
        "WARNING",
        "a call on generation 3 ran out of GPU memory and failed",
    ),
    (
        PolicyIgnored(guard="nlp", generation=3, policy="MemoryLimit('1 GB')", detail="too low"),
        "WARNING",
        "MemoryLimit('1 GB') is ignored for generation 3: too low",
    ),
    (
        PolicyIgnored(guard="nlp", generation=3, policy="MemoryLimit('1 GB')", detail="too low", cause="onednn plans"),
        "WARNING",
        "MemoryLimit('1 GB') is ignored for generation 3: too low; what grows in this process: onednn plans",
    ),
    (
        GrowthFound(
            guard="nlp",
            cause="threads",
            share=0.9,
            seen="70 more threads",
            fix="End them.",
            growth=90 * MB,
            calls=9,
        ),
        "WARNING",
        "memory grows with the calls, by 90 MB so far, 90% of it by threads: 70 more threads. End them.",
    ),
    (
        GrowthFound(guard="nlp", cause=None, share=0.0, seen="", fix="", growth=90 * MB, calls=9),
        "WARNING",
        "memory grows with the calls, by 90 MB so far; the cause is not known",
    ),
    (
        CallbackErrored(guard="nlp", callback="reload_on", error="KeyError: 'x'"),
        "WARNING",
        "reload_on raised KeyError: 'x'",
    ),
    (
        BatchFinished(guard="nlp", size=8, waiting=5, wait_seconds=0.02, run_seconds=0.1, failed=2, reruns=6),
        "DEBUG",
        "a batch of 8 took 0.100 s; 5 waiting",
    ),
    (
        BatchErrored(guard="nlp", size=8, failed=2, error="ValueError: no", reruns=6),
        "WARNING",
        "a batch failed with ValueError: no; 6 of 8 items succeeded when they were run again",
    ),
    (
        BatchErrored(guard="nlp", size=8, failed=8, error="ValueError: no", reruns=0),
        "WARNING",
        "a batch failed with ValueError: no; 8 of 8 items fail",
    ),
    (
        BatchSizeChosen(guard="nlp", size=16, previous=8, slo=0.1, item_seconds=0.005, reachable=True),
        "INFO",
        "batches of at most 16, for slo=0.1 s; one item alone takes 0.005 s",
    ),
    (
        BatchSizeChosen(guard="nlp", size=1, previous=8, slo=0.1, item_seconds=0.25, reachable=False),
        "WARNING",
        "slo=0.1 s is out of reach: one item alone takes 0.25 s; items run alone",
    ),
    (
        BatchSizeChosen(guard="nlp", size=8, previous=1, slo=None, item_seconds=0.0, reachable=True),
        "INFO",
        "batches of at most 8, as configured",
    ),
    (
        RequestsRefused(guard="nlp", full=3, late=0, open=0, quota=0, expired=2, cancelled=0, waiting=7),
        "WARNING",
        "requests without a result: 3 queue full, 2 expired; 7 waiting",
    ),
    (
        CircuitOpened(guard="nlp", failures=5, retry_after=1.5, error="ValueError: no"),
        "WARNING",
        "circuit open after 5 failed runs, next try in 1.5 s: ValueError: no",
    ),
    (CircuitClosed(guard="nlp"), "INFO", "circuit closed"),
    (
        WorkerStarted(guard="nlp", generation=1, worker=4711, seconds=0.045),
        "INFO",
        "worker 4711 takes calls after 0.045 s",
    ),
    (
        WorkersReleased(
            guard="nlp",
            generation=1,
            reasons=(Reason("idle", "Idle('10m', keep='mold')"),),
            workers=3,
            bytes_before=300 * MB,
            bytes_after=120 * MB,
            seconds=0.1,
        ),
        "INFO",
        "3 workers ended until the next call, 180 MB returned to the system: Idle('10m', keep='mold')",
    ),
    (ended("recycled"), "INFO", "worker 4711 ended after 2.5 s: a policy was due"),
    (ended("crashed"), "WARNING", "worker 4711 ended after 2.5 s: it crashed (SIGSEGV)"),
    (ended("idle"), "INFO", "worker 4711 ended after 2.5 s: nobody has called"),
    (ended("timeout"), "WARNING", "worker 4711 ended after 2.5 s: its call took longer than the timeout"),
]


@pytest.mark.parametrize(("event", "level", "line"), LINES, ids=range(len(LINES)))
def test_every_event_is_one_line(caplog: pytest.LogCaptureFixture, event: Event, level: str, line: str) -> None:
    """Each event is one line on the logger ``modelguard``, a warning if it needs attention."""
    with caplog.at_level(logging.DEBUG, "modelguard"):
        emit(event)
    assert [("modelguard", getattr(logging, level), f"nlp: {line}")] == caplog.record_tuples


def test_every_kind_of_event_is_tried_here() -> None:
    """No event is missing above."""
    assert set(Event.__subclasses__()) == {type(event) for event, _, _ in LINES}


def test_fields_travel_with_the_line(caplog: pytest.LogCaptureFixture) -> None:
    """The name and every field of the event are in the record, so a structured log needs no parsing."""
    with caplog.at_level(logging.INFO, "modelguard"):
        emit(released(alive=True, holders=("a list of 3",)))
    (record,) = caplog.records
    fields = {name: value for name, value in vars(record).items() if name.startswith("modelguard_")}
    assert ("GenerationReleased", "nlp", 3, 900 * MB, True, ("a list of 3",)) == (
        fields["modelguard_event"],
        fields["modelguard_guard"],
        fields["modelguard_generation"],
        fields["modelguard_bytes_before"],
        fields["modelguard_alive"],
        fields["modelguard_holders"],
    )


def test_what_the_faq_looks_for_is_in_the_log() -> None:
    """Who searches the log for the words on that page finds the line."""
    seen = [row.split("|")[1] for row in FAQ.read_text(encoding="utf-8").splitlines() if row.startswith("|")]
    words = [each for one in seen if "in the log" in one for each in re.findall('"(.+?)"', one)]
    assert len(words) > 10
    assert [] == [each for each in words if not any(each in line for _, _, line in LINES)]


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


#: Begins a record of its own, clears a terminal, and breaks lines in all ways.
FORGED = "nlp\nERROR root: forged\r\x1b[2J\x85\u2028"


class Key:
    def __repr__(self) -> str:
        return FORGED


def fails(*_arguments: object) -> Never:
    raise ValueError(FORGED)


class TestWhatIsNotPrintable:
    """Names and the texts of errors are not the library's: they neither forge lines nor control a terminal."""

    @pytest.mark.parametrize("kind", ["guard", "pool", "replicas"])
    def test_of_a_model(self, kind: str, caplog: pytest.LogCaptureFixture) -> None:
        """It is escaped in the log, in errors, in the status and in the labels of metrics."""
        registry = CollectorRegistry()
        remove = telemetry.add_hook(prometheus(registry))
        made: Any = {
            "guard": lambda: guard(fails, reload_on=None, name=FORGED),
            "pool": lambda: pool(fails, max_memory="1 GB", name=FORGED),
            "replicas": lambda: replicas(guard(fails, reload_on=None, name=FORGED)),
        }[kind]()
        with caplog.at_level("INFO"), pytest.raises(LoadFailed) as failed:
            made.lease(Key()).__enter__() if kind == "pool" else made.load()
        remove()
        labels = [value for metric in registry.collect() for one in metric.samples for value in one.labels.values()]
        shown = [str(failed.value), failed.value.reason, made.name, *labels, *caplog.messages]
        assert "forged" in str(failed.value)
        assert [] == [text for text in shown if not text.isprintable()]
        if kind == "guard":
            assert str(made.status().last_error).isprintable()

    def test_of_a_batched_function(self, caplog: pytest.LogCaptureFixture) -> None:
        """The same, and in the errors that its callers share."""
        f: Any = batched(max_size=2, max_wait="20s", name=FORGED)(fails)
        futures = [f.submit(Key()), f.submit(Key())]
        with caplog.at_level("INFO"):
            errors = [future.exception(20.0) for future in futures]
            f.close()
        assert [] == [text for text in (f.name, *caplog.messages) if not text.isprintable()]
        assert {ValueError} == {type(error) for error in errors}, "each gets what was raised for it"

    def test_of_an_isolated_function(self) -> None:
        """Its name is escaped."""
        assert isolate(name=FORGED)(fails).name.isprintable()

    def test_of_all_that_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        """Whoever logs it, by position or by name."""
        logger.warning("%s: no mold: %s", FORGED, ValueError(FORGED))
        logger.warning("%(name)s: no mold: %(error)s", {"name": FORGED, "error": ValueError(FORGED)})
        logger.warning("%s", {"name": FORGED})
        assert [True] * 3 == [text.isprintable() for text in caplog.messages]

    def test_an_error_without_a_text_stops_nobody(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Its handler reports that it cannot be shown, as for any logger; whoever logs it goes on."""

        class Odd(Exception):
            def __str__(self) -> str:
                raise ValueError("no text")

        monkeypatch.setattr(logger, "handlers", [logging.StreamHandler()])
        monkeypatch.setattr(logger, "propagate", False)
        logger.warning("%s: no mold: %s", "nlp", Odd())
        assert "ValueError: no text" in capsys.readouterr().err

    @pytest.mark.parametrize("text", ["plain", "日本語 é", "C:\\new", "a\tb"])
    def test_other_text_stays(self, text: str, caplog: pytest.LogCaptureFixture) -> None:
        """What can be read is not changed, and nothing is escaped twice."""
        logger.warning("%s", LoadFailed("nlp", LoadFailed("nlp", text).reason).reason)
        assert [text.replace("\t", "\\t")] == caplog.messages


def test_a_handler_that_raises_stops_no_load(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model is loaded, replaced and closed whatever the application's handlers and filters do; stderr has why."""

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> Never:
            raise OSError("no log server")

    monkeypatch.setattr(logger, "handlers", [Broken()])
    monkeypatch.setattr(logger, "propagate", False)
    with caplog.at_level(logging.INFO, "modelguard"), guard(object, reload_on=None) as model:
        model.reload()
        assert 2 == model.status().generation
    assert "no log server" in capsys.readouterr().err
