"""The metrics, and which events each is read from.

The hooks of Prometheus and OpenTelemetry both use this module, so they report the same numbers under the same names.
Labels are few, and their values are fixed: with an error's text or a file's name in a label, a metric would grow
forever.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, Literal, NamedTuple, get_args

from modelguard import _units
from modelguard.runtime import fork_hooks
from modelguard.telemetry import _events as events
from modelguard.telemetry.reasons import ReasonKind

Subject = Literal["guard", "function", "service"]
Mode = Literal["livemax", "livesum"]

#: What an event adds to a metric, or sets it to; None for nothing. With a second label: the label's value, or an amount
#: for each of its values.
Amount = float | str | Mapping[str, float] | None

REASONS: tuple[ReasonKind, ...] = get_args(ReasonKind)
#: From half a second for a spaCy pipeline to minutes for a language model on a slow disk.
_LOADING = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
#: From times that no client notices to times that every client notices.
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)

_BUCKETS = {"load.duration": _LOADING, "drain.duration": _LOADING, "batch.size": _SIZES}

#: The second labels, and all their values.
_LABELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "loads.started": ("host_lock", get_args(events.HostLockHeld)),
    "load.reasons": ("reason", REASONS),
    "loads": ("swap", get_args(events.Swap)),
    "reloads.due": ("reason", REASONS),
    "reloads.postponed": ("cause", get_args(events.PostponeCause)),
    "recycles.asked": ("reason", REASONS),
    "replays": ("outcome", ("accepted", "rejected", "not_compared")),
    "releases": ("outcome", ("gone", "alive", "unknown")),
    "requests.refused": ("reason", ("full", "late", "circuit_open", "quota")),
    "swaps.chosen": ("swap", ("load_first", "drain_first")),
    "workers.ended": ("cause", get_args(events.WorkerEndCause)),
}

_SUFFIXES = {"s": "_seconds", "By": "_bytes"}


class Metric(NamedTuple):
    """One metric."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str  # OpenTelemetry's, without ``modelguard.``
    help: str
    subject: Subject  # the label with the name of the guard, function or watch
    sources: Mapping[str, Callable[[Any], Amount]]  # what each event adds to it, by the name of the event's class
    unit: str = "{event}"  # in OpenTelemetry's notation
    label: str | None = None  # a second one
    values: tuple[str, ...] = ()  # all values of that
    buckets: tuple[float, ...] = ()
    mode: Mode = "livemax"  # how the gauges of several processes are combined
    only_current: bool = False  # of the second label's values, not known beforehand, only the current one has a series

    @property
    def full_name(self) -> str:
        return f"modelguard.{self.name}"

    @property
    def prometheus_name(self) -> str:
        total = "_total" if self.kind == "counter" else ""
        return self.full_name.replace(".", "_") + _SUFFIXES.get(self.unit, "") + total

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.subject,) if self.label is None else (self.subject, self.label)


