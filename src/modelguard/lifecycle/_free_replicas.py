"""Which replica takes a call: one that no other call uses, and that has its model if there is such a one."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from modelguard.errors import Overloaded
from modelguard.lifecycle import _deadlocks, _fork, _in_thread
from modelguard.lifecycle._engine import Engine
from modelguard.lifecycle._leases import Lease

if TYPE_CHECKING:
    from modelguard.lifecycle._state import GuardState

__all__ = ["FreeReplicas"]

M = TypeVar("M")

#: Seconds after which a waiting call looks again while a free replica is being loaded.
_LOOK = 0.05


class FreeReplicas(Generic[M]):
    """Hands replicas out, each to one call at a time.

    Args:
        name: Of the replicas.
        engines: One for each replica.
        wait: Seconds that a call waits for a free one.

    Attributes:
        rolling: Held while all are replaced, one after another.
    """

    fork_rank = 2

    def __init__(self, name: str, engines: Sequence[Engine[M]], wait: float) -> None:
        self._name = name
        self._engines = engines
        self._wait = wait
        self._start()
        _fork.register(self)

    def _start(self) -> None:
        # Reentrant: the garbage collector may end a lease in the middle of a change.
        self._changed = threading.Condition(threading.RLock())
        self._free = [*range(len(self._engines))]
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._process = os.getpid()
        self.rolling = threading.Lock()

    def take(self, timeout: float | None = None) -> Lease[M]:
        """Take a lease on a free replica, inside a call on the one that this call uses.

        Raises:
            Overloaded: All are in use, and the time is over.
            GuardClosed, LoadFailed, Reloading: It has no model.
        """
        engine = self._enclosing()
        if engine is not None:
            return Lease.take(engine)
        at = self._wait_for_free(self._wait if timeout is None else timeout)
        return self._lease(at, timeout)

    def _lease(self, at: int, timeout: float | None) -> Lease[M]:
        try:
            lease = _ExclusiveLease.take(self._engines[at], timeout)
        except BaseException:
            self._give_back(at)
            raise
        return self._bound(lease, at)

    async def atake(self, timeout: float | None = None) -> Lease[M]:
        """:meth:`take` without blocking the event loop."""
        engine = self._enclosing()
        if engine is not None:
            return await Lease.atake(engine)
        at = await self._await_free(self._wait if timeout is None else timeout)
        try:
            lease = await _ExclusiveLease.atake(self._engines[at], timeout)
        except BaseException:
            self._give_back(at)
            raise
        return self._bound(lease, at)

    def _bound(self, lease: Any, at: int) -> Lease[M]:
        lease.replica, lease.replicas, lease.process = at, self, self._process
        return lease  # type: ignore[no-any-return]

    def _enclosing(self) -> Engine[M] | None:
        return next((engine for engine in self._engines if engine.state.enclosing_generation() is not None), None)

    def _free_now(self) -> int | None:
        """Take a free replica: one that has its model, else one that could be loaded now; None if there is none."""
        with self._changed:
            ready = [at for at in self._free if self._engines[at].state.current is not None]
            chosen = ready or [at for at in self._free if not self._engines[at].loading]
            if not chosen:
                return None
            at: int = chosen[0]
            self._free.remove(at)
            return at

    def _wait_for_free(self, wait: float) -> int:
        until = time.monotonic() + wait
        search = _deadlocks.Search(self._states_if_all_load)
        with self._changed:
            while (at := self._free_now()) is None:
                self._changed.wait(search.pause(self._pause(until, wait)))
                search.look()
            return at

    def _states_if_all_load(self) -> list[GuardState[M]]:
        """The states of all, if none has a model; else none: one that is in use becomes free."""
        states = [engine.state for engine in self._engines]
        return states if all(state.current is None and state.job is not None for state in states) else []

    async def _await_free(self, wait: float) -> int:
        until = time.monotonic() + wait
        while True:
            with self._changed:
                at = self._free_now()
                if at is not None:
                    return at
                _in_thread.require_asyncio("waiting for a free replica in a coroutine")
                loop = asyncio.get_running_loop()
                waiter: asyncio.Future[None] = loop.create_future()
                pause = self._pause(until, wait)
                self._waiters.append((loop, waiter))
            try:
                await asyncio.wait_for(waiter, pause)
            except TimeoutError:
                pass
            finally:
                with self._changed, suppress(ValueError):
                    self._waiters.remove((loop, waiter))

    def _pause(self, until: float, wait: float) -> float:
        """Seconds after which to look again, at the latest."""
        left = until - time.monotonic()
        if left <= 0:
            raise Overloaded(f"{self._name}: all {len(self._engines)} replicas were in use for {wait:g} s")
        return min(left, _LOOK) if self._free else left

    def _give_back(self, at: int) -> None:
        with self._changed:
            self._free.append(at)
            self._changed.notify()
            waiters, self._waiters = self._waiters, []
        for loop, waiter in waiters:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_wake, waiter)

    def ended(self, lease: _ExclusiveLease[Any]) -> None:
        """Note that a lease has ended."""
        if lease.process == os.getpid():  # else a fork lies between, and all are free here
            self._give_back(lease.replica)

    # Fork

    def before_fork(self) -> None:
        """Nothing: a child keeps nothing of the parent's state."""

    def after_fork_in_parent(self) -> None:
        """Nothing, as above."""

    def after_fork_in_child(self) -> None:
        """All are free: the other calls are the parent's. A thread of the parent may have held a lock."""
        self._start()

    @property
    def in_use(self) -> int:
        """How many are used by a call."""
        return len(self._engines) - len(self._free)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class _ExclusiveLease(Lease[M]):
    """A lease that keeps other calls from its replica."""

    __slots__ = ("process", "replica", "replicas")

    replica: int
    process: int
    replicas: FreeReplicas[M] | None

    def __init__(self, engine: Engine[M], timeout: float | None = None) -> None:
        super().__init__(engine, timeout)
        self.replicas = None

    def end(self, *, failed: bool) -> None:
        """Return the lease, once; the replica is free then."""
        with self._freeing():
            super().end(failed=failed)

    def drop(self) -> None:
        """The same, where the garbage collector may be at work."""
        with self._freeing():
            super().drop()

    @contextmanager
    def _freeing(self) -> Iterator[None]:
        replicas, self.replicas = self.replicas, None
        try:
            yield
        finally:
            if replicas is not None:
                replicas.ended(self)
