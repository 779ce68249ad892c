"""How the amounts of events are passed on: each event once, and zeros and versions besides."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.unit.serving.gated import until

from modelguard import Loaded, _units, pool, telemetry
from modelguard.telemetry import Event, _metrics
from modelguard.telemetry._metrics import Metric, Recorder, amounts_of

REFUSED = telemetry.RequestsRefused(guard="predict", full=1, late=0, open=0, quota=0, expired=0, cancelled=0, waiting=0)


def test_a_first_increase_can_be_seen() -> None:
    """Counters of failures are zero from the first event on; else ``increase()`` would miss the first failure."""
    seen: list[tuple[str, tuple[str, ...], float]] = []
    recorder = Recorder(lambda metric, labels, amount: seen.append((metric.name, labels, amount)))
    recorder(REFUSED)
    assert ("circuit.openings", ("predict",), 0) in seen
    assert ("requests.refused", ("predict", "late"), 0) in seen
    assert {"predict"} == {labels[0] for _, labels, _ in seen}, "nothing of guards"
    told = len(seen)
    recorder(REFUSED)
    assert len([*amounts_of(REFUSED)]) == len(seen) - told, "zeros are reported once"


def test_the_models_of_a_pool_are_counted_together() -> None:
    """A pool may have a key for each tenant: with keys in a label, the metrics would grow for ever."""
    seen: list[tuple[str, tuple[str, ...]]] = []
    remove = telemetry.add_hook(Recorder(lambda metric, labels, _: seen.append((metric.name, labels))))
    voices = pool(lambda key: Loaded({"model": key}, version="1"), max_memory="1 GB", max_models=2, name="voices")
    try:
        for key in range(10):
            with voices.lease(f"tenant {key}"):
                pass
        voices.close()
        until(lambda: 11 == seen.count(("loads", ("voices", "first"))))  # one is the zero
        until(lambda: 10 == seen.count(("release.duration", ("voices",))))
    finally:
        voices.close()
        remove()
    assert {"voices"} == {labels[0] for _, labels in seen}
    assert not {"generation", "model.size", "model.info", "load.failing"} & {name for name, _ in seen}


def test_the_name_of_a_pools_model_is_text() -> None:
    """In logs, and in events that come from other processes."""
    name = _units.KeyedName("voices", "a\nb")
    assert r"voices['a\nb']" == name
    for again in (pickle.loads(pickle.dumps(name)), copy.deepcopy(name), _units.name(name)):
        assert (name, "voices") == (again, again.pool)  # type: ignore[attr-defined]


def test_an_event_in_the_middle_of_another_waits() -> None:
    """A call that the garbage collector ends while a metric is written does not wait for that metric's lock."""
    depth, deepest, told = 0, 0, list[str]()

    def record(metric: Metric, labels: tuple[str, ...], amount: float) -> None:
        nonlocal depth, deepest
        depth += 1
        deepest = max(deepest, depth)
        if labels[0] == "predict" and "other" not in told:
            recorder(telemetry.CircuitClosed(guard="other"))
        told.append(labels[0])
        depth -= 1

    recorder = Recorder(record)
    recorder(telemetry.CircuitClosed(guard="predict"))
    assert (1, {"predict", "other"}) == (deepest, set(told))


def test_an_event_at_the_very_end_of_another_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may end a call after the last look for such events, while the lock is given back."""
    told: list[str] = []
    recorder = Recorder(lambda _metric, labels, _amount: told.append(labels[0]))

    @contextmanager
    def lock() -> Iterator[None]:
        yield
        if "other" not in told:
            monkeypatch.undo()
            recorder(telemetry.CircuitClosed(guard="other"))

    monkeypatch.setattr(_metrics, "WRITE_LOCK", lock())
    recorder(telemetry.CircuitClosed(guard="predict"))
    assert {"predict", "other"} == set(told)


def test_a_record_that_fails_does_not_stop_the_next() -> None:
    """A disk that is full loses what could not be written, and no event after that."""
    told: list[str] = []
    full = True

    def record(metric: Metric, labels: tuple[str, ...], amount: float) -> None:
        if full:
            raise OSError("no space left")
        told.append(metric.name)

    recorder = Recorder(record)
    with pytest.raises(OSError, match="no space left"):
        recorder(telemetry.CircuitClosed(guard="predict"))
    full = False
    recorder(telemetry.CircuitClosed(guard="predict"))
    assert "circuit.open" in told


def finished(generation: int, version: str | None) -> Event:
    """The end of a load."""
    return telemetry.LoadFinished(
        guard="nlp",
        generation=generation,
        reasons=(),
        seconds=1.0,
        stall_seconds=0.0,
        model_bytes=0,
        swap="first",
        waited_seconds=0.0,
        version=version,
    )


def released(generation: int) -> Event:
    """The end of a generation."""
    return telemetry.GenerationReleased(
        guard="nlp",
        generation=generation,
        bytes_before=0,
        bytes_after=0,
        alive=False,
        holders=(),
        collected=False,
        trimmed_by=None,
        trim_error=None,
        seconds=0.0,
        drain_seconds=0.0,
        error=None,
    )


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ((finished(1, "a"),), {"a"}),
        ((finished(1, "a"), finished(2, "b"), released(1)), {"b"}),
        ((finished(1, "a"), finished(2, "a"), released(1)), {"a"}),
        ((finished(1, "a"), released(1)), set()),
        ((finished(1, "a"), released(1), finished(2, "b")), {"b"}),
        ((finished(1, "a"), finished(2, None), released(1)), set()),
        (tuple(finished(number, f"v{number}") for number in range(1, 1000)), {"v999"}),
    ],
)
def test_only_the_current_version_has_a_series(events: tuple[Event, ...], expected: set[str]) -> None:
    """A metric with a label for each version that ever served would grow for ever."""
    shown = set[str]()

    def record(metric: Metric, labels: tuple[str, ...], amount: float) -> None:
        if metric.only_current:
            (shown.add if amount else shown.remove)(labels[1])

    recorder = Recorder(record)
    for event in events:
        recorder(event)
    assert expected == shown
