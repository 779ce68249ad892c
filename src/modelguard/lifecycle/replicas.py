"""``replicas`` and ``ModelReplicas``: copies of a model that is not thread-safe, each for one call at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from modelguard import _public, _units
from modelguard._entered import Entered
from modelguard.errors import InvalidOption, Reloading
from modelguard.lifecycle import _deadlocks, _in_thread, _misuse
from modelguard.lifecycle._free_replicas import FreeReplicas
from modelguard.lifecycle._known_models import KnownModels
from modelguard.lifecycle._pool_leases import PoolLease, call_on
from modelguard.lifecycle._turns import Turns, in_turn
from modelguard.lifecycle._waiting import Timeout
from modelguard.lifecycle._wrappers import wrap
from modelguard.lifecycle.model_guard import ModelGuard, hide
from modelguard.telemetry import logger

if TYPE_CHECKING:
    from modelguard.lifecycle.status import Status

__all__ = ["ModelReplicas", "replicas"]

M = TypeVar("M")
S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


class ModelReplicas(Entered, Generic[M]):
    """Copies of one model in this process, each with a lifecycle of its own. Made by :func:`replicas`.

    It is a decorator and a handle, as a guard is, and a context manager that loads on entry and closes on exit, for
    ``with`` and ``async with``.
    """

    if not TYPE_CHECKING:

        def __new__(cls, *args: object, **kwargs: object) -> Self:  # noqa: D102 - Python's own
            _misuse.check_made_by("replicas(guard(load, reload_on=...), 2)", cls, args, kwargs)
            return super().__new__(cls)

    def __init__(self, name: str, guards: tuple[ModelGuard[M], ...]) -> None:
        super().__init__()
        self._name = name
        self._guards = guards
        engines = [guard.engine for guard in guards]
        self._free = FreeReplicas(name, engines, engines[0].guard.options.wait_timeout)

    @property
    def name(self) -> str:
        """The name of the guard that they were made from. Their own have a number: ``name[0]``."""
        return self._name

    @property
    def ready(self) -> bool:
        """Whether calls get a replica: one has its model, or its next call loads it."""
        return any(guard.ready for guard in self._guards)

    def __repr__(self) -> str:
        return f"<ModelReplicas {self._name!r}, {len(self._guards)} of them>"

    def __reduce__(self) -> Any:
        raise TypeError(f"replicas {self._name!r} cannot be pickled: import the module that makes them")

    # Use

    @overload
    def __call__(self, function: classmethod[S, Concatenate[M, P], R], /) -> classmethod[S, P, R]: ...
    @overload
    def __call__(self, function: staticmethod[Concatenate[M, P], R], /) -> staticmethod[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[M, P], R], /) -> Callable[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[S, M, P], R], /) -> Callable[Concatenate[S, P], R]: ...
    def __call__(self, function: Any, /) -> Any:
        """Decorate a function that takes the model as its first parameter, after ``self`` or ``cls`` in a class.

        Each call has a replica for itself, from its start to its end: functions, methods, coroutines and generators.

        Raises:
            InvalidOption: It is not a function, or has no parameter to take the model.
        """
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

    # Lifecycle

    def load(self, timeout: _units.Duration | None = None) -> None:
        """Load all replicas, one after another, unless they are loaded. Blocks.

        Args:
            timeout: How long to wait at most, for all of them together. Default: as long as it takes.

        Raises:
            LoadFailed, Reloading, GuardClosed, WouldDeadlock: As :meth:`ModelGuard.load`.
        """
        limit = Timeout(timeout)
        for guard in self._guards:
            guard.load(limit.left())

    async def aload(self, timeout: _units.Duration | None = None) -> None:
        """:meth:`load` for a coroutine: does not block the event loop."""
        limit = Timeout(timeout)
        for guard in self._guards:
            await guard.aload(limit.left())

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
            threading.Thread(target=self._roll_in_background, name=f"modelguard-roll-{self._name}", daemon=True).start()
        elif timeout is None:
            self._roll()
        else:
            _deadlocks.raise_on_event_loop(self._name, "reload", "await replicas.areload()")
            try:
                self._begin_to_roll().result(limit.left())
            except TimeoutError:
                raise Reloading(self._name, waited=limit.waited()) from None

    async def areload(self, timeout: _units.Duration | None = None) -> None:
        """:meth:`reload` for a coroutine: does not block the event loop."""
        limit = Timeout(timeout)
        _in_thread.require_asyncio("waiting for models in a coroutine")  # before the first load begins
        try:
            await asyncio.wait_for(asyncio.wrap_future(self._begin_to_roll()), limit.left())
        except TimeoutError:
            raise Reloading(self._name, waited=limit.waited()) from None

    def unload(self, timeout: _units.Duration | None = None) -> None:
        """Release all models until their next use, which loads one again. Blocks.

        Args:
            timeout: How long to wait at most, for all of them together. Default: until they are released.

        Raises:
            Reloading: ``timeout`` has passed. A release that has begun goes on; the others keep their models.
            GuardClosed, WouldDeadlock: As :meth:`ModelGuard.unload`.
        """
        limit = Timeout(timeout)
        for guard in self._guards:
            guard.unload(limit.left())

    async def aunload(self, timeout: _units.Duration | None = None) -> None:
        """:meth:`unload` for a coroutine: does not block the event loop."""
        limit = Timeout(timeout)
        for guard in self._guards:
            await guard.aunload(limit.left())

    def rollback(self) -> None:
        """Go back to the previous model of each replica, as :meth:`ModelGuard.rollback` does. Does not block.

        Raises:
            NoPreviousModel: One of them keeps none; then all stay as they are.
            GuardClosed: They are closed.
        """
        for guard in sorted(self._guards, key=_previous):  # one without comes first
            guard.rollback()

    def pause(self) -> None:
        """Let policies start nothing until :meth:`resume`, as :meth:`ModelGuard.pause` does."""
        for guard in self._guards:
            guard.pause()

    def resume(self) -> None:
        """End :meth:`pause`."""
        for guard in self._guards:
            guard.resume()

    def _begin_to_roll(self) -> Future[None]:
        runtime = self._guards[0].engine.guard.runtime
        return _in_thread.start(self._roll, f"modelguard-roll-{self._name}", runtime.start_thread)

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

    def close(self, timeout: _units.Duration | None = None) -> None:
        """Close all replicas, as :meth:`ModelGuard.close` does.

        Args:
            timeout: How long to wait for the calls on all of them together. Default: ``drain_timeout`` for each.

        Raises:
            InvalidOption: ``timeout`` is not a duration.
        """
        limit = Timeout(timeout)
        for guard in self._guards:
            guard.close(limit.left())

    async def aclose(self, timeout: _units.Duration | None = None) -> None:
        """:meth:`close` for a coroutine: does not block the event loop."""
        limit = Timeout(timeout)
        for guard in self._guards:
            await guard.aclose(limit.left())

    def _open(self) -> None:
        self._reopen()
        self.load()

    async def _aopen(self) -> None:
        self._reopen()
        await self.aload()

    def _reopen(self) -> None:
        for guard in self._guards:
            guard.engine.reopen()


def _previous(guard: ModelGuard[Any]) -> int:
    return guard.status().previous


def _has_model(guard: ModelGuard[Any]) -> bool:
    return guard.engine.state.current is not None


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
    if not isinstance(model, ModelGuard):
        why = f"must be a guard, not {_units.kind_of(model)}"
        raise InvalidOption("model", model, why=why, fix="Write replicas(guard(load, reload_on=...), 2).")
    _units.whole_number(count, "count", at_least=2)
    if model.engine.state.generations:
        why = "has loaded a model of its own already"
        raise InvalidOption("model", model, why=why, fix="Make a guard for the replicas alone, and do not load it.")
    options, runtime = model.engine.guard.options, model.engine.guard.runtime
    if options.keeps_mold:
        why = "is for isolated functions, and copies are in this process"
        raise InvalidOption("keep", "mold", why=why, fix="Leave it out, to release the copies that nobody uses.")
    if options.replay is not None:
        why = "calls the current model beside its other calls, and a replica takes one call at a time"
        raise InvalidOption(
            "replay", options.replay, why=why, fix="Leave it out, and use validate= to compare the two."
        )
    hide(model)
    loading: list[Callable[[], bool]] = []
    loaded: list[Callable[[], bool]] = []
    turns = Turns(loading, loaded, runtime.clock)
    options = replace(options, family=KnownModels())
    guards = tuple(
        ModelGuard(
            replace(options, name=f"{options.name}[{at}]", reload_on=in_turn(options.reload_on, at, turns)), runtime
        )
        for at in range(count)
    )
    for guard in guards:
        loading.append(partial(getattr, guard.engine, "loading"))
        loaded.append(partial(_has_model, guard))
    return ModelReplicas(options.name, guards)


_public.set_module(globals(), "modelguard")
