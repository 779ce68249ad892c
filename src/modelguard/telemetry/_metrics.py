"""The metrics by name, kind and unit, and what each event adds to them.

The hooks of Prometheus and of OpenTelemetry both use this, so they report the same numbers under the same names.
Labels are few and their values are fixed: with an error's text or a file's name in a label, a metric would grow for
ever.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from modelguard.telemetry import events
from modelguard.telemetry.reasons import Reason, ReasonKind

Subject = Literal["guard", "function"]
Mode = Literal["livemax", "livesum"]

REASONS: tuple[ReasonKind, ...] = get_args(ReasonKind)
SWAPS: tuple[events.Swap, ...] = get_args(events.Swap)
LOCKS: tuple[events.HostLockHeld, ...] = get_args(events.HostLockHeld)
_ALIVE = {False: "gone", True: "alive", None: "unknown"}

#: From a spaCy pipeline's half second to the minutes of a language model on a slow disk.
_LOADING = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
#: From what nobody notices to what every client does.
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)

_SUFFIXES = {"s": "_seconds", "By": "_bytes"}
#: Label values of a metric that are told as zero from its first event on, so that a first increase can be seen.
_FEW = 3


class Metric(NamedTuple):
    """One metric.

    Attributes:
        name: Its name as OpenTelemetry writes it, less ``modelguard.``.
        kind: ``counter`` (only grows), ``gauge`` (the last value counts), ``histogram``.
        help: What it tells, in one line.
        subject: The label that says whose it is: ``guard`` or ``function``.
        unit: ``s``, ``By``, or what is counted in braces, as OpenTelemetry writes units.
        label: A second label, None for most.
        values: All the values of that label.
        buckets: Upper bounds of a histogram's buckets.
        mode: How the gauges of several processes are put together.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    subject: Subject = "guard"
    unit: str = "{event}"
    label: str | None = None
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    mode: Mode = "livemax"

    @property
    def full_name(self) -> str:
        """Its name in OpenTelemetry."""
        return f"modelguard.{self.name}"

    @property
    def prometheus_name(self) -> str:
        """Its name in Prometheus, with the unit, and ``_total`` for counters."""
        total = "_total" if self.kind == "counter" else ""
        return self.full_name.replace(".", "_") + _SUFFIXES.get(self.unit, "") + total

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of its labels."""
        return (self.subject,) if self.label is None else (self.subject, self.label)


class Measure(NamedTuple):
    """What an event adds to a metric, or sets it to: the metric's name, the amount, the second label's value."""

    name: str
    amount: float
    value: str | None = None


def _all() -> Iterator[Metric]:
    yield from _of_loads()
    yield from _of_releases()
    yield from _of_batches()


def _counter(subject: Subject, name: str, text: str, label: str | None = None, values: tuple[str, ...] = ()) -> Metric:
    return Metric(name, "counter", text, subject, "{event}", label, values)


def _of_loads() -> Iterator[Metric]:
    counter = partial(_counter, "guard")
    yield counter("loads.started", "Loads begun, by the lock that they held.", "host_lock", LOCKS)
    yield counter("load.reasons", "Loads begun, once for each reason.", "reason", REASONS)
    yield Metric("load.deferred", "counter", "Waited for a pause among the calls before loads.", unit="s")
    yield counter("loads", "Loads after which a new generation serves.", "swap", SWAPS)
    yield counter("load.failures", "Loads that failed.")
    yield counter("loads.discarded", "Models that were loaded and never served.")
    yield Metric("load.duration", "histogram", "Load, validation and warm-up.", unit="s", buckets=_LOADING)
    yield Metric("load.stall", "histogram", "Longest time in a load without other threads.", unit="s", buckets=_SHORT)
    yield Metric("load.outage", "counter", "Time in which no generation served (drain_first).", unit="s")
    yield Metric("load.last_success.timestamp", "gauge", "When a load last succeeded, since the epoch.", unit="s")
    yield Metric("load.failing", "gauge", "Loads that have failed in a row; 0 after a success.", unit="{load}")
    yield Metric(
        "generation",
        "gauge",
        "Number of the serving generation; 0 if a load failed and none serves.",
        unit="{generation}",
    )
    yield Metric("model.size", "gauge", "Size of the model, measured at its load.", unit="By")
    yield counter("reloads.due", "Policies that became due, for a reload.", "reason", REASONS)
    yield counter("recycles.asked", "Policies that became due, for a fresh worker.", "reason", REASONS)
    yield counter("swaps.chosen", "How the next generation replaces the current one.", "swap", SWAPS[1:])
    yield counter("policies.futile", "Policies ignored, as a reload could not help.")
    yield counter("callback.errors", "Callables of the author that raised.")


def _of_releases() -> Iterator[Metric]:
    yield Metric(
        "releases",
        "counter",
        "Generations dropped, by what became of the model.",
        label="outcome",
        values=("gone", "alive", "unknown"),
    )
    yield Metric("release.freed", "counter", "Private memory given back by releases.", unit="By")
    yield Metric("release.duration", "histogram", "Unload, drop, collection and trim.", unit="s", buckets=_SHORT)
    yield Metric("drain.duration", "histogram", "Until a replaced generation's last call.", unit="s", buckets=_LOADING)
    yield Metric("unload.errors", "counter", "Unload hooks that raised.")
    yield Metric("generations.abandoned", "counter", "Replaced generations whose calls outlasted drain_timeout.")
    yield Metric("trims", "counter", "Trims that trim_every asked for.")
    yield Metric("trim.freed", "counter", "Private memory given back by trims.", unit="By")
    yield Metric("trim.duration", "histogram", "Trims that trim_every asked for.", unit="s", buckets=_SHORT)


def _of_batches() -> Iterator[Metric]:
    counter = partial(_counter, "function")
    yield Metric("batch.size", "histogram", "Items of a batch.", "function", "{item}", buckets=_SIZES)
    yield Metric("batch.wait", "histogram", "Wait of a batch's first item.", "function", "s", buckets=_SHORT)
    yield Metric("batch.run", "histogram", "Computing a batch, reruns included.", "function", "s", buckets=_SHORT)
    yield counter("batches.failed", "Batches on which the function raised.")
    yield counter("batches.bisected", "Batches run again in parts, to find the items at fault.")
    yield counter("batch.reruns", "Calls to find the items at fault.")
    yield counter("items.failed", "Items whose answer is an error.")
    yield counter("requests.refused", "Requests refused at once.", "reason", ("full", "late", "circuit_open"))
    yield counter("requests.expired", "Requests dropped at their deadline.")
    yield counter("requests.cancelled", "Requests dropped since their caller was gone.")
    yield Metric("queue.depth", "gauge", "Items that wait.", "function", "{item}", mode="livesum")
    yield Metric("circuit.open", "gauge", "Processes whose circuit is open.", "function", "{process}", mode="livesum")
    yield counter("circuit.openings", "How often the circuit opened.")


METRICS = {metric.name: metric for metric in _all()}


def of(event: events.Event) -> tuple[Measure, ...]:
    """What an event adds to the metrics."""
    way = _WAYS.get(type(event))
    return () if way is None else way(event)


def _each(name: str, reasons: tuple[Reason, ...]) -> tuple[Measure, ...]:
    return tuple(Measure(name, 1, reason.kind) for reason in reasons)


def _of_a_start(event: events.LoadStarted) -> tuple[Measure, ...]:
    started = Measure("loads.started", 1, event.host_lock)
    return started, Measure("load.deferred", event.deferred_seconds), *_each("load.reasons", event.reasons)


def _of_a_load(event: events.LoadFinished) -> tuple[Measure, ...]:
    return (
        Measure("loads", 1, event.swap),
        Measure("load.duration", event.seconds),
        Measure("load.stall", event.stall_seconds),
        Measure("load.outage", event.waited_seconds),
        Measure("load.last_success.timestamp", event.time),
        Measure("load.failing", 0),
        Measure("generation", event.generation),
        Measure("model.size", event.model_bytes),
    )


def _of_a_failure(event: events.LoadErrored) -> tuple[Measure, ...]:
    current = event.current or 0
    return Measure("load.failures", 1), Measure("load.failing", event.attempt), Measure("generation", current)


def _of_a_release(event: events.GenerationReleased) -> tuple[Measure, ...]:
    drained = () if event.drain_seconds is None else (Measure("drain.duration", event.drain_seconds),)
    return (
        Measure("releases", 1, _ALIVE[event.alive]),
        Measure("release.freed", max(0, event.freed)),  # a counter cannot fall where the process grew meanwhile
        Measure("release.duration", event.seconds),
        Measure("unload.errors", 0 if event.error is None else 1),
        *drained,
    )


def _of_a_trim(event: events.MemoryTrimmed) -> tuple[Measure, ...]:
    freed = Measure("trim.freed", max(0, event.freed))
    return Measure("trims", 1), freed, Measure("trim.duration", event.seconds)


def _of_a_batch(event: events.BatchFinished) -> tuple[Measure, ...]:
    again = (Measure("batches.bisected", 1), Measure("batch.reruns", event.reruns)) if event.reruns else ()
    return (
        Measure("batch.size", event.size),
        Measure("batch.wait", event.wait_seconds),
        Measure("batch.run", event.run_seconds),
        Measure("items.failed", event.failed),
        Measure("queue.depth", event.waiting),
        *again,
    )


def _of_refusals(event: events.RequestsRefused) -> tuple[Measure, ...]:
    return (
        Measure("requests.refused", event.full, "full"),
        Measure("requests.refused", event.late, "late"),
        Measure("requests.refused", event.open, "circuit_open"),
        Measure("requests.expired", event.expired),
        Measure("requests.cancelled", event.cancelled),
        Measure("queue.depth", event.waiting),
    )


_WAYS: dict[type[events.Event], Callable[[Any], tuple[Measure, ...]]] = {
    events.LoadStarted: _of_a_start,
    events.LoadFinished: _of_a_load,
    events.LoadErrored: _of_a_failure,
    events.LoadDiscarded: lambda _: (Measure("loads.discarded", 1),),
    events.ReloadDue: lambda event: _each("reloads.due", event.reasons),
    events.RecycleAsked: lambda event: _each("recycles.asked", event.reasons),
    events.SwapChosen: lambda event: (Measure("swaps.chosen", 1, event.swap),),
    events.PolicyFutile: lambda _: (Measure("policies.futile", 1),),
    events.CallbackErrored: lambda _: (Measure("callback.errors", 1),),
    events.GenerationReleased: _of_a_release,
    events.GenerationAbandoned: lambda _: (Measure("generations.abandoned", 1),),
    events.MemoryTrimmed: _of_a_trim,
    events.BatchFinished: _of_a_batch,
    events.BatchErrored: lambda _: (Measure("batches.failed", 1),),
    events.RequestsRefused: _of_refusals,
    events.CircuitOpened: lambda _: (Measure("circuit.open", 1), Measure("circuit.openings", 1)),
    events.CircuitClosed: lambda _: (Measure("circuit.open", 0),),
}


def _from_the_start(subject: Subject) -> tuple[Measure, ...]:
    """Zeros: ``increase()`` sees a first failure only where there was a value before it."""
    return tuple(
        Measure(metric.name, 0, value)
        for metric in METRICS.values()
        if metric.subject == subject and len(metric.values) <= _FEW and (metric.kind == "counter" or _summed(metric))
        for value in metric.values or (None,)
    )


def _summed(metric: Metric) -> bool:
    return metric.kind == "gauge" and metric.mode == "livesum"


#: Held while a metric is written, and over a fork: a child that inherited a library's lock from a thread of its parent
#: would wait for it for ever.
WRITING = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=WRITING.acquire, after_in_parent=WRITING.release, after_in_child=WRITING.release)


class Recorder:
    """Hands what events tell to whoever records it, one event at a time.

    The garbage collector may end a dropped call at any point, also while a metric is being written and its lock is
    held; that call's event then waits until the metric is done, or the thread would wait for itself.

    Args:
        record: Takes a metric, the labels' values in the metric's order, and the amount.
    """

    def __init__(self, record: Callable[[Metric, tuple[str, ...], float], None]) -> None:
        self._record = record
        self._seen: set[tuple[Subject, str]] = set()
        self._thread = threading.local()

    def __call__(self, event: events.Event) -> None:
        """Record one event, and those that came up in this thread meanwhile.

        Raises:
            Exception: What could not be written; the first of several.
        """
        waiting: deque[events.Event] | None = getattr(self._thread, "waiting", None)
        if waiting is not None:
            waiting.append(event)
            return
        waiting = self._thread.waiting = deque([event])
        failed: Exception | None = None
        try:
            with WRITING:
                while waiting:
                    try:
                        self._one(waiting.popleft())
                    except Exception as error:  # noqa: BLE001 - the other events are to be written all the same
                        failed = failed or error
        finally:
            self._thread.waiting = None
        if failed is not None:
            raise failed

    def _one(self, event: events.Event) -> None:
        measures = of(event)
        if not measures:
            return
        subject = METRICS[measures[0].name].subject
        if (subject, event.guard) not in self._seen:
            self._seen.add((subject, event.guard))
            measures = (*_from_the_start(subject), *measures)
        for name, amount, value in measures:
            metric = METRICS[name]
            self._record(metric, (event.guard,) if value is None else (event.guard, value), amount)
