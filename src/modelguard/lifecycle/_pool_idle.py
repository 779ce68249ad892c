"""The models of a pool that are released until their next use, and their keys. Only under the pool's lock."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Generic, TypeVar

from cachetools import LRUCache

from modelguard import _units
from modelguard.lifecycle._pool_lru import PoolLRU
from modelguard.lifecycle._pool_sources import REMEMBERED
from modelguard.telemetry.reasons import Reason

__all__ = ["IdleKeys"]

K = TypeVar("K", bound=Hashable)
M = TypeVar("M")

#: How often a pool looks for models that nobody uses, in the time after which they are released.
_LOOKS = 10


class IdleKeys(Generic[K, M]):
    """The keys whose models were released until their next use: nobody used them, or it was requested.

    Args:
        after: Seconds without use; infinity for never.

    Attributes:
        unloads: How many there were.
    """

    def __init__(self, after: float) -> None:
        self._after = after
        self._keys: LRUCache[K, None] = LRUCache(REMEMBERED)
        self.unloads = 0

    @property
    def interval(self) -> float:
        """Seconds until the next look; infinity if none is needed."""
        return self._after / _LOOKS

    @property
    def keys(self) -> tuple[K, ...]:
        """The latest of them that were not loaded again."""
        return tuple(self._keys)

    def evict_from(self, models: PoolLRU[K, M], now: float) -> None:
        """Evict the models that nobody has used for long enough."""
        if self._after == math.inf:
            return
        reason = Reason("idle", f"Idle({_units.format_seconds(self._after)!r})")
        for key, model in list(models.items()):
            if model.seconds_unused(now) >= self._after:
                self.evict(key, models, reason)

    def evict(self, key: K, models: PoolLRU[K, M], until_next_use: Reason | None) -> None:
        """Evict the model of ``key``; with a reason, until its next use."""
        model = models.pop(key)
        model.until_next_use = until_next_use
        models.evicted.append(model)
        if until_next_use is not None:
            self._keys[key] = None
            self.unloads += 1

    def wake(self, key: K) -> bool:
        """The model of ``key`` is about to be loaded; returns whether it was one of them."""
        try:
            del self._keys[key]
        except KeyError:
            return False
        return True

    def clear(self) -> None:
        """The pool is closed, so nothing is loaded again."""
        self._keys.clear()
