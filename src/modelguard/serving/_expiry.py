"""When requests expire: a heap of deadlines that keeps nothing of a request that has its answer."""

from __future__ import annotations

import heapq
import math
from typing import Any

from modelguard.serving._requests import Request

__all__ = ["Expiry"]

#: Entries of requests that have their answers may stay until they are this many, and more than all others.
_STALE = 64


class Expiry:
    """The deadlines of what waits and runs."""

    def __init__(self) -> None:
        self._heap: list[list[Any]] = []  # deadline, a number that makes entries comparable, the request or None
        self._number = 0
        self._stale = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def nearest(self) -> float:
        """No request that waits or runs has a deadline before this; infinity if none has one."""
        return self._heap[0][0] if self._heap else math.inf

    def add(self, request: Request) -> None:
        """Note the deadline of a request."""
        self._number += 1
        request.timer = [request.deadline, self._number, request]
        heapq.heappush(self._heap, request.timer)

    def settle(self, requests: list[Request]) -> None:
        """Forget requests that are done: a large item must not stay in memory until its deadline."""
        for request in requests:
            if (timer := request.timer) is not None:
                timer[2] = request.timer = None
                self._stale += 1
        if self._stale > _STALE and self._stale * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2] is not None]
            heapq.heapify(self._heap)
            self._stale = 0

    def pop(self, now: float) -> Request | None:
        """The next request whose deadline has come; None if there is none."""
        while self._heap and self._heap[0][0] <= now:
            request: Request | None = heapq.heappop(self._heap)[2]
            if request is not None:
                request.timer = None
                return request
            self._stale -= 1
        return None

    def next(self) -> float:
        """When :meth:`pop` has something to return; infinity for never."""
        while self._heap and self._heap[0][2] is None:
            heapq.heappop(self._heap)
            self._stale -= 1
        return self.nearest
