"""Caches with an upper limit, which grow until they are full and then stop: ``functools.lru_cache`` and cachetools."""

from __future__ import annotations

import functools
import gc
from typing import NamedTuple

from cachetools import Cache

_LRU = type(functools.lru_cache(lambda: None))


class Fill(NamedTuple):
    """How full a cache is.

    Attributes:
        name: The cached function, or the type of the cache.
        used: The entries in it, or their size.
        limit: The most that it will keep.
    """

    name: str
    used: float
    limit: float

    @property
    def full(self) -> bool:
        return self.used >= self.limit

    def __str__(self) -> str:
        return f"{self.name} (filled to {self.used:,} of {self.limit:,})"


def bounded_caches() -> dict[int, Fill]:
    """The bounded caches of this process, by their ``id``."""
    found = {}
    for candidate in gc.get_objects():
        if type(candidate) is _LRU:
            info = candidate.cache_info()
            if info.maxsize is not None:
                name = getattr(candidate, "__qualname__", "a function")
                found[id(candidate)] = Fill(f"the lru_cache of {name}()", info.currsize, info.maxsize)
        elif isinstance(candidate, Cache):
            found[id(candidate)] = Fill(f"a {type(candidate).__qualname__}", candidate.currsize, candidate.maxsize)
    return found


def growing(before: dict[int, Fill], after: dict[int, Fill]) -> list[Fill]:
    """The caches that have taken up entries in the meantime."""
    return [fill for key, fill in after.items() if key in before and fill.used > before[key].used]
