"""How long a batch takes: a fixed time, and a time for each item and each unit of weight, learned from every run."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from modelguard.serving._requests import Group

#: Nothing is refused before so many runs, nor when the last one is older than so many seconds, and than so many runs.
_ENOUGH = 3
_FRESH_SECONDS = 10.0
_FRESH_RUNS = 10.0
#: Each run counts this much less than the next one: the last twenty make up two thirds.
_DECAY = 0.95
#: A time counts as longer than the estimate by this factor at most, and by what times usually differ: a stall says
#: little. If the last three agree that the model is slower or faster, what was learned is rescaled.
_CHANGED = 1.5
_AGREE = 3
#: If they agree within the first so many runs that it is so many times slower, what came before is forgotten: scaled by
#: as much, what only one of these runs has shown would be far too long.
_FIRST_RUNS, _FAR_SLOWER = 16, 10.0
#: If the last eight are all longer or all shorter by this factor, the line lags behind. If their sizes differ by a
#: quarter, it is learned anew from them: it may have mixed times from before and after a change.
_DRIFTED = 1.1
_DRIFT = 8
_DIFFER = 1.25
#: Where sizes vary by less than this, the slope stays near what it was when they did: else it would follow chance.
_RIGID = 0.1
_RIGID_STEP = 0.05
#: The spread of the times is that of so many runs: stalls, up to one in four, do not raise it.
_KEPT = 32
_SPREAD = 1.0
_WIDEST = 2.0
#: So many times the distance to the upper quartile count if one run in ten needs it. Where times vary at all, so does
#: what passes between two batches and is in no run: 3 % are kept for that.
_SKEWED = 4.0
_LEAST = 1.03
#: After the first runs it is learned from the last so many each time that batches have taken so many seconds, for
#: learning takes time too.
LEARNED, _RUNS = 0.01, 16
#: Keyword arguments whose runs take longer or shorter than others are remembered for this many of their values.
_GROUPS = 256
#: No run counts as more than so many times slower or faster than expected.
_FAR = 1000.0
#: How fast a group's factor follows its runs.
_GROUP_STEP = 0.3
#: A batch may be twice as large as the largest one so far, where it is not known that the deadlines hold.
_GROWTH = 2
#: How fast what one size takes is followed, what all take together (models become slower as a whole), and their spread.
_SIZE_STEP = 0.1
_LEVEL_STEP = 0.1
_SPREAD_STEP = 0.05
#: What was learned of a size counts so much less with each run of another one.
_FORGOTTEN = 0.97
#: So much of a run says for ever that an item takes no longer than in the next smaller size: so what a slow run has
#: shown is doubted in the end, and the size is tried again. Each further run doubles the time until then.
_DOUBTED = 0.2
#: How fast the share of bad items is followed, with each item; and the runs that one of them adds, with each batch.
_BAD_STEP = 0.005
_AGAIN_STEP = 0.2
_NO_BAD = 1e-4


@dataclass(frozen=True, slots=True)
class Curve:
    """How long batches of one group take: by a line, and by what those of each size have taken, where that is known."""

    fixed: float  # seconds for any batch
    each: float  # seconds for each item
    unit: float  # seconds for each unit of weight
    most: float  # seconds for the only size that was measured, if there was only one: larger batches may take as long
    reach: float  # how many items the largest batch had
    #: The factor by which all of these are longer than what is usual. A goal for latency needs that. Deadlines go by
    #: what is usual: on the safe side, a model whose times vary would refuse most of what it could answer.
    margin: float = 1.0
    #: Sizes of batches, and their seconds, where these were measured; both rise.
    points: tuple[tuple[float, float], ...] = ()
    #: The share of a run that bad items add, for each item beside the first: a batch is run again in parts.
    again: float = 0.0

    def seconds(self, count: float, weight: float) -> float:
        """How long a batch takes, on the safe side."""
        once = self._by_points(count) if self.points else self._by_line(count, weight)
        return once * (1.0 + self.again * (count - 1)) if count > 1 else once

    def _by_line(self, count: float, weight: float) -> float:
        return min(self.most, self.fixed + self.each * count + self.unit * weight)

    def _by_points(self, count: float) -> float:
        points = self.points
        at = bisect_left(points, (count,))
        if not 0 < at < len(points):
            return self._beyond(points[-1 if at else 0], count)
        (low, shorter), (high, longer) = points[at - 1], points[at]
        return shorter + (longer - shorter) * (count - low) / (high - low)

    def _beyond(self, point: tuple[float, float], count: float) -> float:
        """From the nearest size on, by the line."""
        there = self._by_line(point[0], 0.0)
        return point[1] * self._by_line(count, 0.0) / there if there > 0 else point[1]

    def rate(self, count: int, weight: float) -> float:
        """How many items a batch computes a second."""
        seconds = self.seconds(count, weight)
        return count / seconds if seconds > 0 else math.inf

    def at_best(self, count: float, weight: float) -> float:
        """How long a batch takes if larger ones than any so far take no longer: else nobody would find that out."""
        seconds = self.seconds(count, weight)
        if not self.points or count <= self.reach:
            return seconds
        return min(seconds, self.points[-1][1] * (1.0 + self.again * (count - 1)))

    def at_worst(self, count: int, weight: float) -> float:
        """How long a batch takes if larger batches gain nothing.

        What is more than twice as large as any batch so far is judged by the time for an item in the largest one: the
        first steps of a slope say little about its far end.
        """
        seconds = self.seconds(count, weight)
        if count <= _GROWTH * self.reach:
            return seconds
        return max(seconds, self.seconds(self.reach, weight * self.reach / count) * count / self.reach)

    def hopeless(self, seconds: float, left: float) -> bool:
        """Whether a batch that is expected to take so long never ends within this time."""
        return seconds > left * self.margin * self.margin

    def holds(self, count: int, weight: float, left: float) -> bool:
        """Whether a batch usually ends within this time, even if larger batches gain nothing."""
        return self.at_worst(count, weight) <= left * self.margin

    def count_within(self, seconds: float, mean: float, most: int) -> int:
        """How many items of this mean weight, at most so many, a batch may have that ends in time in any case."""
        return bisect_right(range(1, most + 1), seconds, key=lambda count: self.at_worst(count, count * mean))


class BatchTimes:
    """Learns the times of batches. Not thread-safe by itself.

    Runs are only noted when they end, and worked through when somebody asks.
    """

    def __init__(self) -> None:
        self._unread: deque[tuple[int, float, Hashable, float]] = deque(maxlen=_RUNS)
        self._unread_seconds = 0.0
        self._line = _FittedLine()
        self._factors: OrderedDict[Hashable, float] = OrderedDict()
        self._ratios: deque[float] = deque(maxlen=_KEPT)
        self._last: deque[tuple[float, int, float, float]] = deque(maxlen=_DRIFT)  # time over estimate, and the run
        self._curves: dict[Hashable, Curve] = {}
        self._reach, self._least = 0.0, math.inf
        self._runs = 0
        self._fresh_until = -math.inf
        self._recent: deque[tuple[float, int, float]] = deque(maxlen=_KEPT)
        self._sizes = _Sizes()
        self._weighed = False
        self._told = 0  # items that were computed
        self._passed = 0.0  # seconds of the runs that succeeded since the last batch
        self.bad = 0.0  # the share of items that make their batches raise
        self._bad_runs = self._bad_items = 0.0  # of the last batches with bad items: the runs that these have added

    def record(self, count: int, weight: float, group: Hashable, seconds: float, now: float) -> None:
        """Record one run of the function that succeeded. The weight is 0 if nothing is weighed."""
        self._passed += seconds
        self._unread.append((count, weight, group, seconds))
        self._unread_seconds += seconds
        self._runs += 1
        self._fresh_until = now + max(_FRESH_SECONDS, _FRESH_RUNS * seconds)

    def record_batch(
        self, items: int, seconds: float, now: float, *, bad: float = 0.0, weight: float = 0.0, group: Hashable = None
    ) -> None:
        """Record how long a thread was busy with a batch, runs that failed included, and the share of bad items."""
        self._recent.append((now, items, seconds))
        passed, self._passed = self._passed, 0.0
        self._told += items
        if not (bad or self.bad):
            return
        self.bad += max(1 - (1 - _BAD_STEP) ** items, items / self._told) * (bad - self.bad)
        if self.bad < _NO_BAD:
            self.bad = 0.0
        if bad and items > 1 and (curve := self.curve(group)) is not None:
            once = min(curve.seconds(items, weight) / (curve.margin * (1 + curve.again * (items - 1))), passed)
            if once > 0:
                runs = min(max(seconds / once - 1, 0.0), 4 * math.log2(items) + 4)
                self._bad_runs += runs - _AGAIN_STEP * self._bad_runs
                self._bad_items += bad * items - _AGAIN_STEP * self._bad_items
        self._curves.clear()

    @property
    def enough(self) -> bool:
        """Whether there are enough measurements to say anything because of them."""
        return self._runs >= _ENOUGH

    @property
    def spread_known(self) -> bool:
        """Whether enough runs were compared with what was expected of them: else a margin of 1 says nothing."""
        return len(self._ratios) >= _ENOUGH

    def fresh(self, now: float) -> bool:
        """Whether there are enough recent measurements to refuse anything because of them."""
        return self.enough and now <= self._fresh_until

    def rate(self, now: float) -> float | None:
        """Items per second that one thread computes, from the last batches; None if there were none recently."""
        fresh = [(items, seconds) for when, items, seconds in self._recent if now - when <= _FRESH_SECONDS]
        total = math.fsum(seconds for _, seconds in fresh)
        return sum(items for items, _ in fresh) / total if total > 0 else None

    def curve(self, group: Hashable = None) -> Curve | None:
        """How long batches of this group take, on the safe side; None before the first run."""
        if self._unread and (self._unread_seconds >= LEARNED or self._runs <= _RUNS or not self._line.total):
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
            run = self._unread.popleft()
            with suppress(Exception):  # keyword arguments that raise where they are compared: others learn all the same
                self._learn_run(*run)
        self._unread_seconds = 0.0
        self._curves.clear()

    def _learn_run(self, count: int, weight: float, group: Hashable, seconds: float) -> None:
        line, factor = self._line, self._factors.get(group, 1.0)
        inside = self._least <= count <= self._reach and (bool(weight) or self._sizes.knows(count))
        low, high = self._explained(count, weight, inside=inside)
        self._reach, self._least = max(self._reach, count), min(self._least, count)
        if not line.total:
            line.add(count, weight, seconds)
            self._sizes.note(count, seconds, seconds)
            return
        if group is not None and group not in self._factors and line.known:
            # Of a new group at a new size nobody can tell which of the two takes longer.
            usual = self._curve_of(1.0).seconds(count, weight)
            self._learn_group(group, _bounded_ratio(seconds, usual))
            return
        nearest = min(max(seconds, low * factor), high * factor)
        ratio = _bounded_ratio(seconds, nearest)
        expected = nearest / factor
        if group is not None:
            ratio = self._learn_group(group, ratio)
            factor = self._factors.get(group, 1.0)
        seconds /= factor
        if line.known or not weight:  # until weights are known to explain the time, runs of one size differ
            if inside:
                self._ratios.append(ratio)
            if inside or ratio != 1.0:
                seconds = self._checked(ratio, count, weight, seconds, expected)
            else:  # the line is about to turn: how far runs were from it says nothing about the new one
                self._last.clear()
        self._line.add(count, weight, seconds)
        if weight:
            self._weighed = True
        else:
            # Of a group, its own factor follows the model's speed.
            self._sizes.note(count, seconds, expected if inside and group is None else 0.0)

    def _explained(self, count: int, weight: float, *, inside: bool) -> tuple[float, float]:
        """The shortest and the longest time of a run that the line explains: of sizes beyond all others it says little.

        A larger batch may take no longer than the largest one, or as much longer as a matrix does of so many rows and
        columns; and so for smaller ones.
        """
        expected = self._line.seconds(count, weight) if self._line.total else 0.0
        if inside and self._line.known and not self._weighed and self._sizes.knows(count):
            items, usual = self._sizes.usual(count)
            there = self._line.seconds(items, 0.0)
            expected = usual * expected / there if there > 0 else usual
        if inside or not self._line.total:
            return expected, expected
        nearest = self._reach if count > self._reach else self._least
        least = self._line.seconds(nearest, weight * nearest / count)
        by = count / nearest
        return min(expected, least, least * by), max(expected, least) * max(by, 1.0)

    def _checked(self, ratio: float, count: int, weight: float, seconds: float, expected: float) -> float:
        """The time of a run as it counts. If the last ones agree, everything learned before is rescaled."""
        margin = self._margin()
        usual = max(_CHANGED, margin * margin)
        last = self._last
        last.append((ratio, count, weight, seconds))
        ratios = [run[0] for run in last]
        if _agree(latest := ratios[-_AGREE:], _AGREE, usual):
            by, agreed = sorted(latest)[_AGREE // 2], list(last)[-_AGREE:]
            if by < _FAR_SLOWER or self._runs > _FIRST_RUNS:
                self._scale(by)
            else:
                self._sizes = _Sizes()
                self._learn_line(agreed)
            for _, items, weighs, took in agreed:
                if not weighs:
                    self._sizes.renew(items, took)
        elif _agree(ratios, _DRIFT, _DRIFTED):
            by, counts = sorted(ratios)[_DRIFT // 2], [run[1] for run in last]
            self._scale(by)
            if max(counts) >= _DIFFER * min(counts):
                self._learn_line(last)
        else:
            return min(max(seconds, expected / usual), usual * expected)
        self._ratios.clear()
        last.clear()
        return seconds

    def _learn_line(self, runs: Iterable[tuple[float, int, float, float]]) -> None:
        """Learn the line from these runs alone, without the last of them, which is being learned."""
        self._line = _FittedLine()
        for _, count, weight, seconds in list(runs)[:-1]:
            self._line.add(count, weight, seconds)

    def _scale(self, by: float) -> None:
        self._line.scale(by)
        self._sizes.scale(by)

    def _learn_group(self, group: Hashable, ratio: float) -> float:
        """Move the factor of a group; returns what is left of the ratio."""
        known = group in self._factors
        factor = self._factors.pop(group, 1.0)
        step = math.pow(ratio, _GROUP_STEP if known else 1.0)
        self._factors[group] = factor * step
        if len(self._factors) > _GROUPS:
            self._factors.popitem(last=False)
        return ratio / step

    def _make_curve(self, group: Hashable) -> Curve:
        margin = self._margin()
        by = self._factors.get(group, 1.0) * margin
        again = self.bad * self._bad_runs / self._bad_items if self._bad_items else 0.0
        if not self._line.known:
            count, weight, seconds = self._line.means()[:3]
            each, unit = (0.0, seconds * by / weight) if weight else (seconds * by / count, 0.0)
            return Curve(0.0, each, unit, seconds * by, self._reach, margin, (), again)
        return self._curve_of(by, margin, again)

    def _curve_of(self, by: float, margin: float = 1.0, again: float = 0.0) -> Curve:
        line, points = self._line, () if self._weighed else self._sizes.points(by)
        return Curve(line.fixed * by, line.each * by, line.unit * by, math.inf, self._reach, margin, points, again)

    def _margin(self) -> float:
        """What the times are multiplied by, so that few batches take longer."""
        if not self.spread_known:
            return 1.0
        ordered = sorted(self._ratios)
        middle, upper = ordered[len(ordered) // 2], ordered[len(ordered) * 3 // 4]
        most = ordered[len(ordered) * 9 // 10]
        spread = min(max(upper + _SPREAD * (upper - middle), most), upper + _SKEWED * (upper - middle))
        least = min(_LEAST, 1.0 + _SKEWED * max(most - 1.0, 0.0))
        return min(max(spread, least), _WIDEST)


def _bounded_ratio(seconds: float, expected: float) -> float:
    return min(max(seconds / expected, 1 / _FAR), _FAR) if expected > 0 else 1.0


def _agree(ratios: list[float], count: int, by: float) -> bool:
    """Whether there are so many, and all of them are more or all are less than expected by this factor."""
    return len(ratios) == count and (min(ratios) > by or max(ratios) < 1 / by)


class _Size(NamedTuple):
    """What batches of about one size have taken."""

    items: float  # how many they have had
    seconds: float  # what they took, over the level
    weight: float  # how many runs that stands for, of which older ones count less
    when: int  # how many runs of all sizes there were with the last one
    runs: int  # how many there were of this size


_UNKNOWN = _Size(0.0, 0.0, 0.0, 0, 0)


class _Sizes:
    """What batches of each size have taken, of which sizes within a factor of two count as one."""

    def __init__(self) -> None:
        self.level = 1.0  # by how much the model has become slower as a whole
        self._known: dict[int, _Size] = {}
        self._noted = 0
        self._log = self._spread = 0.0  # of the logarithms of times over what was expected: their mean and variance

    def note(self, count: int, seconds: float, expected: float) -> None:
        """Note a run, and what was expected of it; 0 if that says nothing of the model's speed."""
        self._noted += 1
        size = self._known.get(count.bit_length(), _UNKNOWN)
        weight = size.weight * _FORGOTTEN ** (self._noted - size.when)
        step = max(1 / (weight + 1), _SIZE_STEP)
        if weight > _ENOUGH and expected > 0 and seconds > 0:
            self._follow(math.log(seconds / expected))
        items = size.items + step * (count - size.items)
        usual = size.seconds + step * (seconds / self.level - size.seconds)
        self._known[count.bit_length()] = _Size(items, usual, weight + 1, self._noted, size.runs + 1)

    def _follow(self, log: float) -> None:
        """Move the level. Where times vary, the logarithm of one is less, on average, than that of their mean."""
        self._log += _SPREAD_STEP * (log - self._log)
        self._spread += _SPREAD_STEP * ((log - self._log) ** 2 - self._spread)
        usual = max(min(self._log, 0.0), -self._spread)  # how much less: else the level would fall with every run
        self.level *= math.exp(_LEVEL_STEP * (log - usual))

    def usual(self, count: int) -> tuple[float, float]:
        """How many items batches of about this size have had, and what they took; both are known."""
        size = self._known[count.bit_length()]
        return size.items, size.seconds * self.level

    def knows(self, count: int) -> bool:
        """Whether batches of this size were measured, and not only smaller and larger ones."""
        return count.bit_length() in self._known

    def scale(self, by: float) -> None:
        """All sizes take longer by this factor; how much each one does is to be learned anew."""
        self.level *= by
        self._known = {of: size._replace(weight=min(size.weight, 1.0)) for of, size in self._known.items()}

    def renew(self, count: int, seconds: float) -> None:
        """Forget what batches of this size took before."""
        self._known[count.bit_length()] = _Size(count, seconds / self.level, 1.0, self._noted, 1)

    def points(self, by: float) -> tuple[tuple[float, float], ...]:
        """Sizes and seconds times a factor; where larger ones took less, they share their mean."""
        merged: list[list[float]] = []
        each = math.inf  # seconds for an item of the next smaller size
        for _, size in sorted(self._known.items()):
            age = math.ldexp(self._noted - size.when, 1 - size.runs)
            weight = min(size.weight, 1 / _SIZE_STEP) * _FORGOTTEN**age
            seconds = size.seconds * weight + min(size.seconds, each * size.items) * _DOUBTED
            each = size.seconds / size.items
            merged.append([size.items * (weight + _DOUBTED), seconds, weight + _DOUBTED])
            while len(merged) > 1 and merged[-2][1] * merged[-1][2] > merged[-1][1] * merged[-2][2]:
                last = merged.pop()
                merged[-1] = [one + other for one, other in zip(merged[-1], last, strict=True)]
        by *= self.level
        return tuple((items / many, seconds / many * by) for items, seconds, many in merged)


