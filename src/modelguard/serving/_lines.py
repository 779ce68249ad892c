"""The requests that wait: a line for each group of keyword arguments, which line is next, and in which order."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter

from modelguard.serving._requests import Group, Request
from modelguard.serving.status import Limits

# Whose turn it is: every key gets its share of what is computed, and the requests of one key go by priority.
#
# This is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): each key has a start, which moves on by the
# cost of what it gets over its share, and the key with the earliest start is next. A newcomer starts from the virtual
# time of WF2Q+ (Bennett and Zhang, IEEE/ACM Transactions on Networking 5, 1997).


#: Keys without requests are remembered until they have paid for what they got, and at most so many of them. A key that
#: is forgotten early starts level with newcomers.
_REMEMBERED = 1024
#: The virtual time moves on at least by what is computed over so many times the shares of all keys with requests. At
#: full pace it would run ahead of keys whose requests are refused: these would be level with keys that ask for little.
_UNHURRIED = 4
#: A key that asked for less than its share has a credit of so many items (for a share of 1): few callers send at even
#: intervals.
_CREDIT = 2.0
#: How fast the mean cost of an item is followed.
_STEP = 0.05
#: An item without weight still costs a place in a batch.
_LEAST_COST = 1.0
#: Starts that differ by less are equal: an error of rounding.
_ROUNDING = 1e-9

_rank = attrgetter("rank")
_turn = itemgetter(0, 1, 2)


@dataclass(slots=True, eq=False)
class Flow:
    """The requests of one key that wait, and the virtual time at which the next one starts."""

    key: Hashable
    share: float
    start: float
    waiting: int = 0
    cost: float = 0.0

    @property
    def last_start(self) -> float:
        """The virtual time at which the last of its requests starts."""
        return self.start + self.cost * (self.waiting - 1) / (self.waiting * self.share)


class Fairness:
    """The order of what waits. Without a clock, and without the requests themselves."""

    def __init__(self, shares: Mapping[Hashable, float], ageing: float) -> None:
        self._shares = shares
        self._ageing = ageing
        self._flows: dict[Hashable, Flow] = {}
        self._waiting = 0
        self._virtual = 0.0
        self._cost = _LEAST_COST  # of an item, on average
        self._by_priority = False  # whether a request that waits has a priority
        self._greediest: Flow | None = None  # None until it is looked for again

    def __len__(self) -> int:
        return len(self._flows)

    def waiting_of(self, key: Hashable) -> int:
        flow = self._flows.get(key)
        return 0 if flow is None else flow.waiting

    # What happens

    def joined(self, request: Request) -> None:
        request.rank = self._rank_of(request)
        flow = self._flows.get(request.key)
        if flow is None:
            flow = self._flows[request.key] = Flow(request.key, self._share_of(request), self._newcomers_start)
        request.flow = flow
        flow.start = self._start_of(flow)
        self._add(flow, request)

    def left(self, request: Request) -> None:
        """A request does not wait any more, and was not computed."""
        flow = request.flow
        self._remove(flow, _cost(request))
        if not self._waiting:
            self._forget_all()
        elif not flow.waiting and self._has_paid(flow):
            self._forget(flow)

    def taken(self, requests: Iterable[Request]) -> None:
        """These requests are being computed: their keys pay for them."""
        total = sum(flow.share for flow in self._flows.values() if flow.waiting)
        work = 0.0
        for request in requests:
            flow, cost = request.flow, _cost(request)
            self._remove(flow, cost)
            flow.start += cost / flow.share
            work += cost
            self._cost += _STEP * (cost - self._cost)
        if not self._waiting:  # whoever comes next competes with nobody who waited beside these
            self._forget_all()
            return
        least = min((flow.start for flow in self._flows.values() if flow.waiting), default=self._virtual)
        pace = work / (_UNHURRIED * total) if total else 0.0
        self._virtual = max(self._virtual + pace, least)
        idle = [flow for flow in self._flows.values() if not flow.waiting]
        idle.sort(key=attrgetter("start"))
        for number, flow in enumerate(idle):
            if self._has_paid(flow) or len(idle) - number > _REMEMBERED:
                self._forget(flow)

    def recount(self, requests: Iterable[Request]) -> None:
        """Count again what waits, after an interruption at any point.

        What has joined is not looked up by its key, whose own code may have been what failed.
        """
        known = set(self._flows.values())
        for flow in known:
            flow.waiting, flow.cost = 0, 0.0
        self._waiting, self._greediest = 0, None
        for request in requests:
            if request.flow in known:
                self._add(request.flow, request)
            else:
                self.joined(request)
        if not self._waiting:
            self._forget_all()

    # The order

    def in_order(self, requests: Iterable[Request]) -> list[Request]:
        """These requests, which come in the order of their arrival, in that of their turns."""
        turns: list[tuple[float, float, int, Request]] = []
        for number, (flow, own) in enumerate(self._by_flow(requests).items()):
            start = flow.start
            for request in own:
                turns.append((start, request.rank, number, request))
                start += _cost(request) / flow.share
        turns.sort(key=_turn)
        return [turn[3] for turn in turns]

    def first(self, requests: Iterable[Request]) -> Request | None:
        return min(requests, key=lambda request: (request.flow.start, request.rank), default=None)

    def ahead(self, request: Request, requests: Iterable[Request], *, all_of_them: bool) -> tuple[int, float]:
        """How many of these requests are computed before a new one, which has not joined, and their weight.

        If they are all that wait, what each key has is known, and nothing is counted.
        """
        mine, start = self._flows.get(request.key), self._start_of_new(request, requests)
        counted = {} if all_of_them else self._by_flow(requests)
        count, weight = 0, 0.0
        for flow in self._flows.values() if all_of_them else counted:
            own = counted.get(flow)
            many, cost = (flow.waiting, flow.cost) if own is None else (len(own), math.fsum(map(_cost, own)))
            if flow.start > start or not many:
                continue
            turns = 1
            if many > 1 or flow is mine:
                passed = math.floor((start - flow.start) * flow.share * many / cost + _ROUNDING)
                turns = min(passed + (flow is not mine), many)
            count += turns
            weight += cost * turns / many
        return count, weight

    def displaced_by(self, request: Request, waiting: Callable[[], Iterable[Request]]) -> Request | None:
        """The request that would be computed last, if a new one goes before it; None if the new one would be last.

        What waits is looked through only if it has to be: whoever floods a full queue must not slow it down.
        """
        if self._greediest is None:  # not known: the key with the request that would be computed last
            flows = (flow for flow in self._flows.values() if flow.waiting)
            self._greediest = max(flows, key=attrgetter("last_start"), default=None)
        mine, greediest = self._flows.get(request.key), self._greediest
        if greediest is None:
            return None
        if greediest is not mine:
            until = self._start_of_new(request, waiting()) + self._cost / self._share_of(request)
            if greediest.last_start < until - _ROUNDING:
                return None
        elif not (self._by_priority or request.priority):
            return None
        own = [one for one in waiting() if one.flow is greediest]
        last = max(reversed(own), key=_rank)  # of several that came at the same time, the last one
        return last if greediest is not mine or last.rank > self._rank_of(request) else None

    def _by_flow(self, requests: Iterable[Request]) -> dict[Flow, list[Request]]:
        flows: defaultdict[Flow, list[Request]] = defaultdict(list)
        for request in requests:
            flows[request.flow].append(request)
        if self._by_priority:
            for own in flows.values():
                own.sort(key=_rank)
        return flows

    def _start_of_new(self, request: Request, requests: Iterable[Request]) -> float:
        """The virtual time at which a new request starts, behind those of its key that go before it."""
        flow = self._flows.get(request.key)
        if flow is None or not flow.waiting:
            return self._start_of(flow)
        if not (self._by_priority or request.priority):
            return flow.start + flow.cost / flow.share
        rank = self._rank_of(request)
        before = math.fsum(_cost(one) for one in requests if one.flow is flow and one.rank <= rank)
        return flow.start + before / flow.share

    # Bookkeeping

    def _add(self, flow: Flow, request: Request) -> None:
        self._greediest = None
        flow.waiting += 1
        flow.cost += _cost(request)
        self._waiting += 1
        self._by_priority = self._by_priority or request.priority > 0

    def _rank_of(self, request: Request) -> float:
        return request.arrived - request.priority * self._ageing

    def _share_of(self, request: Request) -> float:
        return self._shares.get(request.key, 1.0)

    def _start_of(self, flow: Flow | None) -> float:
        """Where a key starts with its next request. One without requests catches up with the others, with a credit."""
        if flow is None:
            return self._newcomers_start
        return flow.start if flow.waiting else max(flow.start, self._newcomers_start)

    def _has_paid(self, flow: Flow) -> bool:
        return flow.start <= self._newcomers_start

    @property
    def _newcomers_start(self) -> float:
        return self._virtual - _CREDIT * self._cost

    def _remove(self, flow: Flow, cost: float) -> None:
        self._greediest = None
        self._waiting -= 1
        flow.waiting -= 1
        flow.cost = flow.cost - cost if flow.waiting else 0.0

    def _forget(self, flow: Flow) -> None:
        try:
            del self._flows[flow.key]
        except Exception:  # noqa: BLE001 - the key was changed since, so its hash is another one
            with contextlib.suppress(Exception):
                self._flows = {key: each for key, each in self._flows.items() if each is not flow}

    def _forget_all(self) -> None:
        self._greediest = None
        self._flows.clear()
        self._virtual = 0.0
        self._by_priority = False


def _cost(request: Request) -> float:
    return max(request.weight, _LEAST_COST)


#: How many of those that wait are looked at to tell how many have less time than a new one.
_SAMPLED = 256
#: So many times the size of a batch is put in order: what the batch is chosen from, and the batches behind it.
#: At least so many, the default of ``max_queue``: an urgent request may come last. That takes 0.1 ms.
_LOOKED_AT = 8
_LEAST_LOOKED_AT = 256


@dataclass(slots=True, eq=False)
class Line:
    """Requests with equal keyword arguments, in the order of their arrival. The weight is 0 if nothing is weighed."""

    group: Group | None
    requests: dict[Request, None] = field(default_factory=dict)
    weight: float = 0.0

    @property
    def waiting(self) -> int:
        return len(self.requests)

    @property
    def oldest(self) -> Request | None:
        return next(iter(self.requests), None)


class Lines:
    """All lines. The next one is found without looking at the others, as long as requests go in the order of arrival.

    Args:
        limits: Bounds of the queue.
        takes: How long a batch of this line takes if it starts now, in seconds; None if that is unknown.
    """

    def __init__(self, limits: Limits, takes: Callable[[Line], float | None]) -> None:
        self._limits = limits
        self.full_size = limits.max_size  # so many items fill a batch
        self._takes = takes
        self.fairness: Fairness | None = None  # None for the order of arrival
        self.ungrouped = Line(None)
        self._grouped: dict[Hashable, Line] = {}
        self._arrived: deque[Request] = deque()  # of groups, in that order; also some that do not wait any more

    def __iter__(self) -> Iterator[Line]:
        yield self.ungrouped
        yield from tuple(self._grouped.values())

    @property
    def several(self) -> bool:
        return bool(self._grouped)

    def __len__(self) -> int:
        return len(self._grouped) + (self.ungrouped.waiting > 0)

    def find(self, group: Group | None) -> Line | None:
        return self.ungrouped if group is None else self._grouped.get(group)

    def of(self, request: Request) -> Line:
        """The line in which a request waits."""
        return request.line or self.ungrouped

    def configure(self, limits: Limits) -> None:
        """Use these limits from now on. What waits does so no longer than it would have."""
        self._limits = limits
        for request in self.live():
            request.patient_until = min(request.patient_until, request.arrived + limits.max_wait)
        grouped = (one for one in self.live() if one.line and self._in_order)
        self._arrived = deque(sorted(grouped, key=attrgetter("arrived")))

    def fill_at(self, size: int) -> None:
        """So many items fill a batch from now on. What has filled one already does not wait for a larger one."""
        if size > self.full_size and self._limits.max_wait:
            for line in self:
                in_full_batches = line.waiting - line.waiting % self.full_size
                for request in itertools.islice(line.requests, in_full_batches):
                    request.patient_until = -math.inf
        self.full_size = size

    @property
    def _in_order(self) -> bool:
        """Whether requests go in the order of their arrival."""
        return self.fairness is None and not self._limits.max_wait

    def order(self) -> None:
        """From now on, requests go by the turns of their keys, and by priority."""
        if self.fairness is None:
            fairness = Fairness(self._limits.shares, self._limits.ageing)
            fairness.recount(self.live())
            self.fairness = fairness  # last: an exception may interrupt this at any point
            self._arrived.clear()

    def live(self) -> Iterator[Request]:
        return itertools.chain.from_iterable(line.requests for line in self)

    def in_order(self, line: Line, most: int) -> list[Request]:
        """What the next batch of at most ``most`` is chosen from, in order: so that it takes as long in any queue."""
        enough = max(_LOOKED_AT * most, _LEAST_LOOKED_AT)
        if self.fairness is None:
            return list(itertools.islice(line.requests, enough))
        return self.fairness.in_order(line.requests)[:enough]

    def ahead(self, request: Request, line: Line, due: Callable[[Request], float]) -> tuple[int, float]:
        """How many requests of a line are computed before a new one, which is due then, and their weight."""
        if self.fairness is None:
            mine, newest = due(request), next(reversed(line.requests), None)
            if newest is None or mine >= due(newest):  # all that came before, as a rule
                return line.waiting, line.weight
            looked_at = list(itertools.islice(line.requests, 0, None, 1 + len(line.requests) // _SAMPLED))
            sooner = sum(due(one) <= mine for one in looked_at) / len(looked_at)
            return round(line.waiting * sooner), line.weight * sooner
        return self.fairness.ahead(request, line.requests, all_of_them=line.waiting > 0 and len(self) <= 1)

    def add(self, request: Request) -> None:
        group = request.group
        line = self.ungrouped if group is None else self._grouped.get(group)
        if line is None:
            line = self._grouped[group] = Line(group)
        if group is not None:
            request.line = line
            if self._in_order:
                self._arrived.append(request)
                if len(self._arrived) > 2 * self._limits.max_queue:  # more than wait: nobody keeps what has ended
                    self._arrived = deque(one for one in self._arrived if one.state == "waiting")
        line.requests[request] = None
        if self._limits.weighed:
            line.weight += request.weight
        if self._limits.max_wait:
            request.patient_until = request.arrived + self._limits.max_wait
        if self.fairness is not None:
            self.fairness.joined(request)

    def removed(self, request: Request) -> None:
        line = self.of(request)
        line.requests.pop(request, None)
        if self.fairness is not None:
            self.fairness.left(request)
        if self._limits.weighed:
            line.weight = line.weight - request.weight if line.requests else 0.0
        if not line.requests:
            self._remove(line)

    def taken(self, line: Line, requests: list[Request]) -> None:
        left_behind = len(requests) < self.full_size <= line.waiting
        if len(requests) == line.waiting:
            line.requests.clear()
        else:
            for request in requests:
                line.requests.pop(request, None)
        if self.fairness is not None:
            self.fairness.taken(requests)
        if self._limits.weighed:
            weight = math.fsum(request.weight for request in requests)
            line.weight = max(line.weight - weight, 0.0) if line.requests else 0.0
        if not line.requests:
            self._remove(line)
        elif left_behind and self._limits.max_wait:
            for request in line.requests:  # they have waited for a full batch, which went without them
                request.patient_until = -math.inf

    def next(self, now: float, *, closed: bool) -> Line | float | None:
        """The line whose batch starts now; or when to ask again; or None if nothing waits."""
        if self._in_order:
            while self._arrived and self._arrived[0].state != "waiting":
                self._arrived.popleft()
            first, other = self.ungrouped.oldest, self._arrived[0] if self._arrived else None
            if other is not None and (first is None or other.arrived < first.arrived):
                first = other
            return None if first is None else self.of(first)
        due = {line: self._due(line, oldest) for line in self if (oldest := line.oldest) is not None}
        soonest = min(due, key=due.__getitem__, default=None)
        if soonest is None or (due[soonest] > now and not closed):
            return None if soonest is None else due[soonest]
        if self.fairness is None:
            return soonest
        ready = (line for line, at in due.items() if closed or at <= now)
        turn = self.fairness.first(request for line in ready for request in line.requests)
        return soonest if turn is None else self.of(turn)

    def recount(self) -> int:
        """Count again what really waits, after an interruption at any point. Returns how many requests do."""
        for line in self:
            line.requests = dict.fromkeys(one for one in line.requests if one.state == "waiting")
            line.weight = math.fsum(one.weight for one in line.requests) if self._limits.weighed else 0.0
            if not line.requests:
                self._remove(line)
        if self.fairness is not None:
            self.fairness.recount(self.live())
        return sum(line.waiting for line in self)

    def _due(self, line: Line, oldest: Request) -> float:
        """When its batch has to start: at once if it is full, else when the oldest request has waited enough."""
        limits = self._limits
        full = line.waiting >= self.full_size or line.weight >= limits.max_weight
        if full or oldest.patient_until <= oldest.arrived:
            return oldest.arrived
        nearest = min(request.deadline for request in line.requests)
        takes = self._takes(line) if nearest != math.inf else 0.0
        if takes is None:  # unmeasured, so the latest start that meets the deadline is unknown
            return oldest.arrived if nearest <= oldest.patient_until else oldest.patient_until
        return min(oldest.patient_until, max(nearest - takes, oldest.arrived))

    def _remove(self, line: Line) -> None:
        """Remove an empty line. It stays if the group's hash has changed, because its values were modified."""
        if line.group is not None:
            with contextlib.suppress(Exception):
                del self._grouped[line.group]
        if not self._grouped:
            self._arrived.clear()  # else the last of them would be kept until another group comes
