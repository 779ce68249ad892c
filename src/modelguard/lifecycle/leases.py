"""A lease as an object: for ``with`` blocks, coroutines, generators and lazy results."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import Token
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from modelguard.lifecycle.generation import Generation, Mark

if TYPE_CHECKING:
    from types import TracebackType

    from modelguard.lifecycle.guard import ModelGuard

M = TypeVar("M")
T = TypeVar("T")


class Lease(Generic[M]):
    """One use of a guard's model: ``with guard.lease() as model:`` or ``async with guard.lease() as model:``.

    The model stays loaded until the block ends. A lease serves once. Guarded functions that are called inside the
    block run on the same generation.
    """

    __slots__ = (
        "__weakref__",
        "_entered",
        "_epoch",
        "_generation",
        "_guard",
        "_mark",
        "_thread",
        "_timeout",
        "_token",
    )

    def __init__(self, guard: ModelGuard[M], timeout: float | None = None) -> None:
        self._guard = guard
        self._timeout = timeout
        self._generation: Generation[M] | None = None
        self._token: Token[Mark | None] | None = None
        self._mark: Mark = []
        self._entered = False

    @classmethod
    def on(cls, guard: ModelGuard[M], generation: Generation[M]) -> Lease[M]:
        """Make an object of a lease that has been taken."""
        lease = cls(guard)
        lease._hold(generation)
        return lease

    @classmethod
    def take(cls, guard: ModelGuard[M], timeout: float | None = None) -> Lease[M]:
        """Take a lease and hand it out, for whoever will end it."""
        return cls.on(guard, guard._enter(timeout))

    @classmethod
    async def atake(cls, guard: ModelGuard[M], timeout: float | None = None) -> Lease[M]:
        """:meth:`take` without blocking the event loop."""
        return cls.on(guard, await guard._aenter(timeout))

    def __enter__(self) -> M:
        self._refuse_second_use()
        return self._begin(self._guard._enter(self._timeout))

    async def __aenter__(self) -> M:
        self._refuse_second_use()
        return self._begin(await self._guard._aenter(self._timeout))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(failed=isinstance(error, Exception))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(failed=isinstance(error, Exception))

    def __del__(self) -> None:
        # The last resort: a generator, coroutine or lazy result that was dropped without being closed.
        if getattr(self, "_generation", None) is not None:
            self.end(failed=False)

    def enter_taken(self) -> M:
        """Begin the block of a lease that was taken before."""
        assert self._generation is not None  # noqa: S101 - it was taken and has not ended
        return self._begin(self._generation)

    @property
    def model(self) -> M:
        """The model, while the lease lasts."""
        assert self._generation is not None  # noqa: S101 - only asked between taking and ending
        return self._generation.model

    def step(self, work: Callable[..., T], *args: Any) -> T:
        """Run one step of lazy work; guarded functions that it calls run on this lease's generation."""
        generation = self._generation
        if generation is None:
            return work(*args)
        core = self._guard._core
        self._thread = threading.get_ident()
        mark = core.mark(generation)
        token = core.held.set(mark)
        try:
            return work(*args)
        finally:
            mark.clear()
            core.held.reset(token)

    async def astep(self, work: Awaitable[T]) -> T:
        """Await one step of lazy work."""
        generation = self._generation
        if generation is None:
            return await work
        core = self._guard._core
        mark = core.mark(generation)
        token = core.held.set(mark)
        try:
            return await work
        finally:
            mark.clear()
            with suppress(ValueError):  # dropped half way, and finalized in another context
                core.held.reset(token)

    def end(self, *, failed: bool) -> None:
        """Return the lease, once."""
        generation, self._generation = self._generation, None
        if generation is None:
            return
        own = bool(self._mark)
        self._mark.clear()
        token, self._token = self._token, None
        if token is not None:
            try:
                self._guard._core.held.reset(token)
            except ValueError:  # ended in another context than it began in, as dependency injectors do
                own = False
        # After a fork only the leases of the forking thread have been carried over.
        if self._epoch == self._guard._core.epoch or (own and self._thread == threading.get_ident()):
            self._guard._leave(generation, failed=failed)

    def carry_over(self) -> bool:
        """Whether a child that was just forked has to honour this lease: the forking thread holds it, in no context."""
        return self._generation is not None and not self._mark and self._thread == threading.get_ident()

    def join_child(self) -> None:
        """Take the lease anew in a child that was just forked."""
        if self._generation is not None:
            self._epoch = self._guard._core.epoch
            self._generation.leases.append(None)

    def _begin(self, generation: Generation[M]) -> M:
        self._hold(generation)
        core = self._guard._core
        self._mark = core.mark(generation)
        self._token = core.held.set(self._mark)
        return generation.model

    def _hold(self, generation: Generation[M]) -> None:
        core = self._guard._core
        self._entered = True
        self._thread = threading.get_ident()
        self._epoch = core.epoch
        self._generation = generation
        core.begun.add(self)

    def _refuse_second_use(self) -> None:
        if self._entered:
            raise RuntimeError(f"a lease of guard {self._guard.name!r} serves once; call lease() for another")
