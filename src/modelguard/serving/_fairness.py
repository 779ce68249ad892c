"""Whose turn it is: every key gets its share of what is computed, and the requests of one key go by priority.

This is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): each key has a start, which moves on by the cost
of what it gets over its share, and the key with the earliest start is next. The virtual time that a newcomer starts
from is that of WF2Q+ (Bennett and Zhang, IEEE/ACM Transactions on Networking 5, 1997). It moves on with what is
computed for everybody, so no number of new keys can keep a key from its turn, and it never falls behind those that
wait, so nobody pays for capacity that nobody else wanted.
"""

from __future__ import annotations

import contextlib
import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from operator import attrgetter

from modelguard.serving._requests import Request

__all__ = ["Fairness", "Flow"]

#: Keys without requests are remembered until they have paid for what they got, and at most so many of them. A key that
#: is forgotten early starts level with newcomers.
_REMEMBERED = 1024
#: The virtual time moves on at least by what is computed over so many times the shares of all keys with requests. At
#: full pace it would run ahead of keys whose requests are refused, and these would be level with keys that ask for
#: little. At a quarter of it, a queue of 256 keeps up to 1,024 greedy keys apart from those.
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


class Flow:
    """The requests of one key.

    Attributes:
        key: The key.
        share: Its share, compared with that of other keys.
        start: The virtual time at which its next request starts.
        waiting: How many of its requests wait.
        cost: What they cost.
    """

    __slots__ = ("cost", "key", "share", "start", "waiting")

    def __init__(self, key: Hashable, share: float, start: float) -> None:
        self.key = key
        self.share = share
        self.start = start
        self.waiting = 0
        self.cost = 0.0

    @property
    def last_start(self) -> float:
        """The virtual time at which the last of its requests starts."""
        return self.start + self.cost * (self.waiting - 1) / (self.waiting * self.share)


class Fairness:
    """The order of what waits. Without a clock, and without the requests themselves.

    Args:
        shares: The shares of keys; 1 for all others.
        ageing: A request of priority 1 goes before those of its key that came up to so many seconds earlier.
    """

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
        """How many keys it remembers."""
        return len(self._flows)

    def waiting_of(self, key: Hashable) -> int:
        """How many requests of a key wait."""
        flow = self._flows.get(key)
        return 0 if flow is None else flow.waiting

    # What happens

    def joined(self, request: Request) -> None:
        """A request waits from now on."""
        request.rank = self._rank_of(request)
        flow = self._flows.get(request.key)
        if flow is None:
            share = self._shares.get(request.key, 1.0)
            flow = Flow(request.key, share, self._newcomers_start)
            self._flows[request.key] = flow
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
        """Count again what waits, after an interruption at any point."""
        for flow in self._flows.values():
            flow.waiting, flow.cost = 0, 0.0
        self._waiting = 0
        for request in requests:
            known = self._flows.get(request.key)
            if known is not None and known is request.flow:
                self._add(known, request)
            else:
                self.joined(request)
        if not self._waiting:
            self._forget_all()

    # The order

    def in_order(self, requests: Iterable[Request], enough: int) -> list[Request]:
        """These requests in the order of their turns.

        Args:
            requests: Requests that wait, in the order of their arrival.
            enough: The order matters for so many of them; the rest comes behind in any order.
        """
        flows = self._by_flow(requests)
        if len(flows) == 1:
            return next(iter(flows.values()))
        ordered: list[Request] = []
        heap = [(flow.start, own[0].rank, number, 0, flow, own) for number, (flow, own) in enumerate(flows.items())]
        heapq.heapify(heap)
        while heap and len(ordered) < enough:
            start, _, number, at, flow, own = heap[0]
            ordered.append(own[at])
            if at + 1 < len(own):
                start += _cost(own[at]) / flow.share
                heapq.heapreplace(heap, (start, own[at + 1].rank, number, at + 1, flow, own))
            else:
                heapq.heappop(heap)
        for _, _, _, at, _, own in heap:
            ordered += own[at:]
        return ordered

    def first(self, requests: Iterable[Request]) -> Request | None:
        """The request whose turn it is; None if there are none."""
        return min(requests, key=lambda request: (request.flow.start, request.rank), default=None)

    def ahead(self, request: Request, requests: Iterable[Request], *, all_of_them: bool) -> tuple[int, float]:
        """How many requests are computed before a new one, and their weight.

        Args:
            request: The new one; it has its time of arrival, and has not joined.
            requests: The requests to count, in any order.
            all_of_them: Whether these are all that wait.
        """
        mine, start = self._flows.get(request.key), self._start_of_new(request, requests)
        count, weight = 0, 0.0
        for flow, many, cost in self._totals() if all_of_them else self._count(requests):
            if flow.start > start:
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

        Args:
            request: The new one; it has its time of arrival, and has not joined.
            waiting: Gives all that wait. Called only if they have to be looked through: whoever floods a full queue
                must not slow it down.
        """
        mine, greediest = self._flows.get(request.key), self._find_greediest()
        if greediest is None:
            return None
        if greediest is not mine:
            until = self._start_of_new(request, waiting()) + self._cost / self._shares.get(request.key, 1.0)
            if greediest.last_start < until - _ROUNDING:
                return None
        elif not (self._by_priority or request.priority):
            return None
        own = [one for one in waiting() if one.flow is greediest]
        last = max(reversed(own), key=_rank)  # of several that came at the same time, the last one
        return last if greediest is not mine or last.rank > self._rank_of(request) else None

    def _find_greediest(self) -> Flow | None:
        """The key with the request that would be computed last."""
        if self._greediest is None:
            flows = (flow for flow in self._flows.values() if flow.waiting)
            self._greediest = max(flows, key=attrgetter("last_start"), default=None)
        return self._greediest

    def _by_flow(self, requests: Iterable[Request]) -> dict[Flow, list[Request]]:
        flows: dict[Flow, list[Request]] = {}
        for request in requests:
            if (own := flows.get(request.flow)) is None:
                flows[request.flow] = [request]
            else:
                own.append(request)
        if self._by_priority:
            for own in flows.values():
                own.sort(key=_rank)
        return flows

    def _totals(self) -> list[tuple[Flow, int, float]]:
        """Number and cost of each key's requests."""
        return [(flow, flow.waiting, flow.cost) for flow in self._flows.values() if flow.waiting]

    def _count(self, requests: Iterable[Request]) -> list[tuple[Flow, int, float]]:
        """The same of these requests."""
        return [(flow, len(own), math.fsum(map(_cost, own))) for flow, own in self._by_flow(requests).items()]

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

    def _start_of(self, flow: Flow | None) -> float:
        """Where a key starts with its next request. One without requests catches up with the others, with a credit."""
        if flow is None:
            return self._newcomers_start
        return flow.start if flow.waiting else max(flow.start, self._newcomers_start)

    def _has_paid(self, flow: Flow) -> bool:
        """Whether a key would start as a new one."""
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
