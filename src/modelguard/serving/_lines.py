"""The requests that wait: a line for each group of keyword arguments, which line is next, and in which order."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator

from modelguard.serving._batches import Limits
from modelguard.serving._fairness import Fairness
from modelguard.serving._requests import Group, Request

__all__ = ["Line", "Lines"]

#: So many times the size of a batch is put in order: what the batch is chosen from, and the batches behind it.
_LOOKED_AT = 8


class Line:
    """Requests with equal keyword arguments, in the order of their arrival.

    Attributes:
        group: Their keyword arguments.
        requests: What waits, and what is done but not removed yet.
        waiting: How many of them wait.
        weight: The weight of what waits; 0 if nothing is weighed.
        due: When its next batch has to start; infinity while it is empty.
        nearest: No request has a deadline before this.
        waited_until: What came by then has waited for a full batch, which went without it.
    """

    __slots__ = ("due", "group", "nearest", "requests", "waited_until", "waiting", "weight")

    def __init__(self, group: Group | None) -> None:
        self.group = group
        self.requests: deque[Request] = deque()
        self.waiting = 0
        self.weight = 0.0
        self.due = math.inf
        self.nearest = math.inf
        self.waited_until = -math.inf

    def oldest(self) -> Request | None:
        """The first request that waits. What is done in front of it is removed."""
        requests = self.requests
        while requests:
            if requests[0].state == "waiting":
                return requests[0]
            requests.popleft()
        return None

    def live(self) -> Iterator[Request]:
        """The requests that wait."""
        return (request for request in self.requests if request.state == "waiting")


class Lines:
    """All lines. The next one is found without looking at the others, as long as requests go in the order of arrival.

    Args:
        limits: Bounds of the queue.
        takes: How long a batch of this line takes if it starts now, in seconds; None if that is unknown.

    Attributes:
        full_size: How many items fill a batch.
        fairness: In which order requests go; None for the order of their arrival.
    """

    def __init__(self, limits: Limits, takes: Callable[[Line], float | None]) -> None:
        self._limits = limits
        self.full_size = limits.max_size
        self._takes = takes
        self._former_wait, self._changed = math.inf, -math.inf
        self.fairness: Fairness | None = None
        self.ungrouped = Line(None)
        self._grouped: dict[Hashable, Line] = {}
        self._heap: list[tuple[float, int, Line]] = []  # the number makes entries comparable
        self._number = itertools.count()

    def __iter__(self) -> Iterator[Line]:
        yield self.ungrouped
        yield from tuple(self._grouped.values())

    @property
    def several(self) -> bool:
        """Whether there are lines of keyword arguments."""
        return bool(self._grouped)

    def __len__(self) -> int:
        return len(self._grouped) + (self.ungrouped.waiting > 0)

    def find(self, group: Group | None) -> Line | None:
        """The line of a group; None if nothing of it waits."""
        return self.ungrouped if group is None else self._grouped.get(group)

    def configure(self, limits: Limits, full_size: int, now: float) -> None:
        """Use these limits from now on. What waits does so no longer than it would have."""
        self._former_wait = min(self._limits.max_wait, self._former_wait if self._waits_from_before() else math.inf)
        self._limits, self.full_size, self._changed = limits, full_size, now
        self._heap.clear()
        for line in self:
            line.due = math.inf
            if (line.group is not None or limits.max_wait) and (due := self._next_due(line)) is not None:
                self._push(line, due)

    def _waits_from_before(self) -> bool:
        """Whether anything waits that came before the limits were last changed."""
        oldest = (line.oldest() for line in self)
        return any(one is not None and one.arrived <= self._changed for one in oldest)

    def order(self) -> None:
        """From now on, requests go by the turns of their keys, and by priority."""
        if self.fairness is None:
            fairness = Fairness(self._limits.shares, self._limits.ageing)
            fairness.recount(self.live())
            self.fairness = fairness  # last: an exception may interrupt this at any point

    def live(self) -> Iterator[Request]:
        """The requests that wait, in all lines."""
        return itertools.chain.from_iterable(line.live() for line in self)

    def in_order(self, line: Line, most: int) -> list[Request]:
        """What the next batch of at most ``most`` is chosen from, in order: so that it takes as long in any queue."""
        enough = _LOOKED_AT * most
        if self.fairness is None:
            return list(itertools.islice(line.live(), enough))
        return self.fairness.in_order(line.live(), enough)[:enough]

    def ahead(self, request: Request, line: Line) -> tuple[int, float]:
        """How many requests of a line are computed before a new one, and their weight."""
        if self.fairness is None:
            return line.waiting, line.weight
        return self.fairness.ahead(request, line.live(), all_of_them=len(self) <= 1)

    def add(self, request: Request, now: float) -> None:
        """Put a request at the end of its line."""
        group = request.group
        if group is None:
            line = self.ungrouped
        else:
            found = self._grouped.get(group)
            line = self._grouped[group] = Line(group) if found is None else found
            request.line = line
        line.requests.append(request)
        line.waiting += 1
        if self._limits.weighed:
            line.weight += request.weight
        line.nearest = min(line.nearest, request.deadline)
        if self.fairness is not None:
            self.fairness.joined(request)
        if group is not None or self._limits.max_wait:
            self._note_due(line, now)

    def removed(self, request: Request) -> None:
        """A request of a line does not wait any more."""
        line = request.line or self.ungrouped
        line.waiting -= 1
        if self.fairness is not None:
            self.fairness.left(request)
        if self._limits.weighed:
            line.weight = line.weight - request.weight if line.waiting else 0.0

    def taken(self, line: Line, requests: list[Request]) -> None:
        """These requests, a batch, were taken out of their line."""
        if line.requests and len(requests) < self.full_size <= line.waiting:
            line.waited_until = line.requests[-1].arrived
        line.waiting -= len(requests)
        if self.fairness is not None:
            self.fairness.taken(requests)
        if self._limits.weighed:
            weight = math.fsum(request.weight for request in requests)
            line.weight = max(line.weight - weight, 0.0) if line.waiting else 0.0
        line.due = math.inf
        if not line.waiting:
            line.nearest = math.inf
        if (line.group is not None or self._limits.max_wait) and (due := self._next_due(line)) is not None:
            self._push(line, due)

    def next(self, now: float, *, closed: bool) -> Line | float | None:
        """The line whose batch starts now; or when to ask again; or None if nothing waits.

        Call :meth:`taken` with what was taken from it.
        """
        if not self._limits.max_wait and not self._grouped:
            return self.ungrouped if self.ungrouped.oldest() is not None else None
        found = self._next_by_arrival(now, closed=closed)
        if self.fairness is None or not isinstance(found, Line):
            return found
        due = (line for line in self if closed or line.due <= now or not self._limits.max_wait)
        first = self.fairness.first(request for line in due for request in line.live())
        return found if first is None else first.line or self.ungrouped

    def _next_by_arrival(self, now: float, *, closed: bool) -> Line | float | None:
        heap, later = self._heap, None
        while heap:
            due, _, line = heap[0]
            if due == line.due and due > now and not closed:
                later = due
                break
            heapq.heappop(heap)
            if due != line.due or (actual := self._next_due(line)) is None:
                continue  # another entry of this line counts, or it is empty
            self._push(line, actual)
            if actual <= now or closed:
                return self._older(line)
        return later if self._limits.max_wait or self.ungrouped.oldest() is None else self.ungrouped

    def sweep(self) -> None:
        """Remove what does not wait, and count what does."""
        for line in self:
            live = list(line.live())
            line.requests.clear()
            line.requests.extend(live)
            line.waiting = len(live)
            line.weight = math.fsum(request.weight for request in live) if self._limits.weighed else 0.0
            if not live:
                self._remove(line)
        if self.fairness is not None:
            self.fairness.recount(self.live())

    def take_out(self, line: Line, requests: Iterable[Request]) -> int:
        """Take requests out of a line. Returns how many others were removed, because they are done."""
        taken, looked_at, found = set(map(id, requests)), [], 0
        for one in line.requests:
            looked_at.append(one)
            found += id(one) in taken
            if found == len(taken):
                break
        kept = [one for one in looked_at if one.state == "waiting" and id(one) not in taken]
        for _ in looked_at:
            line.requests.popleft()
        line.requests.extendleft(reversed(kept))
        return len(looked_at) - len(taken) - len(kept)

    def _older(self, line: Line) -> Line:
        """This line, or the ungrouped one if its oldest request came first."""
        mine, other = line.oldest(), self.ungrouped.oldest()
        if self._limits.max_wait or mine is None or other is None or other.arrived >= mine.arrived:
            return line
        return self.ungrouped

    def _note_due(self, line: Line, now: float) -> None:
        """Bring the start of a line's batch forward, if its newest request requires that."""
        if not self._limits.max_wait:
            if line.due == math.inf:
                self._push(line, now)
            return
        oldest = line.oldest()
        if oldest is not None and (due := self._due(line, oldest)) < line.due:
            self._push(line, due)

    def _next_due(self, line: Line) -> float | None:
        """When a batch of this line has to start; None if it is empty."""
        oldest = line.oldest()
        if oldest is None:
            self._remove(line)
            return None
        if not self._limits.max_wait:
            return oldest.arrived
        if line.waiting < self.full_size:  # else its batch starts at once
            line.nearest = min(request.deadline for request in line.live())
        return self._due(line, oldest)

    def _due(self, line: Line, oldest: Request) -> float:
        """When a batch has to start: at once if it is full, else ``max_wait`` after the oldest request came."""
        limits = self._limits
        full = line.waiting >= self.full_size or line.weight >= limits.max_weight
        if full or oldest.arrived <= line.waited_until:
            return oldest.arrived
        wait = min(limits.max_wait, self._former_wait) if oldest.arrived <= self._changed else limits.max_wait
        due = oldest.arrived + wait
        if line.nearest == math.inf:
            return due
        takes = self._takes(line)
        if takes is None:  # unmeasured, so the latest start that meets the deadline is unknown
            return oldest.arrived if line.nearest <= due else due
        return min(due, max(line.nearest - takes, oldest.arrived))

    def _push(self, line: Line, due: float) -> None:
        line.due = due
        heapq.heappush(self._heap, (due, next(self._number), line))

    def _remove(self, line: Line) -> None:
        """Remove an empty line. It stays if the group's hash has changed, because its values were modified."""
        line.due = line.nearest = math.inf
        if line.group is not None:
            with contextlib.suppress(Exception):
                del self._grouped[line.group]
