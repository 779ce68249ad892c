"""The scopes whose molds belong to this process, and how a call gets a worker of a mold."""

from __future__ import annotations

import math
import operator
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any, ClassVar

from modelguard import _units
from modelguard.errors import (
    DeadlineExceeded,
    GuardClosed,
    ModelGuardError,
    NoPreviousModel,
    Overloaded,
    QueueFull,
    Reloading,
)
from modelguard.isolation._channel import Channel
from modelguard.isolation._isolation_options import IsolationOptions, PoolSource
from modelguard.isolation._mold_owner import Mold, MoldGuard
from modelguard.isolation._mold_workers import RETRY_AFTER, CallTimes, Claim, Presence, Waiter, Worker
from modelguard.isolation._supervisor import supervisor
from modelguard.isolation.status import IsolationStatus, WorkerStatus
from modelguard.lifecycle import system
from modelguard.lifecycle._engine import Engine, raise_outcome
from modelguard.lifecycle._lease import Lease
from modelguard.lifecycle._pool_engine import PoolEngine
from modelguard.lifecycle._pool_models import afresh
from modelguard.lifecycle.status import Postponed, State
from modelguard.runtime import waiting
from modelguard.runtime.background import SHARED
from modelguard.runtime.fork_hooks import WeakRegistry
from modelguard.runtime.waiting import Steps, Timeout, Wait, Work
from modelguard.telemetry import Reason, WorkerEndCause


class Taken:
    """A worker that a call has. One of its methods ends that."""

    __slots__ = ()
    channel: Channel
    pid: int

    def release(self, *, worn: tuple[Reason, ...], counts: bool = True) -> None:
        """Give the worker back after its answer; ``worn``: why it asked for its replacement, empty if it did not."""
        raise NotImplementedError

    def put_back(self) -> None:
        """Give the worker back without a call."""
        self.release(worn=(), counts=False)

    def end_worker(self, cause: WorkerEndCause, *, blame: bool = True) -> str:
        """Record that the worker has ended in its call, or end it; returns how it ended, for people."""
        raise NotImplementedError


#: Hears that a call has its worker, or an error. The former from any thread and under any lock, so it must not block.
Then = Callable[[Taken | None, BaseException | None], object]


class Followed:
    """The steps of a claim without a thread: whoever ends one of its waits goes on. They end once.

    ``then`` is kept until that end and no longer: the call's future refers to this.
    """

    __slots__ = ("_open", "_scope", "_steps", "_then", "_withdrawn", "until")

    def __init__(self, scope: WorkerScope, claim: Claim, then: Then) -> None:
        self._scope = scope
        self._steps: Steps[Taken] | None = scope.until_taken(claim)
        self._then: Then | None = then
        self._withdrawn = False
        # Who takes the entry out goes on with the steps: one operation, so no lock is needed.
        self._open: list[Steps[Taken]] = []
        self.until = math.inf  # when the present wait ends
        claim.followed = self

    def begin(self) -> Exception | None:
        """Go to the first wait; returns the error if there is one before."""
        assert self._steps is not None  # noqa: S101 - it begins once
        return self._go_on(partial(next, self._steps))

    def withdraw(self) -> None:
        """End it, wherever it waits, or is about to wait."""
        self._withdrawn = True
        if (steps := self._take()) is not None:
            steps.close()
            self._end(None, CancelledError())

    def refuse(self, error: Exception) -> None:
        if (steps := self._take()) is not None:
            self._go_on(partial(steps.throw, error))

    def expire(self, now: float) -> None:
        if now >= self.until and (steps := self._take()) is not None:
            self._go_on(partial(steps.send, None), aside)

    def _take(self) -> Steps[Taken] | None:
        try:
            steps = self._open.pop()
        except IndexError:
            return None
        self.until = math.inf
        return steps

    def _go_on(
        self, resume: Callable[[], Any], tell: Callable[[Callable[[], object]], object] = operator.call
    ) -> Exception | None:
        try:
            step = resume()
        except StopIteration as stop:
            self._end(stop.value, None)
        except Exception as error:  # noqa: BLE001 - it is the call's
            tell(partial(self._end, None, error))
            return error
        else:
            self._wait(step)
        return None

    def _wait(self, step: Any) -> None:
        left = step.limit.left()
        self.until = math.inf if left is None else time.monotonic() + left
        assert self._steps is not None  # noqa: S101 - it has not ended
        self._scope.look_at(self.until)
        self._open.append(self._steps)
        step.future.add_done_callback(self._woken)
        if self._withdrawn:  # meanwhile
            self.withdraw()
        else:
            self.expire(time.monotonic())

    def _woken(self, future: Future[Any]) -> None:
        if (steps := self._take()) is None:
            return
        resume = partial(steps.send, None)
        if isinstance(future, Waiter) and future.exception() is None and future.result() is not None:
            # its worker waits
            self._go_on(resume)
            return
        go_on = partial(self._go_on, resume, aside)
        try:  # what may take a while, or runs callbacks of users
            supervisor().call(go_on)
        except RuntimeError:  # the system gives no thread
            go_on()

    def _end(self, result: Taken | None, error: BaseException | None) -> None:
        then, self._then, self._steps = self._then, None, None
        assert then is not None  # noqa: S101 - it ends once
        then(result, error)


