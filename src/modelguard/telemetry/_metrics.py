"""The metrics by name, kind and unit. What an event adds to them stands with the event, in ``_events.py``.

The hooks of Prometheus and OpenTelemetry both use this module, so they report the same numbers under the same names.
Labels are few, and their values are fixed: with an error's text or a file's name in a label, a metric would grow
forever.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, NamedTuple, get_args

from modelguard.runtime import fork
from modelguard.telemetry import _events as events
from modelguard.telemetry._events import Measure
from modelguard.telemetry.reasons import ReasonKind

Subject = Literal["guard", "function", "service"]
Mode = Literal["livemax", "livesum"]

REASONS: tuple[ReasonKind, ...] = get_args(ReasonKind)
SWAPS: tuple[events.Swap, ...] = get_args(events.Swap)
LOCKS: tuple[events.HostLockHeld, ...] = get_args(events.HostLockHeld)
POSTPONED: tuple[events.PostponeCause, ...] = get_args(events.PostponeCause)
WORKER_ENDS: tuple[events.WorkerEndCause, ...] = get_args(events.WorkerEndCause)
REPLAYS = ("accepted", "rejected", "not_compared")

#: From half a second for a spaCy pipeline to minutes for a language model on a slow disk.
_LOADING = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
#: From times that no client notices to times that every client notices.
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)

_SUFFIXES = {"s": "_seconds", "By": "_bytes"}


class Metric(NamedTuple):
    """One metric.

    Attributes:
        name: Its OpenTelemetry name, without ``modelguard.``.
        kind: ``counter`` (only grows), ``gauge`` (the last value counts), ``histogram``.
        help: What it shows, in one line.
        subject: The label with the name of the guard, function or watch: ``guard``, ``function`` or ``service``.
        unit: OpenTelemetry's notation of the unit: ``s``, ``By``, or the counted thing in braces.
        label: A second label; None for most metrics.
        values: All values of that label.
        buckets: Upper bounds of a histogram's buckets.
        mode: How the gauges of several processes are combined.
        only_current: Of the second label's values, which are not known beforehand, only the current one has a series.
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
    only_current: bool = False

    @property
    def full_name(self) -> str:
        return f"modelguard.{self.name}"

    @property
    def prometheus_name(self) -> str:
        """Its name in Prometheus, with the unit, and ``_total`` for counters."""
        total = "_total" if self.kind == "counter" else ""
        return self.full_name.replace(".", "_") + _SUFFIXES.get(self.unit, "") + total

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.subject,) if self.label is None else (self.subject, self.label)


def _all() -> Iterator[Metric]:
    yield from _of_loads()
    yield from _of_releases()
    yield from _of_batches()
    yield from _of_workers()
    yield _counter(
        "service", "growth.found", "Times that memory was found to grow with the calls, or for another cause."
    )


def _counter(subject: Subject, name: str, text: str, label: str | None = None, values: tuple[str, ...] = ()) -> Metric:
    return Metric(name, "counter", text, subject, "{event}", label, values)


def _of_loads() -> Iterator[Metric]:
    counter = partial(_counter, "guard")
    yield counter("loads.started", "Loads that started, by the lock that they held.", "host_lock", LOCKS)
    yield counter("load.reasons", "Loads that started, counted once for each reason.", "reason", REASONS)
    yield Metric("load.deferred", "counter", "Time that loads waited for a pause between calls.", unit="s")
    yield counter("loads", "Loads after which a new generation serves.", "swap", SWAPS)
    yield counter("load.failures", "Loads that failed.")
    yield counter("loads.discarded", "Models that were loaded but never served.")
    yield Metric("load.duration", "histogram", "Time of load, validation and warm-up.", unit="s", buckets=_LOADING)
    yield Metric("load.stall", "histogram", "Longest pause of other threads in a load.", unit="s", buckets=_SHORT)
    yield Metric("load.outage", "counter", "Time in which no generation served (drain_first).", unit="s")
    yield Metric("load.last_success.timestamp", "gauge", "Time of the last successful load, since the epoch.", unit="s")
    yield Metric("load.failing", "gauge", "Loads that have failed in a row; 0 after a success.", unit="{load}")
    yield Metric(
        "generation",
        "gauge",
        "Number of the current generation; 0 if a load failed and there is none.",
        unit="{generation}",
    )
    yield Metric(
        "model.info",
        "gauge",
        "1 for the version of the current model, as its loader gave it.",
        unit="{model}",
        label="version",
        only_current=True,
    )
    yield Metric("model.size", "gauge", "Size of the model, measured at its load.", unit="By")
    yield counter("reloads.due", "Due policies that led to a reload.", "reason", REASONS)
    yield counter("reloads.postponed", "Due policies that must wait.", "cause", POSTPONED)
    yield Metric("paused", "gauge", "Processes in which the guard is paused.", unit="{process}", mode="livesum")
    yield counter("unloads", "Models released until their next use.")
    yield counter("rollbacks", "Rollbacks to the previous model.")
    yield counter("replays", "New models compared with the current one on recorded calls.", "outcome", REPLAYS)
    yield Metric(
        "idle",
        "gauge",
        "Processes whose model, or its workers, is released until the next use.",
        unit="{process}",
        mode="livesum",
    )
    yield counter("recycles.asked", "Due policies that led to a request for a new worker.", "reason", REASONS)
    yield counter("swaps.chosen", "How the next generation replaces the current one.", "swap", SWAPS[1:])
    yield counter("policies.ignored", "Policies that were ignored because a reload could not help.")
    yield counter("callback.errors", "User callables that raised.")


