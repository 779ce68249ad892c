"""How large batches may be so that requests have their answers within a latency goal: ``max_size="auto"``."""

from __future__ import annotations

import math
from collections import deque

from modelguard.serving._times import BatchTimes, Curve

__all__ = ["AutoSize"]

#: Where the times jump at some size, no line fits them. If this many of the last runs, and half of those that were as
#: large, took longer than they may by this factor, sizes are bounded besides, by additive increase and multiplicative
#: decrease as in Clipper (Crankshaw et al., NSDI 2017): a tenth below the size that took too long, then more with every
#: full batch in time.
_REMEMBERED = 32
_LATE = 3
_LONGER = 1.1
_BACK_OFF = 0.9
#: The bound grows by this share with the first full batch, and by twice as much with every eighth one. So it is back at
#: the size that took too long after 26 of them, and at three times that size after 52.
_GROWTH = 0.001
_FASTER = 8


class AutoSize:
    """Chooses the size of batches by the measured times. Without a clock, a lock or a queue of its own.

    What arrives while a batch runs has to wait for its end, and then needs the time of its own batch. So a batch may
    take half of the goal. An item that takes longer than that runs alone.

    Args:
        slo: The latency goal in seconds, from arrival to answer; infinity for none.
        max_wait: Seconds that the oldest request may wait for a fuller batch.
        ceiling: Most items in a batch, whatever was measured.

    Attributes:
        slo: The goal.
        seconds: How long a batch may take; infinity without a goal.
        size: How many items a batch may have, by what was measured last: 1 before the first measurement.
        reachable: Whether one item alone meets the goal; None until that was measured, and without a goal.
        item_seconds: How long one item alone takes, of the kind that takes longest; 0 until that was measured.
    """

    def __init__(self, slo: float, max_wait: float, ceiling: int) -> None:
        self.slo = slo
        self._ceiling = ceiling
        self.seconds = min(slo / 2, slo - max_wait)
        self.size = ceiling if slo == math.inf else 1
        self.reachable: bool | None = None
        self.item_seconds = 0.0
        self._items: deque[float] = deque(maxlen=_REMEMBERED)
        self._runs: deque[tuple[int, bool]] = deque(maxlen=_REMEMBERED)  # items, and whether it took too long
        self._most: float = ceiling
        self._grown = 0

    def __bool__(self) -> bool:
        """Whether there is a goal."""
        return self.slo != math.inf

    def size_for(self, curve: Curve | None, mean: float) -> int:
        """How many items a batch may have.

        Args:
            curve: The times of its group; None before the first measurement, when one item is tried.
            mean: The mean weight of an item; 0 if nothing is weighed.
        """
        if not self:
            return self._ceiling
        if curve is None:
            return 1
        return int(max(1.0, min(curve.count_within(self.seconds, mean), self._most)))

    def note_run(self, count: int, seconds: float) -> None:
        """Note that a batch of so many items took so long."""
        late = seconds > self.seconds * _LONGER
        self._runs.append((count, late))
        bounded = self._most < self._ceiling
        if late and (not bounded or count >= int(self._most * _BACK_OFF)):  # a smaller one says nothing about the bound
            most = count if bounded else self._too_large()
            self._most, self._grown = max(min(most * _BACK_OFF, self._ceiling), 1.0), 0
        elif bounded and not late and count >= int(self._most):
            self._most = min(self._most * (1 + _GROWTH * 2 ** (self._grown / _FASTER)), self._ceiling)
            self._grown += 1

    def _too_large(self) -> float:
        """The least size that half of the last runs took too long with; infinity for none."""
        least, late = math.inf, 0
        for number, (items, too_long) in enumerate(sorted(self._runs, reverse=True), start=1):
            late += too_long
            if too_long and late >= _LATE and late * 2 >= number:
                least = items
        return least

    def follow(self, times: BatchTimes, curve: Curve | None, mean: float) -> None:
        """Choose by what was measured.

        Args:
            times: Where the curve comes from.
            curve: The times of the group of the last batch.
            mean: The mean weight of its items; 0 if nothing is weighed.
        """
        self.size = self.size_for(curve, mean)
        if curve is not None and times.enough:
            self._items.append(curve.seconds(1, mean))
            self.item_seconds = max(self._items)
            self.reachable = self.item_seconds <= self.slo
