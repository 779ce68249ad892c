"""How large the next batch is, and when a request would have its answer: so that deadlines hold.

The rules, all of them by measured times:

1. No batch is larger than the smallest size that computes nearly the most a second, reruns for bad items included.
   Sizes next to it are tried now and then, so that no wrong measurement stays.
2. A batch takes those with the nearest deadlines, as many as are in time together. Who has no deadline has as long as
   anybody else.
3. It computes as fast as what waits and what arrives needs. If the nearest deadlines do not allow that, those are left
   out, as few as possible, and only where more are answered for it.
4. What cannot be in time even alone is not computed, and changes nothing for others: neither sizes nor order. But when
   nothing else waits something is computed all the same: only a run shows whether the model has become faster.
5. After a batch that failed as a whole, half as many share the next one, until batches succeed again.
6. A request is refused when it comes only if it would be late behind what has less time, or comes before it.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter

from modelguard.serving._lines import Line, Lines
from modelguard.serving._requests import Batch, Group, Request
from modelguard.serving._times import LEARNED, Arrivals, BatchTimes, Curve, sizes_up_to
from modelguard.serving.status import Limits

# Batches of items of like weight, for functions that pad: each item of a batch then costs as much as the heaviest one.
# Each has the request whose turn it is, or one that would be late otherwise, so a rare weight never waits for ever.


#: So many times the size of a batch are compared: those whose turn is later do not fill up batches of those in front.
_COMPARED = 8
#: Before anything was measured, weights that differ by more than this factor do not share a batch.
_UNMEASURED = 2.0
#: Requests may end so many seconds after their deadline: an error of rounding, not of time.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class AlikeBatches:
    """Makes batches of items like the first one: as many as pay for their padding."""

    curve: Curve | None
    now: float
    most: int
    max_weight: float  # padding included; a heavier item runs alone

    def choose_alike(self, waiting: list[Request]) -> list[Request]:
        compared = waiting[: _COMPARED * self.most]
        chosen = self._around(compared[0], compared)
        urgent = self._harmed_by(chosen, waiting)
        return chosen if urgent is None else self._around(urgent, compared)

    def _harmed_by(self, chosen: list[Request], waiting: list[Request]) -> Request | None:
        """Of those that would be late because this batch is computed first, the one with the nearest deadline."""
        curve = self.curve
        if curve is None:
            return None
        heaviest = max(request.weight for request in chosen)
        ends = self.now + curve.seconds(len(chosen), heaviest * len(chosen))
        rest = _without(waiting, chosen)
        harmed = (one for one in rest if ends + curve.seconds(1, one.weight) > one.deadline)
        return min(harmed, key=attrgetter("deadline"), default=None)

    def _around(self, first: Request, compared: list[Request]) -> list[Request]:
        """Of the batches of this request and of those nearest to its weight, the one that computes most for its time.

        Of equal distances, the one whose turn is earlier is nearer.
        """
        others = _without(compared, [first])
        if self.curve is None:
            low, high = first.weight / _UNMEASURED, first.weight * _UNMEASURED
            others = [one for one in others if low <= one.weight <= high]
        others.sort(key=lambda one: abs(one.weight - first.weight))
        chosen, heavy, useful, until = [first], first.weight, first.weight, first.deadline
        best, score = 1, self._worth(1, useful, heavy)
        for one in others:
            count, heavier, nearest = len(chosen) + 1, max(heavy, one.weight), min(until, one.deadline)
            if count > self.most:
                break
            if not self._holds(count, heavier * count, nearest):
                continue
            chosen.append(one)
            heavy, useful, until = heavier, useful + one.weight, nearest
            if (worth := self._worth(count, useful, heavy)) >= score:
                best, score = count, worth
        return chosen[:best]

    def _worth(self, count: int, useful: float, heavy: float) -> float:
        """What the items would cost in a full batch without padding, over what they cost in this one."""
        curve = self.curve
        if curve is None:
            return count
        seconds = curve.seconds(count, heavy * count)
        ideal = count * (curve.fixed / self.most + curve.each) + curve.unit * useful
        return ideal / seconds if seconds > 0 and ideal > 0 else float(count)

    def _holds(self, count: int, weight: float, until: float) -> bool:
        """Whether a batch is light enough, and ends in time."""
        if weight > self.max_weight:
            return False
        return self.curve is None or until == math.inf or self.curve.holds(count, weight, until - self.now + _ROUNDING)


def _without(requests: list[Request], those: list[Request]) -> list[Request]:
    gone = set(map(id, those))
    return [request for request in requests if id(request) not in gone]


# How large batches may be so that requests have their answers within a latency goal: ``AutoSize``.


#: The slowest kind of item among so many batches says whether the goal is in reach.
_REMEMBERED = 32


class GoalSize:
    """Chooses the size of batches by the measured times. Without a clock, a lock or a queue of its own.

    What arrives while a batch runs has to wait for its end, and then needs the time of its own batch. So a batch may
    take half of the goal. An item that takes longer than that runs alone.
    """

    def __init__(self, slo: float, max_wait: float, ceiling: int) -> None:
        self.slo = slo  # the latency goal in seconds, from arrival to answer; infinity for none
        self._ceiling = ceiling
        self.seconds = min(slo / 2, slo - max_wait)  # how long a batch may take; infinity without a goal
        #: How many items a batch may have, by what was measured last: 1 before the first measurement.
        self.size = ceiling if slo == math.inf else 1
        #: Whether one item alone meets the goal; None until that was measured, and without a goal.
        self.reachable: bool | None = None
        #: How long one item alone takes, of the kind that takes longest; 0 until that was measured.
        self.item_seconds = 0.0
        self._items: deque[float] = deque(maxlen=_REMEMBERED)
        self._fits: tuple[Curve | None, float, int] = None, 0.0, 0  # how many items, for this curve and mean

    def __bool__(self) -> bool:
        return self.slo != math.inf

    def size_for(self, curve: Curve | None, mean: float) -> int:
        """How many items of this mean weight a batch may have: one before the first measurement."""
        if not self:
            return self._ceiling
        if curve is None:
            return 1
        if curve is not self._fits[0] or mean != self._fits[1]:
            self._fits = curve, mean, curve.count_within(self.seconds, mean, self._ceiling)
        return max(1, self._fits[2])

    def follow(self, times: BatchTimes, curve: Curve | None, mean: float) -> None:
        """Choose by the times of the group of the last batch, and the mean weight of its items."""
        self.size = self.size_for(curve, mean)
        if curve is not None and times.enough:
            self._items.append(curve.seconds(1, mean))
            self.item_seconds = max(self._items)
            self.reachable = self.item_seconds <= self.slo


#: How long a full queue takes to drain, in seconds, while nothing has been measured.
_DRAIN_UNMEASURED = 1.0
#: How fast the padding is followed.
_STEP = 0.2
#: The nearest deadlines are left out of a batch if without them it answers this many times as many items a second.
_DROP_GAIN = 1.1
#: With more groups than this, the time that those in front take is estimated from these.
_LOOKED_AT = 64
#: A batch that may wait for more items starts this much before the last moment for its deadline: items differ.
_EARLY_SHARE = 1.0
_EARLY_SECONDS = 0.02
#: A run that took as long as expected shows what cannot be in time for so many times as long, and so many seconds at
#: most; then it is tried anew.
_CONFIRMED = 2.0
_CONFIRMED_SECONDS = 1.0


#: A batch costs so many seconds beside its run. The smallest batch that computes this share of the most a second is
#: large enough; where times vary, a little less: which of like sizes seems best is a matter of chance.
_HAND_OVER = 1e-4
_NEARLY = 0.98
_UNSURE = 0.04
#: A full batch that takes no longer than so many seconds is not made smaller: so long may another thread keep the
#: interpreter's lock (``sys.getswitchinterval``).
_QUICK = 5e-3
#: Sizes that are compared are apart by this factor, so many to a doubling.
_APART, _STEPS = 1.15, 5
#: After so many batches a size next to it is tried.
_SOON = 8
#: More bad items than these, on average, are hard to tell from the others of their batch.
_BAD_IN_BATCH = 1.6


class BestSize:
    """The smallest batches that compute nearly as much a second as any: larger ones only take longer.

    Sizes next to it are tried now and then: what smaller and larger batches take is known from runs alone.
    """

    def __init__(self, most: int) -> None:
        self._sizes = sorted({max(int(most / _APART**step), 1) for step in range(most.bit_length() * _STEPS)})
        self._most = most
        self._batches, self._larger = 0, False

    def next(self, curve: Curve | None, mean: float) -> int:
        if curve is not None and curve.at_best(self._most, self._most * mean) <= _QUICK:
            return self._most
        best = self._most if curve is None or curve.most != math.inf else self._find(curve, mean)
        self._batches += 1
        if self._batches % _SOON:
            return best
        self._larger = not self._larger
        return min(best * 2, self._most) if self._larger else max(best // 2, 1)

    def _find(self, curve: Curve, mean: float) -> int:
        rates = [(size, size / (curve.at_best(size, size * mean) + _HAND_OVER)) for size in self._sizes]
        enough = (_NEARLY - _UNSURE * (curve.margin - 1)) * max(rate for _, rate in rates)
        return next(size for size, rate in rates if rate >= enough)


class Planner:
    """Sizes batches and prices requests by what was measured. Without a clock, a lock or a queue of its own.

    Attributes:
        most: Most items in a batch of the kind that was measured last.
    """

    def __init__(self, limits: Limits, times: BatchTimes) -> None:
        self._times = times
        self.arrivals = Arrivals()  # has to be told of all requests that are admitted without an estimate
        self._mean = 0.0  # weight of an item in the last batch
        self.configure(limits)
        self._padding = 1.0  # what a batch weighs over what its items weigh
        self.ended = -math.inf  # when the last batch ended
        self._asked = False  # whether it had to be told since what will be too late
        self._confirmed: dict[Hashable, float] = {}  # until when the last run shows what is too late, for its group

    def configure(self, limits: Limits) -> None:
        """Plan with these bounds from now on. What was measured stays."""
        self._limits = limits
        self._by_weight = limits.max_weight != math.inf or limits.padded  # how many fit depends on their weights
        self.auto = GoalSize(limits.slo, limits.max_wait, limits.max_size)
        self.arrivals.configure(limits.max_size, limits.max_weight, self.auto.seconds)
        self._best, self._unplanned = BestSize(limits.max_size), 0.0
        self._worth = limits.max_size  # fewer where smaller batches compute as much
        self._safe = limits.max_size  # fewer after batches that failed as a whole
        self._ceiling = limits.max_size
        if self.auto:
            self.auto.follow(self._times, self._times.curve(), self._mean)
        self.max_size = self.auto.size
        self._full = math.inf  # seconds of a full batch, for a quick look; infinity where that is not enough
        self._full_by: tuple[Curve | None, int] = None, 0

    # What happens

    def note_batch(self, batch: Batch, seconds: float, now: float) -> None:
        """Note that a batch has ended, which took so long, runs that failed included."""
        self.ended = now
        if batch.padding or self._padding > 1:
            useful = batch.weight - batch.padding
            self._padding += _STEP * ((batch.weight / useful if useful > 0 else 1.0) - self._padding)
        mean = batch.weight / batch.count
        if self.auto:
            self._mean = mean
            self.auto.follow(self._times, self._times.curve(batch.group), self._mean)
        else:
            self._unplanned += seconds
            if self._unplanned >= LEARNED:
                self._unplanned = 0.0
                best = self._best.next(self._times.curve(batch.group), mean)
                self._worth = max(min(best, int(_BAD_IN_BATCH / self._times.bad)), 1) if self._times.bad else best
        self._set_max_size()
        if self._asked or self.arrivals.offered:
            self._full = self._full_batch()
        if self._asked:
            self._asked = False
            self._confirm(batch, seconds, now)
        self.arrivals.note_batch(now)

    def note_verdict(self, count: int, *, failed: bool) -> None:
        """Note whether a batch of so many items failed as a whole.

        If several of them are at fault, nobody could tell them from the others: half as many share the next failure.
        """
        if failed:
            self._safe = max(count // 2, 1)
        elif count >= self._safe < self._limits.max_size:
            self._safe = min(self._safe * 2, self._limits.max_size)
        self._set_max_size()

    def _set_max_size(self) -> None:
        self._ceiling = min(self._worth, self._safe)
        self.max_size = min(self._ceiling, self.auto.size)

    def _confirm(self, batch: Batch, seconds: float, now: float) -> None:
        """Note whether a run took as long as expected, and shows for a while what cannot be in time."""
        self._confirmed.clear()
        curve = self._times.curve(batch.group)
        if curve is None or not self._times.spread_known:
            return
        if not curve.hopeless(curve.seconds(batch.count, batch.weight), seconds):
            until = now + min(_CONFIRMED * seconds, _CONFIRMED_SECONDS)
            with suppress(Exception):  # a keyword argument was changed after its call, and has no hash any more
                self._confirmed = {batch.group: until}

    # What a request would have to wait

    def sure(self) -> int:
        """While fewer wait, a new request has room, and its answer in time even if all batches are full: a quick look.

        It holds for the function's own deadline, and as long as no batch is :meth:`overdue`.
        """
        limits = self._limits
        if limits.deadline == math.inf or not self._full:
            return limits.max_queue
        return min(max(int(limits.deadline / self._full) - 1, 0) * self.max_size, limits.max_queue)

    def overdue(self, running: list[Batch]) -> float:
        """When the batch that has run for the longest takes longer than a full one."""
        return running[0].started + self._full if running else math.inf

    def surely_in_time(self, waiting: int, left: float, running: list[Batch], now: float) -> bool:
        """:meth:`sure` for any deadline."""
        return (waiting // self.max_size + 2) * self._full <= left and now <= self.overdue(running)

    def estimate_if_late(
        self, request: Request, lines: Lines, waiting: int, running: list[Batch], now: float
    ) -> float | None:
        """Seconds that the answer to a new request would take, if it would come after the deadline; None if not.

        What finds a thread idle is in time whatever was measured: its run is a new measurement. But what cannot be in
        time by what the last run of its group has shown takes nobody's turn, and does not count for the size of
        batches.
        """
        self._asked = True
        left = request.deadline - now
        simple = request.group is None and not lines.several
        sure = simple and self.surely_in_time(waiting, left, running, now)
        curve = self._times.curve(request.group) if not sure and self._times.fresh(now) else None
        if curve is None:
            self.arrivals.note(left)
            return None
        alone = curve.seconds(1, request.weight if self._limits.weighed else 0.0)
        if not curve.hopeless(alone, left):
            self.arrivals.note(left)
        elif now < self._confirmed.get(request.group, -math.inf):
            return alone / curve.margin
        if not waiting and len(running) < self._limits.threads:
            return None
        estimate = self._seconds_to_answer(request, curve, lines, running, now) / curve.margin
        return estimate if estimate > left else None

    def _full_batch(self) -> float:
        curve = None if self._limits.weighed else self._times.curve()
        if curve is self._full_by[0] and self.max_size == self._full_by[1]:
            return self._full
        self._full_by = curve, self.max_size
        return math.inf if curve is None else curve.seconds(self.max_size, 0.0)

    def _most(self, curve: Curve | None, mean: float) -> int:
        """How many items a batch of this group may have."""
        return min(self._ceiling, self.auto.size_for(curve, mean))

    def _seconds_to_answer(
        self, request: Request, curve: Curve, lines: Lines, running: list[Batch], now: float
    ) -> float:
        """How long until a new request has its answer.

        Its own batch is priced as large as it will be: with the requests in front, and those that arrive until it
        starts.
        """
        threads = self._limits.threads
        line = lines.find(request.group)
        busy = self._seconds_left(running, now) if len(running) >= threads else 0.0
        ahead = self._seconds_in_front(request, line, lines) if lines.several else 0.0
        place, weight = 1, request.weight
        if line is not None:
            in_front, heavy = lines.ahead(request, line, self._due)
            place, weight = in_front + 1, heavy + request.weight
        weight *= self._padding
        mean = weight / place if self._limits.weighed else 0.0
        crowd = self.arrivals.crowd(request.group, curve, mean, lines=len(lines), ceiling=self._ceiling)
        crowd = min(crowd, self._most(curve, mean))
        batches = (place - 1) // crowd
        if self._limits.max_weight != math.inf:
            batches = max(batches, math.ceil(weight / self._limits.max_weight) - 1)
        ahead += batches * curve.seconds(crowd, crowd * mean)
        start = (busy + ahead) / threads
        joining = self.arrivals.rate * start / max(len(lines), 1)
        mine = max(place - batches * crowd, 1)
        own = max(mine, min(crowd, mine + joining))
        return start + curve.seconds(own, max(own * mean, request.weight if mean else 0.0))

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
            seconds = 0.0 if curve is None else curve.seconds(batch.count, batch.weight)
            total += max(batch.started + seconds - now, 0.0)
        return total

    def _seconds_in_front(self, request: Request, line: Line | None, lines: Lines) -> float:
        """How long the batches of other groups take that start before the one of this request."""
        oldest = None if line is None else line.oldest
        arrived = math.inf if oldest is None else oldest.arrived
        seconds = 0.0
        for other in itertools.islice(lines, _LOOKED_AT + 1):
            if other is line or not other.waiting:
                continue
            first = other.oldest
            curve = self._times.curve(other.group)
            if first is None or curve is None or (first.arrived > arrived and lines.fairness is None):
                continue
            count, weight = lines.ahead(request, other, self._due)
            if count:
                size = self._most(curve, 0.0) if self.auto else self._limits.max_size
                batches = math.ceil(count / size)
                size = min(size, count)
                seconds += batches * curve.seconds(size, weight * self._padding / batches)
        return seconds * max(1.0, len(lines) / (_LOOKED_AT + 1))

    # What is computed next

    def choose_next_batch(
        self, line: Line, lines: Lines, now: float, nearest: float, *, early: bool
    ) -> tuple[list[Request], list[Request]]:
        """The requests of the next batch of a line, and those that will be late in any case.

        No deadline is before ``nearest``; ``early``: some are before that of a request that came earlier.
        """
        limits, ordered = self._limits, lines.fairness is not None
        count = self.max_size
        if nearest != math.inf or limits.slo != math.inf or self._by_weight or ordered:
            in_order = limits.deadline != math.inf and not (early or ordered)
            count = self._size_at_a_glance(line.waiting, line.group, nearest, now, lines=len(lines), in_order=in_order)
        return (list(itertools.islice(line.requests, count)), []) if count else self._choose_closely(line, lines, now)

    def next_size_from_inbox(self, waiting: int, nearest: float, now: float) -> int:
        """How many of ``waiting`` that are in no line yet are the next batch; 0 if that takes a closer look.

        ``nearest`` is the deadline of the first.
        """
        limits = self._limits
        if self._by_weight or limits.max_wait:
            return 0
        bounded = limits.deadline != math.inf
        if not bounded and limits.slo == math.inf:
            return min(waiting, self.max_size)
        return self._size_at_a_glance(waiting, None, nearest, now, lines=1, in_order=bounded)

    def _size_at_a_glance(
        self, waiting: int, group: Group | None, nearest: float, now: float, *, lines: int, in_order: bool
    ) -> int:
        """How many of the first requests of a line are the next batch: a quick look, which is enough in most cases.

        0 where it takes a closer look. No deadline is before ``nearest``; ``in_order``: those that came first have the
        nearest ones.
        """
        count = min(waiting, self._ceiling)
        if self._limits.weighed or (count < waiting and (self.auto or not in_order)):
            return 0
        curve = self._times.curve(group)
        if self.auto and count > self.auto.size_for(curve, 0.0):
            return 0
        if curve is None or not curve.holds(count, 0.0, nearest - now):
            return count if curve is None else 0
        if not self.arrivals.rate or (lines <= 1 and self.surely_in_time(waiting, self.arrivals.shortest, [], now)):
            return count
        return 0 if count > self.arrivals.crowd(group, curve, 0.0, lines=lines, ceiling=self._ceiling) else count

    def _choose_closely(self, line: Line, lines: Lines, now: float) -> tuple[list[Request], list[Request]]:
        """A closer look. Where requests go by keys and priorities, their turns stand for the nearest deadlines."""
        waiting = lines.in_order(line, self.max_size)
        curve = self._times.curve(line.group)
        limits = self._limits
        late = [] if curve is None else self._late(waiting, curve, now)
        if late:
            waiting = _without(waiting, late)
        if not waiting:
            newest = max(late, key=attrgetter("arrived"))
            if newest.arrived < self.ended:  # else something is computed all the same: only a run shows what it takes
                return [], late
            return [newest], _without(late, [newest])
        if limits.padded:
            return AlikeBatches(curve, now, self.max_size, limits.max_weight).choose_alike(waiting), late
        if curve is None:
            return self._fill(waiting, None, now), []
        ordered = self._by_deadline(waiting) if lines.fairness is None else waiting
        chosen, until = self._fast_enough(ordered, curve, now, len(lines))
        if until != -math.inf:
            ends = now + curve.seconds(len(chosen), self._weight(chosen))
            late += [one for one in self._late(waiting, curve, ends) if one.deadline <= until]
        if ordered is not waiting:  # a batch has its items in the order of the calls
            taken = set(map(id, chosen))
            chosen = [one for one in waiting if id(one) in taken]
        return chosen, late

    def _by_deadline(self, waiting: list[Request]) -> list[Request]:
        deadlines = [request.deadline for request in waiting]
        if deadlines[-1] != math.inf and deadlines == sorted(deadlines):
            return waiting
        return sorted(waiting, key=self._due)

    def _due(self, request: Request) -> float:
        """Who has no deadline has as long as anybody: else those with one would pass it for ever."""
        return request.deadline if request.deadline != math.inf else request.arrived + self.arrivals.longest

    def _fast_enough(self, waiting: list[Request], curve: Curve, now: float, lines: int) -> tuple[list[Request], float]:
        """The batch without those whose deadlines would keep it too slow, as few as possible; and the last of these."""
        by_deadline = sorted(request.deadline for request in waiting)
        first = found = self._planned(waiting, curve, now, lines)
        if len(first) >= min(self._ceiling, len(waiting)):
            return first, -math.inf
        needed = self._needed(by_deadline, now, lines)
        best, last = self._rate_of(first, curve), -math.inf
        for skipped in sizes_up_to(len(waiting) - 1):
            if best >= needed or len(found) >= self._ceiling:
                break
            until = by_deadline[skipped - 1]
            room = self._planned([one for one in waiting if one.deadline > until], curve, now, lines)
            lost = sum(one.deadline <= until for one in first)
            rate = self._rate_of(room, curve) * max(len(room) - lost, 0) / max(len(room), 1)
            if rate > best * _DROP_GAIN:
                best, found, last = rate, room, until
        return found, last

    def _needed(self, by_deadline: list[float], now: float, lines: int) -> float:
        """Items a second that have to be computed for everything to be in time: what waits, and what arrives."""
        due = (number / (at - now) for number, at in enumerate(by_deadline, start=1) if at > now)
        return max(self.arrivals.keeping_up(lines), *due)

    def _late(self, requests: list[Request], curve: Curve, start: float) -> list[Request]:
        """Those that would usually be late even alone."""
        if self._limits.weighed:
            return [one for one in requests if start + curve.seconds(1, one.weight) / curve.margin > one.deadline]
        ends = start + curve.seconds(1, 0.0) / curve.margin
        return [one for one in requests if ends > one.deadline]

    def _fill(self, waiting: list[Request], curve: Curve | None, now: float) -> list[Request]:
        """As many requests, from the first on, as one batch may have: by halves, for this is asked thirty times."""
        limits, bound = self._limits, self._ceiling
        if self.auto and (curve is None or not limits.weighed):
            bound = min(bound, self.auto.size_for(curve, 0.0))
        first = waiting[:bound]
        weights = list(itertools.accumulate(one.weight if limits.weighed else 0.0 for one in first))
        nearest = list(itertools.accumulate((one.deadline for one in first), min))

        def exceeds(count: int) -> bool:
            weight, left = weights[count - 1], nearest[count - 1] - now + _ROUNDING
            if count == 1 or weight > limits.max_weight:
                return count > 1
            if curve is None:
                return False
            return not curve.holds(count, weight, left) or curve.at_worst(count, weight) > self.auto.seconds

        return first[: bisect_left(range(1, len(first) + 1), True, key=exceeds)]  # noqa: FBT003 - what is looked for

    def _rest_holds(self, waiting: list[Request], taken: int, curve: Curve, now: float) -> bool:
        """Whether the batch after this one can still meet its first deadline."""
        rest = waiting[taken : taken + self._most(curve, self._mean if self._limits.weighed else 0.0)]
        ends = now + curve.seconds(taken, self._weight(waiting[:taken]))
        return ends + curve.seconds(len(rest), self._weight(rest)) <= rest[0].deadline + _ROUNDING

    def _planned(self, waiting: list[Request], curve: Curve, now: float, lines: int) -> list[Request]:
        """As many as a batch may have, or fewer, where what arrives meanwhile would be late."""
        chosen = self._fill(waiting, curve, now)
        if not chosen or not self.arrivals.rate:
            return chosen
        mean = self._weight(chosen) / len(chosen)
        crowd = self.arrivals.crowd(waiting[0].group, curve, mean, lines=lines, ceiling=self._ceiling)
        return chosen[:crowd] if len(chosen) > crowd and self._rest_holds(waiting, crowd, curve, now) else chosen

    def _rate_of(self, chosen: list[Request], curve: Curve) -> float:
        return curve.rate(len(chosen), self._weight(chosen)) if chosen else 0.0

    def _weight(self, requests: list[Request]) -> float:
        return math.fsum(request.weight for request in requests) if self._limits.weighed else 0.0