def _of_workers() -> Iterator[Metric]:
    yield _counter("guard", "workers.started", "Workers of an isolated function that came up.")
    yield _counter("guard", "workers.ended", "Workers of an isolated function that ended.", "cause", WORKER_ENDS)
    yield Metric("workers.freed", "counter", "Memory returned by workers that ended until the next call.", unit="By")
    yield Metric("worker.startup", "histogram", "Time until a new worker takes calls.", unit="s", buckets=_SHORT)


def _of_releases() -> Iterator[Metric]:
    yield Metric(
        "releases",
        "counter",
        "Released generations, by whether the model was freed.",
        label="outcome",
        values=("gone", "alive", "unknown"),
    )
    yield Metric("release.freed", "counter", "Private memory returned by releases.", unit="By")
    yield Metric("release.duration", "histogram", "Time of unload, collection and trim.", unit="s", buckets=_SHORT)
    yield Metric("drain.duration", "histogram", "Time until the last call had ended.", unit="s", buckets=_LOADING)
    yield Metric("unload.errors", "counter", "Unload hooks that raised.")
    yield Metric("generations.abandoned", "counter", "Replaced generations with calls that outlasted drain_timeout.")
    yield Metric("allocator.in_use", "gauge", "Memory that malloc had handed out after a release or a trim.", unit="By")
    yield Metric("allocator.held", "gauge", "Memory that malloc had taken from the system by then.", unit="By")
    yield Metric(
        "gpu.allocated",
        "gauge",
        "GPU memory in tensors after a load, a release or a repair.",
        unit="By",
        mode="livesum",
    )
    yield Metric("gpu.reserved", "gauge", "GPU memory that torch had reserved by then.", unit="By", mode="livesum")
    yield Metric("release.gpu_freed", "counter", "GPU memory returned by releases.", unit="By")
    yield Metric("gpu.caches_emptied", "counter", "Times that torch's cache was too large for a policy.")
    yield Metric("gpu.out_of_memory", "counter", "Calls that ran out of GPU memory.")
    yield Metric("trims", "counter", "Trims made because of trim_every.")
    yield Metric("trim.freed", "counter", "Private memory returned by these trims.", unit="By")
    yield Metric("trim.duration", "histogram", "Time of these trims.", unit="s", buckets=_SHORT)


def _of_batches() -> Iterator[Metric]:
    counter = partial(_counter, "function")
    yield Metric("batch.size", "histogram", "Items in a batch.", "function", "{item}", buckets=_SIZES)
    yield Metric("batch.wait", "histogram", "Wait of a batch's first item.", "function", "s", buckets=_SHORT)
    yield Metric("batch.run", "histogram", "Time of a batch, with reruns.", "function", "s", buckets=_SHORT)
    yield Metric("batch.weight", "counter", "Weight of the batches, with padding.", "function", "{unit}")
    yield Metric("batch.padding", "counter", "Weight of their padding.", "function", "{unit}")
    yield Metric("batch.max_size", "gauge", "Most items in a batch, as chosen for slo.", "function", "{item}")
    yield Metric(
        "slo.unreachable",
        "gauge",
        "Processes in which one item alone takes longer than slo.",
        "function",
        "{process}",
        mode="livesum",
    )
    yield counter("batches.failed", "Batches in which the function raised.")
    yield Metric(
        "batches.hung", "gauge", "Batches that run for longer than hang_after.", "function", "{batch}", mode="livesum"
    )
    yield counter("batches.bisected", "Batches that were run again in parts, to find the failing items.")
    yield counter("batch.reruns", "Calls to find the failing items.")
    yield counter("items.failed", "Items that got an error as their result.")
    yield counter(
        "requests.refused", "Requests refused immediately.", "reason", ("full", "late", "circuit_open", "quota")
    )
    yield counter("requests.expired", "Requests dropped at their deadline.")
    yield counter("requests.cancelled", "Requests dropped because their caller no longer waits.")
    yield Metric("queue.depth", "gauge", "Items that are waiting.", "function", "{item}", mode="livesum")
    yield Metric("circuit.open", "gauge", "Processes with an open circuit.", "function", "{process}", mode="livesum")
    yield counter("circuit.openings", "How often the circuit opened.")


