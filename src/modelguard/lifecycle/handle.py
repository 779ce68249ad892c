"""The verbs that guards, replicas and pools have in common, over the engines that lend their models.

A handle is thin: it reads the timeout, and asks each of its engines. What an engine must be able to do is
:class:`_Source`; each coroutine does the same as the method without the ``a``, and does not block the event loop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from modelguard import _units
from modelguard._entered import Entered
from modelguard.lifecycle import _misuse
from modelguard.runtime import waiting
from modelguard.runtime.waiting import Steps, Timeout

if TYPE_CHECKING:
    from modelguard.lifecycle._engine import Engine
    from modelguard.lifecycle.system import System

M = TypeVar("M")
S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


def check_wait(wait: object) -> None:
    """Check the argument ``wait`` of a command: a time is given as ``timeout``."""
    _units.instance(wait, "wait", bool, "True or False", fix="To bound the wait, give timeout='5s'.")


_FIX = "A call lends no model: decorate a function, or write with guard.lease() as model, in a FastAPI dependency too."


class Decorator(Generic[M]):
    """Decorates functions that take a model as their first parameter."""

    @overload
    def __call__(self, function: classmethod[S, Concatenate[M, P], R], /) -> classmethod[S, P, R]: ...
    @overload
    def __call__(self, function: staticmethod[Concatenate[M, P], R], /) -> staticmethod[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[M, P], R], /) -> Callable[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[S, M, P], R], /) -> Callable[Concatenate[S, P], R]: ...
    def __call__(self, function: Any = _misuse.REQUIRED) -> Any:
        """Decorate a function that takes the model as its first parameter, after ``self`` or ``cls`` in a class.

        Callers leave the model out. Each call runs on one generation from start to end, and has a replica for itself
        where there are several: functions, methods, class and static methods, coroutines, generators and asynchronous
        generators. A plain function that returns a lazy iterator keeps its lease until that iterator ends.

        Raises:
            InvalidOption: It is not a function, or has no parameter to take the model.
            TypeError: It is missing.
        """
        _misuse.check_keyword("function", function, (), fix=_FIX)
        in_use = _misuse.in_use(sys.getrefcount(function))
        decorated = self._decorate(function)
        if in_use:
            _misuse.check_not_routed(function)
        return decorated

    def _decorate(self, function: Any) -> Any:
        raise NotImplementedError


class _Source(Protocol):
    """What lends models, as a handle sees it."""

    @property
    def name(self) -> str: ...
    @property
    def system(self) -> System: ...
    def set_paused(self, *, paused: bool) -> None: ...
    def close(self, timeout: float | None) -> None: ...
    def reopen(self) -> None: ...


class Handle(Entered):
    """A context manager over sources of models, which is not made by its class."""

    _what: ClassVar[str]

    def __init__(self, name: str, sources: Sequence[_Source]) -> None:
        super().__init__()
        self._name = name
        self._sources = sources

    @property
    def name(self) -> str:
        """Its name, as events and errors show it. Replicas have a number each: ``name[0]``."""
        return self._name

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self._what} {self.name!r} cannot be pickled: import the module that makes it, in each process"
        )

    def pause(self) -> None:
        """Let policies start nothing until :meth:`resume`, as during an incident: no reload, release or new process.

        What they would have done waits (``status().postponed``), and each policy that waits is reported once
        (``ReloadPostponed``). A policy's reload that still waits for its beginning is given up; one that already loads
        goes on. Calls, ``load()``, :meth:`reload` and :meth:`unload` work as usual, and so do loads that calls need:
        in a pool, another model still makes room for them. Pausing twice is the same as once. It holds in this process
        and in children that are forked from now on.
        """
        for source in self._sources:
            source.set_paused(paused=True)

    def resume(self) -> None:
        """End :meth:`pause`, however often it was called. What is due by then starts within about a second."""
        for source in self._sources:
            source.set_paused(paused=False)

    def close(self, timeout: _units.Duration | None = None) -> None:
        """Refuse further calls, wait for those under way, and release each model.

        Closing twice does nothing. Afterwards every use raises ``GuardClosed``.

        Calls that still run when ``timeout`` has passed keep their model and end as usual: ``close`` returns,
        ``GenerationAbandoned`` says how many there are, ``status().in_flight`` counts them down, and the model is
        released when the last of them ends. A process that exits before then does not call ``unload`` for it.

        Args:
            timeout: How long to wait for all calls together at most; 0 does not wait. Default: ``drain_timeout`` for
                each model, in a pool 30 s. The release that follows, with the ``unload`` hook, is not bounded.

        Raises:
            InvalidOption: ``timeout`` is not a duration; then it stays open.
            WouldDeadlock: Called inside a call, whose end it would wait for, or on a running event loop (use
                :meth:`aclose`).
        """
        limit = Timeout(timeout)
        self._raise_on_loop("close")
        for source in self._sources:
            source.close(limit.left())

    async def aclose(self, timeout: _units.Duration | None = None) -> None:
        """:meth:`close` for a coroutine: does not block the event loop."""
        await self._aside("close", partial(self.close, timeout))

    async def _aside(self, verb: str, work: Callable[[], None]) -> None:
        await waiting.run(work, f"modelguard-{verb}-{self.name}", self._sources[0].system.start_thread)

    def _raise_on_loop(self, verb: str) -> None:
        waiting.raise_on_event_loop(self.name, verb, f"await {self._what.split()[-1]}.a{verb}()")

    def _reopen(self) -> None:
        for source in self._sources:
            source.reopen()


class _Loadable(_Source, Protocol):
    @property
    def ready(self) -> bool: ...
    def until_loaded(self, limit: Timeout, /) -> Steps[None]: ...
    def until_reloaded(self, limit: Timeout, /) -> Steps[None]: ...
    def request_reload(self) -> object: ...
    def until_unloaded(self, limit: Timeout, /) -> Steps[None]: ...


class LoadingHandle(Handle):
    """A handle on one model, or on several copies of it: a source for each."""

    _loadable: Sequence[_Loadable]
    _reload_waits = True

    @property
    def ready(self) -> bool:
        """Whether calls get a model: what a readiness probe should report.

        One is loaded, or ``Idle`` has released it and the next call loads it (unless its ``ready`` is False).
        """
        return any(engine.ready for engine in self._loadable)

    def load(self, timeout: _units.Duration | None = None) -> None:
        """Load the model unless it is loaded; replicas one after another. Blocks.

        Args:
            timeout: How long to wait at most, for all together. Default: as long as it takes.

        Raises:
            LoadFailed: The load failed, or an earlier one did and its backoff has not passed.
            Reloading: ``timeout`` has passed.
            GuardClosed: After :meth:`close`.
            WouldDeadlock: Called on a running event loop (use :meth:`aload`) or by the loader itself.
        """
        instead = "await f.aload(), or async with; in a module that uvicorn imports on its loop, f.reload(wait=False)"
        waiting.raise_on_event_loop(self.name, "load", instead)
        waiting.block(self._until_loaded(Timeout(timeout)))

    async def aload(self, timeout: _units.Duration | None = None) -> None:
        """:meth:`load` for a coroutine: does not block the event loop."""
        await waiting.suspend(self._until_loaded(Timeout(timeout)))

    def reload(self, *, wait: bool = True, timeout: _units.Duration | None = None) -> None:
        """Replace the model by one whose load begins after this call. Does not wait for a pause or a backoff.

        A load that is running already becomes stale: while an old generation takes calls, its model is discarded
        (``LoadDiscarded``) and loaded again, once. Replicas are replaced one after another, and the others take the
        calls meanwhile; the reloads that are asked for while one runs are one that follows it. Of an isolated function
        the old mold serves until the new one and its workers are ready; over a pool, the molds of all keys take no new
        calls and end after those that run, the next call with a key makes a new one, and there is nothing to wait for.

        Args:
            wait: Return when the new generation takes calls; if False, return at once.
            timeout: How long to wait at most, for all together. Default: until the load has succeeded or failed.

        Raises:
            LoadFailed: The load failed. The old generation, if there is one, keeps taking calls; replicas after it keep
                their models.
            Reloading: ``timeout`` has passed. The reload goes on.
            GuardClosed: After :meth:`close`.
            WouldDeadlock: With ``wait``: called inside a call, or on a running event loop (use :meth:`areload`).
            InvalidOption: ``wait`` is not a bool, or ``timeout`` is not a duration.
        """
        check_wait(wait)
        limit = Timeout(timeout)  # first: a mistake must not begin a load
        if wait and self._reload_waits:
            self._raise_on_loop("reload")
            waiting.block(self._until_reloaded(limit))
        else:
            self._request_reload()

    async def areload(self, timeout: _units.Duration | None = None) -> None:
        """:meth:`reload` for a coroutine: does not block the event loop."""
        await waiting.suspend(self._until_reloaded(Timeout(timeout)))

    def unload(self, timeout: _units.Duration | None = None) -> None:
        """Release the model until its next use, which loads it again. Blocks.

        It waits for the calls that run, up to ``drain_timeout``, and for a load that is under way. A policy's reload
        that still waits for its beginning is given up. Does nothing if no model is loaded.

        Args:
            timeout: How long to wait at most, for all together. Default: until it is released.

        Raises:
            Reloading: ``timeout`` has passed. A release that has begun goes on; further replicas keep their models.
            GuardClosed: After :meth:`close`.
            WouldDeadlock: Called inside a call, by the loader, or on a running event loop (use :meth:`aunload`).
        """
        self._raise_on_loop("unload")
        waiting.block(self._until_unloaded(Timeout(timeout)))

    async def aunload(self, timeout: _units.Duration | None = None) -> None:
        """:meth:`unload` for a coroutine: does not block the event loop."""
        await waiting.suspend(self._until_unloaded(Timeout(timeout)))

    def _until_loaded(self, limit: Timeout) -> Steps[None]:
        for source in self._loadable:
            yield from source.until_loaded(limit)

    def _until_reloaded(self, limit: Timeout) -> Steps[None]:
        for source in self._loadable:
            yield from source.until_reloaded(limit)

    def _request_reload(self) -> None:
        for source in self._loadable:
            source.request_reload()

    def _until_unloaded(self, limit: Timeout) -> Steps[None]:
        for source in self._loadable:
            yield from source.until_unloaded(limit)

    def _open(self) -> None:
        self._reopen()
        self.load()

    async def _aopen(self) -> None:
        self._reopen()
        await self.aload()


class ModelHandle(LoadingHandle, Decorator[M]):
    """A handle on one model in this process, or on several copies of it: an engine for each."""

    def __init__(self, name: str, engines: Sequence[Engine[M]]) -> None:
        super().__init__(name, engines)
        self._engines = self._loadable = engines

    def rollback(self) -> None:
        """Go back to the model that the current one has replaced. Needs ``keep_previous=True``.

        It takes the next call: nothing is loaded, and nothing is awaited, so this may be called anywhere. A load under
        way is cancelled; calls that run on the current model end on it, and it is released. From now on no policy
        replaces the model, and ``Idle`` does not release it, until ``Modified`` or ``Changed`` see that the source has
        changed since the load that was rolled back, or until :meth:`reload`.

        Raises:
            NoPreviousModel: None is kept. If one replica keeps none, all stay as they are.
            GuardClosed: After :meth:`close`.
        """
        for engine in sorted(self._engines, key=lambda one: one.state.previous is not None):  # one without comes first
            engine.rollback()
