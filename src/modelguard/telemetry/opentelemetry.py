"""Events as OpenTelemetry metrics and spans: ``telemetry.add_hook(opentelemetry())``.

This needs the extra ``opentelemetry``, which installs only the API. The application's SDK determines where the numbers
go; without an SDK they are discarded. The metrics are those in ``docs/metrics.md``; each load is a span
``modelguard.load``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from modelguard import _extras, _units
from modelguard.telemetry import _events as events
from modelguard.telemetry import _metrics
from modelguard.telemetry._metrics import WRITE_LOCK, Recorder

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, Tracer, TracerProvider

__all__ = ["opentelemetry"]

_NAME = "modelguard"
_OUTCOMES = {events.LoadFinished: "loaded", events.LoadErrored: "failed"}
#: The process and the guard of a load.
_Key = tuple[int, str]


def opentelemetry(
    *, meter_provider: MeterProvider | None = None, tracer_provider: TracerProvider | None = None
) -> Callable[[events.Event], None]:
    """Make a hook that reports events as metrics and spans; pass it to :func:`modelguard.telemetry.add_hook`, once.

    Args:
        meter_provider: Receives the metrics. Default: the global one, which may be set later.
        tracer_provider: Receives the spans. Default: the global one, which may be set later.

    Returns:
        The hook: a callable with one event as its argument.

    Raises:
        NotSupported: opentelemetry-api is not installed.
        InvalidOption: A provider is not one.
    """
    metrics, trace = _api("metrics"), _api("trace")
    for argument, given, kind in (
        ("meter_provider", meter_provider, metrics.MeterProvider),
        ("tracer_provider", tracer_provider, trace.TracerProvider),
    ):
        if given is not None:
            fix = "Leave it out to use the global one, or give one."
            _units.instance(given, argument, kind, f"OpenTelemetry's {kind.__name__}", fix=fix)
    meter = metrics.get_meter(_NAME, meter_provider=meter_provider)
    instruments = {metric.name: _make(metrics, meter, metric) for metric in _metrics.METRICS.values()}
    return _OpenTelemetryHook(instruments, _LoadSpans(trace, trace.get_tracer(_NAME, tracer_provider=tracer_provider)))


class _OpenTelemetryHook(Recorder):
    def __init__(self, instruments: dict[str, Callable[..., None]], spans: _LoadSpans) -> None:
        super().__init__(partial(_record, instruments), "OpenTelemetry")
        self._spans = spans

    def __call__(self, event: events.Event) -> None:
        super().__call__(event)
        self._spans.record(event)


def _record(
    instruments: dict[str, Callable[..., None]], metric: _metrics.Metric, labels: tuple[str, ...], amount: float
) -> None:
    instruments[metric.name](amount, dict(zip(metric.labels, labels, strict=True)))


class _LoadSpans:
    """One span for each load: from the choice of how to replace the model, or from the start of the load, to its end.

    A guard runs one load at a time, so its name and the process identify the span of an event. A span that was open
    at a fork is ended by the parent.
    """

    def __init__(self, trace: Any, tracer: Tracer) -> None:
        self._trace = trace
        self._tracer = tracer
        self._before: dict[_Key, list[events.Event]] = {}  # what came before a load, and belongs to its span
        self._open: dict[_Key, Span] = {}

    def record(self, event: events.Event) -> None:
        key = event.pid, event.guard
        match event:
            case events.SwapChosen():
                with WRITE_LOCK:
                    self._before[key] = [event]
            case events.LoadStarted():
                with WRITE_LOCK:
                    if event.host_lock == "none":  # it replaces none: what came before is of one that was given up
                        self._before.pop(key, None)
                    self._open[key] = self._started(key, event)
            case (
                events.LoadFinished()
                | events.LoadErrored()
                | events.LoadDiscarded(cause="closed" | "rolled_back" | "stale")
            ):
                self._end(key, event)
            # Its LoadErrored follows. The load of one that is late has failed long ago, and another may be running.
            case events.LoadDiscarded(cause="rejected") | events.GenerationReleased() | events.GenerationAbandoned():
                with WRITE_LOCK:
                    if key in self._open:
                        _add(self._open[key], event)
                    elif key in self._before:
                        self._before[key].append(event)

    def _started(self, key: _Key, event: events.Event) -> Span:
        told = [*self._before.pop(key, ()), event]
        since = _nanoseconds(told[0])
        span = self._tracer.start_span("modelguard.load", attributes=_attributes(event), start_time=since)
        for each in told:
            _add(span, each)
        return span

    def _end(self, key: _Key, event: events.Event) -> None:
        with WRITE_LOCK:
            span = self._open.pop(key, None)
            if span is not None:
                _add(span, event)
            elif key in self._before:  # it ends before its load
                span = self._started(key, event)
            else:
                return  # the load was already reported as failed
            self._before.pop(key, None)
        span.set_attributes({**_attributes(event), "outcome": _OUTCOMES.get(type(event), "discarded")})
        if isinstance(event, events.LoadErrored):
            span.set_status(self._trace.StatusCode.ERROR, event.error)
        span.end(_nanoseconds(event))  # outside of the lock, because it may export the span, which takes time


class _Current:
    """The current series of such a metric. The SDK asks for them, because a gauge keeps what it was once set to."""

    def __init__(self, observation: Callable[[float, dict[str, str]], Any]) -> None:
        self._observation = observation
        self._current: dict[tuple[str, ...], dict[str, str]] = {}

    def put(self, amount: float, labels: dict[str, str]) -> None:
        """Show these labels with 1, or with 0 no more."""
        if amount:
            self._current[tuple(labels.values())] = labels
        else:
            self._current.pop(tuple(labels.values()), None)

    def observe(self, _options: object) -> list[Any]:
        return [self._observation(1, labels) for labels in list(self._current.values())]


def _add(span: Span, event: events.Event) -> None:
    span.add_event(type(event).__name__, _attributes(event), _nanoseconds(event))


def _attributes(event: events.Event) -> dict[str, Any]:
    """The fields of an event that attributes can represent."""
    return {
        name: list(map(str, value)) if isinstance(value, tuple) else value
        for name, value in vars(event).items()
        if name != "time" and isinstance(value, str | bool | int | float | tuple)  # the span has times of its own
    }


def _nanoseconds(event: events.Event) -> int:
    return int(event.time * 1e9)


def _api(module: str) -> Any:
    return _extras.load(f"opentelemetry.{module}", "modelguard.telemetry.opentelemetry")


def _make(api: Any, meter: Any, metric: _metrics.Metric) -> Any:
    """The function that writes an amount."""
    about = {"name": metric.full_name, "unit": metric.unit, "description": metric.help}
    if metric.only_current:
        current = _Current(api.Observation)
        meter.create_observable_gauge(callbacks=[current.observe], **about)
        return current.put
    if metric.kind == "histogram":
        buckets = list(metric.buckets)
        return meter.create_histogram(**about, explicit_bucket_boundaries_advisory=buckets).record
    return meter.create_counter(**about).add if metric.kind == "counter" else meter.create_gauge(**about).set
