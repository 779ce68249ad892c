"""One use of a model as an object: it holds its generation until it ends, wherever that is."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import Token
from typing import TYPE_CHECKING, Any, Generic, Never, TypeVar

from modelguard.lifecycle._engine import Engine
from modelguard.lifecycle._state import Enclosing, Generation, GuardState

M = TypeVar("M")
T = TypeVar("T")


class Lease(Generic[M]):
    """One use of a guard's model: ``with guard.lease() as model:`` or ``async with guard.lease() as model:``.

    The model stays loaded until the block ends. A lease can be used once. Guarded functions that are called inside the
    block run on the same generation.
    """

    __slots__ = (
        "__weakref__",
        "_enclosing",
        "_engine",
        "_entered",
        "_epoch",
        "_generation",
        "_thread",
        "_timeout",
        "_token",
    )

    def __init__(self, engine: Engine[M], timeout: float | None = None) -> None:
        self._engine = engine
        self._timeout = timeout
        self._generation: Generation[M] | None = None
        self._token: Token[Enclosing | None] | None = None
        self._enclosing: Enclosing = []
        self._entered = False

    @classmethod
    def of(cls, engine: Engine[M], generation: Generation[M]) -> Lease[M]:
        """Make an object of a lease that was taken on ``generation``."""
        lease = cls(engine)
        lease._hold(generation)
        return lease

    @classmethod
    def take(cls, engine: Engine[M], timeout: float | None = None) -> Lease[M]:
        return cls.of(engine, engine.enter(timeout))

    @classmethod
    def take_now(cls, engine: Engine[M]) -> Lease[M] | None:
        """Take a lease if that needs no waiting; None if it does."""
        generation = engine.state.enter()
        return None if generation is None else cls.of(engine, generation)

    @classmethod
    async def atake(cls, engine: Engine[M], timeout: float | None = None) -> Lease[M]:
        return cls.of(engine, await engine.aenter(timeout))

    if not TYPE_CHECKING:  # checkers are to complain about unknown attributes

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"a lease has no attribute {name!r}: it is not the model. Write: with guard.lease() as model: "
                f"model.{name}"
            )

    def __enter__(self) -> M:
        if self._entered:
            self._raise_on_second_use()
        return self._begin(self._engine.enter(self._timeout))

    async def __aenter__(self) -> M:
        if self._entered:
            self._raise_on_second_use()
        return self._begin(await self._engine.aenter(self._timeout))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end_with(error)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end_with(error)

    def __del__(self) -> None:
        # The last resort: a generator, coroutine or lazy result that was dropped without being closed.
        if getattr(self, "_generation", None) is not None:
            self.drop()

    def enter_taken(self) -> M:
        assert self._generation is not None  # noqa: S101 - it was taken and has not ended
        return self._begin(self._generation)

    @property
    def model(self) -> M:
        """The model, while the lease lasts.

        Raises:
            RuntimeError: The lease has not begun, or has ended.
        """
        if self._generation is None:
            raise RuntimeError(
                f"a lease of guard {self._engine.name!r} has a model only inside its block. Write: with guard.lease() "
                "as model: ..."
            )
        return self._generation.model

    @property
    def generation(self) -> Generation[M] | None:
        """The generation that it lends; None before and after its use."""
        return self._generation

    def step(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run one step of lazy work; guarded functions that it calls run on this lease's generation."""
        generation = self._generation
        if generation is None:
            return work(*args, **kwargs)
        state = self._engine.state
        self._thread = threading.get_ident()
        enclosing = state.nest(generation)
        token = state.enclosing.set(enclosing)
        try:
            return work(*args, **kwargs)
        finally:
            enclosing.clear()
            state.enclosing.reset(token)

    async def astep(self, work: Awaitable[T]) -> T:
        """Await one step of lazy work."""
        generation = self._generation
        if generation is None:
            return await work
        state = self._engine.state
        enclosing = state.nest(generation)
        token = state.enclosing.set(enclosing)
        try:
            return await work
        finally:
            enclosing.clear()
            with suppress(ValueError):  # dropped half way, and finalized in another context
                state.enclosing.reset(token)

    def end_with(self, error: BaseException | None) -> None:
        if isinstance(error, GeneratorExit):  # of a generator that may have been dropped
            self.drop()
        elif isinstance(error, Exception):
            try:
                self.repair(error)
            finally:
                self.end(failed=True)
        else:
            self.end(failed=False)

    def repair(self, error: Exception, *, last: bool = False) -> bool:
        """Do what a failed call needs; whether it may run again on this lease. It must be ended in any case.

        Raises:
            CudaAfterFork: CUDA cannot be used in this process.
        """
        return self._generation is not None and self._engine.repair(self._generation, error, last=last)

    def end(self, *, failed: bool) -> None:
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
        generation, self._generation = self._generation, None
        if generation is None:
            return None
        own = bool(self._enclosing)
        self._enclosing.clear()
        token, self._token = self._token, None
        state = self._engine.state
        if token is not None:
            try:
                state.enclosing.reset(token)
            except ValueError:  # ended in another context than it began in, as dependency injectors do
                own = False
        # After a fork only the leases of the forking thread have been carried over.
        counts = self._epoch == state.epoch or (own and self._thread == threading.get_ident())
        return generation if counts else None

    def detach(self) -> None:
        """Let it outlive the context that it was taken in: a child that is forked meanwhile takes it again."""
        self._engine.state.held_leases.add(self)

    def held_here(self) -> Generation[M] | None:
        """Its generation, if this thread last used it; None otherwise and after its end."""
        return self._generation if self._thread == threading.get_ident() else None

    def survives_fork(self) -> bool:
        """Whether a child that was just forked still uses it: the forking thread holds it, outside of any context."""
        return self._generation is not None and not self._enclosing and self._thread == threading.get_ident()

    def retake_in_child(self) -> None:
        if self._generation is not None:
            self._epoch = self._engine.state.epoch
            self._generation.leases.append(None)

    def _begin(self, generation: Generation[M]) -> M:
        state = self._hold(generation)
        self._enclosing = enclosing = state.nest(generation)
        self._token = state.enclosing.set(enclosing)
        return generation.model

    def _hold(self, generation: Generation[M]) -> GuardState[M]:
        state = self._engine.state
        self._entered = True
        self._thread = threading.get_ident()
        self._epoch = state.epoch
        self._generation = generation
        return state

    def _raise_on_second_use(self) -> Never:
        raise RuntimeError(f"a lease of guard {self._engine.name!r} can be used once; call lease() again for another")
