"""``guard`` and ``ModelGuard``: a model that is replaced in time, and really gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from modelguard import _units
from modelguard.errors import GuardClosed, LoadFailed, Reloading, WouldDeadlock
from modelguard.lifecycle import circles, forking, keeper
from modelguard.lifecycle.calls import decorate
from modelguard.lifecycle.core import Core, Outcome, Ticket
from modelguard.lifecycle.flight import Flight
from modelguard.lifecycle.generation import Generation
from modelguard.lifecycle.judge import Judge
from modelguard.lifecycle.leases import Lease
from modelguard.lifecycle.patience import Patience
from modelguard.lifecycle.release import bury, see_off
from modelguard.lifecycle.trimming import Trimmer
from modelguard.telemetry.hooks import logger

if TYPE_CHECKING:
    from concurrent.futures import Future
    from types import TracebackType

    from modelguard.lifecycle.runtime import Runtime
    from modelguard.lifecycle.settings import Settings
    from modelguard.lifecycle.status import State, Status

M = TypeVar("M")
S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


class ModelGuard(Generic[M]):
    """A model with a lifecycle. Made by :func:`guard`; see there for the options.

    It is a handle (``lease``, ``load``, ``reload``, ``status``, ``close``), a decorator, and a context manager that
    loads on entry and closes on exit, for ``with`` and ``async with``.
    """

    _fork_rank = 1

    def __init__(self, settings: Settings[M], runtime: Runtime) -> None:
        self._settings = settings
        self._runtime = runtime
        self._core: Core[M] = Core(settings.name)
        self._judge = Judge(self._core, settings.reload_on, self._runtime)
        rhythm = settings.rhythm
        self._trimmer = None if rhythm is None else Trimmer(rhythm, settings.name, runtime)
        forking.remember(self)

    @property
    def name(self) -> str:
        """The guard's name, as events and errors give it."""
        return self._settings.name

    @property
    def prefork(self) -> bool:
        """Whether :func:`modelguard.prefork.prepare` shares this guard's model when no guard is named."""
        return self._settings.prefork

    def __reduce__(self) -> Any:
        raise TypeError(f"guard {self.name!r} cannot be pickled: import the module that makes it, in each process")

    def __repr__(self) -> str:
        return f"<ModelGuard {self.name!r} {self._state()}>"

    # Use

    @overload
    def __call__(self, function: classmethod[S, Concatenate[M, P], R], /) -> classmethod[S, P, R]: ...
    @overload
    def __call__(self, function: staticmethod[Concatenate[M, P], R], /) -> staticmethod[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[M, P], R], /) -> Callable[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[S, M, P], R], /) -> Callable[Concatenate[S, P], R]: ...
    def __call__(self, function: Any, /) -> Any:
        """Decorate a function that takes the model as its first parameter, after ``self`` or ``cls`` in a class.

        The decorated function is called without the model. Each call runs on one generation from start to end:
        functions, methods, class and static methods, coroutines, generators and asynchronous generators. A plain
        function that returns a lazy iterator keeps its lease until that iterator ends.

        Raises:
            InvalidOption: What is decorated is not a function, or has no parameter to take the model.
        """
        return decorate(self, function)

    def lease(self, timeout: _units.Duration | None = None) -> Lease[M]:
        """Use the model for a block: ``with guard.lease() as model:``, or ``async with`` without blocking the loop.

        Args:
            timeout: How long to wait for a generation to serve. Default: as long as the first load takes, and
                ``wait_timeout`` while a model is being replaced.

        Raises:
            GuardClosed, LoadFailed, Reloading: On entry.
        """
        return Lease(self, None if timeout is None else _units.seconds(timeout, "timeout", zero=True))

    @property
    def ready(self) -> bool:
        """Whether a generation serves: what a readiness probe should tell."""
        return self._core.serving is not None

    def load(self, timeout: _units.Duration | None = None) -> None:
        """Have a generation serve: load the model unless it is loaded. Blocks.

        Raises:
            LoadFailed: The load failed, or an earlier one did and its backoff has not passed.
            Reloading: ``timeout`` has passed.
            GuardClosed: The guard is closed.
            WouldDeadlock: Called on a running event loop (use :meth:`aload`) or by the loader itself.
        """
        circles.refuse_on_loop(self.name, "load", "aload")
        self._core.refuse_if_closed()
        self._wait_ready(self._patience(timeout))

    async def aload(self, timeout: _units.Duration | None = None) -> None:
        """:meth:`load` for a coroutine; the event loop goes on meanwhile."""
        self._core.refuse_if_closed()
        await self._await_ready(self._patience(timeout))

    def reload(self, *, wait: bool = True, timeout: _units.Duration | None = None) -> None:
        """Replace the model by one whose load begins after this call. Does not wait for a quiet moment or a backoff.

        Args:
            wait: Return when the new generation serves; else at once.
            timeout: How long to wait at most. Default: until it serves or has failed.

        Raises:
            LoadFailed: The load failed; an old generation serves on where there is one.
            Reloading: ``timeout`` has passed. The reload goes on.
            GuardClosed: The guard is closed.
            WouldDeadlock: ``wait`` was asked for inside a call on this guard, or on a running event loop.
        """
        if wait:
            circles.refuse_on_loop(self.name, "reload", "areload")
            self._refuse_inside("reload")
            with circles.waiting_for(self._core):
                pass  # refuses a loader that asks for its own reload before the request makes its load stale
        future = self._request_reload()
        if wait:
            self._settle(future, Patience(timeout))

    async def areload(self, timeout: _units.Duration | None = None) -> None:
        """:meth:`reload` for a coroutine; the event loop goes on meanwhile."""
        self._refuse_inside("areload")
        await self._asettle(self._request_reload(), Patience(timeout))

    def check(self) -> bool:
        """Ask the policies now, and trim if it is time, as the keeper thread does by itself; true if a reload began."""
        if self._trimmer is not None and (serving := self._core.serving) is not None:
            self._trimmer.check((serving.number, serving.uses))
        return self._start(self._judge.verdict(sample=True))

    def pace(self) -> float:
        """Seconds until :meth:`check` should be called again; infinity if only the ends of calls matter."""
        return self._judge.pace if self._trimmer is None else min(self._judge.pace, self._trimmer.pace)

    def close(self) -> None:
        """Refuse further calls, wait for those under way up to ``drain_timeout``, and release the model.

        Closing twice does nothing. Afterwards every use raises ``GuardClosed``.

        Raises:
            WouldDeadlock: Called inside a call on this guard, which it would wait for, or on a running event loop
                (use :meth:`aclose`).
        """
        circles.refuse_on_loop(self.name, "close", "aclose")
        self._refuse_inside("close")
        keeper.KEEPER.forget(self)
        old = self._core.close()
        if old is not None:
            see_off(self._core, old, settings=self._settings, runtime=self._runtime)

    async def aclose(self) -> None:
        """:meth:`close` for a coroutine; the event loop goes on meanwhile."""
        await asyncio.to_thread(self.close)

    def status(self) -> Status:
        """What there is to know of the guard now."""
        from modelguard.lifecycle.status import Status

        core = self._core
        with core.lock:
            serving = core.serving
            alive = {*core.draining, *core.abandoned} | ({serving} if serving is not None else set())
            return Status(
                name=self.name,
                state=self._state(),
                generation=serving.number if serving is not None else 0,
                age=self._runtime.clock() - serving.born if serving is not None else 0.0,
                uses=serving.uses if serving is not None else 0,
                in_flight=sum(len(generation.leases) for generation in alive),
                reloads=core.reloads,
                failures=core.failures,
                last_error=core.failure.reason if core.failure is not None else None,
                model_bytes=core.model_bytes,
                last_release=core.last_release,
            )

    def __enter__(self) -> ModelGuard[M]:
        self.load()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> ModelGuard[M]:
        await self.aload()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def recycle_in_children(self, ask: Callable[[tuple[str, ...]], object], *, serves: bool = True) -> None:
        """Have forked children keep the model that they share with this process.

        In a child that is forked from now on a private reload would undo the sharing. There a due policy calls
        ``ask(reasons)``, once, for the server to replace the whole worker; the model serves on until then. ``TTL`` and
        ``Modified`` mean new weights, which a fresh worker of this process would not have: children leave them to it.

        Args:
            ask: Called in the child, from whichever thread finds the policy due.
            serves: Whether this process answers requests too. If not, nothing but ``TTL`` and ``Modified`` counts here.
        """
        self._core.refuse_if_closed()
        self._judge.recycle_in_children(ask, serves=serves)

    def recycle_here(self, ask: Callable[[tuple[str, ...]], object]) -> None:
        """Have this whole process replaced instead of its model.

        From now on a due policy calls ``ask(reasons)``, once for each generation, and the model serves on. This is for
        servers whose processes each load their own model, and start a fresh one in the place of one that has to go.

        Args:
            ask: Called from whichever thread finds the policy due.
        """
        self._core.refuse_if_closed()
        self._judge.recycle_here(ask)

    # What leases and decorated functions call

    def _enter(self, timeout: float | None = None) -> Generation[M]:
        """Take a lease, after a load if need be."""
        generation = self._core.enter()
        if generation is not None:
            return generation
        patience = self._patience(timeout)
        while generation is None:
            self._wait_ready(patience)
            generation = self._core.enter()
        return generation

    def _enter_instead(self, retired: Generation[M]) -> Generation[M]:
        """Take a lease anew, after one that was taken on a generation in the moment of its retirement."""
        retired.leases.pop()
        self._look(retired)
        return self._enter()

    async def _aenter(self, timeout: float | None = None) -> Generation[M]:
        generation = self._core.enter()
        if generation is not None:
            return generation
        patience = self._patience(timeout)
        while generation is None:
            await self._await_ready(patience)
            generation = self._core.enter()
        return generation

    def _leave(self, generation: Generation[M], *, failed: bool) -> None:
        """Return a lease; see to what its end may have brought about."""
        if self._core.leave(generation, failed):
            self._look(generation)

    def _look(self, generation: Generation[M]) -> None:
        if not generation.retired:
            self._start(self._judge.verdict(sample=False))
        elif self._core.ended(generation):
            self._bury(generation)

    def _bury(self, generation: Generation[M]) -> None:
        """Release an abandoned generation after its last call, which is not to wait for that."""

        def work() -> None:
            bury(self._core, generation, settings=self._settings, runtime=self._runtime, drain_seconds=None)

        try:
            self._runtime.start_thread(work, f"modelguard-release-{self.name}")
        except RuntimeError:  # no thread to be had
            work()

    # Waiting

    def _wait_ready(self, patience: Patience) -> None:
        future = self._join_load()
        if future is not None:
            self._settle(future, patience)

    async def _await_ready(self, patience: Patience) -> None:
        future = self._join_load()
        if future is not None:
            await self._asettle(future, patience)

    def _settle(self, future: Future[Outcome], patience: Patience) -> None:
        """Wait, and raise what the wait ended in if it did not end in a generation."""
        try:
            with circles.waiting_for(self._core):
                outcome = future.result(patience.left())
        except TimeoutError:
            raise Reloading(self.name, waited=patience.waited()) from None
        finally:
            self._core.forget(future)
        _raise(outcome)

    async def _asettle(self, future: Future[Outcome], patience: Patience) -> None:
        try:
            with circles.waiting_for(self._core):
                outcome = await asyncio.wait_for(asyncio.wrap_future(future), patience.left())
        except TimeoutError:
            raise Reloading(self.name, waited=patience.waited()) from None
        finally:
            self._core.forget(future)
        _raise(outcome)

    def _patience(self, timeout: _units.Duration | None) -> Patience:
        """A first load may take as long as it takes; a replacement is waited for up to ``wait_timeout``."""
        default = self._settings.wait_timeout if self._core.generations else None
        return Patience(default if timeout is None else timeout)

    def _join_load(self) -> Future[Outcome] | None:
        """Wait with all others for the one load, which is begun if need be; None if a generation serves already."""
        core = self._core
        with core.lock:
            core.refuse_if_closed()
            if core.serving is not None:
                return None
            left = core.retry_at - self._runtime.clock()
            if core.ticket is None and core.failure is not None and left > 0:
                raise core.failure.again(left)
            future = core.wait()
            ticket = core.request_if_idle(("retry" if core.failures else "first use",), urgent=True)
        self._start(ticket)
        return future

    def _request_reload(self) -> Future[Outcome]:
        with self._core.lock:
            request, ticket = self._core.request(("requested",), urgent=True)
            future = self._core.waiter_for(request)
        self._start(ticket)
        return future

    def _start(self, ticket: Ticket | None) -> bool:
        if ticket is None:
            return False
        try:
            if self._runtime.kept:
                keeper.KEEPER.keep(self)
            self._runtime.start_thread(lambda: self._fly(ticket), f"modelguard-load-{self.name}")
        except RuntimeError as error:  # no thread to be had, or the interpreter is shutting down
            # Told to those who wait and not raised: this may be the end of a call that went well.
            self._flight(ticket).fail(LoadFailed, str(error), error)
            return False
        return True

    def _fly(self, ticket: Ticket | None) -> None:
        while ticket is not None:
            ticket = self._flight(ticket).run(self._loaded)

    def _loaded(self) -> None:
        """See to what follows from a load, while its ticket is held: a request in between would get another thread."""
        try:
            self._judge.verdict_after_load()
        except Exception:  # noqa: BLE001 - a fault here must not lose the next ticket, for which others wait
            logger.exception("modelguard could not ask the policies of %r", self)
        if self._settings.reload_on is None and self._trimmer is None and not self._core.failures:
            keeper.KEEPER.forget(self)  # nothing can become due by itself, and a process that forks needs no thread

    def _flight(self, ticket: Ticket) -> Flight[M]:
        return Flight(self._core, self._settings, self._runtime, self._judge.watch, ticket)

    # Refusals

    def _refuse_inside(self, action: str) -> None:
        generation = self._core.inside()
        if generation is not None and not generation.dropped:
            raise WouldDeadlock(
                self.name,
                why=f"{action}() inside a call on the same guard would wait for that call to end",
                fix="Call it outside, or use reload(wait=False).",
            )

    def _state(self) -> State:
        core = self._core
        with core.lock:
            if core.closed:
                return "closed"
            if core.serving is not None:
                return "degraded" if core.failures else "reloading" if core.ticket and core.ticket.replaces else "ready"
            if core.ticket is not None:
                return "draining" if core.generations else "loading"
            return "failed" if core.failures else "new"

    # Fork

    def _before_fork(self) -> None:
        self._core.lock.acquire()

    def _after_fork_in_parent(self) -> None:
        self._core.lock.release()

    def _after_fork_in_child(self) -> None:
        self._core.after_fork_in_child(self._runtime.random())
        self._judge.after_fork_in_child()
        if self._trimmer is not None:
            self._trimmer.after_fork_in_child()


def _raise(outcome: Outcome) -> None:
    # Afresh for each caller: an exception object raised in several threads would mix up their tracebacks.
    if isinstance(outcome, LoadFailed):
        raise outcome.again(outcome.retry_after) from outcome.__cause__
    if outcome is not None:
        raise GuardClosed(outcome.guard)
