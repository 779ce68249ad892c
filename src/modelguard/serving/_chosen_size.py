"""Reports which size of batches ``max_size="auto"`` has chosen."""

from __future__ import annotations

import math

from modelguard import telemetry
from modelguard.serving._auto_size import AutoSize

__all__ = ["ChosenSize"]

#: A size is reported if it has changed by this factor; unless something was configured, at most this often, in seconds.
_WORTH_REPORTING = 1.25
_REPORT_INTERVAL = 1.0


class ChosenSize:
    """Emits ``BatchSizeChosen`` when the goal gets out of reach or within reach, and when the size changes.

    Args:
        name: The batcher's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._size = 0
        self._slo = math.inf
        self._reachable = True
        self._reported_at = -math.inf

    def report(self, auto: AutoSize, now: float) -> None:
        """Emit what was chosen, if that has changed since the last event."""
        if (not auto and self._slo == math.inf) or (auto and auto.reachable is None):
            return  # nothing is chosen, or there were too few runs to say anything
        reachable = auto.reachable is not False
        same = reachable == self._reachable and not self._differs(auto.size)
        if auto.slo == self._slo and (same or now - self._reported_at < _REPORT_INTERVAL):
            return
        event = telemetry.BatchSizeChosen(
            guard=self._name,
            size=auto.size,
            previous=self._size,
            slo=auto.slo if auto else None,
            item_seconds=auto.item_seconds,
            reachable=reachable,
        )
        self._size, self._slo, self._reachable = (auto.size if auto else 0), auto.slo, reachable
        self._reported_at = now
        telemetry.emit(event)

    def _differs(self, size: int) -> bool:
        return max(size, self._size) >= _WORTH_REPORTING * min(size, self._size)