def aside(work: Callable[[], object]) -> None:
    """Run what may block, or runs code of users, in a thread of its own; in this one if the system gives none."""
    try:
        SHARED.start(work, "modelguard-isolated-call")
    except RuntimeError:
        work()


class WorkerScope:
    """Where the workers of a function come from: this process's molds, those of a pool's keys, or a broker.

    For its handle it is a source of models, too: see :mod:`modelguard.lifecycle.handle`.
    """

    #: Why there is no mold to go back to.
    keeps_none: ClassVar[str]

    def __init__(self, options: IsolationOptions, wait_timeout: Callable[[], float]) -> None:
        self.name = options.name
        self.system = system.default()
        self.timeout = math.inf if options.timeout is None else options.timeout
        self.wait_timeout = wait_timeout
        self._waiting: dict[Claim, None] = {}
        self._due = math.inf  # when the next one's time is over, of those that wait without a thread
        self._most_loading = options.bounds.queue + options.workers

    def rollback(self) -> None:
        raise NoPreviousModel(self.name, why=self.keeps_none)

    # Calls

    def take(self, limits: CallTimes, key: Any = None, *, admitted: bool = False) -> Taken:
        """Take a worker; start what is missing. Blocks."""
        return waiting.block(self.until_taken(Claim(limits, key, blocks=True, admitted=admitted)))

    def until_taken(self, claim: Claim) -> Steps[Taken]:
        """:meth:`take`, written once for who blocks and who does not."""
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        raise NotImplementedError

    @property
    def queued(self) -> int:
        """Calls that wait."""
        return len(self._waiting)

    def _admit(self, claim: Claim) -> None:
        """Check whether one more may wait for a load. How many may wait for a worker, the mold's workers know."""
        if len(self._waiting) >= self._most_loading and not claim.admitted:
            queued = sum(one.loading for one in tuple(self._waiting))
            if queued >= self._most_loading:
                raise QueueFull(self.name, queued=queued, retry_after=RETRY_AFTER)
        claim.admitted = True

    def _await(
        self,
        claim: Claim,
        awaited: Any,
        seconds: float,
        late: Callable[[], Exception] | None = None,
        *,
        loading: bool = False,
        step: Callable[[Any, Timeout], Any] = Wait,
    ) -> Steps[None]:
        """Wait for a future, say, at most so many seconds, or until the caller's own deadline."""
        started = time.monotonic()
        until = min(started + seconds, claim.limits.until)
        wait = step(awaited, Timeout(None if until == math.inf else max(0.0, until - started)))
        with self._counted(claim, loading=loading):
            yield wait
        if not wait.future.done():
            raise late() if late is not None and until < claim.limits.until else self._too_late(claim)

    @contextmanager
    def _counted(self, claim: Claim, *, loading: bool) -> Iterator[None]:
        if claim.loading is not loading:
            claim.loading = loading
            if claim.tell is not None:
                claim.tell(loading)
        self._waiting[claim] = None
        try:
            yield
        finally:
            self._waiting.pop(claim, None)

    def _too_late(self, claim: Claim) -> DeadlineExceeded:
        why = "no worker was free within the deadline"
        return DeadlineExceeded(self.name, waited=time.monotonic() - claim.limits.arrived, why=why)

    def _reloading(self, since: float) -> Reloading:
        return Reloading(self.name, waited=time.monotonic() - since)

    def _refuse_waiting(self) -> None:
        """Refuse what waits without a thread. The others are served, or get their error, as their molds end."""
        for one in self.followed():
            one.refuse(GuardClosed(self.name))

    def followed(self) -> list[Followed]:
        return [claim.followed for claim in tuple(self._waiting) if claim.followed is not None]

    def look_at(self, due: float) -> None:
        """End by then what waits without a thread and is due."""
        if due < self._due:
            self._due = due
            try:
                supervisor().later(due - time.monotonic(), self._end_due)
            except RuntimeError:  # the system gives no thread; the next one that waits tries again
                self._due = math.inf

    def _end_due(self) -> None:
        now, self._due = time.monotonic(), math.inf
        for one in self.followed():
            one.expire(now)
        self.look_at(min((one.until for one in self.followed()), default=math.inf))

    # As a source of models

    def _aside(self, verb: str, work: Callable[[], object]) -> Steps[None]:
        yield Work(work, f"modelguard-{verb}-{self.name}", self.system.start_thread)


