"""The one judge of growth: whether readings of memory rise with the calls, in steps, up and down, or not at all.

The rate is the median of the slopes between all pairs of readings (Theil 1950, Sen 1968), and its interval follows from
Kendall's statistic. Readings on two sides of a step are no pair, as in the seasonal test of Hirsch, Slack and Smith
(1982).
docs/diagnosis.md says how well it does on random series; ``benchmarks/growth_judge.py`` prints that.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["FEWEST", "LEAST", "Judgement", "Rise", "Verdict", "judge"]

Verdict = Literal["grows", "steady", "undecided"]

#: Readings without which nothing is decided.
FEWEST = 9
#: Bytes in a run. Growth that may be less is not accused; growth that may be more is not cleared.
LEAST = 1_000_000
#: Standard deviations of the interval: 1.6 % of flat series lie outside of it.
_DEVIATIONS = 2.4
#: A rise or fall by so many standard deviations of the usual one is a step.
_OUTLIER = 5
#: The rate of a part, as a share of that of the part before, from which growth goes on and does not end.
_PERSISTS, _CONSTANT = 0.6, 0.8
#: Lows of a sawtooth that have an interval, and without which nothing at all is known of what lies below it.
_FEWEST_LOWS, _LOWS = 6, 3
#: Readings for which memory has to stay where it has risen to, so that it is called a step, and no peak.
_STAYS = 4
#: How many steps may be explained by something that happens once.
_STEPS = 2
#: Of the calls: after so much without growth, two steps are over.
_LONG = 0.4
#: How many times as many calls at most are said to be needed.
_MOST_MORE = 20.0


class _Reading(NamedTuple):
    calls: float
    size: float


class _Rate(NamedTuple):
    middle: float
    low: float
    high: float


_UNKNOWN = _Rate(0.0, -math.inf, math.inf)
_Readings = Sequence[_Reading]


@dataclass(frozen=True, slots=True)
class Rise:
    """Memory that rose at once."""

    calls: float
    size: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the readings say.

    Attributes:
        verdict: Whether memory grows with the calls.
        growth: Bytes by which it has grown with them, steps excluded.
        low: The least that this may be.
        high: The most.
        steps: What rose at once, at most two.
        reason: Why nothing could be decided, in a sentence without a full stop; empty if it could.
        more: How many times as many calls are likely to decide it; 1 if it is decided.
    """

    verdict: Verdict
    growth: float = 0.0
    low: float = -math.inf
    high: float = math.inf
    steps: tuple[Rise, ...] = ()
    reason: str = ""
    more: float = 1.0


def judge(calls: Sequence[float], sizes: Sequence[float], *, least: float = LEAST) -> Judgement:
    """Decide whether memory grows with the calls.

    It grows if more than ``least`` is left when steps are taken out, and if it goes on at the end of the run as before.
    It is steady if at most ``least`` may be left, in the whole run or in a part of three eighths or more that lasts to
    the end. Where memory rises and falls, only the lows count.
    """
    readings = [_Reading(*pair) for pair in zip(calls, sizes, strict=True)]
    if len(readings) < FEWEST:
        count = "is 1 reading" if len(readings) == 1 else f"are {len(readings)} readings"
        return _undecided(f"there {count}, which is too few", (FEWEST + 1) / max(1, len(readings) - 1))
    total = readings[-1].calls - readings[0].calls
    if total <= 0:
        return _undecided("no call was made between the readings", 1.0)
    usual, limit = _usual(readings, least)
    readings = _without_peaks(readings, limit)
    lows = _lows(readings, limit)
    if len(lows) < _FEWEST_LOWS or lows[-1].calls <= lows[0].calls:
        run = _Run(readings, total, least, usual, falls=lows)
        return _few_lows(run, lows) if lows else run.judged()
    return _Run(lows, total, least, usual).judged()


def _undecided(reason: str, more: float, whole: _Rate = _UNKNOWN, steps: tuple[Rise, ...] = ()) -> Judgement:
    return Judgement("undecided", *whole, steps, reason, min(_MOST_MORE, max(1.5, more)))


def _usual(readings: _Readings, least: float) -> tuple[float, float]:
    extra = _beyond(readings)
    usual = 1.4826 * statistics.median(map(abs, extra))  # of normal noise: its standard deviation
    return usual, max(least / 2, _OUTLIER * usual)


def _beyond(readings: _Readings) -> list[float]:
    pairs = list(itertools.pairwise(readings))
    slopes = _slopes(pairs)
    rate = statistics.median(slopes) if slopes else 0.0
    return [after.size - before.size - rate * (after.calls - before.calls) for before, after in pairs]


def _slopes(pairs: Iterable[tuple[_Reading, _Reading]]) -> list[float]:
    apart = ((before, after) for before, after in pairs if after.calls > before.calls)
    return [(after.size - before.size) / (after.calls - before.calls) for before, after in apart]


def _without_peaks(readings: list[_Reading], limit: float) -> list[_Reading]:
    """Without what rose for up to three readings and fell again: calls under way, or another process's work."""
    keep = [True] * len(readings)
    for last in range(1, len(readings) - 1):
        if readings[last].size - readings[last + 1].size <= limit:
            continue
        for first in range(last, max(0, last - 3), -1):
            before = readings[first - 1].size
            if readings[first].size - before > limit and before - limit <= readings[last + 1].size:
                keep[first : last + 1] = [False] * (last + 1 - first)
                break
    left = list(itertools.compress(readings, keep))
    return left if len(left) >= FEWEST - 2 else readings


