"""How long a batch takes, by what was measured. Without a measurement at that size there is no estimate."""

from __future__ import annotations

import math
from collections import deque

#: Batches are sorted into so many sizes.
_LEVELS = 32
#: So many measurements at a size are evidence; the last so many are kept, and for so many seconds.
_ENOUGH = 3
_KEPT = 16
_FRESH = 10.0
#: Of sixteen the second longest counts: an estimate that half of all batches overrun would let in what is bound to
#: come too late.
_QUANTILE = 0.9


class Estimator:
    """Run times by how full the batch was: its share of a full one, above 0 and up to 1.

    An estimate for a size rests on measurements at that size alone. To extrapolate from small batches to large ones
    turns traffic away that fits: BentoML's estimator, fed with single requests, refused half of what it could serve.
    """

    def __init__(self) -> None:
        self._levels: dict[int, deque[tuple[float, float]]] = {}
        self._estimates: dict[int, tuple[float, float]] = {}
        self._recent: deque[tuple[float, int, float]] = deque(maxlen=_KEPT)

    def record(self, share: float, items: int, seconds: float, now: float) -> None:
        """A batch with so many items, which was so full, has run for so many seconds."""
        level = _level(share)
        kept = self._levels.get(level)
        if kept is None:
            kept = self._levels[level] = deque(maxlen=_KEPT)
        kept.append((now, seconds))
        while now - kept[0][0] > _FRESH:
            kept.popleft()
        if len(kept) >= _ENOUGH:
            ordered = sorted(seconds for _, seconds in kept)
            self._estimates[level] = (ordered[int(len(ordered) * _QUANTILE)], now)
        self._recent.append((now, items, seconds))

    def seconds(self, share: float, now: float) -> float | None:
        """How long a batch takes that is so full, or None if too little is known."""
        found = self._estimates.get(_level(share))
        return found[0] if found is not None and now - found[1] <= _FRESH else None

    def rate(self, now: float) -> float | None:
        """Items a second that one worker computes, by the last batches; None if there were none lately."""
        fresh = [(items, seconds) for when, items, seconds in self._recent if now - when <= _FRESH]
        total = math.fsum(seconds for _, seconds in fresh)
        return sum(items for items, _ in fresh) / total if total > 0 else None


def _level(share: float) -> int:
    return min(math.ceil(share * _LEVELS), _LEVELS)