class TakenWorker(Taken):
    """A worker for the call that has a loan on its mold, while it is held."""

    __slots__ = ("_loan", "_process", "held", "worker")
    worker: Worker

    def __init__(self, loan: Lease[Mold]) -> None:
        self.held = False
        self._process = os.getpid()
        self._loan = loan

    def __del__(self) -> None:
        # An exception of a signal handler has come between two steps of its call. In a forked child it is the parent's.
        if getattr(self, "held", False) and os.getpid() == self._process:
            supervisor().call(partial(self.end_worker, "cancelled"))

    @property
    def channel(self) -> Channel:  # type: ignore[override] # that of the worker that it gets
        return self.worker.channel

    @property
    def pid(self) -> int:  # type: ignore[override] # as above
        return self.worker.pid

    @property
    def mold(self) -> Mold:
        return self._loan.model

    def release(self, *, worn: tuple[Reason, ...], counts: bool = True) -> None:
        self._loan.model.workers.release(self.worker, worn=worn, counts=counts)
        self._end()

    def end_worker(self, cause: WorkerEndCause, *, blame: bool = True) -> str:
        how = self._loan.model.workers.end_worker(self.worker, cause, blame=blame)
        self._end()
        return how

    def _end(self) -> None:
        self.held = False
        self._loan.end(failed=False)


class MoldScope(WorkerScope):
    # Where the molds come from

    def _lend(self, key: Any) -> Lease[Mold] | None:
        """Take a lease on the mold; None if there is none yet. Does not block."""
        raise NotImplementedError

    def _until_lent(self, claim: Claim) -> Steps[Lease[Mold]]:
        """Take a lease on the mold, which is loaded if need be."""
        raise NotImplementedError

    # Calls

    def take(self, limits: CallTimes, key: Any = None, *, admitted: bool = False) -> Taken:
        loan = self._lend(key)
        if loan is not None and (taken := self._take_now(loan, again=limits.again)) is not None:
            return taken
        return super().take(limits, key, admitted=admitted)

    def _take_now(self, loan: Lease[Mold], *, again: bool) -> Taken | None:
        """Take a worker if that needs no waiting: most calls do without a claim."""
        taken = TakenWorker(loan)
        try:
            loan.model.workers.take_now(taken, again=again)
        finally:
            if not taken.held:
                loan.end(failed=False)
        return taken if taken.held else None

    def until_taken(self, claim: Claim) -> Steps[Taken]:
        taken = None
        while taken is None:
            loan = yield from self._until_lent(claim)
            taken = yield from self._until_granted(claim, loan)
            del loan  # a drained generation is released, and must not be alive then
        return taken

    def _until_granted(self, claim: Claim, loan: Lease[Mold]) -> Steps[Taken | None]:
        """Take a worker of this mold; None if the next one is to be asked."""
        workers, taken = loan.model.workers, TakenWorker(loan)
        waiter = Waiter(claim, taken)
        try:
            workers.request(waiter)
        except BaseException:
            workers.withdraw(waiter)
            if not taken.held:
                loan.end(failed=False)
            raise
        if taken.held:
            return taken
        if workers.gone:
            yield from self._until_replaced(claim, loan, waiter)
            return None
        worker = None
        try:
            # Unless new calls get another mold. Those that wait when the function is closed are served.
            if loan.generation is None or not loan.generation.retired or self.closed:
                claim.admitted = True
                yield from self._await(claim, waiter, self.timeout)
                worker = waiter.result()
            return None if worker is None else taken
        finally:
            if worker is None and workers.withdraw(waiter):
                loan.end(failed=False)
            elif worker is None:
                waiter.add_done_callback(partial(_return, loan, taken))

    def _until_replaced(self, claim: Claim, loan: Lease[Mold], waiter: Waiter) -> Steps[None]:
        """Wait for the mold after this one, which has died. Without a lease, or a pool could not end it for another."""
        workers, generation, since = loan.model.workers, loan.generation, time.monotonic()
        loan.end(failed=False)
        try:
            if generation is not None and not generation.retired:
                self._admit(claim)
                late = partial(self._reloading, since)
                yield from self._await(claim, waiter, self.wait_timeout(), late, loading=True)
        finally:
            workers.withdraw(waiter)


