"""How long a batch takes, estimated from measurements. A size that was not measured has no estimate."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from modelguard.serving._batches import Batch, Limits

#: Batches are sorted into this many levels by how full they are.
_LEVELS = 32
#: An estimate needs this many measurements at its level. Only the last 16 count, and only for 10 seconds.
_ENOUGH = 3
_KEPT = 16
_FRESH_SECONDS = 10.0
#: Of sixteen measurements the second longest counts. With an estimate that half of all batches overrun, requests would
#: be admitted that are bound to be late.
_QUANTILE = 0.9
#: How long a full queue takes to drain, in seconds, while nothing has been measured.
_DRAIN_UNMEASURED = 1.0


class Estimator:
    """Run times by fill: how full the batch was, above 0 and up to 1.

    An estimate for a level uses measurements at that level alone. Extrapolating from small batches to large ones
    refuses traffic that could be served: BentoML's estimator, fed with single requests, refused half of what it could
    serve.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._levels: dict[int, deque[tuple[float, float]]] = {}
        self._estimates: dict[int, tuple[float, float]] = {}
        self._recent: deque[tuple[float, int, float]] = deque(maxlen=_KEPT)

    def record(self, fill: float, items: int, seconds: float, now: float) -> None:
        """Record the run time of one batch."""
        level = _level(fill)
        measured = self._levels.get(level)
        if measured is None:
            measured = self._levels[level] = deque(maxlen=_KEPT)
        measured.append((now, seconds))
        while now - measured[0][0] > _FRESH_SECONDS:
            measured.popleft()
        if len(measured) >= _ENOUGH:
            ordered = sorted(seconds for _, seconds in measured)
            self._estimates[level] = (ordered[int(len(ordered) * _QUANTILE)], now)
        self._recent.append((now, items, seconds))

    def seconds(self, fill: float, now: float) -> float | None:
        """How long a batch with this fill takes; None without enough measurements."""
        found = self._estimates.get(_level(fill))
        return found[0] if found is not None and now - found[1] <= _FRESH_SECONDS else None

    def rate(self, now: float) -> float | None:
        """Items per second that one thread computes, from the last batches; None if there were none recently."""
        fresh = [(items, seconds) for when, items, seconds in self._recent if now - when <= _FRESH_SECONDS]
        total = math.fsum(seconds for _, seconds in fresh)
        return sum(items for items, _ in fresh) / total if total > 0 else None

    def seconds_to_answer(self, waiting: int, weight: float, running: list[Batch], now: float) -> float | None:
        """How long until the last of the waiting requests has its answer; None without enough measurements.

        Args:
            waiting: Requests that wait, the one in question included.
            weight: Their weight.
            running: Batches under way.
            now: The time.
        """
        fill = self._limits.fill(waiting, weight)
        batches_ahead = math.ceil(fill) - 1
        # Behind a full batch its own will be full as well: more requests arrive meanwhile.
        own = self.seconds(1.0 if batches_ahead else fill, now)
        if own is None:
            return None
        busy = self._seconds_left(running, now) if len(running) >= self._limits.threads else 0.0
        return (busy + batches_ahead * own) / self._limits.threads + own

    def seconds_to_drain(self, waiting: int, now: float) -> float:
        """How long until all waiting requests are computed, by the measured rate."""
        rate = self.rate(now)
        return _DRAIN_UNMEASURED if rate is None else waiting / (rate * self._limits.threads)

    def _seconds_left(self, running: Iterable[Batch], now: float) -> float:
        takes = ((batch.started, self.seconds(batch.fill, now) or 0.0) for batch in running)
        return math.fsum(max(started + seconds - now, 0.0) for started, seconds in takes)


def _level(fill: float) -> int:
    return min(math.ceil(fill * _LEVELS), _LEVELS)
