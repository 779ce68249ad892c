"""The scopes whose molds belong to this process, and how a call gets a worker of a mold."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import fields, replace
from functools import partial
from typing import Any

from modelguard import _units
from modelguard.errors import GuardClosed, ModelGuardError, Overloaded
from modelguard.isolation._calls import CallTimes, Claim, Taken, WorkerScope
from modelguard.isolation._channel import Channel
from modelguard.isolation._isolation_options import IsolationOptions, PoolSource
from modelguard.isolation._mold_owner import Mold, MoldGuard
from modelguard.isolation._mold_workers import Presence, Waiter, Worker
from modelguard.isolation._supervisor import supervisor
from modelguard.isolation.status import IsolationStatus, WorkerStatus
from modelguard.lifecycle._engine import Engine, raise_outcome
from modelguard.lifecycle._lease import Lease
from modelguard.lifecycle._pool_engine import PoolEngine
from modelguard.lifecycle._pool_models import afresh
from modelguard.lifecycle.runtime import Runtime
from modelguard.lifecycle.status import Postponed, State
from modelguard.runtime.fork_hooks import WeakRegistry
from modelguard.runtime.waiting import Steps, Timeout
from modelguard.telemetry import Reason, WorkerEndCause


class TakenWorker:
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
            supervisor().call(partial(_end_worker, self._loan, self.worker))

    @property
    def channel(self) -> Channel:
        return self.worker.channel

    @property
    def pid(self) -> int:
        return self.worker.pid

    @property
    def mold(self) -> Mold:
        return self._loan.model

    def release(self, *, worn: tuple[Reason, ...], counts: bool = True) -> None:
        self._loan.model.workers.release(self.worker, worn=worn, counts=counts)
        self._end()

    def put_back(self) -> None:
        self.release(worn=(), counts=False)

    def end_worker(self, cause: WorkerEndCause, *, blame: bool = True) -> str:
        how = self._loan.model.workers.end_worker(self.worker, cause, blame=blame)
        self._end()
        return how

    def _end(self) -> None:
        self.held = False
        self._loan.end(failed=False)


def _end_worker(loan: Lease[Mold], worker: Worker) -> None:
    loan.model.workers.end_worker(worker, "cancelled")
    loan.end(failed=False)


class MoldScope(WorkerScope):
    # Where the molds come from

    def _lend(self, key: Any) -> Lease[Mold] | None:
        """Take a lease on the mold; None if there is none yet. Does not block."""
        raise NotImplementedError

    def _until_lent(self, claim: Claim) -> Steps[Lease[Mold]]:
        """Take a lease on the mold, which is loaded if need be."""
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        raise NotImplementedError

    # Calls

    def take(self, limits: CallTimes, key: Any = None) -> Taken:
        loan = self._lend(key)
        if loan is not None and (taken := self._take_now(loan)) is not None:
            return taken
        return super().take(limits, key)

    def _take_now(self, loan: Lease[Mold]) -> Taken | None:
        """Take a worker if that needs no waiting: most calls do without a claim."""
        taken = TakenWorker(loan)
        try:
            loan.model.workers.take_now(taken)
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
        waiter = Waiter(claim.client, holder=taken, arrived=claim.limits.arrived, admitted=claim.admitted)
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
            if not self._is_replaced(loan):
                claim.admitted = True
                yield from self._await(claim, waiter, self.timeout, partial(self._too_late, claim))
                worker = waiter.result()
            return None if worker is None else taken
        finally:
            if worker is None:
                self._leave_line(loan, taken, waiter)

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

    @staticmethod
    def _leave_line(loan: Lease[Mold], taken: TakenWorker, waiter: Waiter) -> None:
        if loan.model.workers.withdraw(waiter):
            loan.end(failed=False)
        else:
            waiter.add_done_callback(partial(_return, loan, taken))

    def _is_replaced(self, loan: Lease[Mold]) -> bool:
        """Whether new calls get another mold. Those that wait when the function is closed are served."""
        generation = loan.generation
        return generation is not None and generation.retired and not self.closed


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

    def request_reload(self) -> None:
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
    ends: Counter[str] = Counter()
    for mold in molds:
        ends.update(mold.workers.counts)
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
        self._pool: PoolEngine[Any, Mold] = PoolEngine(self._engine_of, bounds, self.runtime)
        self._pool.paused = paused
        self.reopen = self._pool.reopen

    def _engine_of(self, key: Any, _world: Runtime) -> Engine[Mold]:
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
        return IsolationStatus(
            name=self.name,
            state=pool.state,
            ready=self.ready,
            **_of_workers(molds),
            in_flight=pool.in_flight,
            queued=self.queued,
            pool=pool,
            paused=pool.paused,
            postponed=_of_all(mold.workers.postponed for mold in molds),
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


def _of_all(reasons: Iterable[tuple[Reason, ...]]) -> Postponed | None:
    waiting = tuple(dict.fromkeys(reason for some in reasons for reason in some))
    return Postponed(reasons=waiting, cause="paused", seconds=None) if waiting else None


def _end_unwanted(future: Future[Lease[Mold]]) -> None:
    if future.exception() is None:
        future.result().end(failed=False)
