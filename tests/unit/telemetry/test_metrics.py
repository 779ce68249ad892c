"""Which numbers the events give, before any library writes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.unit.telemetry.every_event import EVERY

from modelguard import TTL, Errors, MemoryGrowth, MemoryLimit, Modified, Policy, Snapshot, Uses, telemetry
from modelguard.adapters.spacy import IndexGrowth
from modelguard.telemetry import Event, _metrics
from modelguard.telemetry._metrics import METRICS, REASONS, Metric, Recorder

REFUSED = telemetry.RequestsRefused(guard="predict", full=1, late=0, open=0, quota=0, expired=0, cancelled=0, waiting=0)


class _Own(Policy):
    def due(self, now: Snapshot) -> bool:
        return True

    def __repr__(self) -> str:
        return "_Own()"


def test_every_event_counts() -> None:
    """No kind of event is left out, so a new one has to be given a metric."""
    kinds = {kind for kind in vars(telemetry.events).values() if isinstance(kind, type) and issubclass(kind, Event)}
    assert kinds - {Event} == {type(event) for event in EVERY if _metrics.measures_of(event)}


def test_every_metric_is_measured_by_some_event() -> None:
    """A metric that nothing ever writes would look like a service without troubles."""
    told = set[str]()
    recorder = Recorder(lambda metric, _labels, _amount: told.add(metric.name))
    for event in EVERY:
        recorder(event)
    assert set(METRICS) == told


def test_labels_have_the_values_that_they_were_given() -> None:
    """The second label's value is one of a fixed few, and is there where the metric has such a label."""
    for event in EVERY:
        for measure in _metrics.measures_of(event):
            metric = METRICS[measure.name]
            assert measure.value in (metric.values or (None,)), (event, measure)


@pytest.mark.parametrize("metric", METRICS.values(), ids=list(METRICS))
def test_names_keep_prometheus_rules(metric: Metric) -> None:
    """Small letters, base units at the end, ``_total`` on counters alone, and a sentence of help."""
    name = metric.prometheus_name
    assert re.fullmatch(r"modelguard(_[a-z]+)+", name)
    assert ("counter" == metric.kind) == name.endswith("_total")
    assert not re.search(r"milliseconds|_ms\b|megabytes|_mb\b|_count$|_sum$|_bucket$", name)
    assert metric.only_current == name.endswith("_info")
    assert ("s" == metric.unit) == ("_seconds" in name)
    assert ("By" == metric.unit) == ("_bytes" in name)
    assert metric.help.endswith(".")
    assert ("histogram" == metric.kind) == bool(metric.buckets)
    assert sorted(metric.buckets) == list(metric.buckets)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (TTL("1h"), "ttl"),
        (Uses(50_000), "uses"),
        (Errors(consecutive=5), "errors"),
        (MemoryGrowth("500 MB"), "memory_growth"),
        (MemoryLimit("1 GB"), "memory_limit"),
        (Modified("/tmp/a & b"), "modified"),
        (IndexGrowth("50 MB"), "index_growth"),
        (TTL("1h") & Uses(5), "combination"),
        ((TTL("1h") | Errors(3)) & Uses(5), "combination"),
        (_Own(), "custom"),
    ],
    ids=repr,
)
def test_policies_have_one_name_each(policy: Policy, expected: str) -> None:
    """Whatever a policy's figures and files, its reason is one word out of a fixed list."""
    assert expected == policy.kind
    assert expected in REASONS


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
    assert len(_metrics.measures_of(REFUSED)) == len(seen) - told, "zeros are reported once"


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


def test_modules_of_metrics_stay_small() -> None:
    """What a metric costs is one line in the table; the hooks know none by name."""
    folder = Path(_metrics.__file__).parent
    for hook in ("prometheus.py", "opentelemetry.py"):
        text = (folder / hook).read_text(encoding="utf-8")
        assert [] == [name for name in METRICS if f'"{name}"' in text]


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
