"""The engine of one guard, which lends its model to calls, answers commands and closes; and how calls wait for a load.

Leases, decorated functions, ``ModelGuard`` and the pool all stand on this. A call goes one way: enter, run, leave. So
does a load: request, :class:`~modelguard.lifecycle._reload.Reload` (load, install, drain, release), finish.
"""

from __future__ import annotations

import asyncio
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from traceback import walk_stack
from types import CoroutineType, FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from modelguard import telemetry
from modelguard.errors import GuardClosed, InvalidOption, LoadFailed, NoPreviousModel, Reloading, WouldDeadlock
from modelguard.lifecycle import _misuse
from modelguard.lifecycle._policy_checks import PolicyChecks
from modelguard.lifecycle._release import drain_and_release, release_and_report, unload
from modelguard.lifecycle._reload import Inline, Reload, free, named
from modelguard.lifecycle._state import Enclosing, Generation, GuardContext, GuardState, LoadJob, Outcome
from modelguard.lifecycle.policies import subset
from modelguard.lifecycle.system import Fingerprint
from modelguard.runtime import call_context, fork_hooks, waiting
from modelguard.runtime.background import TICKER
from modelguard.runtime.fork_hooks import WeakRegistry
from modelguard.runtime.waiting import Steps, Timeout, Wait, resolve
from modelguard.telemetry import _hooks
from modelguard.telemetry.reasons import Reason

if TYPE_CHECKING:
    from modelguard.lifecycle._guard_options import GuardOptions
    from modelguard.lifecycle.system import System


M = TypeVar("M")

_MEANWHILE = (Reason("requested", "requested during a load"),)


Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]

#: Results of these types cannot be lazy. One look-up in this set saves two failed attribute look-ups on most calls.
#: Files in memory are iterators, but hold all their content already.
EAGER = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset})
EAGER |= {io.BytesIO, io.StringIO}


def is_lazy(kind: type) -> bool:
    """Whether a result of this type does its work after the call has returned: a generator, a coroutine, a future."""
    if kind in EAGER:
        return False
    if hasattr(kind, "__next__") or hasattr(kind, "__anext__"):
        return True
    return kind is CoroutineType or hasattr(kind, "add_done_callback")


engines: WeakRegistry[Engine[Any]] = WeakRegistry()
fork_hooks.at_fork(fork_hooks.Rank.IMPORTS, before=fork_hooks.finish_imports)


def _unload_all(seconds: float) -> None:
    """At interpreter exit: close the files, threads and connections of models."""
    until = time.monotonic() + seconds
    for engine in engines:
        engine.unload_at_exit(max(0.0, until - time.monotonic()))


fork_hooks.before_exit("models", _unload_all)


