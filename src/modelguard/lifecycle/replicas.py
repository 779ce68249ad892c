"""``replicas`` and ``ModelReplicas``: copies of a model that is not thread-safe, each for one call at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from modelguard import _public, _units
from modelguard.errors import GuardClosed, InvalidOption, Overloaded, Reloading
from modelguard.lifecycle import _load_waits, _misuse
from modelguard.lifecycle._engine import Engine, Lease
from modelguard.lifecycle._guard_options import KnownModels
from modelguard.lifecycle._wrappers import wrap
from modelguard.lifecycle.guard import ModelGuard, hide
from modelguard.lifecycle.handle import ModelHandle
from modelguard.lifecycle.policies import NextCheck, Policy, Snapshot, alternatives
from modelguard.lifecycle.pool import PoolLease, call_on
from modelguard.runtime import fork, waiting
from modelguard.runtime.background import start_thread
from modelguard.runtime.waiting import Line, Steps, TimeIsOver, Timeout, Wait
from modelguard.telemetry import logger
from modelguard.telemetry.reasons import Reason

if TYPE_CHECKING:
    from modelguard.lifecycle.status import Status

__all__ = [
    "ModelReplicas",
    "replicas",
]


# Which replica takes a call: one that no other call uses, and that has its model if there is such a one.


M = TypeVar("M")


class FreeReplicas(Generic[M]):
    """Hands replicas out, each to one call at a time.

    Args:
        name: Of the replicas.
        engines: One for each replica.
        wait: Seconds that a call waits for a free one.

    Attributes:
        rolling: Held while all are replaced, one after another.
        closed: Whether no call gets one any more, though some may still have their models.
    """

    fork_rank = fork.Rank.REPLICAS

    def __init__(self, name: str, engines: Sequence[Engine[M]], wait: float) -> None:
        self._name = name
        self._engines = engines
        self._wait = wait
        self.closed = False
        self.line: Line[None, int] = Line(self._take_free, self.give_back)
        for engine in engines:
            engine.changed = self.line.serve  # one that was being loaded may have its model
        self.after_fork_in_child()
        fork.register(self)

    def take(self, timeout: float | None = None) -> Lease[M]:
        """Take a lease on a free replica, inside a call on the one that this call uses.

        Raises:
            Overloaded: All are in use, and the time is over.
            GuardClosed, LoadFailed, Reloading: It has no model.
        """
        engine = self._enclosing()
        if engine is not None:
            return Lease.take(engine)
        at = self._free_now()
        if at is None:
            at = waiting.block(self._until_free(timeout))
        try:
            return self._bound(_ExclusiveLease.take(self._engines[at], timeout), at)
        except BaseException:
            self.give_back(at)
            raise

    async def atake(self, timeout: float | None = None) -> Lease[M]:
        """:meth:`take` without blocking the event loop."""
        engine = self._enclosing()
        if engine is not None:
            return await Lease.atake(engine)
        at = self._free_now()
        if at is None:
            at = await waiting.suspend(self._until_free(timeout))
        try:
            return self._bound(await _ExclusiveLease.atake(self._engines[at], timeout), at)
        except BaseException:
            self.give_back(at)
            raise

    def _bound(self, lease: Any, at: int) -> Lease[M]:
        lease.replica, lease.replicas, lease.process = at, self, self._process
        return lease  # type: ignore[no-any-return]

    def _enclosing(self) -> Engine[M] | None:
        return next((engine for engine in self._engines if engine.state.enclosing_generation() is not None), None)

    def _take_free(self, _request: None = None) -> int | None:
        """Take a free replica: one that has its model, else one that could be loaded now; None if there is none."""
        if self.closed:
            raise GuardClosed(self._name)
        while True:
            free = self._free.copy()
            ready = [at for at in free if self._engines[at].state.current is not None]
            chosen = ready or [at for at in free if not self._engines[at].loading]
            if not chosen:
                return None
            at: int = chosen[0]
            with suppress(ValueError):  # somebody else has just taken it
                self._free.remove(at)
                return at

    def _free_now(self) -> int | None:
        """A free one, unless others wait for it."""
        return None if self.line else self._take_free()

    def _until_free(self, timeout: float | None) -> Steps[int]:
        wait = self._wait if timeout is None else timeout
        try:
            return (yield from self.line.wait(None, Timeout(wait), search=self._search))
        except TimeIsOver:
            raise Overloaded(f"{self._name}: all {len(self._engines)} replicas were in use for {wait:g} s") from None

    def _search(self) -> None:
        """Look for loads that wait for this thread, if no replica has a model: one that is in use becomes free."""
        states = [engine.state for engine in self._engines]
        if all(state.current is None and state.job is not None for state in states):
            for state in states:
                _load_waits.raise_if_load_waits_here(state)

    def close(self) -> None:
        """Refuse calls, and those that wait."""
        self.closed = True
        self.line.serve()

    def give_back(self, at: int) -> None:
        self._free.append(at)
        self.line.serve()

    def ended(self, lease: _ExclusiveLease[Any]) -> None:
        """Note that a lease has ended."""
        if lease.process == os.getpid():  # else a fork lies between, and all are free here
            self.give_back(lease.replica)

    @property
    def in_use(self) -> int:
        """How many are used by a call."""
        return len(self._engines) - len(self._free)

    # Fork

    def before_fork(self) -> None:
        """Nothing: a child keeps nothing of the parent's state."""

    def after_fork_in_parent(self) -> None:
        """Nothing, as above."""

    def after_fork_in_child(self) -> None:
        """All are free: the other calls are the parent's. A thread of the parent may have held a lock."""
        # Which are free: changed in single steps, since the garbage collector may end a lease at any point.
        self._free = [*range(len(self._engines))]
        self.line.renew()
        self._process = os.getpid()
        self.rolling = threading.Lock()


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


