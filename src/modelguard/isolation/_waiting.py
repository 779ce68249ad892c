"""Calls that wait for a worker, in the order in which they get one."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["Waiter", "WaitingLine"]

W = TypeVar("W")


class Waiter(Generic[W]):
    """A call that waits for a worker.

    Attributes:
        client: Whose call it is.
        arrived: When it was made, on the monotonic clock.
        admitted: Whether it has waited before, so that it has a place in any case.
        worker: The worker that it got.
        error: Why it gets none.
    """

    def __init__(self, client: Hashable = None, *, arrived: float = math.inf, admitted: bool = False) -> None:
        self.client = client
        self.arrived = arrived
        self.admitted = admitted
        self.worker: W | None = None
        self.error: Exception | None = None

    def wake(self) -> None:
        """It has its worker, or its error. Called under the roster's lock, so it must not block."""
        raise NotImplementedError


class WaitingLine(Generic[W]):
    """Clients take turns, each with its oldest call: one with many calls does not hold up one with few.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._by_client: OrderedDict[Hashable, deque[Waiter[W]]] = OrderedDict()

    def __len__(self) -> int:
        # Counted anew: an exception from a signal handler may come between two steps.
        return sum(map(len, self._by_client.values()))

    def __iter__(self) -> Iterator[Waiter[W]]:
        for waiters in self._by_client.values():
            yield from waiters

    def append(self, waiter: Waiter[W]) -> None:
        """Add a call behind those of its client that were made before."""
        waiters = self._by_client.setdefault(waiter.client, deque())
        at = len(waiters)
        while at and waiters[at - 1].arrived > waiter.arrived:
            at -= 1
        waiters.insert(at, waiter)

    def popleft(self) -> Waiter[W]:
        """Take the call whose turn it is. Its client is the last one from now on.

        Raises:
            KeyError: Nobody waits.
        """
        client, waiters = self._by_client.popitem(last=False)
        waiter = waiters.popleft()
        if waiters:
            self._by_client[client] = waiters
        return waiter

    def remove(self, waiter: Waiter[W]) -> bool:
        """Take a call out; false if it does not wait."""
        waiters = self._by_client.get(waiter.client)
        if waiters is None or waiter not in waiters:
            return False
        waiters.remove(waiter)
        if not waiters:
            del self._by_client[waiter.client]
        return True
