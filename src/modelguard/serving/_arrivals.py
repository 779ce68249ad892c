"""What arrives, and how large batches have to be to answer most of it under overload."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

from modelguard.serving._requests import Group
from modelguard.serving._times import Curve

__all__ = ["Arrivals", "sizes_up_to"]

#: How fast the rate of arrivals is followed.
_STEP = 0.2
#: The times that so many of the last requests had are remembered, and planned with as so many equal shares of them.
#: Their mean would be nobody's: a few short ones would shrink the batches of all.
_KEPT = 64
_SHARES = 8
#: Batches that keep up compute so many times what arrives: arrivals are random.
_AHEAD = 1.1
#: A batch that is larger by this much must compute so many more items a second, or the smaller one is planned with.
_GAIN = 1.015
#: Sizes are planned anew when times or arrivals have changed by this much.
_ALIKE = 0.1
#: When so many times as many arrive as a batch has room for, it is full.
_MANY = 10
#: Each size that is compared is larger than the one before by this factor.
_NEXT_SIZE = 1.15
#: Sizes are remembered for so many groups and mean weights; means within 2 ** (1 / 4), a fifth, count as one.
_REMEMBERED = 64
_MEANS = 4


class _Plan(NamedTuple):
    """A size, and what it was planned for."""

    curve: Curve
    ceiling: int
    lines: int
    rate: float
    timeouts: tuple[float, ...]
    size: int

    def serves(self, curve: Curve, ceiling: int, lines: int, rate: float, timeouts: tuple[float, ...]) -> bool:
        """Whether it is good enough here: planning takes longer than a look at it."""
        return (
            ceiling == self.ceiling
            and lines == self.lines
            and timeouts is self.timeouts
            and ((curve is self.curve and rate == self.rate) or _alike(self.curve, curve, self.rate, rate))
        )


class Arrivals:
    """Follows how many requests come, and in which time they need their answers. Without a clock of its own.

    Attributes:
        offered: Requests with a deadline since the last batch ended, those that were refused included.
        patient: Requests without one since then.
        rate: Requests a second; 0 until that was measured.
    """

    def __init__(self) -> None:
        self.offered = self.patient = 0
        self.rate = 0.0
        self._since = -math.inf
        self._last: deque[float] = deque(maxlen=_KEPT)
        self._new = 0  # how many of the last came since they were summed up
        self._timeouts: tuple[float, ...] = ()

    def configure(self, max_size: int, max_weight: float, longest: float) -> None:
        """Plan with these bounds from now on. What was measured stays.

        Args:
            max_size: Most items in a batch.
            max_weight: Most weight in a batch; infinity for no bound.
            longest: Seconds that a batch may take; infinity for no bound.
        """
        self._sizes = sizes_up_to(max_size)
        self._max_weight = max_weight
        self._longest = longest
        self._planned: dict[Hashable, _Plan] = {}

    def note(self, left: float) -> None:
        """Note that a request with so many seconds for its answer has come."""
        self.offered += 1
        self._last.append(left)
        self._new += 1
        if self._new * 4 >= len(self._last):
            self._sum_up()

    def _sum_up(self) -> None:
        self._new = 0
        ordered = sorted(self._last)
        count = min(len(ordered), _SHARES)
        timeouts = tuple(ordered[(2 * share + 1) * len(ordered) // (2 * count)] for share in range(count))
        known = self._timeouts
        if len(timeouts) != len(known) or not all(map(_near, timeouts, known)):
            self._timeouts = timeouts

    def note_batch(self, now: float) -> None:
        """Note that a batch has ended."""
        took = now - self._since
        if took > 0 and self.offered:
            rate = (self.offered + self.patient) / took
            self.rate = rate if not self.rate else self.rate + _STEP * (rate - self.rate)
            if self.patient:
                self._last.extend(itertools.repeat(math.inf, min(self.patient, _KEPT)))
        self.offered, self.patient, self._since = 0, 0, now

    def least(self, curve: Curve, mean: float, *, lines: int, crowd: int) -> int:
        """How many items a batch has at least, so that what arrives is computed: no deadline makes it smaller.

        Args:
            curve: How long batches of this group take.
            mean: The mean weight of an item; 0 if nothing is weighed.
            lines: How many groups wait.
            crowd: How many items a batch has under overload.
        """
        rate = _AHEAD * self.rate / max(lines, 1)
        idle = 1 - rate * (curve.each + curve.unit * mean)  # the share of the time that is left for fixed times
        return crowd if idle * crowd <= rate * curve.fixed else max(math.ceil(rate * curve.fixed / idle), 1)

    def crowd(self, group: Group | None, curve: Curve, mean: float, *, lines: int, ceiling: int) -> int:
        """How many items a batch has under overload.

        The larger a batch, the more it computes a second; but what arrives while it runs has to wait for its end, and
        then needs the time of its own batch. So only those requests can be answered that arrive in the last
        ``timeout - seconds`` of it, and those that have less time than that not at all.

        Args:
            group: Its keyword arguments.
            curve: How long batches of this group take.
            mean: The mean weight of an item; 0 if nothing is weighed.
            lines: How many groups wait; arrivals are taken to be spread evenly over them.
            ceiling: Most items in a batch at present.
        """
        key = group, round(math.log2(mean) * _MEANS) if mean else None
        known = self._planned.get(key)
        if known is not None and known.serves(curve, ceiling, lines, self.rate, self._timeouts):
            return known.size
        size = self._most_answers(curve, mean, self.rate / max(lines, 1) or math.inf, ceiling)
        if len(self._planned) > _REMEMBERED:
            self._planned.clear()
        self._planned[key] = _Plan(curve, ceiling, lines, self.rate, self._timeouts, size)
        return size

    def _most_answers(self, curve: Curve, mean: float, rate: float, ceiling: int) -> int:
        """The size of the batches that answer most requests a second, when so many come in a second."""
        alone = curve.seconds(1, mean)
        timeouts = [timeout for timeout in self._timeouts if timeout > alone]
        longest = min(max(timeouts, default=0.0), self._longest)
        best, size = 0.0, 1 if timeouts else ceiling
        for count in self._sizes:
            seconds = curve.seconds(count, count * mean)
            if count > 1 and (seconds >= longest or count * mean > self._max_weight):
                break
            window = sum(max(min(timeout - seconds, seconds), 0.0) for timeout in timeouts) / len(
                self._timeouts or (0,)
            )
            if seconds > 0 and window <= 0:
                continue
            usable = rate * window if seconds > 0 else math.inf
            none = math.exp(-usable)  # nothing came in time: the next request finds the thread idle, and runs alone
            answered = _lesser(count, usable) + none
            spent = curve.seconds(answered, answered * mean) + none / rate
            answers = answered / spent if spent > 0 else math.inf
            if answers > best * _GAIN:
                best, size = answers, count
        return size


def sizes_up_to(most: int) -> list[int]:
    """Numbers from 1 to ``most``, close to each other at the start, and then about a seventh apart."""
    sizes: list[int] = []
    size = 1
    while size < most:
        sizes.append(size)
        size = max(size + 1, int(size * _NEXT_SIZE))
    return [*sizes, most] if most > 0 else []


def _alike(one: Curve, other: Curve, rate: float, other_rate: float) -> bool:
    """Whether two curves and rates differ little."""
    tolerance = _ALIKE * (one.fixed + one.each + one.unit)
    return (
        abs(one.fixed - other.fixed) <= tolerance
        and abs(one.each - other.each) <= _ALIKE * one.each
        and abs(one.unit - other.unit) <= _ALIKE * one.unit
        and one.most == other.most
        and abs(rate - other_rate) <= _ALIKE * rate
    )


def _near(one: float, other: float) -> bool:
    """Whether two times differ little."""
    return one == other or abs(one - other) <= _ALIKE * min(one, other)


def _lesser(count: float, mean: float) -> float:
    """The mean of the lesser of a count and a random number of arrivals."""
    if mean > _MANY * count:
        return count
    return (count + mean - math.sqrt((count - mean) ** 2 + mean * 2 / math.pi)) / 2