#: Each metric in a line: its kind, name, unit, the events that it is read from, and what it shows. ``max`` and ``sum``
#: are gauges, by how those of several processes are combined. An event without a field or a number counts 1.
_METRIC_TABLES: dict[Subject, str] = {
    "guard": """
counter   loads.started {event}        LoadStarted.host_lock         Loads that started, by the lock that they held.
counter   load.reasons {event}         LoadStarted.by_reason         Loads that started, counted once for each reason.
counter   load.deferred s              LoadStarted.deferred_seconds  Time that loads waited for a pause between calls.
counter   loads {event}                LoadFinished.swap             Loads after which a new generation serves.
counter   load.failures {event}        LoadErrored                   Loads that failed.
counter   loads.discarded {event}      LoadDiscarded                 Models that were loaded but never served.
histogram load.duration s              LoadFinished.seconds          Time of load, validation and warm-up.
histogram load.stall s                 LoadFinished.stall_seconds    Longest pause of other threads in a load.
counter   load.outage s                LoadFinished.waited_seconds   Time in which no generation served (drain_first).
max       load.last_success.timestamp s LoadFinished.time             Time of the last successful load, since the epoch.
max       load.failing {load}          LoadErrored.attempt,LoadFinished=0,RolledBack=0 \
    Loads that have failed in a row; 0 after a success or a rollback.
max       generation {generation}      LoadFinished.generation,RolledBack.generation,LoadErrored.serving \
    Number of the current generation; 0 if a load failed and there is none.
max       model.size By                LoadFinished.model_bytes      Size of the model, measured at its load.
counter   reloads.due {event}          ReloadDue.by_reason           Due policies that led to a reload.
counter   reloads.postponed {event}    ReloadPostponed.by_cause      Due policies that must wait.
sum       paused {process}             GuardPaused,GuardResumed=0    Processes in which the guard is paused.
counter   unloads {event}              UnloadStarted                 Models released until their next use.
counter   rollbacks {event}            RolledBack                    Rollbacks to the previous model.
counter   replays {event}              ReplayFinished.outcome \
    New models compared with the current one on recorded calls.
sum       idle {process}               UnloadStarted,WorkersReleased,LoadFinished=0,WorkerStarted=0,IdleEnded=0,\
LoadErrored.not_idle Processes whose model, or its workers, is released until the next use.
counter   recycles.asked {event}       RecycleAsked.by_reason \
    Due policies that led to a request for a new worker.
counter   swaps.chosen {event}         SwapChosen.swap               How the next generation replaces the current one.
counter   policies.ignored {event}     PolicyIgnored \
    Policies that were ignored because a reload could not help.
counter   callback.errors {event}      CallbackErrored               User callables that raised.
counter   releases {event}             GenerationReleased.freed_or_not \
    Released generations, by whether the model was freed.
counter   release.freed By             GenerationReleased.freed      Private memory returned by releases.
histogram release.duration s           GenerationReleased.seconds    Time of unload, collection and trim.
histogram drain.duration s             GenerationReleased.drain_seconds Time until the last call had ended.
counter   unload.errors {event}        GenerationReleased.hook_raised Unload hooks that raised.
counter   generations.abandoned {event} GenerationAbandoned \
    Replaced generations with calls that outlasted drain_timeout.
max       allocator.in_use By          GenerationReleased.in_use,MemoryTrimmed.in_use \
    Memory that malloc had handed out after a release or a trim.
max       allocator.held By            GenerationReleased.held,MemoryTrimmed.held \
    Memory that malloc had taken from the system by then.
sum       gpu.allocated By             LoadFinished.gpu_allocated,GenerationReleased.gpu_allocated,\
GpuCacheEmptied.allocated,GpuOutOfMemory.allocated GPU memory in tensors after a load, a release or a repair.
sum       gpu.reserved By              LoadFinished.gpu_reserved,GenerationReleased.gpu_reserved_after,\
GpuCacheEmptied.reserved_after,GpuOutOfMemory.reserved_after GPU memory that torch had reserved by then.
counter   release.gpu_freed By         GenerationReleased.gpu_freed  GPU memory returned by releases.
counter   gpu.caches_emptied {event}   GpuCacheEmptied \
    Times that torch's cache was too large for a policy.
counter   gpu.out_of_memory {event}    GpuOutOfMemory                Calls that ran out of GPU memory.
counter   trims {event}                MemoryTrimmed                 Trims made because of trim_every.
counter   trim.freed By                MemoryTrimmed.freed           Private memory returned by these trims.
histogram trim.duration s              MemoryTrimmed.seconds         Time of these trims.
counter   workers.started {event}      WorkerStarted                 Workers of an isolated function that came up.
counter   workers.ended {event}        WorkerEnded.cause             Workers of an isolated function that ended.
counter   workers.freed By             WorkersReleased.freed \
    Memory returned by workers that ended until the next call.
histogram worker.startup s             WorkerStarted.seconds         Time until a new worker takes calls.
""",
    "function": """
histogram batch.size {item}            BatchFinished.size            Items in a batch.
histogram batch.wait s                 BatchFinished.wait_seconds    Wait of a batch's first item.
histogram batch.run s                  BatchFinished.run_seconds     Time of a batch, with reruns.
counter   batch.weight {unit}          BatchFinished.weight          Weight of the batches, with padding.
counter   batch.padding {unit}         BatchFinished.padding         Weight of their padding.
max       batch.max_size {item}        BatchSizeChosen.size          Most items in a batch, as chosen for slo.
sum       slo.unreachable {process}    BatchSizeChosen.unreachable \
    Processes in which one item alone takes longer than slo.
counter   batches.failed {event}       BatchErrored                  Batches in which the function raised.
sum       batches.hung {batch}         BatchFinished.hung,BatchErrored.hung Batches that run for longer than hang_after.
counter   batches.bisected {event}     BatchFinished.bisected \
    Batches that were run again in parts, to find the failing items.
counter   batch.reruns {event}         BatchFinished.reruns          Calls to find the failing items.
counter   items.failed {event}         BatchFinished.failed          Items that got an error as their result.
counter   requests.refused {event}     RequestsRefused.refused       Requests refused immediately.
counter   requests.expired {event}     RequestsRefused.expired       Requests dropped at their deadline.
counter   requests.cancelled {event}   RequestsRefused.cancelled \
    Requests dropped because their caller no longer waits.
sum       queue.depth {item}           BatchFinished.waiting,RequestsRefused.waiting Items that are waiting.
sum       circuit.open {process}       CircuitOpened,CircuitClosed=0 Processes with an open circuit.
counter   circuit.openings {event}     CircuitOpened                 How often the circuit opened.
""",
    "service": """
counter   growth.found {event}         GrowthFound \
    Times that memory was found to grow with the calls, or for another cause.
""",
}