def _return(loan: Lease[Mold], taken: TakenWorker, _waiter: Future[Worker | None]) -> None:
    """Give back what a call in line has got that has gone meanwhile. In the thread that gives it."""
    if taken.held:
        supervisor().call(taken.put_back)
    else:
        loan.end(failed=False)


# ``scope="process"``: the mold and the workers belong to this process, and end with it.


class ProcessScope(MoldScope):
    def __init__(self, options: IsolationOptions, molds: MoldGuard) -> None:
        self._molds = molds
        self._engine = molds.guard.engine
        super().__init__(options, lambda: self._engine.options.wait_timeout)
        self.until_reloaded, self.until_unloaded = self._engine.until_reloaded, self._engine.until_unloaded
        self.reopen = self._engine.reopen
        self.set_paused = molds.set_paused
        self.end_at_once, self.abandon = molds.end_at_once, molds.abandon

    def rollback(self) -> None:
        self._molds.rollback()

    def _lend(self, key: Any) -> Lease[Mold] | None:
        del key
        return Lease.take_now(self._engine)

    def _until_lent(self, claim: Claim) -> Steps[Lease[Mold]]:
        while (loan := self._lend(None)) is None:
            self._admit(claim)
            if (future := self._engine.join_load()) is None:
                continue
            since, patience = time.monotonic(), self._engine.load_patience
            seconds = math.inf if patience is None else patience
            try:
                yield from self._await(claim, future, seconds, partial(self._reloading, since), loading=True)
            finally:
                self._engine.state.stop_waiting(future)
            raise_outcome(future.result())
        return loan

    @property
    def closed(self) -> bool:
        return self._engine.state.closed

    @property
    def ready(self) -> bool:
        """Whether a worker can answer, or the next call starts a mold or workers."""
        mold = self._molds.current
        if mold is None:
            return self._molds.guard.ready
        return mold.workers.is_ready or (mold.idle and self._engine.options.ready_when_idle)

    @property
    def version(self) -> str | None:
        return self._molds.guard.version

    def status(self) -> IsolationStatus:
        molds, mold = self._molds.guard.status(), self._molds.current
        shared = {one.name: getattr(molds, one.name) for one in fields(IsolationStatus) if hasattr(molds, one.name)}
        return replace(
            IsolationStatus(**shared),
            name=self.name,
            state=_state(molds.state, mold),
            ready=self.ready,
            mold=None if mold is None or mold.died is not None else mold.pid,
            **_of_workers([] if mold is None else [mold]),
            queued=self.queued,
            postponed=self._molds.postponed,
        )

    def until_loaded(self, limit: Timeout) -> Steps[None]:
        yield from self._engine.until_loaded(limit)
        yield from self._molds.until_workers_return(limit)

    def request_reload(self) -> None:  # without the engine's future, which a broker could not send
        self._engine.request_reload()

    @property
    def paused(self) -> bool:
        return self._engine.state.paused

    def close(self, timeout: float | None) -> None:
        self._refuse_waiting()
        self._engine.shut_down(timeout)

    def refuse_calls(self) -> None:
        self._refuse_waiting()
        self._engine.state.close()


def _of_workers(molds: list[Mold]) -> dict[str, Any]:
    now = time.monotonic()
    workers = tuple(
        WorkerStatus(pid=one.pid, state=state, worn=worn, calls=calls, age=now - one.born)
        for mold in molds
        for one, state, worn, calls in mold.workers.listed()
    )
    ends = sum((Counter(mold.workers.counts) for mold in molds), Counter[WorkerEndCause]())
    return {
        "workers": workers,
        "recycled": ends["recycled"],
        "crashed": ends["crashed"],
        "timed_out": ends["timeout"],
    }


def _state(of_guard: State, mold: Mold | None) -> State:
    """What the guard of the molds says, unless there is a mold without workers."""
    if mold is None or mold.died is not None or of_guard not in {"ready", "degraded"}:
        return of_guard
    states: dict[Presence, State] = {"present": of_guard, "ended": "idle", "returning": "loading"}
    return states[mold.workers.presence]


