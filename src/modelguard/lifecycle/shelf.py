"""The order and the sizes of a pool's models. Touched only under the pool's lock."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

from cachetools import Cache

if TYPE_CHECKING:
    from modelguard.lifecycle.guard import ModelGuard

K = TypeVar("K", bound=Hashable)
M = TypeVar("M")


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

    def popitem(self) -> tuple[K, Entry[M]]:
        """Remove the least recently used model that nobody uses. KeyError if all are in use."""
        for key, entry in self.items():
            if entry.idle:
                del self[key]
                self.evicted.append(entry)
                return key, entry
        raise KeyError("every model of the pool is in use")
