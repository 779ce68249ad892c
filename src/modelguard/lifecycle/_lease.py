"""One use of a model as an object: it holds its generation until it ends, wherever that is."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import Token
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from modelguard.lifecycle._engine import Engine
from modelguard.lifecycle._misuse import Misused
from modelguard.lifecycle._state import Enclosing, Generation

M = TypeVar("M")
T = TypeVar("T")


class Lease(Generic[M]):
    """One use of a guard's model: ``with guard.lease() as model:`` or ``async with guard.lease() as model:``.

    The model stays loaded until the block ends. A lease can be used once. Guarded functions that are called inside the
    block run on the same generation.
    """

    __slots__ = ("__weakref__", "_engine", "_entered", "_epoch", "_taken", "_thread", "_timeout", "_token")

    def __init__(self, engine: Engine[M], timeout: float | None = None) -> None:
        self._engine = engine
        self._timeout = timeout
        self._taken: Enclosing = []
        self._token: Token[Enclosing | None] | None = None
        self._entered = False

    @classmethod
    def of(cls, engine: Engine[M], generation: Generation[M]) -> Lease[M]:
        """Take another lease on a generation that the caller has one on."""
        lease = cls(engine)
        taken = lease.slot()
        taken[:] = generation, 1
        generation.leases.append(None)
        return lease

    @classmethod
    def take(cls, engine: Engine[M], timeout: float | None = None) -> Lease[M]:
        lease = cls(engine)
        engine.enter(lease.slot(), timeout)
        return lease

    @classmethod
    def take_now(cls, engine: Engine[M]) -> Lease[M] | None:
        """Take a lease if that needs no waiting; None if it does."""
        lease = cls(engine)
        return None if engine.state.enter(lease.slot()) is None else lease

    @classmethod
    async def atake(cls, engine: Engine[M], timeout: float | None = None) -> Lease[M]:
        lease = cls(engine)
        await engine.aenter(lease.slot(), timeout)
        return lease

    def slot(self) -> Enclosing:
        """What this thread is about to take."""
        if self._entered:
            raise RuntimeError(
                f"a lease of guard {self._engine.name!r} can be used once; call lease() again for another"
            )
        if self._taken:
            self.drop()  # a signal handler has raised as it was entered before
        self._thread = threading.get_ident()
        self._epoch = self._engine.state.epoch
        return self._taken

    if not TYPE_CHECKING:  # checkers are to complain about unknown attributes

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"a lease has no attribute {name!r}: it is not the model. Write: with guard.lease() as model: "
                f"model.{name}"
            )

    def __enter__(self) -> M:
        self._engine.enter(self.slot(), self._timeout)
        return self.enter_taken()

    async def __aenter__(self) -> M:
        await self._engine.aenter(self.slot(), self._timeout)
        return self.enter_taken()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end_with(error)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end_with(error)

    def __del__(self) -> None:
        # The last resort: a generator, coroutine or lazy result that was dropped without being closed, or a signal
        # handler that has raised on the way.
        if getattr(self, "_taken", None):
            self.drop()

    def enter_taken(self) -> M:
        """Run what this context calls from now on on this lease."""
        state, generation = self._engine.state, self._taken[0]
        self._entered = True
        self._taken[1] = state.depth(generation)
        self._token = state.enclosing.set(self._taken)
        return generation.model  # type: ignore[no-any-return] # it is one of this guard's

    @property
    def model(self) -> M:
        """The model, while the lease lasts.

        Raises:
            RuntimeError: The lease has not begun, or has ended.
        """
        generation = self.generation
        if generation is None:
            raise RuntimeError(
                f"a lease of guard {self._engine.name!r} has a model only inside its block. Write: with guard.lease() "
                "as model: ..."
            )
        return generation.model

    @property
    def generation(self) -> Generation[M] | None:
        """The generation that it lends; None before and after its use."""
        taken = tuple(self._taken)  # one read: another thread may end it
        return taken[0] if taken else None

    def step(self, work: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run one step of lazy work; guarded functions that it calls run on this lease's generation."""
        generation = self.generation
        if generation is None:
            return work(*args, **kwargs)
        state = self._engine.state
        self._thread = threading.get_ident()
        enclosing = [generation, state.depth(generation)]
        token = None
        try:
            token = state.enclosing.set(enclosing)
            return work(*args, **kwargs)
        finally:
            del enclosing[:]  # before any call of a function, in which a signal handler may raise
            if token is not None:
                state.enclosing.reset(token)

    async def astep(self, work: Awaitable[T]) -> T:
        """Await one step of lazy work."""
        generation = self.generation
        if generation is None:
            return await work
        state = self._engine.state
        enclosing = [generation, state.depth(generation)]
        token = None
        try:
            token = state.enclosing.set(enclosing)
            return await work
        finally:
            del enclosing[:]
            if token is not None:
                with suppress(ValueError):  # dropped half way, and finalized in another context
                    state.enclosing.reset(token)

    def end_with(self, error: BaseException | None) -> None:
        if isinstance(error, GeneratorExit):  # of a generator that may have been dropped
            self.drop()
        elif isinstance(error, Misused):
            self.end(failed=None)
            raise error.error from None
        elif isinstance(error, Exception):
            try:
                self.repair(error)
            finally:
                self.end(failed=True)
        else:
            self.end(failed=False if error is None else None)

    def repair(self, error: Exception, *, last: bool = False) -> bool:
        """Do what a failed call needs; whether it may run again on this lease. It must be ended in any case.

        Raises:
            CudaAfterFork: CUDA cannot be used in this process.
        """
        generation = self.generation
        return generation is not None and self._engine.repair(generation, error, last=last)

    def end(self, *, failed: bool | None) -> None:
        """Return the lease; ``failed`` is None if nothing is known of the model."""
        generation = self._give_up()
        if generation is not None:
            self._engine.leave(generation, failed=failed)

    def drop(self) -> None:
        """Return the lease where the garbage collector may be at work: in any thread, which may hold any lock."""
        generation = self._give_up()
        if generation is not None:
            self._engine.leave_dropped(generation)

    def _give_up(self) -> Generation[M] | None:
        """Hold the generation no longer; returns it if the lease counts in this process."""
        if not (taken := self._taken):
            return None
        state, generation = self._engine.state, taken[0]
        counts = self._epoch == state.epoch
        del taken[:]
        if counts:
            generation.leases.pop()
        token, self._token = self._token, None
        if token is not None:
            try:
                state.enclosing.reset(token)
            except ValueError:  # ended in another context than it began in, as dependency injectors do
                token = None
        if not counts and token is not None and self._thread == threading.get_ident():
            generation.leases.pop()  # after a fork only the leases of the forking thread have been carried over
            counts = True
        return generation if counts else None

    def detach(self) -> None:
        """Let it outlive the context that it was taken in: a child that is forked meanwhile takes it again."""
        self._engine.state.held_leases.add(self)

    def held_here(self) -> Generation[M] | None:
        """Its generation, if this thread last used it; None otherwise and after its end."""
        return self.generation if self._thread == threading.get_ident() else None

    def survives_fork(self) -> bool:
        """Whether a child that was just forked still uses it: the forking thread holds it, outside of any context."""
        return self._token is None and self.held_here() is not None

    def retake_in_child(self) -> None:
        if (generation := self.generation) is not None:
            self._epoch = self._engine.state.epoch
            generation.leases.append(None)
