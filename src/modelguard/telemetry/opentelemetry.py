"""Events as OpenTelemetry metrics and spans: ``telemetry.add_hook(opentelemetry())``.

Needs the extra ``opentelemetry``, which installs the API and nothing else. The application's SDK decides where the
numbers go; without an SDK they go nowhere. The metrics are those of ``docs/metrics.md``; each load is a span
``modelguard.load``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from modelguard import _extras
from modelguard.errors import InvalidOption
from modelguard.telemetry import _metrics, events

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, Tracer, TracerProvider

__all__ = ["opentelemetry"]

_NAME = "modelguard"
_SPAN = "modelguard.load"
#: A model that is discarded for one of these causes ends its load. After other causes, LoadErrored ends it.
_ENDING: frozenset[events.DiscardCause] = frozenset({"closed", "stale"})
_ATTRIBUTES = (str, bool, int, float)


def opentelemetry(
    *, meter_provider: MeterProvider | None = None, tracer_provider: TracerProvider | None = None
) -> Callable[[events.Event], None]:
    """Make a hook that tells events as metrics and spans; hand it to :func:`modelguard.telemetry.add_hook`, once.

    Args:
        meter_provider: Where the metrics go; by default to the global one, which may be set later.
        tracer_provider: Where the spans go; by default to the global one, which may be set later.

    Returns:
        The hook: a callable of one event.

    Raises:
        NotSupported: opentelemetry-api is not installed.
        InvalidOption: A provider that is none.
    """
    metrics, trace = _api("metrics"), _api("trace")
    for argument, given, kind in (
        ("meter_provider", meter_provider, metrics.MeterProvider),
        ("tracer_provider", tracer_provider, trace.TracerProvider),
    ):
        if given is not None and not isinstance(given, kind):
            why = f"this is no {kind.__name__} of OpenTelemetry"
            raise InvalidOption(argument, given, why=why, fix="Leave it out for the global one, or hand one in.")
    meter = metrics.get_meter(_NAME, meter_provider=meter_provider)
    instruments = {metric.name: _make(meter, metric) for metric in _metrics.METRICS.values()}
    return _OpenTelemetryHook(instruments, _Loads(trace, trace.get_tracer(_NAME, tracer_provider=tracer_provider)))


class _OpenTelemetryHook:
    """Writes each event into the metrics and into its load's span."""

    def __init__(self, instruments: dict[str, Callable[..., None]], loads: _Loads) -> None:
        self._instruments = instruments
        self._recorder = _metrics.Recorder(self._record)
        self._loads = loads

    def __call__(self, event: events.Event) -> None:
        self._recorder(event)
        self._loads.take(event)

    def __repr__(self) -> str:
        return f"<OpenTelemetry hook: {len(self._instruments)} metrics>"

    def _record(self, metric: _metrics.Metric, labels: tuple[str, ...], amount: float) -> None:
        self._instruments[metric.name](amount, dict(zip(metric.labels, labels, strict=True)))


class _Loads:
    """One span for each load: from the choice of how to replace the model, or from its start, to its end.

    A guard loads once at a time, so its name and the process say which span an event belongs to. A span that was open
    at a fork is the parent's to end.
    """

    def __init__(self, trace: Any, tracer: Tracer) -> None:
        self._trace = trace
        self._tracer = tracer
        self._before: dict[tuple[int, str], list[events.Event]] = {}
        self._open: dict[tuple[int, str], Span] = {}

    def take(self, event: events.Event) -> None:
        """Begin, go on with or end a span."""
        key = event.pid, event.guard
        match event:
            case events.SwapChosen():
                with _metrics.WRITING:
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
                pass  # its load failed long ago, and the load that is under way may be another
            case events.LoadDiscarded() | events.GenerationReleased() | events.GenerationAbandoned():
                self._go_on(key, event)
            case _:
                pass

    def _begin(self, key: tuple[int, str], event: events.LoadStarted) -> None:
        with _metrics.WRITING:
            self._open[key] = self._started(event, self._before.pop(key, []))
            _add(self._open[key], event)

    def _started(self, event: events.Event, before: list[events.Event]) -> Span:
        """A span that holds what came before this event, which is to be its next."""
        since = before[0] if before else event
        span = self._tracer.start_span(_SPAN, attributes=_told(event), start_time=_nanoseconds(since))
        for each in before:
            _add(span, each)
        return span

    def _go_on(self, key: tuple[int, str], event: events.Event) -> None:
        with _metrics.WRITING:
            if key in self._open:
                _add(self._open[key], event)
            elif key in self._before:
                self._before[key].append(event)

    def _end(self, key: tuple[int, str], event: events.Event, outcome: str) -> None:
        with _metrics.WRITING:
            before, span = self._before.pop(key, None), self._open.pop(key, None)
            if span is None:
                if before is None:
                    return  # it is of a load that has been told as failed
                span = self._started(event, before)
            _add(span, event)
        span.set_attributes({**_told(event), "outcome": outcome})
        if isinstance(event, events.LoadErrored):
            span.set_status(self._trace.StatusCode.ERROR, event.error)
        span.end(_nanoseconds(event))  # which may export it at once, and take its time


def _add(span: Span, event: events.Event) -> None:
    span.add_event(type(event).__name__, _told(event), _nanoseconds(event))


def _told(event: events.Event) -> dict[str, Any]:
    """An event's fields, as far as attributes can hold them."""
    told: dict[str, Any] = {}
    for name, value in vars(event).items():
        if isinstance(value, _ATTRIBUTES):
            told[name] = value
        elif isinstance(value, tuple):
            told[name] = list(map(str, value))
    told.pop("time", None)  # it is the span's or its event's own
    return told


def _nanoseconds(event: events.Event) -> int:
    return int(event.time * 1e9)


def _api(module: str) -> Any:
    return _extras.load(f"opentelemetry.{module}", "modelguard.telemetry.opentelemetry")


def _make(meter: Any, metric: _metrics.Metric) -> Callable[..., None]:
    about = {"unit": metric.unit, "description": metric.help}
    if metric.kind == "counter":
        add: Callable[..., None] = meter.create_counter(metric.full_name, **about).add
        return add
    if metric.kind == "gauge":
        put: Callable[..., None] = meter.create_gauge(metric.full_name, **about).set
        return put
    buckets = list(metric.buckets)
    observe: Callable[..., None] = meter.create_histogram(
        metric.full_name, **about, explicit_bucket_boundaries_advisory=buckets
    ).record
    return observe
