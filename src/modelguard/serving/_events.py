"""The events of a batcher. They are emitted in the batcher's own threads, never in a caller's."""

from __future__ import annotations

import math
import threading

from modelguard import telemetry
from modelguard.serving._batches import Batch, Counters
from modelguard.serving._chosen_size import ChosenSize
from modelguard.serving._circuit import CircuitChange
from modelguard.serving._execution import Computed
from modelguard.serving._hung import count_hung, items_in_hung
from modelguard.serving._outcomes import one_line
from modelguard.serving._queue import BatchQueue

#: Refused requests are reported at most this often, in seconds: under overload there are thousands.
_REPORT_INTERVAL = 1.0


class BatchEvents:
    """Emits what has happened since it last did.

    Args:
        name: The batcher's name.
    """

    def __init__(self, name: str) -> None:
        telemetry.import_events()
        self._name = name
        self._lock = threading.Lock()  # a batch may end while the thread that looks after time reports
        self._reported = _refused(Counters())
        self._reported_at = -math.inf
        self._size = ChosenSize(name)

    def batch_ended(
        self, batch: Batch, computed: Computed, queue: BatchQueue, *, seconds: float, change: CircuitChange
    ) -> None:
        """Emit the events of a batch that has ended.

        Args:
            batch: The batch.
            computed: Its outcome.
            queue: The queue it came from.
            seconds: How long it ran, reruns included.
            change: What its verdict changed about the circuit.
        """
        hung = count_hung(queue.running)
        if telemetry.listening():
            telemetry.emit(
                telemetry.BatchFinished(
                    guard=self._name,
                    size=len(batch.requests),
                    waiting=queue.waiting,
                    wait_seconds=batch.started - batch.oldest,
                    run_seconds=seconds,
                    failed=computed.failed,
                    reruns=computed.reruns,
                    weight=batch.weight,
                    padding=batch.padding,
                    hung=hung,
                )
            )
        if computed.error is not None:
            telemetry.emit(
                telemetry.BatchErrored(
                    guard=self._name,
                    size=len(batch.requests),
                    failed=computed.failed,
                    error=one_line(computed.error),
                    reruns=computed.reruns,
                    hung=hung,
                )
            )
        if change is not None:
            self._emit_circuit(queue, change, computed.error)
        now = batch.started + seconds
        self._size.report(queue.auto_size, now)
        self.refused(queue, now)

    def hung(self, queue: BatchQueue, hang_after: float) -> None:
        """Emit that a batch overstays."""
        error = TimeoutError(f"a batch has been running for more than {hang_after:g} s")
        telemetry.emit(
            telemetry.BatchErrored(
                guard=self._name,
                size=items_in_hung(queue.running),
                failed=0,
                error=one_line(error),
                reruns=0,
                hung=count_hung(queue.running),
            )
        )
        if queue.circuit is not None:
            self._emit_circuit(queue, "opened", error)

    def refusals_due(self, counters: Counters) -> float:
        """When to report what was refused since the last report; infinity if there is nothing."""
        return math.inf if _refused(counters) == self._reported else self._reported_at + _REPORT_INTERVAL

    def _emit_circuit(self, queue: BatchQueue, change: CircuitChange, error: BaseException | None) -> None:
        if change == "closed" or queue.circuit is None:
            telemetry.emit(telemetry.CircuitClosed(guard=self._name))
            return
        telemetry.emit(
            telemetry.CircuitOpened(
                guard=self._name,
                failures=queue.circuit.failures,
                retry_after=queue.circuit.cooldown,
                error="" if error is None else one_line(error),
            )
        )

    def refused(self, queue: BatchQueue, now: float) -> None:
        """Emit what was refused since the last report, at most once a second."""
        with self._lock:
            if now < self.refusals_due(queue.counters):
                return
            former, counts = self._reported, _refused(queue.counters)
            self._reported, self._reported_at = counts, now
        full, late, opened, quota, expired, cancelled = (new - old for new, old in zip(counts, former, strict=True))
        telemetry.emit(
            telemetry.RequestsRefused(
                guard=self._name,
                full=full,
                late=late,
                open=opened,
                quota=quota,
                expired=expired,
                cancelled=cancelled,
                waiting=queue.waiting,
            )
        )


def _refused(counters: Counters) -> tuple[int, ...]:
    return (
        counters.refused_full,
        counters.refused_late,
        counters.refused_open,
        counters.refused_quota,
        counters.expired,
        counters.cancelled,
    )
