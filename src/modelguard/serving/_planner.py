"""How large the next batch is, and when a request would have its answer: so that deadlines hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable

from modelguard.serving._batches import Batch, Limits
from modelguard.serving._lines import Line, Lines
from modelguard.serving._padding import choose_alike
from modelguard.serving._requests import Group, Request
from modelguard.serving._times import BatchTimes, Curve

__all__ = ["Planner"]

#: How long a full queue takes to drain, in seconds, while nothing has been measured.
_DRAIN_UNMEASURED = 1.0
#: How fast the rate of arrivals, the time that requests have, and the cost of runs that failed are followed.
_STEP = 0.2
#: A batch that is larger by this much must compute so many more items a second, or the smaller one is planned with.
_GAIN = 1.03
#: The oldest requests are left out of a batch if without them it computes this many times as many items a second.
_DROP_GAIN = 1.1
#: Batches stay as small as planned from this share of the capacity on, or where larger ones compute hardly more.
_BUSY = 0.6
_LITTLE_GAIN = 1.05
#: Batches are kept so small that they have this many bad items on average: the more, the more runs it takes to find
#: them, and the fewer a batch has, the more batches pay its fixed time. The average follows each batch by this much.
_BAD_IN_BATCH = 0.8
_BAD_STEP = 0.1
#: Sizes are planned anew when times or arrivals have changed by this much.
_ALIKE = 0.1
#: When so many times as many arrive as a batch has room for, it is full.
_MANY = 10
#: Each size that is compared is larger than the one before by this factor.
_NEXT_SIZE = 1.15
#: With more groups than this, the time that those in front take is estimated from these.
_LOOKED_AT = 64
#: A batch that may wait for more items starts this much before the last moment at which it could meet its deadline by
#: the estimate: items differ, and whoever waits until then gains little from the last of it.
_EARLY_SHARE = 1.0
_EARLY_SECONDS = 0.02
#: Requests may end so many seconds after their deadline: an error of rounding, not of time.
_ROUNDING = 1e-9


class Planner:
    """Sizes batches and prices requests by what was measured. Without a clock, a lock or a queue of its own.

    Args:
        limits: Bounds of the queue.
        times: How long batches take.
    """

    def __init__(self, limits: Limits, times: BatchTimes) -> None:
        self._limits = limits
        self._times = times
        self._sizes = _sizes(limits.max_size)
        self._crowds: dict[Hashable, tuple[Curve, int, int, float, int]] = {}
        self._bad = 0.0
        self.most = limits.max_size  # items in a batch; fewer while many of them make their batches raise
        self.offered = 0  # requests since the last batch ended, those that were refused included
        self._offered_at = -math.inf
        self._rate = 0.0
        self._timeout = 0.0
        self._overhead = 1.0
        self._padding = 1.0  # what a batch weighs over what its items weigh
        self._full = math.inf  # seconds of a full batch, for a quick look; infinity where that is not enough
        self.ended = -math.inf  # when the last batch ended

    # What happens

    def note_timeout(self, left: float) -> None:
        """Note how long a request has for its answer."""
        self._timeout = left if not self._timeout else self._timeout + _STEP * (left - self._timeout)

    def note_batch(self, batch: Batch, seconds: float, now: float, *, reruns: int, bad: float) -> None:
        """Note that a batch has ended.

        Args:
            batch: Which one.
            seconds: How long it took, runs that failed included.
            now: The time.
            reruns: How often the function was called again.
            bad: The share of items that made it raise.
        """
        self.ended = now
        if batch.padding or self._padding > 1:
            useful = batch.weight - batch.padding
            self._padding += _STEP * ((batch.weight / useful if useful > 0 else 1.0) - self._padding)
        if reruns or self._overhead > 1:
            curve = self._times.curve(batch.group) if reruns else None
            expected = seconds if curve is None else curve.seconds(len(batch.requests), batch.weight)
            if expected > 0:
                self._overhead = max(self._overhead + _STEP * (max(seconds / expected, 1.0) - self._overhead), 1.0)
        if self.offered:
            self._full = self._full_batch()
        if bad or self._bad:
            self._bad += _BAD_STEP * (bad - self._bad)
            even = int(_BAD_IN_BATCH / self._bad) if self._bad > _BAD_IN_BATCH / self._limits.max_size else 0
            self.most = max(1, min(even, self._limits.max_size)) if even else self._limits.max_size
        took = now - self._offered_at
        if took > 0 and self.offered:
            rate = self.offered / took
            self._rate = rate if not self._rate else self._rate + _STEP * (rate - self._rate)
        self.offered, self._offered_at = 0, now

    # What a request would have to wait

    def surely_in_time(self, waiting: int, left: float, running: list[Batch], now: float) -> bool:
        """Whether a new request has its answer in time even if all batches are full: a quick look."""
        if (waiting // self.most + 2) * self._full > left:
            return False
        return not running or now - running[0].started <= self._full

    def too_late(self, request: Request, lines: Lines, waiting: int, running: list[Batch], now: float) -> float | None:
        """Seconds that the answer to a new request would take, if it would come after the deadline; None if not.

        What finds a thread idle is in time whatever was measured: its run is a new measurement.
        """
        left = request.deadline - now
        self.offered += 1
        simple = request.group is None and not lines.several
        if simple and self.surely_in_time(waiting, left, running, now):
            return None
        self.note_timeout(left)
        if not waiting and len(running) < self._limits.threads:
            return None
        estimate = self.seconds_to_answer(request, lines, running, now)
        return estimate if estimate is not None and estimate > left else None

    def _full_batch(self) -> float:
        curve = None if self._limits.weighed else self._times.curve()
        return math.inf if curve is None else curve.seconds(self._limits.max_size, 0.0) * self._overhead

    def seconds_to_answer(self, request: Request, lines: Lines, running: list[Batch], now: float) -> float | None:
        """How long until a new request has its answer; None without enough measurements.

        Its own batch is priced as large as it will be: with the requests in front, and those that arrive until it
        starts.
        """
        if not self._times.fresh(now) or (curve := self._times.curve(request.group)) is None:
            return None
        threads = self._limits.threads
        line = lines.find(request.group)
        busy = self._seconds_left(running, now) if len(running) >= threads else 0.0
        ahead = self._seconds_in_front(request, line, lines) if lines.several else 0.0
        place, weight = 1, request.weight
        if line is not None:
            in_front, heavy = lines.ahead(request, line)
            place, weight = in_front + 1, heavy + request.weight
        weight *= self._padding
        mean = weight / place if self._limits.weighed else 0.0
        crowd = self._crowd(request.group, curve, mean, len(lines))
        crowd = min(crowd, self.most)
        batches = (place - 1) // crowd
        if self._limits.max_weight != math.inf:
            batches = max(batches, math.ceil(weight / self._limits.max_weight) - 1)
        ahead += batches * curve.seconds(crowd, crowd * mean)
        start = (busy + ahead * self._overhead) / threads
        joining = self._rate * start / max(len(lines), 1)
        joining = max(joining - math.sqrt(joining) / 2, 0.0)  # arrivals are random: so many are likely
        own = max(min(crowd, max(place - batches * crowd, 1) + joining), 1)
        return start + curve.seconds(own, max(own * mean, request.weight if mean else 0.0)) * self._overhead

    def seconds_to_drain(self, waiting: int, now: float) -> float:
        """How long until all waiting requests are computed, by the measured rate."""
        rate = self._times.rate(now)
        return _DRAIN_UNMEASURED if rate is None else waiting / (rate * self._limits.threads)

    def latest_start(self, line: Line) -> float | None:
        """How long before its deadline a batch of all that waits in a line has to start; None if that is unknown."""
        curve = self._times.curve(line.group)
        if curve is None:
            return None
        seconds = curve.at_worst(line.waiting, line.weight * self._padding)
        return seconds + max(seconds * _EARLY_SHARE, _EARLY_SECONDS)

    def _seconds_left(self, running: Iterable[Batch], now: float) -> float:
        total = 0.0
        for batch in running:
            curve = self._times.curve(batch.group)
            seconds = 0.0 if curve is None else curve.seconds(len(batch.requests), batch.weight) * self._overhead
            # One that has overrun its time by a second is expected to take a second more: stalls last.
            total += abs(batch.started + seconds - now)
        return total

    def _seconds_in_front(self, request: Request, line: Line | None, lines: Lines) -> float:
        """How long the batches of other groups take that start before the one of this request."""
        oldest = None if line is None else line.oldest()
        arrived = math.inf if oldest is None else oldest.arrived
        seconds, looked_at = 0.0, 0
        for other in itertools.islice(lines, _LOOKED_AT + 1):
            if other is line or not other.waiting:
                continue
            looked_at += 1
            first = other.oldest()
            curve = self._times.curve(other.group)
            if first is None or curve is None or (first.arrived > arrived and lines.fairness is None):
                continue
            count, weight = lines.ahead(request, other)
            if count:
                batches = math.ceil(count / self._limits.max_size)
                seconds += (batches - 1) * curve.fixed + curve.seconds(count, weight * self._padding)
        return seconds * max(1.0, len(lines) / (_LOOKED_AT + 1)) if looked_at else 0.0

    def _crowd(self, group: Group | None, curve: Curve, mean: float, lines: int) -> int:
        """How many items a batch has under overload.

        The larger a batch, the more it computes a second; but what arrives while it runs has to wait for its end, and
        then needs the time of its own batch. So only those requests can be answered that arrive in the last
        ``timeout - seconds`` of it.
        """
        known = self._crowds.get(group)
        if known is not None and known[1:3] == (self.most, lines) and _alike(known[0], curve, known[3], self._rate):
            return known[4]
        rate = self._rate / max(lines, 1) or math.inf
        best, size = 0.0, self.most if curve.seconds(1, mean) >= self._timeout else 1
        for count in self._sizes:
            seconds = curve.seconds(count, count * mean)
            if count > 1 and (seconds >= self._timeout or count * mean > self._limits.max_weight):
                break
            usable = rate * min(max(self._timeout - seconds, 0.0), seconds) if seconds > 0 else math.inf
            answers = max(_lesser(count, usable), 1.0) / seconds if seconds > 0 else math.inf
            if answers > best * _GAIN:
                best, size = answers, count
        if len(self._crowds) > _LOOKED_AT:
            self._crowds.clear()
        self._crowds[group] = curve, self.most, lines, self._rate, size
        return size

    # What is computed next

    def takes_all(self, line: Line, lines: Lines, nearest: float, now: float) -> bool:
        """Whether all that waits in a line is the next batch: a quick look, which is enough in most cases.

        Args:
            line: The line.
            lines: All of them.
            nearest: No deadline is before this.
            now: The time.
        """
        count = line.waiting
        if count > self.most or self._limits.weighed:
            return False
        curve = self._times.curve(line.group)
        if curve is None or not curve.holds(count, 0.0, nearest - now):
            return curve is None
        return not self._rate or count <= self._crowd(line.group, curve, 0.0, len(lines))

    def choose(self, line: Line, lines: Lines, now: float) -> tuple[list[Request], list[Request]]:
        """The requests of the next batch, and those that will be late in any case.

        "Oldest" stands for those whose turn it is, where requests do not go in the order of their arrival.

        As many as can be computed by the earliest deadline among them. The oldest ones are left out only if they would
        make others late, and the batch without them computes more. Something is chosen if anything came while the
        thread was idle, even if it will be late: only a run shows whether the model has become faster.
        """
        waiting = lines.in_order(line, self.most)
        curve = self._times.curve(line.group)
        if self._limits.padded:
            return choose_alike(
                waiting, curve, now, most=self.most, max_weight=self._limits.max_weight, ended=self.ended
            )
        if curve is None:
            return self._fill(waiting, None, now), []
        first = self._fill(waiting, curve, now)
        first = self._planned(waiting, first, curve, now, len(lines))
        if first and self._rest_holds(waiting, len(first), curve, now):
            return first, []
        best, start = self._rate_of(first, curve), 0
        for at in _sizes(len(waiting) - 1):
            room = self._fill(waiting[at:], curve, now)
            rate = self._rate_of(room, curve)
            if rate > best * _DROP_GAIN:
                best, start, first = rate, at, room
            if len(room) >= self.most:
                break
        if not first:
            alive = [one for one in waiting if not self._late(one, curve, now)]
            newest = max(waiting, key=lambda request: request.arrived)
            if not alive and newest.arrived < self.ended:
                return [], waiting
            first, start = self._fill(alive, curve, now) or alive[:1] or [newest], len(waiting)
        ends = now + curve.seconds(len(first), self._weight(first))
        chosen = set(map(id, first))
        return first, [one for one in waiting[:start] if id(one) not in chosen and self._late(one, curve, ends)]

    def _late(self, request: Request, curve: Curve, start: float) -> bool:
        """Whether a request would be late, computed alone from then on."""
        return start + curve.seconds(1, request.weight if self._limits.weighed else 0.0) > request.deadline

    def _fill(self, waiting: list[Request], curve: Curve | None, now: float) -> list[Request]:
        """As many requests, from the first on, as one batch may have."""
        limits = self._limits
        bound = min(self.most, len(waiting))
        chosen: list[Request] = []
        weight, until = 0.0, math.inf
        for request in waiting:
            if len(chosen) >= bound or (chosen and weight + request.weight > limits.max_weight):
                break
            if curve is not None:
                nearest = min(until, request.deadline)
                mine = request.weight if limits.weighed else 0.0
                if not curve.holds(len(chosen) + 1, weight + mine, nearest - now + _ROUNDING):
                    if chosen and curve.holds(len(chosen) + 1, weight + mine, until - now + _ROUNDING):
                        continue  # this one alone would be late
                    break
                until = nearest
            chosen.append(request)
            weight += request.weight
        return chosen

    def _rest_holds(self, waiting: list[Request], taken: int, curve: Curve, now: float) -> bool:
        """Whether the batch after this one can still meet its first deadline."""
        if taken >= len(waiting):
            return True
        rest = waiting[taken : taken + self.most]
        ends = now + curve.seconds(taken, self._weight(waiting[:taken]))
        return ends + curve.seconds(len(rest), self._weight(rest)) <= rest[0].deadline + _ROUNDING

    def _planned(
        self, waiting: list[Request], chosen: list[Request], curve: Curve, now: float, lines: int
    ) -> list[Request]:
        """Fewer requests, where a larger batch computes hardly more and what arrives meanwhile would be late."""
        mean = self._weight(chosen) / len(chosen) if chosen else 0.0
        crowd = self._crowd(waiting[0].group, curve, mean, lines)
        if len(chosen) <= crowd or not self._rate:
            return chosen
        fewer = chosen[:crowd]
        rate = self._rate_of(fewer, curve)
        busy = self._rate / max(lines, 1) > rate * _BUSY
        if (busy or rate * _LITTLE_GAIN > self._rate_of(chosen, curve)) and self._rest_holds(
            waiting, crowd, curve, now
        ):
            return fewer
        return chosen

    def _rate_of(self, chosen: list[Request], curve: Curve) -> float:
        """Items a second."""
        if not chosen:
            return 0.0
        seconds = curve.seconds(len(chosen), self._weight(chosen))
        return len(chosen) / seconds if seconds > 0 else math.inf

    def _weight(self, requests: list[Request]) -> float:
        return math.fsum(request.weight for request in requests) if self._limits.weighed else 0.0


def _alike(one: Curve, other: Curve, rate: float, other_rate: float) -> bool:
    """Whether a plan for one still serves for the other: planning takes longer than a look at it."""
    if one is other:
        return rate == other_rate
    tolerance = _ALIKE * (one.fixed + one.each + one.unit)
    return (
        abs(one.fixed - other.fixed) <= tolerance
        and abs(one.each - other.each) <= _ALIKE * one.each
        and abs(one.unit - other.unit) <= _ALIKE * one.unit
        and one.most == other.most
        and abs(rate - other_rate) <= _ALIKE * rate
    )


def _lesser(count: float, mean: float) -> float:
    """The mean of the lesser of a count and a random number of arrivals."""
    if mean > _MANY * count:
        return count
    return (count + mean - math.sqrt((count - mean) ** 2 + mean * 2 / math.pi)) / 2


def _sizes(most: int) -> list[int]:
    """Numbers from 1 to ``most``, each larger than the one before by at least a seventh."""
    sizes: list[int] = []
    size = 1
    while size < most:
        sizes.append(size)
        size = max(size + 1, int(size * _NEXT_SIZE))
    return [*sizes, most] if most > 0 else []
