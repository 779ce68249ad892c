"""An isolated function over a pool: each key has a mold of its own with its workers, within the pool's budget.

The pool is that of :mod:`modelguard.lifecycle`, with molds for models: it finds room, evicts the least recently used
mold that nobody uses, and all memory of that one comes back, because its processes end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from modelguard import _units
from modelguard.errors import ModelGuardError, NotSupported, Overloaded
from modelguard.isolation._claims import Claim, aside
from modelguard.isolation._mold_guard import MoldGuard
from modelguard.isolation._mold_scope import Loan, MoldScope
from modelguard.isolation._molds import Mold
from modelguard.isolation._options import IsolationOptions, PoolSource
from modelguard.isolation.status import IsolationStatus, WorkerStatus
from modelguard.lifecycle import runtime
from modelguard.lifecycle._engine import Engine
from modelguard.lifecycle._leases import Lease
from modelguard.lifecycle._pool_engine import PoolEngine
from modelguard.lifecycle._pool_models import afresh
from modelguard.lifecycle.status import Postponed
from modelguard.runtime.threads import WeakRegistry
from modelguard.runtime.waiting import Timeout
from modelguard.telemetry import Reason

if TYPE_CHECKING:
    from modelguard.lifecycle.runtime import Runtime

__all__ = ["PoolScope"]


class _Fetching:
    """Waits for the model of a key."""

    loading = True
    over = False

    def leave(self) -> bool:
        return True  # the load goes on


class PoolScope(MoldScope):
    """Molds by key. See :class:`~modelguard.isolation.status.Scope`.

    Args:
        options: Of the function.
        source: Its pool.
        paused: Whether it is paused from the start.
    """

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

    def _engine_of(self, key: Any, _world: Runtime) -> Engine[Mold]:
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
            claim.until = math.inf if own else time.monotonic() + self._wait_timeout()
        claim.place = _Fetching()
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
        """State, processes and counts of all keys together."""
        pool, now = self._pool.status(), time.monotonic()
        molds = [mold for one in list(self._guards) if (mold := one.current) is not None]
        counts = [mold.roster.counts for mold in molds]
        return IsolationStatus(
            name=self._options.name,
            state="closed" if self._closed else "ready" if pool.models else "idle" if pool.idle else "new",
            ready=self.ready,
            workers=tuple(
                WorkerStatus(pid=one.pid, state=state, worn=worn, calls=calls, age=now - one.born)
                for mold in molds
                for one, state, worn, calls in mold.roster.listed()
            ),
            in_flight=pool.in_flight,
            queued=queued,
            recycled=sum(one["recycled"] for one in counts),
            crashed=sum(one["crashed"] for one in counts),
            timed_out=sum(one["timeout"] for one in counts),
            pool=pool,
            paused=pool.paused,
            postponed=_of_all(mold.roster.postponed for mold in molds),
        )

    def rollback(self) -> NoReturn:
        """There is no one model to go back to."""
        raise NotSupported(
            f"{self._options.name}: rollback", reason="each key of a pool has a mold of its own, and none is kept"
        )

    def load(self, timeout: _units.Duration | None) -> None:
        """Molds are made when a call needs their key."""

    async def aload(self, timeout: _units.Duration | None) -> None:
        """Molds are made when a call needs their key."""

    def reload(self, *, wait: bool, timeout: _units.Duration | None) -> None:
        """Make new molds, each for the next call with its key, so there is nothing to wait for."""
        del wait, timeout
        self._pool.reload(())

    async def areload(self, timeout: _units.Duration | None) -> None:
        """:meth:`reload`, which does not block."""
        self.reload(wait=True, timeout=timeout)

    @property
    def paused(self) -> bool:
        """Whether policies are held back."""
        return self._pool.paused

    def set_paused(self, *, paused: bool) -> None:
        """Hold back what the pool's options and ``recycle_on`` ask for, or no longer."""
        self._pool.set_paused(paused=paused)
        for molds in list(self._guards):
            molds.follow_pause(paused=paused)

    def unload(self, timeout: _units.Duration | None) -> None:
        """End the molds of all keys until their next call."""
        self._pool.unload((), Timeout(timeout))

    async def aunload(self, timeout: _units.Duration | None) -> None:
        """:meth:`unload` for coroutines."""
        await self._pool.aunload((), Timeout(timeout))

    def close(self) -> None:
        """End all processes."""
        self._closed = True
        self._pool.close()

    async def aclose(self) -> None:
        """End all processes."""
        self._closed = True
        await self._pool.aclose()

    def reopen(self) -> None:
        """Admit calls again."""
        if self._closed:
            self._closed, self._pool = False, self._new_pool(paused=self.paused)

    def refuse_calls(self) -> None:
        """Raise ``GuardClosed`` from now on."""
        self._closed = True
        self._pool.refuse_calls()

    def end_at_once(self) -> None:
        """Kill all processes."""
        for molds in list(self._guards):
            molds.end_at_once()

    def abandon(self) -> None:
        """Leave the parent's processes alone."""
        for molds in list(self._guards):
            molds.abandon()


def _of_all(reasons: Iterable[tuple[Reason, ...]]) -> Postponed | None:
    """What the workers of all keys wait for."""
    waiting = tuple(dict.fromkeys(reason for some in reasons for reason in some))
    return Postponed(reasons=waiting, cause="paused", seconds=None) if waiting else None
