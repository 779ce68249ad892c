"""Batches of items of like weight, for functions that pad: each item of a batch then costs as much as the heaviest one.

Every batch contains the request whose turn it is, or one that would be late otherwise, so a rare weight never waits for
ever: a request waits for at most one batch for each one that is in front of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from modelguard.serving._requests import Request
from modelguard.serving._times import Curve

__all__ = ["choose_alike"]

#: So many times the size of a batch are compared: those whose turn is later do not fill up batches of those in front.
_COMPARED = 8
#: Each number of requests that is tried is larger than the one before by this factor.
_NEXT = 1.15
#: Before anything was measured, weights that differ by more than this factor do not share a batch.
_UNMEASURED = 2.0
#: Requests may end so many seconds after their deadline: an error of rounding, not of time.
_ROUNDING = 1e-9


def choose_alike(
    waiting: list[Request], curve: Curve | None, now: float, *, most: int, max_weight: float, ended: float
) -> tuple[list[Request], list[Request]]:
    """The requests of the next batch, and those that will be late in any case.

    The batch is the one that computes most for its time: items like the first one, and as many as pay for the padding.

    Args:
        waiting: What waits, in the order of the turns.
        curve: How long batches take; None if that is unknown.
        now: The time, in seconds.
        most: Most items in a batch.
        max_weight: Most weight in it, padding included; a heavier item runs alone.
        ended: When the last batch ended. If nothing can be in time, something that came later is computed all the same:
            only a run shows whether the model has become faster.
    """
    room = _Room(curve, now, most, max_weight)
    waiting, late = room.split(waiting)
    if not waiting:
        newest = max(late, key=lambda request: request.arrived)
        if newest.arrived < ended:
            return [], late
        return [newest], [request for request in late if request is not newest]
    compared = waiting[: _COMPARED * most]
    chosen = room.around(compared[0], compared)
    urgent = room.harmed_by(chosen, waiting)
    return chosen if urgent is None else room.around(urgent, compared), late


class _Prefix:
    """Weight and nearest deadline of the first so many requests."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.weight = [0.0, *itertools.accumulate(request.weight for request in requests)]
        self.until = [math.inf, *itertools.accumulate((request.deadline for request in requests), min)]


@dataclass(frozen=True, slots=True)
class _Room:
    """What a batch may hold that starts now."""

    curve: Curve | None
    now: float
    most: int
    max_weight: float

    def split(self, waiting: list[Request]) -> tuple[list[Request], list[Request]]:
        """Those that would be in time, computed alone from now on, and those that would not."""
        late = [request for request in waiting if self._late(request, self.now)]
        if not late:
            return waiting, late
        gone = set(map(id, late))
        return [request for request in waiting if id(request) not in gone], late

    def harmed_by(self, chosen: list[Request], waiting: list[Request]) -> Request | None:
        """Of those that would be late because this batch is computed first, the one with the nearest deadline."""
        if self.curve is None:
            return None
        taken = set(map(id, chosen))
        heaviest = max(request.weight for request in chosen)
        ends = self.now + self.curve.seconds(len(chosen), heaviest * len(chosen))
        harmed = (request for request in waiting if id(request) not in taken and self._late(request, ends))
        return min(harmed, key=lambda request: request.deadline, default=None)

    def around(self, first: Request, compared: list[Request]) -> list[Request]:
        """The batch with this request that computes most for its time."""
        others = [(number, request) for number, request in enumerate(compared) if request is not first]
        # Of equal weights, the one whose turn is earlier is nearer to the first one.
        lighter = [pair for pair in others if pair[1].weight < first.weight]
        lighter.sort(key=lambda pair: (-pair[1].weight, pair[0]))
        heavier = [pair for pair in others if pair[1].weight >= first.weight]
        heavier.sort(key=lambda pair: (pair[1].weight, pair[0]))
        near = (
            [request for _, request in lighter[: self.most - 1]],
            [request for _, request in heavier[: self.most - 1]],
        )
        return self._nearest(first, *near) if self.curve is None else self._best(first, *near, self.curve)

    def _nearest(self, first: Request, lighter: list[Request], heavier: list[Request]) -> list[Request]:
        """The requests whose weights are nearest to that of the first one: nothing is known about times."""
        low, high = first.weight / _UNMEASURED, first.weight * _UNMEASURED
        near = [request for request in (*lighter, *heavier) if low <= request.weight <= high]
        by_distance = sorted(near, key=lambda request: abs(request.weight - first.weight))
        chosen, heaviest = [first], first.weight
        for request in by_distance[: self.most - 1]:
            heavy = max(heaviest, request.weight)
            if heavy * (len(chosen) + 1) <= self.max_weight:
                chosen.append(request)
                heaviest = heavy
        return chosen

    def _best(self, first: Request, lighter: list[Request], heavier: list[Request], curve: Curve) -> list[Request]:
        """For some requests that may be the heaviest, lighter ones are added as long as they pay for their padding."""
        below, above = _Prefix(lighter), _Prefix([first, *heavier])
        best, score = (1, 0), -1.0
        for more in _steps(len(heavier)):
            heavy, until = above.requests[more].weight, above.until[more + 1]
            if more and not self._holds(more + 1, heavy, until):
                break
            reached = -1.0
            for less in _steps(min(len(lighter), self.most - more - 1)):
                count = more + less + 1
                if less and not self._holds(count, heavy, min(until, below.until[less])):
                    break
                worth = self._worth(count, above.weight[more + 1] + below.weight[less], heavy, curve)
                if worth <= reached:
                    break
                reached = worth
                if worth > score:
                    best, score = (more + 1, less), worth
        return [*above.requests[: best[0]], *lighter[: best[1]]]

    def _worth(self, count: int, useful: float, heavy: float, curve: Curve) -> float:
        """What the items would cost in a full batch without padding, over what they cost in this one."""
        seconds = curve.seconds(count, heavy * count)
        ideal = count * (curve.fixed / self.most + curve.each) + curve.unit * useful
        return ideal / seconds if seconds > 0 and ideal > 0 else float(count)

    def _holds(self, count: int, heavy: float, until: float) -> bool:
        """Whether a batch is light enough, and ends in time."""
        weight = heavy * count
        if count > self.most or weight > self.max_weight:
            return False
        return self.curve is None or until == math.inf or self.curve.holds(count, weight, until - self.now + _ROUNDING)

    def _late(self, request: Request, start: float) -> bool:
        """Whether a request would be late, computed alone from then on."""
        return (
            self.curve is not None
            and request.deadline != math.inf
            and start + self.curve.seconds(1, request.weight) > request.deadline
        )


def _steps(most: int) -> Iterator[int]:
    """Numbers from 0 to ``most``, closer to each other at the start."""
    number = 0
    while number < most:
        yield number
        number = max(number + 1, int(number * _NEXT))
    yield most