class PoolScope(MoldScope):
    keeps_none = "each key of a pool has a mold of its own, and none is kept"

    def __init__(self, options: IsolationOptions, source: PoolSource, *, paused: bool = False) -> None:
        super().__init__(options, lambda: source.pooled.options.wait_timeout)
        self._options = options
        self._source = source
        self._guards: WeakRegistry[MoldGuard] = WeakRegistry()
        bounds = source.pooled.options._replace(name=options.name)
        self._pool: PoolEngine[Any, Mold] = PoolEngine(self._engine_of, bounds, self.system)
        self._pool.paused = paused
        self.reopen = self._pool.reopen

    def _engine_of(self, key: Any, _world: system.System) -> Engine[Mold]:
        options = replace(self._options, name=_units.KeyedName(self.name, key))
        molds = MoldGuard(options, self._source.options_for(key), key=key, retries=False)
        self._guards.add(molds)
        molds.set_paused(paused=self._pool.paused, reported=False)  # last, so that no pause is missed
        return molds.guard.engine

    def _lend(self, key: Any) -> Lease[Mold] | None:
        return self._pool.take_now(key)

    def _until_lent(self, claim: Claim) -> Steps[Lease[Mold]]:
        until: float | None = None
        while (loan := self._lend(claim.key)) is None:
            self._admit(claim)
            future, own = self._pool.fetch(claim.key)
            if until is None:  # who begins a load waits for as long as that takes
                until = math.inf if own else time.monotonic() + self.wait_timeout()
            seconds = max(0.0, until - time.monotonic())
            try:
                yield from self._await(claim, future, seconds, partial(self._pool.why_full, claim.key), loading=True)
            except BaseException:
                if own:
                    future.add_done_callback(_end_unwanted)
                raise
            error = future.exception()
            if error is None and own:
                return future.result()
            late = isinstance(error, Overloaded) and (own or time.monotonic() >= until)
            if error is not None and (late or not isinstance(error, Overloaded)):
                raise afresh(error) if isinstance(error, ModelGuardError) else error
        return loan

    @property
    def closed(self) -> bool:
        return self._pool.closed

    @property
    def ready(self) -> bool:
        """Whether it takes calls: the mold of a key is made when one needs it."""
        return not self.closed

    @property
    def version(self) -> None:
        """Each key has a model of its own; the pool's status has their versions."""
        return None

    def status(self) -> IsolationStatus:
        pool = self._pool.status()
        molds = [mold for one in list(self._guards) if (mold := one.current) is not None]
        reasons = tuple(dict.fromkeys(reason for mold in molds for reason in mold.workers.postponed))
        return IsolationStatus(
            name=self.name,
            state=pool.state,
            ready=self.ready,
            **_of_workers(molds),
            in_flight=pool.in_flight,
            queued=self.queued,
            pool=pool,
            paused=pool.paused,
            postponed=Postponed(reasons=reasons, cause="paused", seconds=None) if reasons else None,
        )

    def until_loaded(self, _limit: Timeout) -> Steps[None]:
        """Load nothing: the mold of a key is made when one needs it."""
        if self.closed:
            raise GuardClosed(self.name)
        yield from ()

    def until_reloaded(self, _limit: Timeout) -> Steps[None]:
        self.request_reload()
        yield from ()

    def request_reload(self) -> None:
        """Make new molds, each for the next call with its key, so there is nothing to wait for."""
        self._pool.reload(())

    @property
    def paused(self) -> bool:
        return self._pool.paused

    def set_paused(self, *, paused: bool) -> None:
        """Hold back what the pool's options and ``recycle_on`` ask for, or no longer."""
        self._pool.set_paused(paused=paused)
        for molds in list(self._guards):
            molds.set_paused(paused=paused, reported=False)

    def until_unloaded(self, limit: Timeout) -> Steps[None]:
        return self._aside("unload", partial(self._pool.unload, (), limit))

    def close(self, timeout: float | None) -> None:
        self._refuse_waiting()
        self._pool.close(timeout)

    def refuse_calls(self) -> None:
        self._refuse_waiting()
        self._pool.refuse_calls()

    def end_at_once(self) -> None:
        for molds in list(self._guards):
            molds.end_at_once()

    def abandon(self) -> None:
        for molds in list(self._guards):
            molds.abandon()


def _end_unwanted(future: Future[Lease[Mold]]) -> None:
    if future.exception() is None:
        future.result().end(failed=False)
