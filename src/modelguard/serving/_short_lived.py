"""Notices that instances with batched methods are made for each request."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

__all__ = ["ShortLived"]

#: So many instances that came within so many seconds are short-lived if half of them are gone.
_MANY = 100
_SOON = 60.0


class ShortLived:
    """Counts what is made for the instances of a class.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._recent: list[weakref.ref[object]] = []
        self._found = False

    def note(self, made: object) -> int:
        """Note what was made for another instance, and lives as long as it.

        Returns:
            How many instances of the last minute were short-lived, once; else 0.
        """
        if self._found:
            return 0
        self._recent.append(weakref.ref(made))
        if len(self._recent) < _MANY:
            return 0
        recent, self._recent = self._recent, []
        now = self._clock()
        began, self._began = self._began, now
        gone = sum(reference() is None for reference in recent)
        self._found = now - began <= _SOON and 2 * gone >= _MANY
        return _MANY if self._found else 0
