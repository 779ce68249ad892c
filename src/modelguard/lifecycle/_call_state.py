"""Which calls run on which generation of a guard: the part of its state that each call changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from modelguard import _reruns
from modelguard._weak_registry import WeakRegistry
from modelguard.lifecycle._enclosing import EnclosingCalls
from modelguard.lifecycle._generation import Generation

__all__ = ["CallState", "HeldLease"]

M = TypeVar("M")


class HeldLease(Protocol):
    """A lease that an object holds, rather than a running call."""

    def held_here(self) -> Generation[Any] | None:
        """Its generation, if this thread last used it; None otherwise and after its end."""
        ...

    def survives_fork(self) -> bool:
        """Whether a child that was just forked still uses it."""
        ...

    def retake_in_child(self) -> None:
        """Take it again in that child."""
        ...


class CallState(EnclosingCalls[M]):
    """Calls of one guard, and the generations that they run on.

    Attributes:
        lock: Is held while a field changes, except for the leases of a generation.
        drained: Is notified when a call on a retired generation has ended.
        current: The generation that takes new calls; None if there is none.
        previous: The generation that is kept for a rollback; None if there is none.
        draining: Retired generations that are to be released when their calls have ended.
        abandoned: Those of them whose calls have taken too long.
        closed: Whether calls are refused.
        held_leases: Leases that objects hold, which a forked child may have to take again.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.current: Generation[M] | None = None
        self.previous: Generation[M] | None = None
        self.draining: set[Generation[M]] = set()
        self.abandoned: set[Generation[M]] = set()
        self.closed = False
        self.held_leases: WeakRegistry[HeldLease] = WeakRegistry()
        self._renew_locks()

    def _renew_locks(self) -> None:
        # Reentrant: the garbage collector may return a dropped lease at any point, also under this lock.
        self.lock = threading.RLock()
        self.drained = threading.Condition(self.lock)

    def enter(self) -> Generation[M] | None:
        """Take a lease on the enclosing call's generation, else on the current one; None if there is neither.

        :meth:`Engine.wrapper` writes out the common case of this.
        """
        outer = self.enclosing_generation() if self.enclosing.get() else None
        with self.lock:
            generation = self.current if outer is None or outer.dropped else outer
            if generation is None and not self.closed:
                generation = self._half_used_here()
            if generation is not None:
                generation.leases.append(None)
            return generation

    def _half_used_here(self) -> Generation[M] | None:
        """While no generation is current: one that is drained and whose drain waits for this very thread.

        A loop over a guarded generator calls other guarded functions between two steps. If these waited for the next
        generation, the drain would wait for the generator, and so for them.
        """
        held = (lease.held_here() for lease in list(self.held_leases))
        waited_for = self.draining - self.abandoned
        return next((one for one in held if one in waited_for and not one.dropped), None)

    @contextmanager
    def lent_current(self) -> Iterator[Generation[M] | None]:
        """Keep the current generation, if there is one, from being released in the block. It does not count as a use.

        Who leaves the block last of all calls on a generation that was abandoned meanwhile must release it: see
        :meth:`retired_call_ended`.
        """
        with self.lock:
            generation = self.current
            if generation is not None:
                generation.leases.append(None)
        try:
            yield generation
        finally:
            if generation is not None:
                generation.leases.pop()

    @staticmethod
    def leave(generation: Generation[M], failed: bool) -> bool:  # noqa: FBT001 - a keyword would cost the hot path
        """Return a lease; true if a policy may be due or a drain waits."""
        generation.leases.pop()
        generation.uses = uses = generation.uses + 1
        if failed:
            if generation.errors == 0 and uses > 1:
                generation.served = True
            if not _reruns.active():
                generation.errors += 1
            return True
        generation.errors = 0
        return uses >= generation.alarm

    def retired_call_ended(self, generation: Generation[M]) -> bool:
        """Record the end of a call on a retired generation; true if it was the last call on an abandoned one."""
        with self.lock:
            self.drained.notify_all()
            if generation.leases or generation not in self.abandoned:
                return False
            self.abandoned.remove(generation)
            generation.dropped = True
            return True

    @property
    def version(self) -> str | None:
        """The version of the current model; None if it has none, or if there is no model."""
        current = self.current  # read once
        return None if current is None else current.version

    @property
    def in_flight(self) -> int:
        """Calls that run now, on the current generation and on those that are kept, being drained or abandoned."""
        with self.lock:
            generations = {self.current, self.previous, *self.draining, *self.abandoned}
            return sum(len(generation.leases) for generation in generations if generation is not None)
