"""Writes what events add to the metrics with a metrics library: one event at a time, from any thread."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

from modelguard.telemetry import events
from modelguard.telemetry._metrics import METRICS, Measure, Metric, Subject, measures_of

__all__ = ["WRITE_LOCK", "Recorder"]

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
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=WRITE_LOCK.acquire, after_in_parent=WRITE_LOCK.release, after_in_child=WRITE_LOCK.release
    )


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
        measures = measures_of(event)
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