# Replicas are replaced one at a time: whose turn it is, and how policies on memory count for all of them.


#: Seconds after which a replica loses a turn that it has not used, for example because it was closed.
_UNUSED = 5.0


class Turns:
    """Gives one replica after another the turn to be replaced.

    Args:
        engines: Of the replicas; they may come later.
        clock: Returns the time in seconds.
    """

    fork_rank = fork.Rank.REPLICAS  # nothing else is taken while its lock is held

    def __init__(self, engines: Sequence[Engine[Any]], clock: Callable[[], float]) -> None:
        self._engines = engines
        self._clock = clock
        self._lock = threading.RLock()  # reentrant: a signal handler may call another replica
        self._born: dict[int, tuple[int, float]] = {}  # of each replica, its generation and when that was first seen
        self._baselines: dict[int, int | None] = {}
        self._holder: tuple[int, float] | None = None
        fork.register(self)

    def see(self, replica: int, now: Snapshot) -> None:
        """Note what a replica has read."""
        with self._lock:
            if self._born.get(replica, (0, 0.0))[0] != now.generation:
                self._born[replica] = now.generation, self._clock() - now.age
            self._baselines[replica] = now.baseline

    def take(self, replica: int) -> bool:
        """Give a replica its turn, unless another one is being replaced."""
        with self._lock:
            if any(engine.loading for other, engine in enumerate(self._engines) if other != replica):
                return False
            now = self._clock()
            if self._holder is not None:
                holder, since = self._holder
                if holder != replica and now - since < _UNUSED and not self._was_replaced(holder, since):
                    return False
            self._holder = replica, now
            return True

    def before_fork(self) -> None:
        self._lock.acquire()

    def after_fork_in_parent(self) -> None:
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """The same: the thread that has forked is the one that holds the lock."""
        self._lock.release()

    def _was_replaced(self, replica: int, since: float) -> bool:
        return self._born.get(replica, (0, 0.0))[1] > since

    def is_oldest(self, replica: int) -> bool:
        """Whether no other replica has taken calls for longer."""
        with self._lock:
            return replica == min(self._with_models(replica), key=lambda one: (self._born[one][1], one))

    def baseline(self, replica: int) -> int | None:
        """Private memory when the youngest replica had settled; None until then. It has the models of all others."""
        with self._lock:
            youngest = max(self._with_models(replica), key=lambda one: self._born[one][1])
            return self._baselines[youngest]

    def _with_models(self, replica: int) -> list[int]:
        """Replicas that have a model, as this one has; others have released theirs until their next use."""
        return [one for one in list(self._born) if one == replica or self._engines[one].state.current is not None]