#: What the table reads from an event that is not one of its fields.
_COMPUTED: dict[str, Callable[[Any], Amount]] = {
    "bisected": lambda event: event.reruns > 0,
    "by_cause": lambda event: {event.cause: len(event.reasons)},
    "by_reason": lambda event: Counter(reason.kind for reason in event.reasons),
    "freed_or_not": lambda event: {False: "gone", True: "alive", None: "unknown"}[event.alive],
    "hook_raised": lambda event: event.error is not None,
    "not_idle": lambda event: None if event.current else 0,  # an isolated function may have a mold and no workers
    "refused": lambda event: {"full": event.full, "late": event.late, "circuit_open": event.open, "quota": event.quota},
    "serving": lambda event: event.current or 0,
    "unreachable": lambda event: not event.reachable,
}

_INFO = "1 for the version of the current model, as its loader gave it."
#: A gauge that the recorder sets.
_MODEL_INFO = Metric("gauge", "model.info", _INFO, "guard", {}, "{model}", label="version", only_current=True)


def _read(subject: Subject, line: str) -> Metric:
    kind, name, unit, sources, text = line.split(maxsplit=4)
    label, values = _LABELS.get(name, (None, ()))
    buckets = _BUCKETS.get(name, _SHORT) if kind == "histogram" else ()
    mode: Mode = "livesum" if kind == "sum" else "livemax"
    known: Any = "gauge" if kind in {"max", "sum"} else kind  # a test looks at each
    read = dict(map(_read_source, sources.split(",")))
    return Metric(known, name, text, subject, read, unit, label, values, buckets, mode)


def _read_source(source: str) -> tuple[str, Callable[[Any], Amount]]:
    event, _, field = source.partition(".")
    if field:
        return event, _COMPUTED.get(field) or attrgetter(field)
    event, _, number = source.partition("=")
    amount = int(number or 1)
    return event, lambda _event: amount


METRICS = {
    metric.name: metric
    for metric in (
        *(_read(subject, line) for subject, table in _METRIC_TABLES.items() for line in table.strip().splitlines()),
        _MODEL_INFO,
    )
}

#: The metrics that are read from each kind of event.
_METRICS_OF: dict[str, list[Metric]] = {}
for _metric in METRICS.values():
    for _kind in _metric.sources:
        _METRICS_OF.setdefault(_kind, []).append(_metric)


