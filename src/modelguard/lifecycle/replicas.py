"""``replicas`` and ``ModelReplicas``: copies of a model that is not thread-safe, each for one call at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from modelguard import _public, _units
from modelguard.errors import GuardClosed, InvalidOption, LoadFailed, Overloaded, Reloading
from modelguard.lifecycle import _engine
from modelguard.lifecycle._engine import Engine
from modelguard.lifecycle._lease import Lease, wrap
from modelguard.lifecycle._models import KnownModels
from modelguard.lifecycle.guard import ModelGuard, hide
from modelguard.lifecycle.handle import ModelHandle
from modelguard.lifecycle.policies import Snapshot
from modelguard.lifecycle.pool import PoolLease
from modelguard.runtime import fork_hooks, waiting
from modelguard.runtime.waiting import Line, Steps, TimeIsOver, Timeout, Wait
from modelguard.telemetry import logger

if TYPE_CHECKING:
    from modelguard.lifecycle._guard_options import GuardOptions
    from modelguard.lifecycle.status import Status

__all__ = ["ModelReplicas", "replicas"]


# Which replica takes a call: one that no other call uses, and that has its model if there is such a one.


M = TypeVar("M")

#: Copies at most: more than any machine holds.
_MOST = 1_000


#: The place of the only roll that waits for its beginning.
_NEXT = 0


class _Roll:
    """A replacement of all, one after another."""

    def __init__(self) -> None:
        self.loaded: list[ModelGuard[Any]] = []  # which of them had a model when it was last asked for
        self.heard = True  # whether everybody who asked waits for its end
        self.ended: Future[None] = waiting.promise()  # gets its end


class FreeReplicas(fork_hooks.Forkable, Generic[M]):
    """Hands replicas out, each to one call at a time, and has them replaced one at a time.

    Args:
        name: Of the replicas.
        wait: Seconds that a call waits for a free one.

    Attributes:
        rolling: Held while all are replaced, one after another.
        asking: Held while that is asked for.
    """

    fork_rank = fork_hooks.Rank.REPLICAS

    def __init__(self, name: str, wait: float) -> None:
        self._name = name
        self._engines: list[Engine[M]] = []
        self._wait = wait
        self.line: Line[int | None, _ExclusiveLease[M]] = Line(self._take, lambda lease: lease.drop())
        self.after_fork_in_child()
        fork_hooks.register(self)

    def options_of(self, at: int, options: GuardOptions[M]) -> GuardOptions[M]:
        """Those of one replica, by the options of all."""
        alone = partial(self.alone, at, options.swap.drain_timeout)
        seen, turn = partial(self.seen, at), partial(self.turn, at)
        return replace(options, name=f"{options.name}[{at}]", seen=seen, turn=turn, alone=alone)

    def add(self, engine: Engine[M]) -> None:
        engine.changed = self.line.serve  # one that was being loaded may have its model
        self._engines.append(engine)
        at = len(self._free)
        self._free[at] = at

    def take(self, timeout: float | None = None) -> Lease[M]:
        """Take a lease on a free replica, inside a call on the one that this call uses.

        Raises:
            Overloaded: All are in use, and the time is over.
            GuardClosed, LoadFailed, Reloading: It has no model.
        """
        lease = self._take_now()
        return waiting.block(self._until_taken(timeout)) if lease is None else lease

    async def atake(self, timeout: float | None = None) -> Lease[M]:
        """:meth:`take` without blocking the event loop."""
        lease = self._take_now()
        return await waiting.suspend(self._until_taken(timeout)) if lease is None else lease

    def _take_now(self) -> Lease[M] | None:
        """Take a lease if that needs no waiting: not in line, and not for a load."""
        enclosing = next((one for one in self._engines if one.state.enclosing_generation() is not None), None)
        if enclosing is not None:
            return Lease.take_now(enclosing)
        lease = None if self.line else self._take_free(or_load=False)
        if lease is None or lease.take_lease_now():
            return lease
        lease.drop()
        return None

    def _until_taken(self, timeout: float | None) -> Steps[Lease[M]]:
        wait = self._wait if timeout is None else timeout
        limit = Timeout(wait)
        while True:
            self._load_one_more()
            try:
                lease = yield from self.line.wait(None, limit, search=self._search)
            except TimeIsOver:
                raise Overloaded(
                    f"{self._name}: all {len(self._engines)} replicas were in use for {wait:g} s"
                ) from None
            try:
                yield from lease.until_leased(timeout)
            except LoadFailed:
                lease.drop()
                if not self._has_model():  # else another one is in use, and becomes free
                    raise
            except BaseException:
                lease.drop()
                raise
            else:
                return lease

    def _load_one_more(self) -> None:
        """Load a free replica for a call that has to wait: it goes on as soon as any is free, this one or another."""
        for at in list(self._free) if self._has_model() else ():
            engine = self._engines[at]
            if engine.state.current is None and not engine.loading:
                with suppress(LoadFailed, GuardClosed):  # its backoff has not passed, or all are closed
                    engine.join_load()
                    return

    def _has_model(self) -> bool:
        return any(engine.state.current is not None for engine in self._engines)

    def _take(self, at: int | None) -> _ExclusiveLease[M] | None:
        return self._take_free(or_load=True) if at is None else self._take_this(at)

    def _take_this(self, at: int) -> _ExclusiveLease[M] | None:
        lease = _ExclusiveLease(self._engines[at], self._free, self.line)
        with suppress(KeyError):  # a call has it, or has just taken it
            lease.places.extend(map(self._free.pop, [at]))  # one step: no signal handler raises in it
            return lease
        return None

    def _take_free(self, *, or_load: bool) -> _ExclusiveLease[M] | None:
        """Take a free replica that has its model; where none has, one that could be loaded. None if there is none."""
        if self._engines[0].state.closed:
            raise GuardClosed(self._name)
        while True:
            free = list(self._free)  # not a tuple, which the collector may interrupt
            ready = [at for at in free if self._engines[at].state.current is not None]
            if or_load and not (ready or self._has_model()):
                ready = [at for at in free if not self._engines[at].loading]
            if not ready:
                return None
            if (lease := self._take_this(ready[0])) is not None:
                return lease

    def _search(self) -> None:
        """Look for loads that wait for this thread, if no replica has a model: one that is in use becomes free."""
        states = [engine.state for engine in self._engines]
        if all(state.current is None and state.job is not None for state in states):
            _engine.search(states)

    @contextmanager
    def alone(self, at: int, timeout: float) -> Iterator[bool]:
        """Keep calls from a replica in the block, once the one that has it has ended; false if that takes too long."""
        try:
            lease = waiting.block(self.line.wait(at, Timeout(timeout)))
        except TimeIsOver:
            yield False
            return
        try:
            yield True
        finally:
            lease.drop()

    # Policies

    def seen(self, at: int, now: Snapshot) -> Snapshot:
        """What the policies of a replica are to read.

        Memory is that of the whole process, so it grows when another replica is loaded, and says nothing about which
        model grows. It counts from the baseline of the youngest, when all others were there, and the oldest goes first.
        """
        born = {one: current.born for one, engine in enumerate(self._engines) if (current := engine.state.current)}
        if at not in born or at != min(born, key=lambda one: born[one]):
            return replace(now, memory=())
        return replace(now, baseline=self._engines[max(born, key=lambda one: born[one])].checks.readings.baseline)

    @contextmanager
    def turn(self, at: int) -> Iterator[bool]:
        """Whether a replica may be replaced: no other one is. None begins in the block."""
        with waiting.turn(self._deciding) as mine:  # else another thread decides, or this one, and a signal came
            yield mine and not any(engine.loading for one, engine in enumerate(self._engines) if one != at)

    # Fork

    def after_fork_in_child(self) -> None:
        """All are free: the other calls are the parent's. A thread of the parent may have held a lock."""
        # Which are free: changed in single steps, since the garbage collector may end a lease at any point. Leases of
        # the parent give back to its own.
        self._free = {at: at for at in range(len(self._engines))}
        self.line.renew()
        self.rolling, self.asking = threading.Lock(), threading.RLock()
        self.next_roll: dict[int, _Roll] = {}  # what has been asked for and has not begun
        self._deciding = threading.Lock()