class Engine(GuardContext[M], fork_hooks.Forkable):
    """Runs one guard. Its loads run one at a time, and all who need the model join them."""

    fork_rank = fork_hooks.Rank.GUARD

    def __init__(self, options: GuardOptions[M], system: System) -> None:
        super().__init__(options, system)
        self.checks = PolicyChecks(self, self._start)  # ask the policies, and start what is due
        #: Called when a load has ended, and while :attr:`GuardState.watched` at the end of each call.
        self.changed: Callable[[], object] = lambda: None
        #: Called when it is closed or rolled back: ends a load, where one can be ended. Does not block.
        self.end_load: Callable[[], object] = lambda: None
        _hooks.import_events()
        engines.add(self)
        fork_hooks.register(self)

    def __repr__(self) -> str:
        return f"<Engine of guard {self.name!r}>"

    @property
    def loading(self) -> bool:
        """Whether a load is under way, or the release of what it replaced."""
        return self.state.job is not None

    def _check_keep(self) -> None:
        """Refuse to load a model in a process where ``keep="mold"`` has no meaning. Before, nobody can know."""
        policy = self.options.reload_on
        if policy is not None and policy.ends_workers and self.options.workers is None and not self.system.in_mold:
            why = f"is for the workers of an isolated function, and guard {self.name!r} loads its model in this process"
            fix = "Put @isolate() above the guard's decorator, or leave keep out to release the model."
            raise InvalidOption("keep", "mold", why=why, fix=fix)

    def request_reload(self) -> Future[Outcome]:
        """Begin a reload, and wait for nothing."""
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
            if self.system.ticks:
                TICKER.add(self)
            self.system.start_thread(lambda: self._run(job), f"modelguard-load-{self.name}")
        except RuntimeError as error:  # the system gives no thread, or the interpreter is shutting down
            if job.unloads:
                if waiting.on_any_loop():
                    self._start(self.state.finish(job, _MEANWHILE))
                    return False
                self._run(job)  # a release needs no thread of its own
                return True
            # Reported to those who wait and not raised: this may be the end of a call that succeeded.
            self._reload(job).fail(LoadFailed, str(error), error)
            self.changed()
            return False
        return True

    def _run(self, job: LoadJob | None) -> None:
        while job is not None:
            self._reload(job).run()
            self.checks.after_load()  # before the job ends: a request in between would start another thread
            if not self.checks.needed and self.state.failure is None:
                TICKER.remove(self)  # nothing can become due, and a process that forks should have few threads
            job = self.state.finish(job, _MEANWHILE)
            self.changed()
            if job is not None and self.system.ticks:
                with suppress(RuntimeError):  # the interpreter is shutting down
                    TICKER.add(self)
        current = self.state.current
        if current is not None and current.uses >= current.alarm:
            # The ends of calls start nothing as long as there is a job, and one may just have seen this job.
            self.checks.ask(sample=False, insist=True)

    def _reload(self, job: LoadJob) -> Reload[M]:
        return Reload(self, self.checks.readings, job, lent=partial(_is_lent_the_turn, self.state))

    # Waiting

    @property
    def load_patience(self) -> float | None:
        """Seconds that a call waits for the load that it joins; None for as long as that takes, as at the first one."""
        return self.options.wait_timeout if self.state.generations else None

    def until_loaded(self, limit: Timeout) -> Steps[None]:
        if call_context.is_inline():
            yield Inline(self)
        elif (future := self.join_load()) is not None:
            yield from until_there(self.state, future, limit)

    def until_leased(self, mine: Enclosing, timeout: float | None) -> Steps[Generation[M]]:
        """Take a lease, after a load if need be; an error if there is no generation to run on."""
        limit = Timeout(self.load_patience if timeout is None else timeout)
        while (generation := self.state.take_lease(mine)) is None:
            yield from self.until_loaded(limit)
        return generation

    def join_load(self) -> Future[Outcome] | None:
        """Join the one load, started here if need be; None if there is a current generation already. Does not block."""
        if call_context.is_inline():
            Inline(self).block()
            return None
        state = self.state
        with state.lock:
            state.raise_if_closed()
            if state.current is not None:
                return None
            self._check_keep()
            left = state.retry_at - self.system.clock()
            if state.job is None and state.failure is not None and left > 0:
                raise state.failure.again(left)
            future = state.wait_for()
            if state.failure is not None:
                reason = Reason("retry", "retry")
            else:
                reason = Reason("woken", "next use") if state.unloaded else Reason("first_use", "first use")
            job = state.request_if_idle((reason,), urgent=True)
        self._start(job)
        return future

    # What the ticker asks

    def check(self) -> bool:
        return self.checks.ask(sample=True)

    def tick(self) -> None:
        self.checks.tick()

    def check_interval(self) -> float:
        """Seconds until :meth:`check` should be called again; infinity if only the ends of calls matter."""
        return self.checks.interval

    def follow(self, options: GuardOptions[M], files: Mapping[Path, Fingerprint | None]) -> None:
        """Go by other options from now on. For the guard of molds, whose load under way has found them.

        ``files`` are what the paths were that their policy watches, before that load read them.
        """
        self.options = options
        self.checks.decide_by(options.reload_on, files)

    # Calls

    def wait_for_lease(self, mine: Enclosing, timeout: float | None = None) -> Generation[M]:
        return waiting.block(self.until_leased(mine, timeout))

    def plain_call(self, keep: Callable[[Generation[M], Any], Any]) -> Wrapper:  # noqa: C901 - the hot path
        """Make the body of a decorated plain function.

        This is the hot path. It writes out a :class:`Lease` and :meth:`GuardState.count_use`, and makes nothing but the
        context's list and token: 350 ns over a bare decorator. Everything else uses leases.

        ``keep`` has a lazy result take a lease of its own on the generation.
        """
        state = self.state
        enclosing, take_lease = state.enclosing, state.take_lease

        def hand_over(generation: Generation[M], result: Any) -> Any:
            """Give a lazy result a lease besides the call's own, which ends now: it counts as one use, at its end."""
            generation.uses -= 1
            return keep(generation, result)

        def again(generation: Generation[M], wrapped: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            try:
                result = wrapped(generation.model, *args, **kwargs)
            except Exception as error:
                self.repair(generation, error, last=True)
                raise
            return hand_over(generation, result) if is_lazy(type(result)) else result

        def call(wrapped: Callable[..., Any], _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            mine: Enclosing = []
            token, failed = None, None  # nothing is known of the model yet
            try:
                generation = take_lease(mine) or self.wait_for_lease(mine)
                token = enclosing.set(mine)
                try:
                    result = wrapped(generation.model, *args, **kwargs)
                    if (kind := type(result)) in EAGER or not is_lazy(kind):
                        failed = False
                        return result
                    return hand_over(generation, result)
                except TypeError as error:
                    if (misuse := _misuse.wrong_arguments(error, wrapped, args, kwargs)) is not None:
                        raise misuse from None  # says nothing about the model
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
                if mine:
                    used: Generation[M] = mine[0]
                    mine *= 0  # empties it, in less time than ``del mine[:]``
                    used.leases.pop()
                    if failed is not False:
                        look_further = state.count_use(used, failed)
                    else:
                        used.uses = uses = used.uses + 1
                        used.errors = 0
                        look_further = uses >= used.alarm
                    if token is not None:
                        enclosing.reset(token)
                    if look_further:
                        self.after_call(used)

        return call

    def repair(self, generation: Generation[M], error: Exception, *, last: bool = False) -> bool:
        """Free the GPU memory that a failed call has left, if that was its trouble; whether to run the call again."""
        if (better := named(self.name, self.system.gpu, error)) is not error:
            raise better
        if not self.system.gpu.is_out_of_memory(error):
            return False
        retry = self.options.retry and not last
        reasons = free(self, generation, error, retry=retry)
        if reasons and generation is self.state.current:
            self.checks.demand(reasons, generation)
            self._wake_checks()  # it may have to wait
        return retry

    def after_call(self, generation: Generation[M]) -> None:
        if not generation.retired:
            self.checks.ask(sample=False)
        elif self.state.retired_call_ended(generation):
            # After the last call on an abandoned generation, which must not wait for its release.
            self._in_background(partial(release_and_report, self, generation, drain_seconds=None))
        if self.state.watched:
            self.changed()

    def after_dropped(self, generation: Generation[M]) -> None:
        """:meth:`after_call` where the garbage collector may have interrupted any code, with any lock held."""
        if generation.retired or self.state.watched:
            self._in_background(partial(self.after_call, generation))

    # Loads

    def until_reloaded(self, limit: Timeout) -> Steps[None]:
        self.raise_inside_call("reload")
        raise_on_circle(self.state)  # a loader is refused before its request makes its own load stale
        yield from until_there(self.state, self.request_reload(), limit)

    def until_unloaded(self, limit: Timeout) -> Steps[None]:
        self.raise_inside_call("unload")
        self.state.raise_if_closed()
        if call_context.is_inline():
            self.state.retire_until_next_use(if_unused=False)
            return
        with LoadWait(self.state), self.state.about_to_unload():
            yield from until_ended(self.state, self.state.job, limit)  # a load that has nothing to replace counts too
            job = None
            while self.state.current is not None and job is None:
                job = self.state.request_if_idle((Reason("requested", "requested"),), urgent=True, unloads=True)
                if not self._start(job) and job is not None:
                    raise RuntimeError(f"guard {self.name!r} was not unloaded: the system gives no thread")
                yield from until_ended(self.state, job or self.state.job, limit)
            self.state.end_outage()

    def rollback(self) -> None:
        """Make the generation that the current one has replaced current again; a load under way is cancelled.

        The one that took calls is released in the background. Nothing is loaded.
        """
        swapped = self.state.roll_back(LoadFailed(self.name, "rollback() was called during the load"), self.end_load)
        if swapped is None:
            if not self.options.swap.keep_previous:
                fix = "Make it with guard(..., swap=Swap(keep_previous=True))."
                raise NoPreviousModel(self.name, why="the guard keeps none", fix=fix)
            why = "no reload has kept one since the first load, the last rollback, a release or a shortage of memory"
            raise NoPreviousModel(self.name, why=why)
        back, old = swapped
        self.shown.show(back.version)
        event = telemetry.RolledBack(
            guard=self.name,
            generation=back.number,
            version=back.version,
            replaced=old.number,
            replaced_version=old.version,
        )
        telemetry.emit(event)
        self._in_background(partial(drain_and_release, self, old))

    def _in_background(self, work: Callable[[], None]) -> None:
        self.system.in_background(work, f"modelguard-release-{self.name}")

    def warm_up(self) -> None:
        warmup, generation = self.options.warmup, self.state.current
        if warmup is not None and generation is not None:
            with self.state.running_on(generation), call_context.stay():
                resolve(warmup(generation.model))
            generation.uses = generation.errors = 0  # as after a load: a warm-up is not a request

    @property
    def ready(self) -> bool:
        state = self.state
        ready_when_idle = state.unloaded and state.failure is None and self.options.ready_when_idle
        return state.current is not None or ready_when_idle

    def raise_inside_call(self, action: str) -> None:
        """Refuse an action that would wait for the end of a call that encloses it."""
        generation = self.state.enclosing_generation()
        if generation is not None and not generation.dropped:
            why = f"{action}() inside a call on the same guard would wait for that call to end"
            fix = "Call it outside." if action == "close" else "Call it outside, or use reload(wait=False)."
            raise WouldDeadlock(self.name, why=why, fix=fix)

    # Policies

    def set_paused(self, *, paused: bool) -> None:
        with self.state.lock:  # so that what is shown is what is set
            changed = self.state.set_paused(paused=paused)
            self.shown_pause.show(paused=paused)
        if changed:
            telemetry.emit((telemetry.GuardPaused if paused else telemetry.GuardResumed)(guard=self.name))
        if not paused:
            self._wake_checks()

    def _wake_checks(self) -> None:
        if self.checks.needed and self.state.current is not None and self.system.ticks:
            with suppress(RuntimeError):  # the system gives no thread; the next call tries again
                TICKER.add(self)

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
        self.raise_inside_call("close")
        self.shut_down(timeout)

    def shut_down(self, timeout: float | None = None) -> None:
        """:meth:`close` without its check, for an owner that has made it."""
        self.end(self.refuse(), timeout)

    def refuse(self) -> list[Generation[M]]:
        """Refuse calls from now on; returns what is to be drained and released. Waits for nothing."""
        TICKER.remove(self)
        idle = self._is_idle
        ended = (self.state.close(), self.state.take_previous())  # once it is closed, nothing is kept any more
        self.end_load()
        if idle:
            telemetry.emit(telemetry.IdleEnded(guard=self.name))
        return [old for old in ended if old is not None]

    @property
    def _is_idle(self) -> bool:
        workers = self.options.workers
        has_none = workers is not None and self.state.current is not None and workers.workers_ended
        return self.state.unloaded or has_none

    def end(self, ended: list[Generation[M]], timeout: float | None) -> None:
        """Drain and release what :meth:`refuse` has returned. It may have been reopened meanwhile."""
        for old in ended:
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
        self.state.after_fork_in_child(self.system.random())
        self.checks.after_fork_in_child()
        if self.recorded is not None:
            self.recorded.after_fork_in_child()


# How callers wait for a load: for how long at most, and how the wait ends.

# Loads that wait for themselves, directly or through others: found before anybody waits.


class LoadWait:
    """Inside the block, this thread waits for a load of the guard with this ``state``, if that does not wait for it.

    Known by a weak reference, so that a wait which a signal handler ends at any point ends with its frame.
    """

    __slots__ = ("__weakref__", "state", "thread")

    def __init__(self, state: GuardState[Any]) -> None:
        self.state = state
        self.thread = threading.get_ident()

    def __enter__(self) -> None:
        waits.add(self)  # first: if two threads close a circle at once, the second one sees it
        try:
            raise_on_circle(self.state)
        except BaseException:
            waits.discard(self)
            raise

    def __exit__(self, *_: object) -> None:
        waits.discard(self)


#: The waits of all threads. The tasks of one event loop may wait for several loads.
waits: WeakRegistry[LoadWait] = WeakRegistry()


def _forget_waits() -> None:
    """The threads of a parent do not exist in its child."""
    global waits
    waits = WeakRegistry()


fork_hooks.at_fork(fork_hooks.Rank.LOCKS, in_child=_forget_waits)


def search(states: Iterable[GuardState[Any]]) -> None:
    """Check that no load under way waits for work that this thread does for it.

    A warm-up that calls the guarded function by way of an executor waits for a thread that waits for the new model.
    Which thread that is can be read off the stacks only, so this is for those who have waited for some time.
    """
    loads = [(state.name, list(job.threads)) for state in states if (job := state.job) is not None]
    frames = sys._current_frames() if loads else {}  # noqa: SLF001 - there is no public way to the stacks
    for name, threads in loads:
        stacks = [walk_stack(frames[thread]) for thread in threads if thread in frames]
        if any(_is_done_here(frame) for stack in stacks for frame, _ in stack):
            why = "its load, or the warm-up in it, waits for this thread, which waits for that load"
            fix = "Call the function in the warm-up itself, or submit contextvars.copy_context().run(...)."
            raise WouldDeadlock(name, why=why, fix=fix)


def _is_done_here(frame: FrameType) -> bool:
    """Whether a frame waits for a future of an executor that this thread computes, or for this thread's end.

    An event loop waits for the futures that it has a callback on, as ``loop.run_in_executor`` leaves one.
    """
    waits_for = frame.f_locals.get("self") if frame.f_code in _WAITS else None
    if waits_for is None:
        return False
    if isinstance(waits_for, threading.Thread):
        return waits_for.ident == threading.get_ident()
    own = [future for item in _own_work() if (future := getattr(item, "future", None)) is not None]
    if frame.f_code is _RUN_LOOP:
        return any(_calls_back(future, waits_for) for future in own)
    return any(future is waits_for for future in own)


def _own_work() -> Iterator[object]:
    """What executors have given this thread to compute."""
    for frame, _ in walk_stack(sys._getframe()):  # noqa: SLF001 - as above
        if frame.f_code.co_qualname == "_WorkItem.run":
            yield frame.f_locals.get("self")


def _calls_back(future: object, loop: object) -> bool:
    callbacks = tuple(getattr(future, "_done_callbacks", ()))
    cells = (cell for callback in callbacks for cell in getattr(callback, "__closure__", None) or ())
    with suppress(ValueError):  # a cell is empty
        return any(cell.cell_contents is loop for cell in cells)
    return False


_RUN_LOOP = asyncio.BaseEventLoop.run_forever.__code__
_WAITS = {Future.result.__code__, Future.exception.__code__, threading.Thread.join.__code__, _RUN_LOOP}


def raise_on_circle(state: GuardState[Any]) -> None:
    """Check that a load does not wait for this thread: its loader runs here, or waits for a load whose loader does."""
    if any(threading.get_ident() in threads for _, threads in _waited_for(state)):
        why = "its loader, its unload or a hook would wait for the load that runs it"
        fix = "Use the model itself, move the call to warmup, which has the new model, or write wait=False."
        raise WouldDeadlock(state.name, why=why, fix=fix)


def _is_lent_the_turn(state: GuardState[Any]) -> bool:
    """Whether a reload that has the turn of this host waits, in its loader or in a hook, for a load of this guard."""
    here = any(state is awaited for turn in _turns() for awaited, _ in _waited_for(turn))
    return here or any(wait.state is state and wait.thread in _lent_from_outside for wait in waits)


def has_turn() -> bool:
    """Whether a reload that has the turn of this host waits for this thread."""
    return any(threading.get_ident() in threads for turn in _turns() for _, threads in _waited_for(turn))


@contextmanager
def lent_turn() -> Iterator[None]:
    """Inside the block, a reload of another process that has the turn of this host waits for this thread."""
    me = threading.get_ident()
    _lent_from_outside.add(me)
    try:
        yield
    finally:
        _lent_from_outside.discard(me)


_lent_from_outside: set[int] = set()


def _turns() -> list[GuardState[Any]]:
    return [engine.state for engine in engines if (job := engine.state.job) is not None and job.has_turn]


def _waited_for(state: GuardState[Any]) -> Iterator[tuple[GuardState[Any], list[int]]]:
    """The guards for whose loads one of ``state`` waits, itself and through others too, and the threads of each."""
    pending, seen = [state], {state}
    while pending:
        job = (one := pending.pop()).job
        threads = [] if job is None else list(job.threads)
        yield one, threads
        following = [wait.state for wait in waits if wait.thread in threads and wait.state not in seen]
        seen.update(following)
        pending.extend(following)


def until_there(state: GuardState[Any], future: Future[Outcome], timeout: Timeout) -> Steps[None]:
    """Wait until there is a current generation; an error if the wait ends without one."""
    try:
        with LoadWait(state):
            yield Wait(future, timeout, search=partial(search, [state]))
    finally:
        state.stop_waiting(future)
    if not future.done():
        raise Reloading(state.name, waited=timeout.waited(), current=state.number)
    raise_outcome(future.result())


def until_ended(state: GuardState[Any], job: LoadJob | None, timeout: Timeout) -> Steps[None]:
    """Wait until a job has ended, if there is one."""
    if job is not None:
        yield Wait(job.ended, timeout, search=partial(search, [state]))
        if not job.ended.done():
            command = "the load or release under way"
            raise Reloading(state.name, waited=timeout.waited(), command=command, current=state.number)
    state.raise_if_closed()


def raise_outcome(outcome: Outcome) -> None:
    """Raise what a wait has ended with, unless that is a model."""
    # A new object for each caller: an exception that is raised in several threads mixes up their tracebacks.
    if isinstance(outcome, LoadFailed):
        raise outcome.again(outcome.retry_after, outcome.current) from outcome.__cause__
    if outcome is not None:
        raise GuardClosed(outcome.guard)
