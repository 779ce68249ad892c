"""The scopes whose molds belong to this process, and how a call gets a worker of a mold."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeAlias

from modelguard import _units
from modelguard.errors import GuardClosed, ModelGuardError, NotSupported, Overloaded
from modelguard.isolation._calls import Claim, Limits, Place, Source, Taken, aside
from modelguard.isolation._channel import Channel
from modelguard.isolation._isolation_options import IsolationOptions, PoolSource
from modelguard.isolation._mold_workers import MoldGone, Presence, Waiter, Worker
from modelguard.isolation._molds import Mold, MoldGuard
from modelguard.isolation._supervisor import supervisor
from modelguard.isolation.status import IsolationStatus, WorkerStatus
from modelguard.lifecycle import runtime
from modelguard.lifecycle._engine import Engine, Lease
from modelguard.lifecycle._load_waits import raise_outcome
from modelguard.lifecycle._pool_engine import PoolEngine
from modelguard.lifecycle._pool_models import afresh
from modelguard.lifecycle._state import Generation, Outcome
from modelguard.lifecycle.status import Postponed, State
from modelguard.runtime.fork import WeakRegistry
from modelguard.runtime.waiting import Timeout
from modelguard.telemetry import Reason, WorkerEndCause

#: Seconds between two looks whether a mold that calls wait at has been replaced.
_LOOK = 0.02


class _Loan:
    """A lease on a mold: each call takes one, and the object that blocks and coroutines use would cost it 5 us."""

    __slots__ = ("engine", "generation")

    def __init__(self, engine: Engine[Mold], generation: Generation[Mold]) -> None:
        self.engine = engine
        self.generation = generation

    @property
    def model(self) -> Mold:
        return self.generation.model

    def end(self, *, failed: bool) -> None:
        self.engine.leave(self.generation, failed=failed)


#: What a call holds: a lease on a mold, of its guard or of a pool.
Loan: TypeAlias = _Loan | Lease[Mold]


class TakenWorker:
    __slots__ = ("_loan", "_workers", "channel", "worker")

    def __init__(self, loan: Loan, worker: Worker) -> None:
        self._loan = loan
        self._workers = loan.model.workers
        self.worker = worker
        self.channel: Channel = worker.channel

    @property
    def pid(self) -> int:
        return self.worker.pid

    @property
    def mold(self) -> Mold:
        return self._loan.model

    def release(self, *, worn: tuple[Reason, ...]) -> None:
        self._workers.release(self.worker, worn=worn)

    def put_back(self) -> None:
        self._workers.release(self.worker, worn=(), counts=False)
        self.leave()

    def lose(self, cause: WorkerEndCause, *, blame: bool = True) -> str:
        return self._workers.lose(self.worker, cause, blame=blame)

    def leave(self) -> None:
        self._loan.end(failed=False)


class _InLine(Place, Waiter):
    def __init__(self, scope: MoldScope, claim: Claim, loan: Loan) -> None:
        super().__init__(claim.client, arrived=claim.limits.arrived, admitted=claim.admitted)
        self._scope = scope
        self._claim = claim
        self._loan = loan
        self._workers = loan.model.workers

    @property
    def over(self) -> bool:
        return self._scope.has_replaced(self._loan, self._claim.key)

    def leave(self) -> bool:
        if not self._workers.withdraw(self):
            return False
        self._loan.end(failed=False)
        return True

    def join(self) -> bool:
        """Take a free worker, or a place in the line; returns whether it is a place."""
        worker = self._workers.request(self)
        if worker is not None:
            self._grant(worker)
        return worker is None

    def wake(self) -> None:
        if self.worker is not None:
            self._grant(self.worker)
        elif isinstance(self.error, MoldGone):
            self._scope.await_next_mold(self._claim, self._loan)
        else:
            aside(partial(self._fail, self.error))

    def _grant(self, worker: Worker) -> None:
        taken = TakenWorker(self._loan, worker)
        if not self._claim.grant(taken):
            supervisor().call(taken.put_back)  # not under the lock of the workers

    def _fail(self, error: Exception | None) -> None:
        assert error is not None  # noqa: S101 - for the checkers
        self._loan.end(failed=False)
        self._claim.fail(error)


class _Stranded(Place):
    def __init__(self, generation: Generation[Mold] | None) -> None:
        self._generation = generation

    @property
    def over(self) -> bool:
        return self._generation is None or self._generation.retired


class MoldScope(Source):
    _looking = False

    # Where the molds come from

    def _lend(self, key: Any) -> Loan | None:
        """Take a lease on the mold; None if there is none yet. Does not block."""
        raise NotImplementedError

    def _wait_for_load(self, claim: Claim) -> bool:
        """Have the claim wait for a mold, which is loaded if need be; false if there is one now. Does not block."""
        raise NotImplementedError

    def has_replaced(self, loan: Loan, key: Any) -> bool:
        """Whether new calls get another mold, so that those that wait at this one should leave it."""
        raise NotImplementedError

    # Calls

    def take(self, limits: Limits, key: Any = None) -> Taken:
        loan = self._lend(key)
        if loan is not None and (taken := self._take_now(loan)) is not None:
            return taken
        return super().take(limits, key)

    def _take_now(self, loan: Loan) -> Taken | None:
        """Take a worker if that needs no waiting: most calls do without a claim."""
        worker = None
        try:
            worker = loan.model.workers.take_now()
        except MoldGone:
            pass
        finally:
            if worker is None:
                loan.end(failed=False)
        return None if worker is None else TakenWorker(loan, worker)

    def _go_on(self, claim: Claim) -> None:
        """:meth:`request` anew, in a thread that must not run code of users."""
        try:
            self._advance(claim)
        except Exception as error:  # noqa: BLE001 - it is the call's
            aside(partial(claim.fail, error))

    def _advance(self, claim: Claim) -> None:
        while not claim.ended:
            loan = self._lend(claim.key)
            if loan is not None:
                self._line_up(claim, loan)
                return
            if self._wait_for_load(claim):
                return

    def _line_up(self, claim: Claim, loan: Loan) -> None:
        place = _InLine(self, claim, loan)
        claim.go_to(place)
        try:
            waits = place.join()
        except MoldGone:
            self.await_next_mold(claim, loan)
            return
        except BaseException:
            if not claim.ended and not place.leave():
                loan.end(failed=False)
            raise
        if waits:
            claim.admitted = True
            since = time.monotonic()
            claim.wait(self.claims, since + self.timeout, partial(self.too_late, claim.limits.arrived))
            self._look_soon()

    def await_next_mold(self, claim: Claim, loan: Loan) -> None:
        claim.go_to(_Stranded(loan.generation))
        loan.end(failed=False)
        since = time.monotonic()
        claim.wait(self.claims, since + self.wait_timeout(), partial(self.reloading, since))
        self._look_soon()

    # Replaced molds

    def _look_soon(self) -> None:
        if not self._looking:
            self._looking = True
            supervisor().later(_LOOK, self._look)

    def _look(self) -> None:
        """Have those go on who wait at a mold that has been replaced: neither is to wait for the other."""
        self._looking = False
        for claim in self.claims:
            place = claim.place
            if place is not None and place.over and place.leave():
                self._go_on(claim)
        if self.claims:
            self._look_soon()


# ``scope="process"``: the mold and the workers belong to this process, and end with it.


class _Loading(Place):
    loading = True

    def __init__(self, engine: Engine[Mold], future: Future[Outcome]) -> None:
        self._engine = engine
        self._future = future

    def leave(self) -> bool:
        self._engine.state.stop_waiting(self._future)
        return True


class ProcessScope(MoldScope):
    def __init__(self, options: IsolationOptions, molds: MoldGuard) -> None:
        self._molds = molds
        self._engine = molds.guard.engine
        super().__init__(options, lambda: self._engine.options.wait_timeout)
        guard = molds.guard
        self.reload, self.unload = guard.reload, guard.unload
        self.close, self.reopen = guard.close, self._engine.reopen
        self.rollback, self.set_paused = molds.rollback, molds.set_paused
        self.end_at_once, self.abandon = molds.end_at_once, molds.abandon

    def _lend(self, key: Any) -> Loan | None:
        del key
        generation = self._engine.state.enter()
        return None if generation is None else _Loan(self._engine, generation)

    def _wait_for_load(self, claim: Claim) -> bool:
        self.claims.admit(claim)
        future = self._engine.join_load()
        if future is None:
            return False
        since, patience = time.monotonic(), self._engine.load_patience
        claim.go_to(_Loading(self._engine, future))
        claim.wait(self.claims, math.inf if patience is None else since + patience, partial(self.reloading, since))
        future.add_done_callback(partial(self._loaded, claim))
        return True

    def _loaded(self, claim: Claim, future: Future[Outcome]) -> None:
        try:
            raise_outcome(future.result())
        except ModelGuardError as error:
            aside(partial(claim.fail, error))
        else:
            supervisor().call(partial(self._go_on, claim))

    def has_replaced(self, loan: Loan, key: Any) -> bool:
        """Whether new calls get another mold. Those that wait when the function is closed are served."""
        del key
        generation = loan.generation
        return generation is not None and generation.retired and not self._engine.state.closed

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

    def status(self, queued: int) -> IsolationStatus:
        molds, mold = self._molds.guard.status(), self._molds.current
        return IsolationStatus(
            **{field: getattr(molds, field) for field in _OF_ITS_GUARD},
            name=self._name,
            state=_state(molds.state, mold),
            ready=self.ready,
            mold=None if mold is None or mold.died is not None else mold.pid,
            **_of_workers([] if mold is None else [mold]),
            queued=queued,
            postponed=self._molds.postponed,
        )

    def load(self, timeout: _units.Duration | None) -> None:
        limit = Timeout(timeout)
        self._molds.guard.load(timeout)
        self._molds.call_back_workers(limit)

    @property
    def paused(self) -> bool:
        return self._engine.state.paused

    def refuse_calls(self) -> None:
        self._engine.state.close()


#: What the status of a function has from that of the guard of its molds.
_OF_ITS_GUARD = (
    "generation",
    "age",
    "in_flight",
    "reloads",
    "failures",
    "last_error",
    "version",
    "previous",
    "pinned",
    "paused",
)


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


class _Fetching(Place):
    """Waits for the model of a key. If it leaves, the load goes on."""

    loading = True


class PoolScope(MoldScope):
    def __init__(self, options: IsolationOptions, source: PoolSource, *, paused: bool = False) -> None:
        super().__init__(options, lambda: source.pooled.options.wait_timeout)
        self._options = options
        self._source = source
        self._guards: WeakRegistry[MoldGuard] = WeakRegistry()
        self._closed = False
        self._pool = self._new_pool(paused=paused)

    def _new_pool(self, *, paused: bool) -> PoolEngine[Any, Mold]:
        bounds = self._source.pooled.options._replace(name=self._options.name)
        pool: PoolEngine[Any, Mold] = PoolEngine(self._engine_of, bounds, runtime.default())
        pool.paused = paused
        return pool

    def _engine_of(self, key: Any, _world: runtime.Runtime) -> Engine[Mold]:
        options = replace(self._options, name=f"{self._options.name}[{key!r}]")
        molds = MoldGuard(options, self._source.options_for(key), key=key, retries=False)
        self._guards.add(molds)
        molds.follow_pause(paused=self._pool.paused)  # last, so that no pause is missed
        return molds.guard.engine

    def _lend(self, key: Any) -> Loan | None:
        return self._pool.take_now(key)

    def _wait_for_load(self, claim: Claim) -> bool:
        again = isinstance(claim.place, _Fetching)
        self.claims.admit(claim)
        future, own = self._pool.fetch(claim.key)
        if not again:
            # Who begins a load waits for as long as that takes.
            claim.until = math.inf if own else time.monotonic() + self.wait_timeout()
        claim.go_to(_Fetching())
        claim.wait(self.claims, claim.until, partial(self._pool.why_full, claim.key))
        future.add_done_callback(partial(self._fetched, claim, own))
        return True

    def _fetched(self, claim: Claim, own: bool, future: Future[Lease[Mold]]) -> None:  # noqa: FBT001 - by position
        error = future.exception()
        if own and error is None:
            self._line_up_fetched(claim, future.result())
        elif claim.ended:
            return
        elif error is None or (isinstance(error, Overloaded) and not own and time.monotonic() < claim.until):
            self._go_on(claim)
        else:
            aside(partial(claim.fail, afresh(error) if isinstance(error, ModelGuardError) else error))

    def _line_up_fetched(self, claim: Claim, lease: Lease[Mold]) -> None:
        if claim.ended:
            lease.end(failed=False)
            return
        try:
            self._line_up(claim, lease)
        except Exception as error:  # noqa: BLE001 - it is the call's
            aside(partial(claim.fail, error))

    def has_replaced(self, loan: Loan, key: Any) -> bool:
        """Whether new calls with the key get another mold. Those that wait when the function is closed are served."""
        generation = loan.generation
        if generation is None or self._closed:
            return False
        return generation.retired or not self._pool.still_lends(key, loan.engine)

    @property
    def ready(self) -> bool:
        """Whether it takes calls: the mold of a key is made when one needs it."""
        return not self._closed

    @property
    def version(self) -> None:
        """Each key has a model of its own; the pool's status has their versions."""
        return None

    def status(self, queued: int) -> IsolationStatus:
        pool = self._pool.status()
        molds = [mold for one in list(self._guards) if (mold := one.current) is not None]
        return IsolationStatus(
            name=self._options.name,
            state="closed" if self._closed else "ready" if pool.models else "idle" if pool.idle else "new",
            ready=self.ready,
            **_of_workers(molds),
            in_flight=pool.in_flight,
            queued=queued,
            pool=pool,
            paused=pool.paused,
            postponed=_of_all(mold.workers.postponed for mold in molds),
        )

    def rollback(self) -> NoReturn:
        raise NotSupported(
            f"{self._options.name}: rollback", reason="each key of a pool has a mold of its own, and none is kept"
        )

    def load(self, timeout: _units.Duration | None) -> None:
        """Load nothing: the mold of a key is made when one needs it."""
        Timeout(timeout)  # which may be a mistake all the same
        if self._closed:
            raise GuardClosed(self._options.name)

    def reload(self, *, wait: bool, timeout: _units.Duration | None) -> None:
        """Make new molds, each for the next call with its key, so there is nothing to wait for."""
        del wait
        Timeout(timeout)
        self._pool.reload(())

    @property
    def paused(self) -> bool:
        return self._pool.paused

    def set_paused(self, *, paused: bool) -> None:
        """Hold back what the pool's options and ``recycle_on`` ask for, or no longer."""
        self._pool.set_paused(paused=paused)
        for molds in list(self._guards):
            molds.follow_pause(paused=paused)

    def unload(self, timeout: _units.Duration | None) -> None:
        self._pool.unload((), Timeout(timeout))

    def close(self) -> None:
        self._closed = True
        self._pool.close()

    def reopen(self) -> None:
        if self._closed:
            self._closed, self._pool = False, self._new_pool(paused=self.paused)

    def refuse_calls(self) -> None:
        self._closed = True
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