class _FittedLine:
    """The line through counts, weights and times, of which older ones count less and less."""

    def __init__(self) -> None:
        self.known = False  # whether different sizes were measured, so that there is a slope
        self.fixed = self.each = self.unit = 0.0
        self._sums = [0.0] * 9  # of 1, n, w, y, and of the products of these
        self._each = self._unit = 0.0  # the slopes, followed slowly

    @property
    def total(self) -> float:
        """How many runs it stands for."""
        return self._sums[0]

    def add(self, n: float, w: float, y: float) -> None:
        new = (1.0, n, w, y, n * n, w * w, n * w, n * y, w * y)
        self._sums = [before * _DECAY + one for before, one in zip(self._sums, new, strict=True)]
        self._fit()

    def scale(self, by: float) -> None:
        for at in (3, 7, 8):  # those with y
            self._sums[at] *= by
        self.fixed, self.each, self.unit = self.fixed * by, self.each * by, self.unit * by
        self._each, self._unit = self._each * by, self._unit * by

    def means(self) -> list[float]:
        """Of n, w and y, and of their products."""
        return [one / self.total for one in self._sums[1:]]

    def seconds(self, count: float, weight: float) -> float:
        """The time of a batch, by the line; by the one size that was measured while there is no slope."""
        return self.fixed + self.each * count + self.unit * weight if self.known else self._sums[3] / self.total

    def _fit(self) -> None:
        n, w, y, nn, ww, nw, ny, wy = self.means()
        var_n, var_w = max(nn - n * n, 0.0), max(ww - w * w, 0.0)
        rigid_n, rigid_w = (_RIGID * n) ** 2, (_RIGID * w) ** 2
        first = not self.known
        if first:
            if var_n <= rigid_n / 100 and var_w <= rigid_w / 100:
                return
            self.known = True
            rigid_n, rigid_w = rigid_n * 1e-6, rigid_w * 1e-6  # there is nothing to stay near
        a = var_n + rigid_n
        p = ny - n * y + rigid_n * self._each
        if w:
            d = var_w + rigid_w
            b = nw - n * w
            q = wy - w * y + rigid_w * self._unit
            each, unit = _solve(a, b, d, p, q)
            step = max(_RIGID_STEP * max(var_n / a, var_w / d), float(first))
        else:
            each, unit = max(p / a, 0.0), 0.0
            step = max(_RIGID_STEP * var_n / a, float(first))
        slope = each * n + unit * w
        if slope > y:  # nothing takes less than no time
            each, unit = each * y / slope, unit * y / slope
        self._each += step * (each - self._each)
        self._unit += step * (unit - self._unit)
        self.fixed, self.each, self.unit = max(y - each * n - unit * w, 0.0), each, unit


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


