"""Whether replacing a model by ``load_first`` leaves more and more memory behind.

While two copies are alive, what outlives a load (interned strings, caches of libraries, objects of the service) lies
among the objects of both. CPython frees memory by arenas of 1 MiB, and one object that lives keeps its arena. With
ja_ginza, 50 reloads by ``load_first`` raised private memory from 284 to 333 MB (361 in between); by ``drain_first``,
with one copy at a time, it stayed flat (slope -0.03 MB a reload; CPython 3.11, glibc). Garbage collection, malloc's
settings and other allocators change nothing. One ``drain_first`` in between returned it: 344 to 273 MB.
"""

from __future__ import annotations

from collections import deque

#: Memory may creep up by this share of the model's size.
SHARE = 0.1

#: And at least by this many bytes: a load's own heap differs by up to 30 MB from one load of ja_ginza to the next.
NOISE = 16 * 2**20

#: The lowest of so many readings counts, as for the memory policies.
READINGS = 3


class Creep:
    """Private memory after each replacement, when one model is left."""

    def __init__(self) -> None:
        self._readings: deque[int] = deque(maxlen=READINGS)
        self._least: int | None = None
        self._patience = 1

    @property
    def amount(self) -> int:
        """Bytes by which the lowest of the last three readings is above the lowest of all."""
        if self._least is None or len(self._readings) < READINGS:
            return 0
        return min(self._readings) - self._least

    def is_too_much(self, model_bytes: int) -> bool:
        """Whether the next replacement should have one copy at a time."""
        return self.amount > self._patience * max(SHARE * model_bytes, NOISE)

    def record(self, memory: int, *, one_copy: bool) -> None:
        """Add a reading, in bytes.

        Args:
            memory: After the replacement.
            one_copy: Whether the old model was released before the new one was loaded. Nothing can lower memory
                further, so counting begins anew. If that gave back less than half, something else grows, and twice as
                much is tolerated from then on.
        """
        if one_copy:
            if amount := self.amount:
                in_vain = self._readings[-1] - memory < amount / 2
                self._patience = 2 * self._patience if in_vain else 1
            self._readings.clear()
            self._least = memory
        self._readings.append(memory)
        self._least = memory if self._least is None else min(self._least, memory)
