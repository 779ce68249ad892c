"""The OpenTelemetry hook, with the SDK's own reader and exporter in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.lifecycle.world import until
from tests.unit.telemetry.every_event import EVERY, MB

from modelguard import Loaded, guard, telemetry
from modelguard.errors import InvalidOption, LoadFailed, ModelRejected, NotSupported
from modelguard.telemetry import Event, Reason
from modelguard.telemetry._metrics import METRICS
from modelguard.telemetry.opentelemetry import opentelemetry

pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode


class Sdk:
    """What an application sets up, and what reached it."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.exporter = InMemorySpanExporter()
        self.meters = MeterProvider(metric_readers=[self.reader])
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.hook = opentelemetry(meter_provider=self.meters, tracer_provider=self.tracers)

    def metrics(self) -> dict[str, Any]:
        data = self.reader.get_metrics_data()
        assert data is not None
        return {
            metric.name: metric
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def value(self, name: str, **labels: str) -> Any:
        points = {frozenset(point.attributes.items()): point for point in self.metrics()[name].data.data_points}
        point = points[frozenset(labels.items())]
        return point.sum if hasattr(point, "sum") else point.value

    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()


@pytest.fixture
def sdk() -> Iterator[Sdk]:
    """An SDK of this test's own, and the hook added."""
    made = Sdk()
    remove = telemetry.add_hook(made.hook)
    yield made
    remove()
    made.meters.shutdown()
    made.tracers.shutdown()


def events_of(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


def started(**more: Any) -> Event:
    fields = {
        "guard": "nlp",
        "generation": 2,
        "reasons": (Reason("requested", "requested"),),
        "deferred_seconds": 0.0,
        "deferred_growth": 0,
        "host_lock": "host",
    }
    return telemetry.LoadStarted(**{**fields, **more})


def test_every_metric_is_exported(sdk: Sdk) -> None:
    """The metrics are those of Prometheus, by OpenTelemetry's names and units."""
    for event in EVERY:
        telemetry.emit(event)
    told = {name: metric.unit for name, metric in sdk.metrics().items()}
    assert told == {metric.full_name: metric.unit for metric in METRICS.values()}


def test_numbers_and_labels_are_the_events(sdk: Sdk) -> None:
    """Counters add up, gauges have the last value, histograms have the buckets of the table."""
    for event in EVERY:
        telemetry.emit(event)
    assert 100 * MB == sdk.value("modelguard.release.freed", guard="nlp")
    assert 2 == sdk.value("modelguard.generation", guard="nlp")
    assert 7 == sdk.value("modelguard.queue.depth", function="predict")
    assert 3 == sdk.value("modelguard.requests.refused", function="predict", reason="circuit_open")
    assert 5 == sdk.value("modelguard.load.duration", guard="nlp")
    (point,) = sdk.metrics()["modelguard.batch.size"].data.data_points
    assert METRICS["batch.size"].buckets == tuple(point.explicit_bounds)


def test_a_real_load_is_a_span(sdk: Sdk) -> None:
    """From the load's start to its end, with the reasons, and nothing after it is part of it."""
    model = guard(lambda: {"a": 1}, reload_on=None, name="spanned")
    model.load()
    model.close()
    (span,) = sdk.spans()
    assert ("modelguard.load", StatusCode.UNSET) == (span.name, span.status.status_code)
    assert ["LoadStarted", "LoadFinished"] == events_of(span)
    assert span.attributes is not None
    assert ("spanned", ("first use",), "loaded") == tuple(
        span.attributes[name] for name in ("guard", "reasons", "outcome")
    )
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.start_time <= span.end_time


def test_a_reload_tells_how_it_replaced_the_model(sdk: Sdk) -> None:
    """The choice of the swap is in the span; for drain_first, so is the release of the old generation."""
    model = guard(lambda: {"a": 1}, reload_on=None, swap="drain_first", name="swapped")
    model.load()
    model.reload()
    model.close()
    span = sdk.spans()[-1]
    assert ["SwapChosen", "GenerationReleased", "LoadStarted", "LoadFinished"] == events_of(span)
    assert [event.timestamp for event in span.events] == sorted(event.timestamp for event in span.events)
    assert span.start_time == span.events[0].timestamp


def test_a_first_load_is_not_that_of_a_reload_that_was_given_up(sdk: Sdk) -> None:
    """A guard that was closed while its reload drained, and is opened again, has a span of its first load alone."""
    telemetry.emit(telemetry.SwapChosen(guard="nlp", swap="drain_first", why="room", model_bytes=1, headroom=None))
    model = guard(lambda: {"a": 1}, reload_on=None, name="nlp")
    with model:
        pass
    (span,) = sdk.spans()
    assert ["LoadStarted", "LoadFinished"] == events_of(span)


def test_a_failed_load_is_a_span_with_an_error(sdk: Sdk) -> None:
    """Its status is an error, and the description is the failure in one line."""

    def load() -> dict[str, int]:
        raise OSError("no weights")

    model = guard(load, reload_on=None, name="failing")
    with pytest.raises(LoadFailed):
        model.load()
    model.close()
    (span,) = sdk.spans()
    assert (StatusCode.ERROR, "OSError: no weights") == (span.status.status_code, span.status.description)
    assert ["LoadStarted", "LoadErrored"] == events_of(span)


def test_a_refused_model_is_one_span(sdk: Sdk) -> None:
    """A model that ``validate`` rejects was loaded and discarded, and its load is one failed span."""
    model = guard(lambda: {"a": 1}, reload_on=None, validate=lambda model: False, name="refused")
    with pytest.raises(ModelRejected):
        model.load()
    model.close()
    (span,) = sdk.spans()
    assert ["LoadStarted", "LoadDiscarded", "LoadErrored"] == events_of(span)
    assert StatusCode.ERROR is span.status.status_code


def test_a_stale_model_ends_its_span(sdk: Sdk) -> None:
    """A discarded load is marked as discarded, and the load that follows has its own span."""
    telemetry.emit(started(generation=2))
    telemetry.emit(telemetry.LoadDiscarded(guard="nlp", cause="stale"))
    telemetry.emit(started(generation=3))
    telemetry.emit(telemetry.LoadErrored(guard="nlp", attempt=1, error="no", retry_after=1.0, current=1))
    assert ["discarded", "failed"] == [(span.attributes or {})["outcome"] for span in sdk.spans()]


def test_a_model_that_came_too_late_is_no_part_of_the_next_load(sdk: Sdk) -> None:
    """Its load was reported as failed when its time was over; the one under way is not affected."""
    telemetry.emit(started())
    telemetry.emit(telemetry.LoadErrored(guard="nlp", attempt=1, error="late", retry_after=1.0, current=1))
    telemetry.emit(started())
    telemetry.emit(telemetry.LoadDiscarded(guard="nlp", cause="late"))
    assert 1 == len(sdk.spans())
    telemetry.emit(telemetry.LoadErrored(guard="nlp", attempt=2, error="no", retry_after=1.0, current=1))
    assert ["LoadStarted", "LoadErrored"] == events_of(sdk.spans()[1])


def test_a_failure_before_the_load_is_a_span_too(sdk: Sdk) -> None:
    """A replacement that fails while the old model is being seen off has its choice of the swap, and the error."""
    telemetry.emit(telemetry.SwapChosen(guard="nlp", swap="drain_first", why="room", model_bytes=1, headroom=None))
    telemetry.emit(telemetry.LoadErrored(guard="nlp", attempt=1, error="no thread", retry_after=1.0, current=1))
    (span,) = sdk.spans()
    assert ["SwapChosen", "LoadErrored"] == events_of(span)


def test_two_guards_have_spans_of_their_own(sdk: Sdk) -> None:
    """Loads that run at the same time are distinguished by the guards' names."""
    telemetry.emit(started(guard="a"))
    telemetry.emit(started(guard="b"))
    for name in ("a", "b"):
        telemetry.emit(telemetry.LoadErrored(guard=name, attempt=1, error="no", retry_after=1.0, current=None))
    assert ["a", "b"] == [(span.attributes or {})["guard"] for span in sdk.spans()]


def test_a_childs_load_does_not_end_the_parents_span(sdk: Sdk) -> None:
    """A span that was open at a fork is the parent's to end."""
    telemetry.emit(started(pid=1))
    telemetry.emit(telemetry.LoadErrored(guard="nlp", attempt=1, error="no", retry_after=1.0, current=1, pid=2))
    assert () == sdk.spans()
    telemetry.emit(telemetry.LoadErrored(guard="nlp", attempt=1, error="no", retry_after=1.0, current=1, pid=1))
    assert 1 == len(sdk.spans())


def test_opentelemetrys_prometheus_exporter_tells_the_same_as_the_prometheus_hook() -> None:
    """Names, labels and values are equal, so one dashboard and one set of alerts serve both ways."""
    exporter = pytest.importorskip("opentelemetry.exporter.prometheus", reason="needs the exporter for Prometheus")
    client = pytest.importorskip("prometheus_client", reason="needs prometheus-client")
    from modelguard.telemetry.prometheus import prometheus

    meters = MeterProvider(metric_readers=[exporter.PrometheusMetricReader()])
    registry = client.CollectorRegistry()
    try:
        hooks = opentelemetry(meter_provider=meters), prometheus(registry)
        for event in EVERY:
            for hook in hooks:
                hook(event)
        assert samples(client.REGISTRY) == samples(registry)
    finally:
        meters.shutdown()


def samples(registry: Any) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """What a scrape of modelguard's metrics gives, less the exporter's own labels."""
    return {
        (
            sample.name,
            frozenset((name, value) for name, value in sample.labels.items() if not name.startswith("otel_")),
        ): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.startswith("modelguard_") and not sample.name.endswith("_created")
    }


@pytest.mark.parametrize(
    ("argument", "kind"), [("meter_provider", "MeterProvider"), ("tracer_provider", "TracerProvider")]
)
def test_an_invalid_provider_is_rejected(argument: str, kind: str) -> None:
    """The error comes when the hook is made, not at the first event."""
    wrong: dict[str, Any] = {argument: "console"}
    with pytest.raises(InvalidOption, match=f"{argument}='console': must be OpenTelemetry's {kind}"):
        opentelemetry(**wrong)


@pytest.mark.parametrize("module", ["opentelemetry.metrics", "opentelemetry.trace"])
def test_a_missing_package_is_named_with_its_extra(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without opentelemetry-api, the error says what to install."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(NotSupported, match=r"pip install 'modelguard-lifecycle\[opentelemetry\]'"):
        opentelemetry()


ALONE = """
import sys
from modelguard import guard, telemetry
from modelguard.telemetry.opentelemetry import opentelemetry

telemetry.add_hook(opentelemetry())
guard(dict, reload_on=None).load()
print(sorted(name for name in sys.modules if name.startswith("opentelemetry.sdk")))
"""


def test_the_api_alone_is_enough() -> None:
    """Without an SDK nothing is reported and nothing fails; modelguard itself never imports one."""
    environ = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", ALONE], env=environ, capture_output=True, text=True, check=True)
    assert ("[]\n", "") == (done.stdout, done.stderr)


def test_only_the_current_version_is_exported(sdk: Sdk) -> None:
    """An old version is not exported beside the new one."""
    names = iter("abc")
    model = guard(lambda: Loaded({}, version=next(names)), reload_on=None, name="versioned")
    model.load()
    model.reload()
    model.reload()

    def versions() -> list[dict[str, str]]:
        metric = sdk.metrics().get("modelguard.model.info")
        return [] if metric is None else [dict(point.attributes) for point in metric.data.data_points]

    until(lambda: versions() == [{"guard": "versioned", "version": "c"}])  # events may come after what they report
    model.close()
    until(lambda: versions() == [])
