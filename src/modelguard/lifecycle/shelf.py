"""The order and the sizes of a pool's models. Touched only under the pool's lock."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

from cachetools import Cache

if TYPE_CHECKING:
    from modelguard.lifecycle.guard import ModelGuard

K = TypeVar("K", bound=Hashable)
M = TypeVar("M")


#: So many seconds the first in line waits for calls to end by themselves before a model in use is sent away.
_PATIENCE = 0.25


class Entry(Generic[M]):
    """One model of the pool.

    Attributes:
        pins: Callers that have found it and are about to take their lease.
        failure: What its load ended in, for those who waited for it.
    """

    def __init__(self, size: int) -> None:
        self.guard: ModelGuard[M] | None = None
        self.size = size
        self.pins = 0
        self.expires = math.inf
        self.loading = True
        self.failure: Exception | None = None

    @property
    def idle(self) -> bool:
        """Whether nobody uses the model or is about to."""
        if self.loading or self.pins or self.guard is None:
            return False
        return not self.guard.status().in_flight

    @property
    def mine(self) -> bool:
        """Whether the calling context is inside a call on it."""
        return self.guard is not None and self.guard._core.inside() is not None

    def send_away(self) -> None:
        """Lend it no more: it is evicted when the calls under way are done."""
        self.expires = -math.inf


class Place:
    """One caller's place among those who wait for room; it is taken when the caller first asks whose turn it is."""

    def __init__(self, queue: list[Place], clock: Callable[[], float]) -> None:
        self._queue = queue
        self._clock = clock
        self._since = 0.0

    def first(self) -> bool:
        """Whether it is this caller's turn to make room."""
        if self not in self._queue:
            self._queue.append(self)
            self._since = self._clock()
        return self._queue[0] is self

    def overdue(self) -> bool:
        """Whether this caller, the first in line, has waited so long that a model in use must be sent away for it."""
        if not self.first() or self._clock() < self._since + _PATIENCE:
            return False
        self._since = self._clock()
        return True


class Queue:
    """Those who wait for room, in order: else a key that is seldom asked for could wait for ever."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._places: list[Place] = []
        self._clock = clock

    def __len__(self) -> int:
        return len(self._places)

    @contextmanager
    def place(self) -> Iterator[Place]:
        """A place for the block, given up at its end."""
        place = Place(self._places, self._clock)
        try:
            yield place
        finally:
            if place in self._places:
                self._places.remove(place)


class Shelf(Cache[K, Entry[M]]):
    """cachetools adds up the sizes and makes room; what is evicted is the least recently used that nobody uses.

    ``LRUCache`` would not do: it evicts in its own order, whether or not a model is in use.
    """

    def __init__(self, max_memory: int) -> None:
        super().__init__(max_memory, getsizeof=lambda entry: entry.size)
        self.evicted: list[Entry[M]] = []

    def touch(self, key: K) -> Entry[M] | None:
        """The entry of ``key``, as the most recently used from now on."""
        entry = self.get(key)
        if entry is not None:
            del self[key]
            self[key] = entry  # entries are kept in the order in which they were put in
        return entry

    def inside(self) -> bool:
        """Whether the calling context uses one of the models: it must not wait for those who wait for its end."""
        return any(entry.mine for entry in self.values())

    def send_away(self) -> None:
        """Send away the least recently used of the models in use, so that steady traffic makes room some day."""
        for entry in self.values():
            if not entry.loading and entry.expires > -math.inf:
                entry.send_away()
                return

    def popitem(self) -> tuple[K, Entry[M]]:
        """Remove the least recently used model that nobody uses. KeyError if all are in use."""
        for key, entry in self.items():
            if entry.idle:
                del self[key]
                self.evicted.append(entry)
                return key, entry
        raise KeyError("every model of the pool is in use")