def _lows(readings: _Readings, limit: float) -> list[_Reading]:
    """The reading after each fall; none if memory does not fall."""
    return [
        after
        for before, after, following in zip(readings, readings[1:], [*readings[2:], readings[-1]], strict=False)
        if before.size - after.size > limit and following.size >= after.size - limit
    ]


def _few_lows(run: _Run, lows: _Readings) -> Judgement:
    """Of a sawtooth with few teeth: what rises may be a tooth, unless it rises beyond all that was there before."""
    span = (lows[-1].calls - lows[0].calls) / run.total
    sizes = [low.size for low in lows]
    if len(lows) >= _LOWS and max(sizes) - min(sizes) < span * run.least:
        return Judgement("steady", 0.0, min(sizes) - max(sizes), (max(sizes) - min(sizes)) / span)
    found = run.judged()
    if found.verdict == "steady" or (found.verdict == "grows" and run.rises_beyond(lows[0])):
        return found
    return _undecided("memory rises and falls too slowly for these calls", 3.0)


class _Run:
    def __init__(self, readings: _Readings, total: float, least: float, usual: float, *, falls: _Readings = ()) -> None:
        self.readings = readings
        self.total, self.least = total, least
        extra = _beyond(readings)
        *_, third, second, first = sorted(range(len(extra)), key=extra.__getitem__)
        # Cut at what may be a step: it stands alone, where stairs do not. It is called one if it is far from usual.
        alone, step = max(least / 2, 3 * usual, 1.25 * extra[third]), max(least, _OUTLIER * usual)
        self.cuts = sorted(at + 1 for at in (first, second) if extra[at] > alone)
        ends = sorted({0, *self.cuts, *(readings.index(low) for low in falls), len(readings)})
        self.parts = [readings[begin:end] for begin, end in itertools.pairwise(ends)]
        steps = [at for at in self.cuts if extra[at - 1] > step and len(readings) - at >= _STAYS]
        self.steps = tuple(Rise(readings[at].calls, extra[at - 1]) for at in steps)

    def judged(self) -> Judgement:
        whole = self.rate()
        if whole.high < self.least or any(self.is_flat_from(eighth) for eighth in (2, 3, 4, 5)):
            if len(self.steps) == _STEPS and self.readings[-1].calls - self.steps[-1].calls < _LONG * self.total:
                return _undecided("memory rose in steps, which may be the first of more", 3.0, whole, self.steps)
            return Judgement("steady", *whole, self.steps)
        late = self.rate(4)
        beyond_noise = len(self.readings) < FEWEST or (late.low > 0 and late.middle > self.least)
        if whole.low <= 0 or whole.middle <= self.least or not beyond_noise:
            if self.returns_to_floor():
                return Judgement("steady", *whole, self.steps)
            reason = "what memory grows by cannot be told from its noise"
            return _undecided(reason, self.more(whole), whole, self.steps)
        return self.grows_or_levels_off(whole, late)

    def returns_to_floor(self) -> bool:
        """Whether readings lie at the lowest one until the end, as under calls that take much and keep nothing."""
        floor = min(one.size for one in self.readings) + self.least / 4
        at = [place for place, one in enumerate(self.readings) if one.size < floor]
        return len(at) >= _STAYS and at[0] < len(self.readings) // 2 and at[-1] >= self._at(6)

    def rises_beyond(self, low: _Reading) -> bool:
        before = self.readings[: self.readings.index(low)]
        each = abs(self.rate().middle) / len(self.readings)
        end = statistics.median(one.size for one in self.readings[-_STAYS + 1 :])
        return end > max(one.size for one in before) + self.least + 2 * each

    def grows_or_levels_off(self, whole: _Rate, late: _Rate) -> Judgement:
        """Of what has grown: whether it goes on."""
        early, third, fourth = self.rate(0, 4), self.rate(4, 6), self.rate(6)
        goes_on = fourth.middle >= _PERSISTS * third.middle and late.middle >= _PERSISTS * early.middle
        constant = fourth.low > 0 and fourth.middle >= _CONSTANT * third.middle
        if goes_on or constant:
            return Judgement("grows", *whole, self.steps)
        return _undecided("memory grows less and less", 3.0, whole, self.steps)

    def is_flat_from(self, eighth: int) -> bool:
        begin = self._at(eighth)
        return sum(cut > begin for cut in self.cuts) < _STEPS and self.rate(eighth).high < self.least

    def rate(self, first: int = 0, last: int = 8) -> _Rate:
        begin, end = self.readings[self._at(first)].calls, self.readings[self._at(last)].calls
        slopes, variance = list[float](), 0.0
        for part in self.parts:
            inside = [reading for reading in part if begin <= reading.calls <= end]
            variance += len(inside) * (len(inside) - 1) * (2 * len(inside) + 5) / 18
            slopes += _slopes(itertools.combinations(inside, 2))
        return _interval(sorted(self.total * slope for slope in slopes), _DEVIATIONS * math.sqrt(variance))

    def _at(self, eighth: int) -> int:
        return min(len(self.readings) - 1, len(self.readings) * eighth // 8)

    def more(self, whole: _Rate) -> float:
        """How many times as many calls: growth rises with them, and its interval stays about as wide."""
        width = whole.high - max(whole.low, 2 * whole.middle - whole.high)
        return (self.least + width) / max(whole.middle, self.least, 1.0)


def _interval(slopes: Sequence[float], width: float) -> _Rate:
    """The median and its interval; without a bound where there are too few slopes for one."""
    count = len(slopes)
    if not count:
        return _UNKNOWN
    low, high = math.floor((count - width) / 2), math.ceil((count + width) / 2)
    ends = (slopes[low], slopes[high]) if low >= 0 and high < count else (-math.inf, math.inf)
    return _Rate(statistics.median(slopes), *ends)
