"""The events of a batcher. They are made in its worker threads, never while a caller waits at the door."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from modelguard import telemetry
from modelguard.serving.running import one_line

if TYPE_CHECKING:
    from modelguard.serving.batches import Batch
    from modelguard.serving.core import Core
    from modelguard.serving.running import Computed

#: Requests that were turned away are told at most so often, in seconds: under overload they are thousands.
_PACE = 1.0

Change = Literal["opened", "closed"] | None


class Telling:
    """Tells what has happened since it last did.

    Args:
        name: The batcher's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._told = (0, 0, 0, 0, 0)
        self._told_at = -math.inf

    def batch(self, batch: Batch, computed: Computed, core: Core, *, seconds: float, change: Change) -> None:
        """A batch has ended."""
        if telemetry.listening():
            telemetry.emit(
                telemetry.BatchFinished(
                    guard=self._name,
                    size=len(batch.entries),
                    waiting=core.waiting,
                    wait_seconds=batch.started - batch.oldest,
                    run_seconds=seconds,
                    failed=computed.failed,
                    reruns=computed.reruns,
                )
            )
        if computed.error is not None:
            telemetry.emit(
                telemetry.BatchErrored(
                    guard=self._name,
                    size=len(batch.entries),
                    failed=computed.failed,
                    error=one_line(computed.error),
                    reruns=computed.reruns,
                )
            )
        if change is not None:
            self._circuit(core, change, computed.error)
        self._refusals(core, batch.started + seconds)

    def _circuit(self, core: Core, change: Change, error: BaseException | None) -> None:
        if change == "closed" or core.circuit is None:
            telemetry.emit(telemetry.CircuitClosed(guard=self._name))
            return
        telemetry.emit(
            telemetry.CircuitOpened(
                guard=self._name,
                failures=core.circuit.failures,
                retry_after=core.circuit.cooldown,
                error="" if error is None else one_line(error),
            )
        )

    def _refusals(self, core: Core, now: float) -> None:
        tally = core.tally
        counts = (tally.refused_full, tally.refused_late, tally.refused_open, tally.expired, tally.cancelled)
        if counts == self._told or now - self._told_at < _PACE:
            return
        full, late, opened, expired, cancelled = (new - old for new, old in zip(counts, self._told, strict=True))
        self._told, self._told_at = counts, now
        telemetry.emit(
            telemetry.RequestsRefused(
                guard=self._name,
                full=full,
                late=late,
                open=opened,
                expired=expired,
                cancelled=cancelled,
                waiting=core.waiting,
            )
        )
