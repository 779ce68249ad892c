"""Objects that are listed for as long as somebody else refers to them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["WeakRegistry"]

T = TypeVar("T")


class WeakRegistry(Generic[T]):
    """A set of weak references that any thread may change while others go through it.

    ``weakref.WeakSet`` is not made for that: a loop over it raises "Set changed size during iteration" when another
    thread adds or removes something. Here a loop goes over a copy, which CPython makes in one step.
    """

    __slots__ = ("__weakref__", "_references")

    def __init__(self) -> None:
        self._references: set[weakref.ref[T]] = set()

    def add(self, item: T) -> None:
        """List it from now on."""
        self._references.add(weakref.ref(item, self._references.discard))

    def discard(self, item: T) -> None:
        """List it no longer, if it is listed."""
        self._references.discard(weakref.ref(item))

    def __iter__(self) -> Iterator[T]:
        """Those that are listed now, in no order."""
        return iter([item for reference in self._references.copy() if (item := reference()) is not None])

    def __bool__(self) -> bool:
        return any(reference() is not None for reference in self._references.copy())