METRICS = {metric.name: metric for metric in _all()}


# Writes what events add to the metrics with a metrics library: one event at a time, from any thread.


#: Metrics with at most this many label values start at zero with their subject's first event, so that a first increase
#: can be seen.
_MAX_ZEROS = 4


def _zeros(subject: Subject) -> tuple[Measure, ...]:
    """The zeros at a subject's first event: ``increase()`` does not see a first failure without them."""
    return tuple(
        Measure(metric.name, 0, value)
        for metric in METRICS.values()
        if metric.subject == subject
        and len(metric.values) <= _MAX_ZEROS
        and (metric.kind == "counter" or _summed(metric))
        for value in metric.values or (None,)
    )


def _summed(metric: Metric) -> bool:
    return metric.kind == "gauge" and metric.mode == "livesum"


#: Held while a metric is written, and during a fork: if another thread held the lock of a metrics library during a
#: fork, the child would wait for it forever.
WRITE_LOCK = threading.RLock()
fork.at_fork(fork.Rank.METRICS, before=WRITE_LOCK.acquire, in_parent=WRITE_LOCK.release, in_child=WRITE_LOCK.release)


class Recorder:
    """Passes the measures of events to a recording function, one event at a time.

    The garbage collector may end an abandoned call at any point, even while a metric is being written and its lock is
    held. The event of that call then waits until the metric is written; otherwise the thread would wait for itself.

    Args:
        record: Takes a metric, the values of its labels in their order, and the amount.
    """

    def __init__(self, record: Callable[[Metric, tuple[str, ...], float], None]) -> None:
        self._record = record
        self._seen: set[tuple[Subject, str]] = set()
        self._versions: dict[str, tuple[int, str]] = {}  # of each guard, the generation and the version that is shown
        self._thread = threading.local()

    def __call__(self, event: events.Event) -> None:
        """Record one event, and those that happen in this thread in the meantime.

        Raises:
            Exception: A metric could not be written; the first error if there are several.
        """
        waiting: deque[events.Event] | None = getattr(self._thread, "waiting", None)
        if waiting is not None:
            waiting.append(event)
            return
        waiting = self._thread.waiting = deque([event])
        failed: Exception | None = None
        try:
            with WRITE_LOCK:
                while waiting:
                    try:
                        self._record_event(waiting.popleft())
                    except Exception as error:  # noqa: BLE001 - the other events must still be written
                        failed = failed or error
        finally:
            self._thread.waiting = None
        for late in waiting:  # than the last look
            self(late)
        if failed is not None:
            raise failed

    def _record_event(self, event: events.Event) -> None:
        measures = tuple(event._measures())  # noqa: SLF001 - of this package
        if not measures:
            return
        subject = METRICS[measures[0].name].subject
        if (subject, event.guard) not in self._seen:
            self._seen.add((subject, event.guard))
            measures = (*_zeros(subject), *measures)
        for name, amount, value in measures:
            metric = METRICS[name]
            self._record(metric, (event.guard,) if value is None else (event.guard, value), amount)
        if isinstance(event, events.LoadFinished | events.RolledBack):
            self._show_version(event.guard, event.generation, event.version)
        elif isinstance(event, events.GenerationReleased) and event.generation == self._shown_generation(event.guard):
            self._show_version(event.guard, event.generation, None)

    def _shown_generation(self, guard: str) -> int | None:
        return self._versions[guard][0] if guard in self._versions else None

    def _show_version(self, guard: str, generation: int, version: str | None) -> None:
        """Show one version of a guard's model at a time: a metric must not grow with each new one."""
        metric = METRICS["model.info"]
        _, shown = self._versions.pop(guard, (0, None))
        if shown is not None and shown != version:
            self._record(metric, (guard, shown), 0)
        if version is not None:
            self._versions[guard] = generation, version
            self._record(metric, (guard, version), 1)
