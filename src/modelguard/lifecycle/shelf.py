"""The order and the sizes of a pool's models. Touched only under the pool's lock."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

from cachetools import LRUCache

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


class Shelf(LRUCache[K, Entry[M]]):
    """cachetools holds the order and adds up the sizes; what is in use is passed over when room is made."""

    def __init__(self, max_memory: int) -> None:
        super().__init__(max_memory, getsizeof=lambda entry: entry.size)
        self.evicted: list[Entry[M]] = []

    def popitem(self) -> tuple[K, Entry[M]]:
        """Remove the least recently used model that nobody uses. KeyError if all are in use."""
        busy = []
        try:
            while True:
                key, entry = super().popitem()
                if entry.idle:
                    self.evicted.append(entry)
                    return key, entry
                busy.append((key, entry))
        finally:
            for key, entry in busy:  # what is in use counts as just used
                self[key] = entry

    def peek(self) -> dict[K, Entry[M]]:
        """All entries, without counting the look as a use."""
        return {key: super(LRUCache, self).__getitem__(key) for key in self}
