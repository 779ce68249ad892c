"""The call that encloses a piece of code, as a context variable carries it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from modelguard.lifecycle._generation import Generation

M = TypeVar("M")

#: What a context holds while a call runs: the call's generation and how deeply calls on it are nested. The end of the
#: call empties the list, so a context that outlives its call (a task started inside it) can tell.
Enclosing = list[Any]


class EnclosingCalls(Generic[M]):
    """Which call of one guard encloses the running code.

    Attributes:
        name: The guard's name.
        enclosing: What the context holds, None outside of calls.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.enclosing: ContextVar[Enclosing | None] = ContextVar(f"modelguard {name}", default=None)

    def enclosing_generation(self) -> Generation[M] | None:
        """The generation of the call that encloses this one, if any."""
        outer = tuple(self.enclosing.get() or ())  # one read: another thread may be emptying the list
        return outer[0] if outer else None

    def nest(self, generation: Generation[M]) -> Enclosing:
        """Make what the context holds while a call runs on ``generation``."""
        outer = self.enclosing.get()
        if not outer:
            return [generation, 1]
        both = tuple(outer)  # one read, as above
        return [generation, both[1] + 1 if both and both[0] is generation else 1]

    @contextmanager
    def running_on(self, generation: Generation[M]) -> Iterator[None]:
        """Run guarded functions that the block calls on ``generation``. The block itself does not count as a use."""
        enclosing = self.nest(generation)
        token = self.enclosing.set(enclosing)
        try:
            yield
        finally:
            enclosing.clear()
            self.enclosing.reset(token)
