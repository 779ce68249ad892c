"""Which requests are refused when they come: by the circuit, quotas, the room in the queue, and their deadlines."""

from __future__ import annotations

from modelguard.errors import DeadlineExceeded, DeadlineUnreachable, QueueFull, QuotaExceeded
from modelguard.serving._batches import Batch, Counters, Limits
from modelguard.serving._circuit import QueueCircuit
from modelguard.serving._lines import Lines
from modelguard.serving._planner import Planner
from modelguard.serving._requests import Request

__all__ = ["Admission"]


class Admission:
    """Checks requests before they wait, and counts those that it refuses. It changes nothing else.

    Args:
        limits: Bounds of the queue.
        lines: What waits.
        planner: Gives the time of the answer, and when to try again.
        circuit: Refuses everything while it is open.
        counters: Where refusals are counted.
    """

    def __init__(
        self, limits: Limits, lines: Lines, planner: Planner, circuit: QueueCircuit, counters: Counters
    ) -> None:
        self._limits = limits
        self._lines = lines
        self._planner = planner
        self._circuit = circuit
        self._counters = counters

    def configure(self, limits: Limits) -> None:
        """Refuse by these bounds from now on."""
        self._limits = limits

    def check_room(self, request: Request, waiting: int, now: float) -> Request | None:
        """Check whether a request may wait beside so many others.

        Returns:
            The request that loses its place to this one; None if there is room.

        Raises:
            CircuitOpen, QuotaExceeded, QueueFull: It must not wait.
        """
        limits, fairness = self._limits, self._lines.fairness
        if (refusal := self._circuit.refusal(now)) is not None:
            self._counters.refused_open += 1
            raise refusal
        if fairness is not None and limits.quota is not None:
            of_key = fairness.waiting_of(request.key)
            if of_key >= limits.quota:
                self._counters.refused_quota += 1
                pause = self._planner.seconds_to_drain(of_key, now)
                raise QuotaExceeded(limits.name, request.key, queued=of_key, quota=limits.quota, retry_after=pause)
        if waiting < limits.max_queue:
            return None
        displaced = None if fairness is None else fairness.displaced_by(request, self._lines.live)
        if displaced is None:
            raise self.queue_full(waiting, now)
        return displaced

    def queue_full(self, waiting: int, now: float, *, displaced: bool = False) -> QueueFull:
        """The error for a request without a place among so many that wait.

        Args:
            waiting: How many wait.
            now: The time.
            displaced: Whether it has waited, and lost its place to another one.
        """
        self._counters.refused_full += 1
        pause = self._planner.seconds_to_drain(waiting, now)
        return QueueFull(self._limits.name, queued=waiting, retry_after=pause, displaced=displaced)

    def check_deadline(self, request: Request, waiting: int, running: list[Batch], now: float) -> None:
        """Check that, by what was measured, the answer to a request can come in time.

        Raises:
            DeadlineExceeded, DeadlineUnreachable: It would come too late.
        """
        left = request.deadline - now
        if left <= 0:
            self._counters.expired += 1
            raise DeadlineExceeded(self._limits.name, waited=0.0)
        estimate = self._planner.too_late(request, self._lines, waiting, running, now)
        if estimate is not None:
            self._counters.refused_late += 1
            raise DeadlineUnreachable(self._limits.name, estimate=estimate, left=left, retry_after=estimate - left)
