"""How long a batch takes: a fixed time, and a time for each item and each unit of weight, learned from every run."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass

__all__ = ["BatchTimes", "Curve"]

#: Nothing is refused before this many runs were measured, nor when the last one is older than 10 seconds (and older
#: than ten runs took, for models whose batches take that long).
_ENOUGH = 3
_FRESH_SECONDS = 10.0
_FRESH_RUNS = 10.0
#: Each run counts this much less than the next one: the last twenty make up two thirds.
_DECAY = 0.95
#: A time that differs from the estimate by more than this factor is left out, unless the last three agree that the
#: model has become slower or faster: a single stall says nothing about the next batch.
_CHANGED = 1.3
_AGREE = 3
#: Where sizes hardly vary (by less than 2 % of their mean), the slope stays what it was when they did.
_RIGID = 0.02
#: The spread of the times is taken from so many runs. Above the median by 2.5 times the distance to the upper quartile
#: are 5 % of normally distributed times. Stalls, up to one run in four, do not raise it.
_KEPT = 16
_SPREAD = 1.5
_WIDEST = 3.0
#: Keyword arguments whose runs take longer or shorter than others are remembered for this many of their values.
_GROUPS = 256
#: How fast a group's factor follows its runs.
_GROUP_STEP = 0.3
#: A batch may be twice as large as the largest one so far, where it is not known that the deadlines hold.
_GROWTH = 2


@dataclass(frozen=True, slots=True)
class Curve:
    """How long batches of one group take: ``fixed + each * count + unit * weight`` seconds, at most ``most``.

    Attributes:
        fixed: Seconds for any batch.
        each: Seconds for each item.
        unit: Seconds for each unit of weight.
        most: Seconds for the only size that was measured, if there was only one: larger batches may take as long.
        reach: How many items the largest batch had.
    """

    fixed: float
    each: float
    unit: float
    most: float
    reach: float

    def seconds(self, count: float, weight: float) -> float:
        """How long a batch takes, on the safe side."""
        seconds = self.fixed + self.each * count + self.unit * weight
        return seconds if seconds < self.most else self.most

    def holds(self, count: int, weight: float, left: float) -> bool:
        """Whether a batch ends within this time.

        What is more than twice as large as any batch so far is judged by the time for an item in the largest one: the
        first steps of a slope say little about its far end.
        """
        seconds = self.seconds(count, weight)
        if seconds > left:
            return False
        if count <= _GROWTH * self.reach:
            return True
        return self.seconds(self.reach, weight * self.reach / count) * count / self.reach <= left


class BatchTimes:
    """Learns the times of batches. Not thread-safe by itself.

    Runs are only noted when they end, and worked through when somebody asks.
    """

    def __init__(self) -> None:
        self._unread: deque[tuple[int, float, Hashable, float]] = deque(maxlen=2 * _KEPT)
        self._sums = _Sums()
        self._slopes: tuple[float, float] | None = None
        self._factors: OrderedDict[Hashable, float] = OrderedDict()
        self._ratios: deque[float] = deque(maxlen=_KEPT)
        self._last: deque[float] = deque(maxlen=_AGREE)
        self._curves: dict[Hashable, Curve] = {}
        self._reach = 0.0
        self._runs = 0
        self._fresh_until = -math.inf
        self._recent: deque[tuple[float, int, float]] = deque(maxlen=_KEPT)

    def record(self, count: int, weight: float, group: Hashable, seconds: float, now: float) -> None:
        """Record one run of the function that succeeded.

        Args:
            count: Its items.
            weight: Their weight; 0 if nothing is weighed.
            group: Their keyword arguments.
            seconds: How long it took.
            now: When it ended.
        """
        self._unread.append((count, weight, group, seconds))
        self._runs += 1
        self._fresh_until = now + max(_FRESH_SECONDS, _FRESH_RUNS * seconds)

    def record_batch(self, items: int, seconds: float, now: float) -> None:
        """Record how long a thread was busy with a batch, runs that failed included."""
        self._recent.append((now, items, seconds))

    def fresh(self, now: float) -> bool:
        """Whether there are enough recent measurements to refuse anything because of them."""
        return self._runs >= _ENOUGH and now <= self._fresh_until

    def rate(self, now: float) -> float | None:
        """Items per second that one thread computes, from the last batches; None if there were none recently."""
        fresh = [(items, seconds) for when, items, seconds in self._recent if now - when <= _FRESH_SECONDS]
        total = math.fsum(seconds for _, seconds in fresh)
        return sum(items for items, _ in fresh) / total if total > 0 else None

    def curve(self, group: Hashable = None) -> Curve | None:
        """How long batches of this group take, on the safe side; None before the first run."""
        if self._unread:
            self._learn()
        try:
            curve = self._curves.get(group)
        except Exception:  # noqa: BLE001 - a value was changed after its call, and raises when it is compared
            group = curve = None
        if curve is None and self._runs:
            curve = self._make_curve(group)
            if len(self._curves) < _GROUPS:
                self._curves[group] = curve
        return curve

    # Learning

    def _learn(self) -> None:
        while self._unread:
            self._learn_run(*self._unread.popleft())
        self._slopes = self._sums.slopes(self._slopes)
        self._curves.clear()

    def _learn_run(self, count: int, weight: float, group: Hashable, seconds: float) -> None:
        self._reach = max(self._reach, count)
        if self._sums.total == 0:
            self._sums.add(count, weight, seconds)
            return
        self._slopes = self._sums.slopes(self._slopes)
        expected = self._sums.seconds(self._slopes, count, weight) * self._factor(group)
        ratio = seconds / expected if expected > 0 else 1.0
        if group is not None:
            ratio = self._learn_group(group, ratio)
        if self._changed(ratio):
            self._ratios.append(ratio)
            return
        self._ratios.append(ratio)
        self._sums.add(count, weight, seconds / self._factor(group))

    def _changed(self, ratio: float) -> bool:
        """Whether a run must be left out. If the last three agree, everything learned before is rescaled."""
        known_shape = self._slopes is not None
        self._last.append(ratio)
        if not known_shape or 1 / _CHANGED <= ratio <= _CHANGED:
            return False
        if len(self._last) < _AGREE or not (min(self._last) > _CHANGED or max(self._last) < 1 / _CHANGED):
            return self._runs > _ENOUGH
        by = sorted(self._last)[_AGREE // 2]
        self._sums.scale(by)
        if self._slopes is not None:
            self._slopes = self._slopes[0] * by, self._slopes[1] * by
        self._ratios.clear()
        self._last.clear()
        return False

    def _factor(self, group: Hashable) -> float:
        return self._factors.get(group, 1.0) if group is not None else 1.0

    def _learn_group(self, group: Hashable, ratio: float) -> float:
        """Move the factor of a group; returns what is left of the ratio."""
        known = group in self._factors
        factor = self._factors.pop(group, 1.0)
        step = ratio ** (_GROUP_STEP if known else 1.0)
        self._factors[group] = factor * step
        if len(self._factors) > _GROUPS:
            self._factors.popitem(last=False)
        return ratio / step

    def _make_curve(self, group: Hashable) -> Curve:
        by = self._factor(group) * self._margin()
        if self._slopes is None:
            count, weight, seconds = self._sums.means()
            if weight:
                return Curve(0.0, 0.0, seconds * by / weight, seconds * by, self._reach)
            return Curve(0.0, seconds * by / count, 0.0, seconds * by, self._reach)
        fixed, each, unit = self._sums.line(self._slopes)
        return Curve(fixed * by, each * by, unit * by, math.inf, self._reach)

    def _margin(self) -> float:
        """What the times are multiplied by, so that few batches take longer."""
        if len(self._ratios) < _ENOUGH:
            return 1.0
        ordered = sorted(self._ratios)
        middle, upper = ordered[len(ordered) // 2], ordered[len(ordered) * 3 // 4]
        return min(max(upper + _SPREAD * (upper - middle), 1.0), _WIDEST)


class _Sums:
    """Decaying sums of counts, weights and times, and the line through them."""

    def __init__(self) -> None:
        self.total = 0.0
        self._n = self._w = self._y = 0.0
        self._nn = self._ww = self._nw = self._ny = self._wy = 0.0

    def add(self, n: float, w: float, y: float) -> None:
        self.total = self.total * _DECAY + 1
        self._n = self._n * _DECAY + n
        self._w = self._w * _DECAY + w
        self._y = self._y * _DECAY + y
        self._nn = self._nn * _DECAY + n * n
        self._ny = self._ny * _DECAY + n * y
        if w or self._w:
            self._ww = self._ww * _DECAY + w * w
            self._nw = self._nw * _DECAY + n * w
            self._wy = self._wy * _DECAY + w * y

    def scale(self, by: float) -> None:
        """Make all times longer or shorter."""
        self._y *= by
        self._ny *= by
        self._wy *= by

    def means(self) -> tuple[float, float, float]:
        """Mean count, weight and seconds."""
        return self._n / self.total, self._w / self.total, self._y / self.total

    def slopes(self, before: tuple[float, float] | None) -> tuple[float, float] | None:
        """Seconds for an item and for a unit of weight; None while only one size was measured.

        Args:
            before: What they were. They stay where sizes hardly vary.
        """
        n, w, y = self.means()
        var_n, var_w = self._nn / self.total - n * n, self._ww / self.total - w * w
        if before is None and var_n < (_RIGID * n) ** 2 and var_w < (_RIGID * w) ** 2:
            return None
        rigid_n, rigid_w = ((_RIGID * n) ** 2, (_RIGID * w) ** 2) if before is not None else (1e-9 * n * n, 1e-9 * w * w)
        each, unit = before or (0.0, 0.0)
        a, d = var_n + rigid_n, var_w + rigid_w
        p = self._ny / self.total - n * y + rigid_n * each
        if not w:
            each, unit = max(p / a, 0.0), 0.0
        else:
            b = self._nw / self.total - n * w
            q = self._wy / self.total - w * y + rigid_w * unit
            each, unit = _solve(a, b, d, p, q)
        slope = each * n + unit * w
        by = y / slope if slope > y else 1.0  # nothing takes less than no time
        return each * by, unit * by

    def line(self, slopes: tuple[float, float]) -> tuple[float, float, float]:
        """Fixed seconds, seconds for an item, and for a unit of weight."""
        n, w, y = self.means()
        return max(y - slopes[0] * n - slopes[1] * w, 0.0), *slopes

    def seconds(self, slopes: tuple[float, float] | None, count: float, weight: float) -> float:
        """The time of a batch, by the line; by the one size that was measured while there is no slope."""
        if slopes is None:
            return self._y / self.total
        fixed, each, unit = self.line(slopes)
        return fixed + each * count + unit * weight


def _solve(a: float, b: float, d: float, p: float, q: float) -> tuple[float, float]:
    """The least squares ``x, y >= 0`` of ``a x + b y = p`` and ``b x + d y = q``."""
    determinant = a * d - b * b
    if determinant > 1e-9 * a * d:
        x, y = (p * d - q * b) / determinant, (q * a - p * b) / determinant
        if x >= 0 and y >= 0:
            return x, y
    if p * p / a >= q * q / d:  # the one that explains more by itself
        return max(p / a, 0.0), 0.0
    return 0.0, max(q / d, 0.0)
