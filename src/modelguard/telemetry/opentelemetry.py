"""Events as OpenTelemetry metrics and spans: ``telemetry.add_hook(opentelemetry())``.

This needs the extra ``opentelemetry``, which installs only the API. The application's SDK determines where the numbers
go; without an SDK they are discarded. The metrics are those in ``docs/metrics.md``; each load is a span
``modelguard.load``.
"""

from __future__ import annotations

from collections.abc import Callable
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
_SPAN = "modelguard.load"
#: If a model is discarded for one of these causes, the load has ended. After other causes, LoadErrored ends the load.
_ENDING: frozenset[events.DiscardCause] = frozenset({"closed", "rolled_back", "stale"})
_ATTRIBUTES = (str, bool, int, float)


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


class _OpenTelemetryHook:
    """Records each event in the metrics and in the span of its load."""

    def __init__(self, instruments: dict[str, Callable[..., None]], spans: _LoadSpans) -> None:
        self._instruments = instruments
        self._recorder = Recorder(self._record)
        self._spans = spans

    def __call__(self, event: events.Event) -> None:
        self._recorder(event)
        self._spans.record(event)

    def __repr__(self) -> str:
        return f"<OpenTelemetry hook: {len(self._instruments)} metrics>"

    def _record(self, metric: _metrics.Metric, labels: tuple[str, ...], amount: float) -> None:
        self._instruments[metric.name](amount, dict(zip(metric.labels, labels, strict=True)))


class _LoadSpans:
    """One span for each load: from the choice of how to replace the model, or from the start of the load, to its end.

    A guard runs one load at a time, so its name and the process identify the span of an event. A span that was open
    at a fork is ended by the parent.
    """

    def __init__(self, trace: Any, tracer: Tracer) -> None:
        self._trace = trace
        self._tracer = tracer
        self._before: dict[tuple[int, str], list[events.Event]] = {}
        self._open: dict[tuple[int, str], Span] = {}

    def record(self, event: events.Event) -> None:
        key = event.pid, event.guard
        match event:
            case events.SwapChosen():
                with WRITE_LOCK:
                    self._before[key] = [event]
            case events.LoadStarted():
                self._begin(key, event)
            case events.LoadFinished():
                self._end(key, event, "loaded")
            case events.LoadErrored():
                self._end(key, event, "failed")
            case events.LoadDiscarded() if event.cause in _ENDING:
                self._end(key, event, "discarded")
            case events.LoadDiscarded(cause="late"):
                pass  # its load failed long ago, and the running load may be another one
            case events.LoadDiscarded() | events.GenerationReleased() | events.GenerationAbandoned():
                self._continue(key, event)
            case _:
                pass

    def _begin(self, key: tuple[int, str], event: events.LoadStarted) -> None:
        with WRITE_LOCK:
            before = self._before.pop(key, [])
            if event.host_lock == "none":  # it replaces none: those are of a reload that was given up
                before = []
            self._open[key] = self._started(event, before)
            _add(self._open[key], event)

    def _started(self, event: events.Event, before: list[events.Event]) -> Span:
        since = before[0] if before else event
        span = self._tracer.start_span(_SPAN, attributes=_attributes(event), start_time=_nanoseconds(since))
        for each in before:
            _add(span, each)
        return span

    def _continue(self, key: tuple[int, str], event: events.Event) -> None:
        with WRITE_LOCK:
            if key in self._open:
                _add(self._open[key], event)
            elif key in self._before:
                self._before[key].append(event)

    def _end(self, key: tuple[int, str], event: events.Event, outcome: str) -> None:
        with WRITE_LOCK:
            before, span = self._before.pop(key, None), self._open.pop(key, None)
            if span is None:
                if before is None:
                    return  # the load was already reported as failed
                span = self._started(event, before)
            _add(span, event)
        span.set_attributes({**_attributes(event), "outcome": outcome})
        if isinstance(event, events.LoadErrored):
            span.set_status(self._trace.StatusCode.ERROR, event.error)
        span.end(_nanoseconds(event))  # outside of the lock, because it may export the span, which takes time


class _Current:
    """The current series of such a metric. The SDK asks for them, because a gauge keeps what it was once set to.

    Args:
        api: OpenTelemetry's module of metrics.
    """

    def __init__(self, api: Any) -> None:
        self._api = api
        self._current: dict[tuple[str, ...], dict[str, str]] = {}

    def put(self, amount: float, labels: dict[str, str]) -> None:
        """Show these labels with 1, or with 0 no more."""
        if amount:
            self._current[tuple(labels.values())] = labels
        else:
            self._current.pop(tuple(labels.values()), None)

    def observe(self, _options: object) -> list[Any]:
        return [self._api.Observation(1, labels) for labels in list(self._current.values())]


def _add(span: Span, event: events.Event) -> None:
    span.add_event(type(event).__name__, _attributes(event), _nanoseconds(event))


def _attributes(event: events.Event) -> dict[str, Any]:
    """The fields of an event that attributes can represent."""
    found: dict[str, Any] = {}
    for name, value in vars(event).items():
        if isinstance(value, _ATTRIBUTES):
            found[name] = value
        elif isinstance(value, tuple):
            found[name] = list(map(str, value))
    found.pop("time", None)  # the span and its events have their own time
    return found


def _nanoseconds(event: events.Event) -> int:
    return int(event.time * 1e9)


def _api(module: str) -> Any:
    return _extras.load(f"opentelemetry.{module}", "modelguard.telemetry.opentelemetry")


def _make(api: Any, meter: Any, metric: _metrics.Metric) -> Callable[..., None]:
    about = {"name": metric.full_name, "unit": metric.unit, "description": metric.help}
    write: Callable[..., None]
    if metric.kind == "counter":
        write = meter.create_counter(**about).add
    elif metric.only_current:
        current = _Current(api)
        meter.create_observable_gauge(callbacks=[current.observe], **about)
        write = current.put
    elif metric.kind == "gauge":
        write = meter.create_gauge(**about).set
    else:
        buckets = list(metric.buckets)
        write = meter.create_histogram(**about, explicit_bucket_boundaries_advisory=buckets).record
    return write