class _ExclusiveLease(Lease[M]):
    """A lease that keeps other calls from its replica."""

    __slots__ = ("_free", "_line", "places")

    def __init__(self, engine: Engine[M], free: dict[int, int], line: Line[int | None, Any]) -> None:
        super().__init__(engine)
        self._free, self._line = free, line
        self.places: list[int] = []  # which one it is; empty once that is free

    def __del__(self) -> None:
        if getattr(self, "places", None) or getattr(self, "_taken", None):
            self.drop()

    def take_lease_now(self) -> bool:
        return self._engine.state.take_lease(self.slot()) is not None

    def until_leased(self, timeout: float | None) -> Steps[object]:
        return self._engine.until_leased(self.slot(), timeout)

    def end(self, *, failed: bool | None) -> None:
        """Return the lease, once; the replica is free then."""
        try:
            super().end(failed=failed)
        finally:
            self._give_back()

    def drop(self) -> None:
        """The same, where the garbage collector may be at work."""
        try:
            super().drop()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        if self.places:
            at = self.places[0]
            del self.places[:]
            self._free[at] = at
            self._line.serve()


class ModelReplicas(ModelHandle[M]):
    """Copies of one model in this process, each with a lifecycle of its own. Made by :func:`replicas`.

    It is a decorator and a handle, as a guard is, and a context manager that loads on entry and closes on exit, for
    ``with`` and ``async with``.
    """

    _made_by = "replicas(guard(load, reload_on=...), 2)"
    _status = "modelguard.lifecycle.status:Status"
    _what = "replicas"

    def __init__(self, name: str, guards: tuple[ModelGuard[M], ...], free: FreeReplicas[M]) -> None:
        super().__init__(name, [guard.engine for guard in guards])
        self._guards = guards
        self._free = free

    def __repr__(self) -> str:
        return f"<ModelReplicas {self._name!r}, {len(self._guards)} of them>"

    def _decorate(self, function: Any) -> Any:
        return wrap(
            function,
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

    def _request_reload(self) -> None:
        self._engines[0].state.raise_if_closed()
        self._ask_for_roll(heard=False)

    def _until_reloaded(self, limit: Timeout) -> Steps[None]:
        self._raise_inside_call("reload")
        with self._waiting_for_loads():
            ended = self._ask_for_roll(heard=True)
            yield Wait(ended, limit, search=partial(_engine.search, [engine.state for engine in self._engines]))
        if not ended.done():
            raise Reloading(self._name, waited=limit.waited())
        error = ended.exception()
        if isinstance(error, (LoadFailed, GuardClosed)):
            _engine.raise_outcome(error)
        ended.result()

    def _ask_for_roll(self, *, heard: bool) -> Future[None]:
        """Have all replaced from now on: by the roll that has not begun yet, if there is one. What gets its end.

        Args:
            heard: Whether somebody waits for that; else a failure is logged.
        """
        with self._free.asking:  # a signal handler may ask in here, too
            own = _Roll()
            roll = self._free.next_roll.setdefault(_NEXT, own)
            roll.loaded = self._loaded()
            roll.heard = roll.heard and heard
            if roll is own:
                try:
                    self._engines[0].system.start_thread(self._roll, f"modelguard-roll-{self._name}")
                except BaseException as error:
                    self._free.next_roll.clear()
                    roll.ended.set_exception(error)
                    raise
        return roll.ended

    @contextmanager
    def _waiting_for_loads(self) -> Iterator[None]:
        with ExitStack() as waits:
            for engine in self._engines:
                waits.enter_context(_engine.LoadWait(engine.state))
            yield

    def _until_unloaded(self, limit: Timeout) -> Steps[None]:
        self._raise_inside_call("unload")
        yield from super()._until_unloaded(limit)

    def _raise_inside_call(self, action: str) -> None:
        """Before anything is done to the first of them: the call may be on a later one."""
        for engine in self._engines:
            engine.raise_inside_call(action)

    def close(self, timeout: _units.Duration | None = None) -> None:  # noqa: D102 - as Handle.close says
        limit = Timeout(timeout)
        self._raise_on_loop("close")
        self._raise_inside_call("close")
        # All before the first of them drains, else the others would take its calls, and one that was reopened meanwhile
        # would be closed again.
        ended = [(engine, engine.refuse()) for engine in self._engines]
        self._free.line.serve()  # those who wait are refused, too
        for engine, old in ended:
            engine.end(old, limit.left())

    def _roll(self) -> None:
        with self._free.rolling:
            with self._free.asking:
                roll = self._free.next_roll.pop(_NEXT)
            try:
                for guard in self._guards:
                    # Else it was unloaded after this was asked for.
                    if not (guard in roll.loaded and guard.engine.state.unloaded):
                        guard.reload()
            except BaseException as error:  # noqa: BLE001 - it is raised where the end is awaited
                if not roll.heard:  # the failed load has its event
                    logger.error("modelguard: replicas %r were not all replaced", self._name, exc_info=error)
                roll.ended.set_exception(error)
            else:
                roll.ended.set_result(None)

    def _loaded(self) -> list[ModelGuard[M]]:
        return [guard for guard in self._guards if guard.engine.state.current is not None]

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
        count: How many copies, 2 to 1,000.

    Raises:
        InvalidOption: ``model`` is not a guard, is in use already or has ``replay`` or ``Idle(keep="mold")``, or
            ``count`` is invalid.
    """
    _units.instance(model, "model", ModelGuard, "a guard", fix="Write replicas(guard(load, reload_on=...), 2).")
    _units.whole_number(count, "count", at_least=2, most=_MOST, fix="Write replicas(guard(load, reload_on=...), 2).")
    if model.engine.state.generations:
        why = "has loaded a model of its own already"
        raise InvalidOption("model", model, why=why, fix="Make a guard for the replicas alone, and do not load it.")
    options, world = model.engine.options, model.engine.system
    if options.reload_on is not None and options.reload_on.ends_workers:
        why = "is for isolated functions, and copies are in this process"
        raise InvalidOption("keep", "mold", why=why, fix="Leave it out, to release the copies that nobody uses.")
    if options.swap.replay is not None:
        why = "calls the current model beside its other calls, and a replica takes one call at a time"
        fix = "Leave it out, and use validate= to compare the two."
        raise InvalidOption("replay", options.swap.replay, why=why, fix=fix)
    hide(model)
    free: FreeReplicas[M] = FreeReplicas(options.name, options.wait_timeout)
    options = replace(options, family=KnownModels())
    guards = tuple(ModelGuard(free.options_of(at, options), world) for at in range(count))
    for one in guards:
        free.add(one.engine)
    return ModelReplicas(options.name, guards, free)


_public.set_module(globals(), "modelguard")
