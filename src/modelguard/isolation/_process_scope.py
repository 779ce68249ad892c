"""``scope="process"``: the mold and the workers belong to this process, and end with it."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future
from functools import partial
from typing import Any

from modelguard import _units
from modelguard.errors import ModelGuardError
from modelguard.isolation._claims import Claim, aside
from modelguard.isolation._crew import Presence
from modelguard.isolation._mold_guard import MoldGuard
from modelguard.isolation._mold_scope import Loan, MoldScope
from modelguard.isolation._molds import Mold
from modelguard.isolation._options import IsolationOptions
from modelguard.isolation.status import IsolationStatus, WorkerStatus
from modelguard.lifecycle import _in_thread
from modelguard.lifecycle._engine import Engine
from modelguard.lifecycle._generation import Generation
from modelguard.lifecycle._waiters import Outcome
from modelguard.lifecycle._waiting import Timeout, raise_outcome
from modelguard.lifecycle.status import State

__all__ = ["ProcessScope"]


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


class _Loading:
    """Waits for a load."""

    loading = True
    over = False

    def __init__(self, engine: Engine[Mold], future: Future[Outcome]) -> None:
        self._engine = engine
        self._future = future

    def leave(self) -> bool:
        self._engine.state.stop_waiting(self._future)
        return True


class ProcessScope(MoldScope):
    """Molds of this process. See :class:`~modelguard.isolation._scope.Scope`.

    Args:
        options: Of the function.
        molds: Makes and replaces them.
    """

    def __init__(self, options: IsolationOptions, molds: MoldGuard) -> None:
        self._molds = molds
        self._engine = molds.guard.engine
        super().__init__(options, lambda: self._engine.guard.options.wait_timeout)

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
        claim.place = _Loading(self._engine, future)
        claim.wait(self.claims, math.inf if patience is None else since + patience, partial(self._reloading, since))
        future.add_done_callback(partial(self._loaded, claim))
        return True

    def _loaded(self, claim: Claim, future: Future[Outcome]) -> None:
        if claim.ended:
            return
        try:
            raise_outcome(future.result())
        except ModelGuardError as error:
            aside(partial(claim.fail, error))
        else:
            self._go_on(claim)

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
        return mold.roster.is_ready or (mold.idle and self._engine.guard.options.ready_when_idle)

    @property
    def version(self) -> str | None:
        """The version of the model in the current mold."""
        return self._molds.guard.version

    def status(self, queued: int) -> IsolationStatus:
        """State, processes and counts."""
        molds, mold = self._molds.guard.status(), self._molds.current
        now = time.monotonic()
        listed = [] if mold is None else mold.roster.listed()
        counts: dict[Any, int] = {} if mold is None else dict(mold.roster.counts)
        return IsolationStatus(
            name=self._name,
            state=_state(molds.state, mold),
            ready=self.ready,
            generation=molds.generation,
            age=molds.age,
            mold=None if mold is None or mold.died is not None else mold.pid,
            reforked=mold is not None and mold.heir is not None,
            workers=tuple(
                WorkerStatus(pid=one.pid, state=state, worn=worn, calls=calls, age=now - one.born)
                for one, state, worn, calls in listed
            ),
            in_flight=molds.in_flight,
            queued=queued,
            reloads=molds.reloads,
            failures=molds.failures,
            last_error=molds.last_error,
            recycled=counts.get("recycled", 0),
            crashed=counts.get("crashed", 0),
            timed_out=counts.get("timeout", 0),
            version=molds.version,
            previous=molds.previous,
            pinned=molds.pinned,
            paused=molds.paused,
            postponed=self._molds.postponed,
        )

    def rollback(self) -> None:
        """Make the previous mold current again."""
        self._molds.rollback()

    def load(self, timeout: _units.Duration | None) -> None:
        """Start the mold, and workers."""
        limit = Timeout(timeout)
        self._molds.guard.load(timeout)
        self._molds.call_back_workers(limit)

    async def aload(self, timeout: _units.Duration | None) -> None:
        """Start the mold, and workers."""
        limit = Timeout(timeout)
        await self._molds.guard.aload(timeout)
        mold = self._molds.current
        if mold is not None and mold.idle:
            work = partial(self._molds.call_back_workers, limit)
            await _in_thread.run(work, f"modelguard-load-{self._name}", self._engine.guard.runtime.start_thread)

    @property
    def paused(self) -> bool:
        """Whether policies are held back."""
        return self._engine.state.paused

    def set_paused(self, *, paused: bool) -> None:
        """Hold back what policies ask for, or no longer."""
        self._molds.set_paused(paused=paused)

    def unload(self, timeout: _units.Duration | None) -> None:
        """End the mold and its workers until the next call."""
        self._molds.guard.unload(timeout)

    async def aunload(self, timeout: _units.Duration | None) -> None:
        """End the mold and its workers until the next call."""
        await self._molds.guard.aunload(timeout)

    def reload(self, *, wait: bool, timeout: _units.Duration | None) -> None:
        """Make a new mold."""
        self._molds.guard.reload(wait=wait, timeout=timeout)

    async def areload(self, timeout: _units.Duration | None) -> None:
        """Make a new mold."""
        await self._molds.guard.areload(timeout)

    def close(self) -> None:
        """End all processes."""
        self._molds.guard.close()

    async def aclose(self) -> None:
        """End all processes."""
        await self._molds.guard.aclose()

    def reopen(self) -> None:
        """Admit calls again."""
        self._engine.reopen()

    def refuse_calls(self) -> None:
        """Raise ``GuardClosed`` from now on."""
        self._engine.state.close()

    def end_at_once(self) -> None:
        """Kill all processes."""
        self._molds.end_at_once()

    def abandon(self) -> None:
        """Leave the parent's processes alone."""
        self._molds.abandon()


def _state(of_guard: State, mold: Mold | None) -> State:
    """What the guard of the molds says, unless there is a mold without workers."""
    if mold is None or mold.died is not None or of_guard not in {"ready", "degraded"}:
        return of_guard
    states: dict[Presence, State] = {"present": of_guard, "ended": "idle", "returning": "loading"}
    return states[mold.roster.presence]
