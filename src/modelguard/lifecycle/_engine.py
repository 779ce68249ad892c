"""The engine of one guard, which lends its model to calls, answers commands and closes; and a lease as an object.

Leases, decorated functions, ``ModelGuard`` and the pool all stand on this. A call goes one way: enter, run, leave. So
does a load: request, :class:`~modelguard.lifecycle._reload.Reload` (load, install, drain, release), finish.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Token
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Never, TypeVar

from modelguard import _units, telemetry
from modelguard.errors import InvalidOption, LoadFailed, NoPreviousModel, WouldDeadlock
from modelguard.lifecycle import _load_waits, _misuse, _reload
from modelguard.lifecycle._checks import Checks
from modelguard.lifecycle._load_waits import until_ended, until_loaded
from modelguard.lifecycle._release import drain_and_release, release_and_report, unload
from modelguard.lifecycle._reload import Reload, free, named
from modelguard.lifecycle._state import Enclosing, Generation, GuardContext, GuardState, LoadJob, Outcome
from modelguard.lifecycle.policies import subset
from modelguard.lifecycle.runtime import Fingerprint
from modelguard.runtime import fork, own_thread, waiting
from modelguard.runtime.background import TICKER
from modelguard.runtime.fork import WeakRegistry
from modelguard.runtime.waiting import Steps, Timeout, resolve
from modelguard.telemetry import _hooks
from modelguard.telemetry.reasons import Reason

if TYPE_CHECKING:
    from types import TracebackType

    from modelguard.lifecycle._guard_options import GuardOptions
    from modelguard.lifecycle.runtime import Runtime


M = TypeVar("M")

_MEANWHILE = (Reason("requested", "requested during a load"),)


Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]

#: Results of these types cannot be lazy. One look-up in this set saves two failed attribute look-ups on most calls.
EAGER = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset})

_engines: WeakRegistry[Engine[Any]] = WeakRegistry()
fork.at_fork(fork.Rank.IMPORTS, before=fork.finish_imports)


def engines() -> tuple[Engine[Any], ...]:
    return tuple(_engines)


def _unload_all(seconds: float) -> None:
    """At interpreter exit: close the files, threads and connections of models."""
    until = time.monotonic() + seconds
    for engine in engines():
        engine.unload_at_exit(max(0.0, until - time.monotonic()))


class Engine(GuardContext[M], fork.Forkable):
    """Runs one guard. Its loads run one at a time, and all who need the model join them.

    Attributes:
        checks: Ask the policies, and start what is due.
        changed: Called when a load has ended, and while :attr:`GuardState.watched` at the end of each call.
    """

    fork_rank = fork.Rank.GUARD

    def __init__(self, options: GuardOptions[M], runtime: Runtime) -> None:
        super().__init__(options, runtime)
        self.checks = Checks(self, self._start)
        self.changed: Callable[[], object] = lambda: None
        _hooks.import_events()
        _engines.add(self)
        if options.unload is not None:
            fork.before_exit("models", _unload_all)
        fork.register(self)

    def __repr__(self) -> str:
        return f"<Engine of guard {self.name!r}>"

    @property
    def loading(self) -> bool:
        """Whether a load is under way, or the release of what it replaced."""
        return self.state.job is not None

    def _check_keep(self) -> None:
        """Refuse to load a model in a process where ``keep="mold"`` has no meaning. Before, nobody can know."""
        if self.options.keeps_mold and self.options.workers is None and not self.runtime.in_mold:
            why = f"is for the workers of an isolated function, and guard {self.name!r} loads its model in this process"
            fix = "Put @isolate() above the guard's decorator, or leave keep out to release the model."
            raise InvalidOption("keep", "mold", why=why, fix=fix)

    def _request_reload(self) -> Future[Outcome]:
        self._check_keep()
        if (renew := self.checks.renew) is not None:
            self.state.raise_if_closed()
            renew()
            asked: Future[Outcome] = Future()
            asked.set_result(None)  # whoever waits for more would wait for the end of this process
            return asked
        future, job = self.state.request((Reason("requested", "requested"),))
        self._start(job)
        return future

    def _start(self, job: LoadJob | None) -> bool:
        if job is None:
            return False
        try:
            if self.runtime.ticks:
                TICKER.add(self)
            self.runtime.start_thread(lambda: self._run(job), f"modelguard-load-{self.name}")
        except RuntimeError as error:  # the system gives no thread, or the interpreter is shutting down
            if job.unloads:
                return self._start(self.state.finish(job, _MEANWHILE))
            # Reported to those who wait and not raised: this may be the end of a call that succeeded.
            self._reload(job).fail(LoadFailed, str(error), error)
            self.changed()
            return False
        return True

    def _run(self, job: LoadJob | None) -> None:
        while job is not None:
            self._reload(job).run()
            self.checks.after_load()  # before the job ends: a request in between would start another thread
            if not self.checks.needed and not self.state.failures:
                TICKER.remove(self)  # nothing can become due, and a process that forks should have few threads
            job = self.state.finish(job, _MEANWHILE)
            self.changed()
            if job is not None and self.runtime.ticks:
                with suppress(RuntimeError):  # the interpreter is shutting down
                    TICKER.add(self)
        current = self.state.current
        if current is not None and current.uses >= current.alarm:
            # The ends of calls start nothing as long as there is a job, and one may just have seen this job.
            self.checks.ask(sample=False, insist=True)

    def _reload(self, job: LoadJob) -> Reload[M]:
        return Reload(self, self.checks.readings, job)

    # Waiting

    def _limit(self, timeout: _units.Duration | None) -> Timeout:
        """A first load may take as long as it takes; a replacement is awaited for up to ``wait_timeout``."""
        return Timeout(self.load_patience if timeout is None else timeout)

    @property
    def load_patience(self) -> float | None:
        """Seconds that a call waits for the load that it joins; None for as long as that takes."""
        return self.options.wait_timeout if self.state.generations else None

    def _until_loaded(self, limit: Timeout) -> Steps[None]:
        if _reload.active():
            yield _reload.Inline(self)
        elif (future := self.join_load()) is not None:
            yield from until_loaded(self.state, future, limit)

    def until_entered(self, timeout: float | None) -> Steps[Generation[M]]:
        """Take a lease, after a load if need be.

        Raises:
            GuardClosed, LoadFailed, Reloading, WouldDeadlock: There is no generation to run on.
        """
        limit = self._limit(timeout)
        while (generation := self.state.enter()) is None:
            yield from self._until_loaded(limit)
        return generation

    def join_load(self) -> Future[Outcome] | None:
        """Join the one load, started here if need be; None if there is a current generation already. Does not block.

        Raises:
            GuardClosed, LoadFailed: None begins.
        """
        if _reload.active():
            _reload.load(self)
            return None
        state = self.state
        with state.lock:
            state.raise_if_closed()
            if state.current is not None:
                return None
            self._check_keep()
            left = state.retry_at - self.runtime.clock()
            if state.job is None and state.failure is not None and left > 0:
                raise state.failure.again(left)
            future = state.wait_for()
            if state.failures:
                reason = Reason("retry", "retry")
            else:
                reason = Reason("woken", "next use") if state.unloaded else Reason("first_use", "first use")
            job = state.request_if_idle((reason,), urgent=True)
        self._start(job)
        return future

    # What the ticker asks

    def check(self) -> bool:
        return self.checks.check()

    def tick(self) -> None:
        self.checks.tick()

    def check_interval(self) -> float:
        """Seconds until :meth:`check` should be called again; infinity if only the ends of calls matter."""
        return self.checks.interval

    def follow(self, options: GuardOptions[M], files: Mapping[Path, Fingerprint | None]) -> None:
        """Go by other options from now on. For the guard of molds, whose load under way has found them.

        Args:
            options: The options.
            files: What the paths were that their policy watches, before that load read them.
        """
        self.options = options
        self.checks.follow(options.reload_on, files)

    # Calls

    def enter(self, timeout: float | None = None) -> Generation[M]:
        generation = self.state.enter()
        return waiting.block(self.until_entered(timeout)) if generation is None else generation

    async def aenter(self, timeout: float | None = None) -> Generation[M]:
        generation = self.state.enter()
        if generation is None:
            self.state.raise_if_closed()  # whatever the loop
            generation = await waiting.suspend(self.until_entered(timeout))
        return generation

    def leave(self, generation: Generation[M], *, failed: bool) -> None:
        if self.state.leave(generation, failed):
            self._after_call(generation)

    def leave_dropped(self, generation: Generation[M]) -> None:
        """Return a lease that nobody has ended. Takes no lock: the garbage collector may have interrupted any code.

        So no policy is asked, and no hook called, which may wait for a lock that this thread holds: the next call asks,
        or the ticker.
        """
        state = self.state
        if state.leave(generation, False) and (generation.retired or state.watched):  # noqa: FBT003 - by position, it is the hot path
            self._in_background(partial(self._after_call, generation))

    def wrapper(  # noqa: C901 - the hot path is written out
        self, is_lazy: Callable[[type], bool], keep: Callable[[Generation[M], Any], Any]
    ) -> Wrapper:
        """Make the body of a decorated plain function.

        This is the hot path. It writes out :meth:`GuardState.enter`, :meth:`GuardState.nest` and a lease, and makes
        nothing but the context's list and token: 300 ns over a bare decorator. Everything else uses leases.

        Args:
            is_lazy: Whether a result of this type does its work later.
            keep: Hands a lease that was taken on this generation over to a lazy result.
        """
        state = self.state
        enclosing = state.enclosing

        def again(generation: Generation[M], wrapped: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            result = wrapped(generation.model, *args, **kwargs)
            if not is_lazy(type(result)):
                return result
            generation.leases.append(None)
            return keep(generation, result)

        def call(wrapped: Callable[..., Any], _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            generation = state.current
            if generation is None or enclosing.get():
                generation = self.enter()
                mine = state.nest(generation)
            else:
                mine = [generation, 1]
                generation.leases.append(None)
                if generation.retired:  # in this very moment
                    generation = mine[0] = self._enter_instead_of(generation)
            token, failed = None, False
            try:
                token = enclosing.set(mine)
                result = wrapped(generation.model, *args, **kwargs)
                if (kind := type(result)) in EAGER or not is_lazy(kind):
                    return result
                generation.leases.append(None)  # besides the call's own, which ends now
                return keep(generation, result)
            except TypeError as error:
                if (misuse := _misuse.wrong_arguments(error, wrapped, args, kwargs)) is not None:
                    raise misuse from None  # says nothing about the model, so it does not count as its failure
                failed = True
                raise
            except Exception as error:
                failed = True
                if not self.repair(generation, error):
                    raise
                result = again(generation, wrapped, args, kwargs)
                failed = False
                return result
            finally:
                mine.clear()
                look_further = state.leave(generation, failed)
                if token is not None:
                    enclosing.reset(token)
                if look_further:
                    self._after_call(generation)

        return call

    def repair(self, generation: Generation[M], error: Exception) -> bool:
        """Free the GPU memory that a failed call has left, if that was its trouble; whether to run the call again.

        Raises:
            CudaAfterFork: CUDA cannot be used in this process.
        """
        if (better := named(self.name, self.runtime.gpu, error)) is not error:
            raise better
        if not self.runtime.gpu.is_out_of_memory(error):
            return False
        reasons = free(self, generation, error)
        if reasons and generation is self.state.current:
            self.checks.demand(reasons, generation)
        return self.options.retry

    def _enter_instead_of(self, retired: Generation[M]) -> Generation[M]:
        """Take a lease again, after one that was taken in the moment of the generation's retirement."""
        retired.leases.pop()
        self._after_call(retired)
        return self.enter()

    def _after_call(self, generation: Generation[M]) -> None:
        if not generation.retired:
            self.checks.ask(sample=False)
        elif self.state.retired_call_ended(generation):
            # After the last call on an abandoned generation, which must not wait for its release.
            self._in_background(partial(release_and_report, self, generation, drain_seconds=None))
        if self.state.watched:
            self.changed()

    # Loads

    def load(self, timeout: _units.Duration | None = None) -> None:
        waiting.raise_on_event_loop(self.name, "load", "await guard.aload()")
        self.ensure_loaded(timeout)

    def ensure_loaded(self, timeout: _units.Duration | None = None) -> None:
        """:meth:`load`, on an event loop too, which it then blocks."""
        self.state.raise_if_closed()
        waiting.block(self._until_loaded(self._limit(timeout)))

    async def aload(self, timeout: _units.Duration | None = None) -> None:
        limit = self._limit(timeout)
        self.state.raise_if_closed()
        if self.state.current is None:
            await waiting.suspend(self._until_loaded(limit))

    def reload(self, *, wait: bool, timeout: _units.Duration | None = None) -> None:
        limit = Timeout(timeout)  # first: a mistake must not begin a load
        if wait:
            waiting.raise_on_event_loop(self.name, "reload", "await guard.areload()")
            self.raise_inside_call("reload")
            with _load_waits.waiting_for(self.state):
                pass  # a loader that asks for its own reload is refused before the request makes its load stale
            waiting.block(self._until_reloaded(limit))
        else:
            self._request_reload()

    async def areload(self, timeout: _units.Duration | None = None) -> None:
        limit = Timeout(timeout)
        self.raise_inside_call("areload")
        await waiting.suspend(self._until_reloaded(limit))

    def _until_reloaded(self, limit: Timeout) -> Steps[None]:
        yield from until_loaded(self.state, self._request_reload(), limit)

    def unload(self, timeout: _units.Duration | None = None) -> None:
        waiting.raise_on_event_loop(self.name, "unload", "await guard.aunload()")
        waiting.block(self._until_unloaded(Timeout(timeout)))

    async def aunload(self, timeout: _units.Duration | None = None) -> None:
        await waiting.suspend(self._until_unloaded(Timeout(timeout)))

    def _until_unloaded(self, limit: Timeout) -> Steps[None]:
        self.raise_inside_call("unload")
        self.state.raise_if_closed()
        if _reload.active():
            _reload.unload(self)
            return
        with _load_waits.waiting_for(self.state):
            yield from until_ended(self.state, self.state.withdraw(), limit)  # a first load counts too
            job = None
            while self.state.current is not None and job is None:
                job = self.state.request_if_idle((Reason("requested", "requested"),), urgent=True, unloads=True)
                self._start(job)
                yield from until_ended(self.state, job or self.state.withdraw(), limit)

    def rollback(self) -> None:
        """Make the generation that the current one has replaced current again; a load under way is cancelled.

        The one that took calls is released in the background. Nothing is loaded.

        Raises:
            NoPreviousModel: None is kept.
            GuardClosed: The guard is closed.
        """
        swapped = self.state.roll_back(LoadFailed(self.name, "rollback() was called during the load"))
        if swapped is None:
            why, fix = "the guard keeps none", "Make it with guard(..., swap=Swap(keep_previous=True))."
            if self.options.swap.keep_previous:
                why = (
                    "no reload has kept one since the first load, the last rollback, a release or a shortage of memory"
                )
                fix = "Call reload() to load a model."
            raise NoPreviousModel(self.name, why=why, fix=fix)
        back, old = swapped
        self.shown.show(back.version)
        telemetry.emit(
            telemetry.RolledBack(
                guard=self.name,
                generation=back.number,
                version=back.version,
                replaced=old.number,
                replaced_version=old.version,
            )
        )
        self._in_background(partial(drain_and_release, self, old))

    def _in_background(self, work: Callable[[], None]) -> None:
        self.runtime.in_background(work, f"modelguard-release-{self.name}")

    def warm_up(self) -> None:
        warmup, generation = self.options.warmup, self.state.current
        if warmup is not None and generation is not None:
            with self.state.running_on(generation), own_thread.stay():
                resolve(warmup(generation.model))
            generation.uses = generation.errors = 0  # as after a load: a warm-up is not a request

    @property
    def ready(self) -> bool:
        state = self.state
        ready_when_idle = state.unloaded and not state.failures and self.options.ready_when_idle
        return state.current is not None or ready_when_idle

    def raise_inside_call(self, action: str) -> None:
        """Refuse an action that would wait for the end of a call that encloses it.

        Raises:
            WouldDeadlock: This context is inside a call on the guard.
        """
        generation = self.state.enclosing_generation()
        if generation is not None and not generation.dropped:
            raise WouldDeadlock(
                self.name,
                why=f"{action}() inside a call on the same guard would wait for that call to end",
                fix="Call it outside." if action == "close" else "Call it outside, or use reload(wait=False).",
            )

    # Policies

    def set_paused(self, *, paused: bool) -> None:
        with self.state.lock:  # so that what is shown is what is set
            changed = self.state.set_paused(paused=paused)
            self.shown_pause.show(paused=paused)
        if changed:
            telemetry.emit((telemetry.GuardPaused if paused else telemetry.GuardResumed)(guard=self.name))
        if not paused and self.checks.needed and self.state.current is not None and self.runtime.ticks:
            with suppress(RuntimeError):  # the system gives no thread; the next call tries again
                TICKER.add(self)  # and wake it

    def stop_checks(self) -> None:
        """Ask the policies no longer as time passes: nobody can call any more."""
        TICKER.remove(self)

    @property
    def renews_weights(self) -> bool:
        """Whether a part of the policy asks for new weights (``TTL``, ``Modified``, ``Changed``)."""
        return subset(self.options.reload_on, renews=True) is not None

    # The end, and forks

    def reopen(self) -> None:
        self.state.reopen()

    def close(self, timeout: float | None = None) -> None:
        self.check_closable()
        self.shut_down(timeout)

    def check_closable(self) -> None:
        """Check that nobody waits for the end of calls that would wait for this thread.

        Raises:
            WouldDeadlock: On an event loop, or inside a call.
        """
        waiting.raise_on_event_loop(self.name, "close", "await guard.aclose()")
        self.raise_inside_call("close")

    def shut_down(self, timeout: float | None = None) -> None:
        """:meth:`close` without its checks, for an owner that has made them."""
        TICKER.remove(self)
        for old in (self.state.close(), self.state.take_previous()):  # once it is closed, nothing is kept any more
            if old is not None:
                drain_and_release(self, old, timeout)
        if self.recorded is not None:
            self.recorded.clear()

    def unload_at_exit(self, seconds: float) -> None:
        """Call the ``unload`` hook, unless calls still run on the model after ``seconds`` or a parent loaded it."""
        state = self.state
        for old in (state.close(), state.take_previous()) if self.options.unload is not None else ():
            if old is None or old.pid != os.getpid() or state.drain(old, seconds):
                continue
            error = unload(self, old.drop())
            if error is not None:
                telemetry.emit(telemetry.CallbackErrored(guard=self.name, callback="unload", error=error))

    def before_fork(self) -> None:
        self.state.lock.acquire()

    def after_fork_in_parent(self) -> None:
        self.state.lock.release()

    def after_fork_in_child(self) -> None:
        self.state.after_fork_in_child(self.runtime.random())
        self.checks.after_fork_in_child()
        if self.recorded is not None:
            self.recorded.after_fork_in_child()


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_with(error)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
    def engine(self) -> Engine[M]:
        return self._engine

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

    def repair(self, error: Exception) -> bool:
        """Do what a failed call needs; whether it may run again on this lease. It must be ended in any case.

        Raises:
            CudaAfterFork: CUDA cannot be used in this process.
        """
        return self._generation is not None and self._engine.repair(self._generation, error)

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