def in_turn(policy: Policy | None, replica: int, turns: Turns) -> Policy | None:
    """The policy of one replica: due only in its turn, and on memory only if it is the oldest."""
    joined: Policy | None = None
    for member in alternatives(policy):
        mine = _InTurn(member, replica, turns)
        joined = mine if joined is None else joined | mine
    return joined


class _InTurn(Policy):
    """One policy of one replica.

    Memory is that of the whole process, so it grows when another replica is loaded, and says nothing about which model
    grows. It counts from the youngest replica's baseline, and the oldest replica goes first.
    """

    def __init__(self, policy: Policy, replica: int, turns: Turns) -> None:
        self._policy = policy
        self._replica = replica
        self._turns = turns
        flags = ("kind", "reads_memory", "renews", "watches_source", "unloads", "restricts")
        vars(self).update({flag: getattr(policy, flag) for flag in flags})

    def due(self, now: Snapshot) -> bool:
        return bool(self.reasons(now))

    def reasons(self, now: Snapshot) -> tuple[Reason, ...]:
        self._turns.see(self._replica, now)
        if self.unloads:  # which loads nothing, so several may at once
            return self._policy.reasons(now)
        if self.reads_memory:
            if not self._turns.is_oldest(self._replica):
                return ()
            now = replace(now, baseline=self._turns.baseline(self._replica))
        reasons = self._policy.reasons(now)
        return reasons if reasons and self._turns.take(self._replica) else ()

    def next_check(self, now: Snapshot) -> NextCheck:
        self._turns.see(self._replica, now)
        own = self._policy.next_check(now)
        return NextCheck(uses=max(own.uses, 1), seconds=max(own.seconds, 1.0)) if self._policy.due(now) else own

    def parts(self) -> tuple[Policy, ...]:
        return self._policy.parts()

    def ignored_because(self, now: Snapshot) -> str | None:
        return self._policy.ignored_because(now)

    def __repr__(self) -> str:
        return repr(self._policy)


class ModelReplicas(ModelHandle[M]):
    """Copies of one model in this process, each with a lifecycle of its own. Made by :func:`replicas`.

    It is a decorator and a handle, as a guard is, and a context manager that loads on entry and closes on exit, for
    ``with`` and ``async with``.
    """

    _made_by = "replicas(guard(load, reload_on=...), 2)"
    _what = "replicas"

    def __init__(self, name: str, guards: tuple[ModelGuard[M], ...]) -> None:
        engines = [guard.engine for guard in guards]
        super().__init__(name, engines)
        self._guards = guards
        self._free = FreeReplicas(name, engines, engines[0].guard.options.wait_timeout)

    def __repr__(self) -> str:
        return f"<ModelReplicas {self._name!r}, {len(self._guards)} of them>"

    def _decorate(self, function: Any, *, in_use: bool) -> Any:
        del in_use
        return wrap(
            function,
            call=call_on(lambda _args, _kwargs: self._free.take()),
            take=lambda _args, _kwargs: self._free.take(),
            atake=lambda _args, _kwargs: self._free.atake(),
            owner=self,
        )

    def lease(self, timeout: _units.Duration | None = None) -> PoolLease[M]:
        """Use a replica for a block: ``with replicas.lease() as model:`` or ``async with``.

        Args:
            timeout: How long to wait for a free one. Default: the guard's ``wait_timeout``.

        Raises:
            Overloaded, LoadFailed, Reloading, GuardClosed: On entry.
        """
        wait = None if timeout is None else _units.seconds(timeout, "timeout", zero=True)
        return PoolLease(partial(self._free.take, wait), partial(self._free.atake, wait))

    def reload(self, *, wait: bool = True, timeout: _units.Duration | None = None) -> None:
        """Replace all replicas, one after another; the others take the calls meanwhile.

        Args:
            wait: Return when all are replaced; if False, return at once. A reload that is asked for while one runs
                follows it.
            timeout: How long to wait at most, for all of them together. Default: as long as it takes.

        Raises:
            LoadFailed: A load failed; the replicas after it keep their models.
            Reloading: ``timeout`` has passed. The reload of all of them goes on.
            GuardClosed, WouldDeadlock: As :meth:`ModelGuard.reload`.
            InvalidOption: ``wait`` is not a bool, or ``timeout`` is not a duration.
        """
        _misuse.check_wait(wait)
        limit = Timeout(timeout)
        if not wait:
            self._engines[0].state.raise_if_closed()
            start_thread(self._roll_in_background, f"modelguard-roll-{self._name}")
        elif timeout is None:
            self._roll()
        else:
            waiting.raise_on_event_loop(self._name, "reload", "await replicas.areload()")
            waiting.block(self._until_rolled(limit))

    async def areload(self, timeout: _units.Duration | None = None) -> None:
        """:meth:`reload` for a coroutine: does not block the event loop."""
        limit = Timeout(timeout)
        waiting.require_loop("waiting for models in a coroutine")  # before the first load begins
        await waiting.suspend(self._until_rolled(limit))

    def _until_rolled(self, limit: Timeout) -> Steps[None]:
        rolling = waiting.start(
            self._roll, f"modelguard-roll-{self._name}", self._guards[0].engine.guard.runtime.start_thread
        )
        yield Wait(rolling, limit)
        if not rolling.done():
            raise Reloading(self._name, waited=limit.waited())
        rolling.result()

    def close(self, timeout: _units.Duration | None = None) -> None:  # noqa: D102 - as Handle.close says
        limit = Timeout(timeout)
        for engine in self._engines:
            engine.check_closable()
        self._free.close()  # of all before the first of them drains, else the others would take its calls
        super().close(limit.left())

    def _reopen(self) -> None:
        super()._reopen()
        self._free.closed = False

    def _roll(self) -> None:
        with self._free.rolling:
            for guard in self._guards:
                guard.reload()

    def _roll_in_background(self) -> None:
        try:
            self._roll()
        except Exception:  # noqa: BLE001 - the failed load has its event
            logger.exception("modelguard: replicas %r were not all replaced", self._name)

    def status(self) -> tuple[Status, ...]:
        """The figures of each replica at this moment."""
        return tuple(guard.status() for guard in self._guards)