# What arrives, and how large batches have to be to answer most of it under overload.


#: How fast the rate of arrivals is followed.
_STEP = 0.2
#: The times of the last so many requests are planned with as so many equal shares. Their mean would be nobody's.
_KEPT_ARRIVALS = 64
_SHARES = 8
#: Batches that keep up compute so many times what arrives: arrivals are random.
_AHEAD = 1.1
#: A batch that is larger by this much must compute so many more items a second, or the smaller one is planned with.
_GAIN = 1.015
#: Sizes are planned anew when arrivals have changed by this much.
_ALIKE = 0.1
#: When so many times as many arrive as a batch has room for, it is full.
_MANY = 10
#: Each size that is compared is larger than the one before by this factor.
_NEXT_SIZE = 1.15
#: Sizes are remembered for so many groups and mean weights; means within 2 ** (1 / 4), a fifth, count as one.
_REMEMBERED = 64
_MEANS = 4


class Arrivals:
    """Follows how many requests come, and in which time they need their answers. Without a clock of its own."""

    def __init__(self) -> None:
        self.offered = 0  # requests with a deadline since the last batch ended, those that were refused included
        self._patient = 0  # requests without one since then
        self.rate = 0.0  # requests a second; 0 until that was measured
        self._since = -math.inf
        self._last: deque[float] = deque(maxlen=_KEPT_ARRIVALS)
        self._new = 0  # how many of the last came since they were summed up
        self._alike = 0  # how many of them in a row had the same time
        self._timeouts: tuple[float, ...] = ()
        self.longest = 0.0  # the longest time of one of the last requests that had a deadline

    def configure(self, max_size: int, max_weight: float, longest: float) -> None:
        """Plan with these bounds, and so many seconds at most, from now on. What was measured stays."""
        self._sizes = sizes_up_to(max_size)
        self._max_weight = max_weight
        self._longest = longest
        self._planned: dict[Hashable, tuple[Curve, float, int]] = {}  # for which curve and rate, and the size

    @property
    def shortest(self) -> float:
        """The shortest time that some of the last requests had; infinity if none had a deadline."""
        return min(self._timeouts, default=math.inf)

    def note(self, left: float, count: int = 1) -> None:
        """Note that so many requests, with so many seconds for their answers, have come."""
        if left == math.inf:
            self._patient += count
            return
        self.offered += count
        self._alike = self._alike + count if self._last and left == self._last[-1] else count
        if self._alike > 2 * _KEPT_ARRIVALS:  # all that are remembered, and that is summed up
            return
        self._last.extend(itertools.repeat(left, min(count, _KEPT_ARRIVALS)))
        self._new += count
        if self._new * 4 >= len(self._last):
            self._sum_up()

    def _sum_up(self) -> None:
        self._new = 0
        ordered = sorted(self._last)
        count = min(len(ordered), _SHARES)
        timeouts = tuple(ordered[(2 * share + 1) * len(ordered) // (2 * count)] for share in range(count))
        self.longest = max((timeout for timeout in ordered if timeout != math.inf), default=self.longest)
        if timeouts != self._timeouts:
            self._timeouts = timeouts
            self._planned.clear()

    def note_batch(self, now: float) -> None:
        took = now - self._since
        if took > 0 and self.offered:
            rate = (self.offered + self._patient) / took
            self.rate = rate if not self.rate else self.rate + _STEP * (rate - self.rate)
            if self._patient:
                self._last.extend(itertools.repeat(math.inf, min(self._patient, _KEPT_ARRIVALS)))
        self.offered, self._patient, self._since = 0, 0, now

    def keeping_up(self, lines: int) -> float:
        """Items a second that each of so many groups has to compute, so that what arrives is computed."""
        return _AHEAD * self.rate / max(lines, 1)

    def crowd(self, group: Group | None, curve: Curve, mean: float, *, lines: int, ceiling: int) -> int:
        """How many items a batch has under overload.

        The larger a batch, the more it computes a second; but what arrives while it runs has to wait for its end, and
        then needs the time of its own batch. So only those requests can be answered that arrive in the last
        ``timeout - seconds`` of it, and those that have less time than that not at all. Arrivals are taken to be spread
        evenly over the groups that wait.
        """
        key = group, round(math.log2(mean) * _MEANS) if mean else None, lines, ceiling
        known = self._planned.get(key)
        if known is not None and known[0] is curve and abs(known[1] - self.rate) <= _ALIKE * known[1]:
            return known[2]
        size = self._most_answers(curve, mean, max(lines, 1), ceiling)
        if len(self._planned) > _REMEMBERED:
            self._planned.clear()
        self._planned[key] = curve, self.rate, size
        return size

    def _most_answers(self, curve: Curve, mean: float, lines: int, ceiling: int) -> int:
        """The size of the batches that answer most requests a second, when so many come in a second."""
        rate = self.rate / lines or math.inf
        alone = curve.seconds(1, mean)
        timeouts = [timeout for timeout in self._timeouts if timeout > alone]
        longest, shares = min(max(timeouts, default=0.0), self._longest), max(len(self._timeouts), 1)
        best, size = 0.0, 1 if timeouts else ceiling
        for count in self._sizes:
            seconds = curve.seconds(count, count * mean)
            if count > 1 and (seconds >= longest or count * mean > self._max_weight):
                break
            window = sum(max(min(timeout - seconds, seconds), 0.0) for timeout in timeouts) / shares
            if seconds > 0 and window <= 0:
                continue
            usable = rate * window if seconds > 0 else math.inf
            none = math.exp(-usable)  # nothing came in time: the next request finds the thread idle, and runs alone
            answered = _lesser(count, usable) + none
            spent = curve.seconds(answered, answered * mean) + none / rate
            answers = answered / spent if spent > 0 else math.inf
            nothing_comes = rate * lines * seconds < 1  # while it runs: then all sizes answer equally many
            if answers > best * _GAIN or nothing_comes:
                best, size = max(answers, best), count
        return size


def sizes_up_to(most: int) -> list[int]:
    """Numbers from 1 to ``most``, close to each other at the start, and then about a seventh apart."""
    sizes: list[int] = []
    size = 1
    while size < most:
        sizes.append(size)
        size = max(size + 1, int(size * _NEXT_SIZE))
    return [*sizes, most] if most > 0 else []


def _lesser(count: float, mean: float) -> float:
    """The mean of the lesser of a count and a random number of arrivals."""
    if mean > _MANY * count:
        return count
    return (count + mean - math.sqrt((count - mean) ** 2 + mean * 2 / math.pi)) / 2