class Measure(NamedTuple):
    """What an event adds to a metric, or sets it to, and the value of its second label."""

    metric: Metric
    value: str | None
    amount: float


def amounts_of(event: events.Event) -> Iterator[Measure]:
    kind = type(event).__name__
    for metric in _METRICS_OF.get(kind, ()):
        amount = metric.sources[kind](event)
        if isinstance(amount, str):
            yield Measure(metric, amount, 1)
        elif isinstance(amount, Mapping):
            yield from (Measure(metric, value, count) for value, count in amount.items())
        elif amount is not None:  # a counter must not fall, even if the process has grown
            yield Measure(metric, None, max(0, amount) if metric.kind == "counter" else amount)


# Writes what events add to the metrics with a metrics library: one event at a time, from any thread.


#: Metrics with at most this many label values start at zero with their subject's first event, so that a first increase
#: can be seen.
_MAX_ZEROS = 4


def _zeros(subject: Subject) -> Iterator[Measure]:
    """The zeros at a subject's first event: ``increase()`` does not see a first failure without them."""
    for metric in METRICS.values():
        counts = metric.kind == "counter" or metric.mode == "livesum"
        if metric.subject == subject and counts and len(metric.values) <= _MAX_ZEROS:
            yield from (Measure(metric, value, 0) for value in metric.values or (None,))


#: Held while a metric is written, and during a fork: if another thread held the lock of a metrics library during a
#: fork, the child would wait for it forever.
WRITE_LOCK = threading.RLock()
fork_hooks.at_fork(
    fork_hooks.Rank.METRICS, before=WRITE_LOCK.acquire, in_parent=WRITE_LOCK.release, in_child=WRITE_LOCK.release
)


#: Gauges that say something of one model. The models of a pool are counted together, and have none of these.
_OF_ONE_MODEL = frozenset({"load.failing", "generation", "model.size", "idle"})


class Recorder:
    """Passes the amounts of events to a recording function, one event at a time.

    The garbage collector may end an abandoned call at any point, even while a metric is being written and its lock is
    held. The event of that call then waits until the metric is written; otherwise the thread would wait for itself.
    """

    def __init__(self, record: Callable[[Metric, tuple[str, ...], float], None], name: str = "metrics") -> None:
        self._record = record
        self._name = name
        self._seen: set[tuple[Subject, str]] = set()
        self._versions: dict[str, tuple[int, str]] = {}  # of each guard, the generation and the version that is shown
        self._thread = threading.local()

    def __call__(self, event: events.Event) -> None:
        """Record one event, and those that happen in this thread in the meantime. Raises the first error."""
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

    def __repr__(self) -> str:
        return f"<{self._name} hook: {len(METRICS)} metrics>"

    def _record_event(self, event: events.Event) -> None:
        told = tuple(amounts_of(event))
        if not told:
            return
        subject, name = told[0].metric.subject, event.guard
        if isinstance(name, _units.KeyedName):  # with keys in a label, a metric would grow forever
            name, told = name.pool, tuple(one for one in told if one.metric.name not in _OF_ONE_MODEL)
        if (subject, name) not in self._seen:
            self._seen.add((subject, name))
            told = (*_zeros(subject), *told)
        for metric, value, amount in told:
            self._record(metric, (name,) if value is None else (name, value), amount)
        if name is not event.guard:
            return
        shown, _ = self._versions.get(name, (None, None))
        if isinstance(event, events.LoadFinished | events.RolledBack):
            self._show_version(name, event.generation, event.version)
        elif isinstance(event, events.GenerationReleased) and event.generation == shown:
            self._show_version(name, event.generation, None)

    def _show_version(self, guard: str, generation: int, version: str | None) -> None:
        """Show one version of a guard's model at a time: a metric must not grow with each new one."""
        _, shown = self._versions.pop(guard, (0, None))
        if shown is not None and shown != version:
            self._record(_MODEL_INFO, (guard, shown), 0)
        if version is not None:
            self._versions[guard] = generation, version
            self._record(_MODEL_INFO, (guard, version), 1)