def replicas(model: ModelGuard[M], count: int = 2) -> ModelReplicas[M]:
    """Keep copies of a model in this process, for a model that is not thread-safe and releases the GIL.

    Each copy has a guard of its own with the options of ``model``. It takes one call at a time; a call gets a free one.
    With ``@batched(threads=2)`` above it, one queue feeds all of them::

        pair = replicas(guard(load, reload_on=TTL("1h")), 2)

        @batched(max_size=16, threads=2)
        @pair
        def embed(model, texts: list[str]) -> list[list[float]]: ...

    Reloads roll: one copy is replaced at a time, while the others take calls. Policies on memory read the whole
    process: when they are due, the copy that has served longest is replaced, and growth counts from the copy that came
    last.
    All copies need their memory; several processes that share one copy need less.

    Args:
        model: A guard, whose options are used. It is not used itself.
        count: How many copies, at least 2.

    Raises:
        InvalidOption: ``model`` is not a guard, is in use already or has ``replay`` or ``Idle(keep="mold")``, or
            ``count`` is invalid.
    """
    _units.instance(model, "model", ModelGuard, "a guard", fix="Write replicas(guard(load, reload_on=...), 2).")
    _units.whole_number(count, "count", at_least=2)
    if model.engine.state.generations:
        why = "has loaded a model of its own already"
        raise InvalidOption("model", model, why=why, fix="Make a guard for the replicas alone, and do not load it.")
    options, world = model.engine.guard.options, model.engine.guard.runtime
    if options.keeps_mold:
        why = "is for isolated functions, and copies are in this process"
        raise InvalidOption("keep", "mold", why=why, fix="Leave it out, to release the copies that nobody uses.")
    if options.swap.replay is not None:
        why = "calls the current model beside its other calls, and a replica takes one call at a time"
        raise InvalidOption(
            "replay", options.swap.replay, why=why, fix="Leave it out, and use validate= to compare the two."
        )
    hide(model)
    engines: list[Engine[M]] = []
    turns = Turns(engines, world.clock)
    options = replace(options, family=KnownModels())
    guards = tuple(
        ModelGuard(
            replace(options, name=f"{options.name}[{at}]", reload_on=in_turn(options.reload_on, at, turns)), world
        )
        for at in range(count)
    )
    engines.extend(guard.engine for guard in guards)
    return ModelReplicas(options.name, guards)


_public.set_module(globals(), "modelguard")
