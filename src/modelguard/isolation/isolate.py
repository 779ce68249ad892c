"""``isolate``: run a guarded function in worker processes."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, Never, ParamSpec, Protocol, TypeVar, overload

from modelguard import _public, _units
from modelguard._units import FunctionKind
from modelguard.errors import InvalidOption, NotSupported, WouldDeadlock
from modelguard.isolation import _isolation_options, _processes, _supervisor, status
from modelguard.isolation._calls import CLOSE, NO_ITEM, Arguments, Caller, CallTimes, Items
from modelguard.isolation._isolation_options import (
    Bounds,
    Host,
    IsolationOptions,
    PoolSource,
    ScopeName,
    Source,
    StartMethod,
)
from modelguard.isolation._mold_owner import MoldGuard
from modelguard.isolation._scopes import PoolScope, ProcessScope
from modelguard.isolation.status import IsolationStatus
from modelguard.lifecycle.handle import LoadingHandle
from modelguard.lifecycle.policies import Policy
from modelguard.runtime import call_context, waiting
from modelguard.runtime.background import SHARED
from modelguard.serving import deadlines
from modelguard.serving.breaker import Breaker

if TYPE_CHECKING:
    from modelguard.isolation._host_scope import HostScope

__all__ = ["Isolated", "isolate"]


# How web frameworks see an isolated function: with the hints and the kind of the function that was written.


def mark(isolated: Any, *, coroutine: bool) -> None:
    """Have frameworks read the function's own hints, and await it if it is a coroutine function.

    Litestar reads the hints of an instance's ``__call__`` if that is a method, so the instance gets one that is not.
    Calls look it up in the class.
    """
    isolated.__call__ = _call_of(weakref.ref(isolated), coroutine=coroutine)
    if not coroutine:
        return
    mark_function: Callable[[Any], object] | None = getattr(inspect, "markcoroutinefunction", None)
    if mark_function is not None:  # from Python 3.12 on
        mark_function(isolated)
    else:
        isolated._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]  # noqa: SLF001 - the mark


def _call_of(reference: weakref.ref[Any], *, coroutine: bool) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        isolated = reference()
        return type(isolated).__call__(isolated, *args, **kwargs)

    async def acall(*args: Any, **kwargs: Any) -> Any:
        return await call(*args, **kwargs)

    return acall if coroutine else call


# ``Isolated``: a function whose model lives in worker processes, forked from a mold.


P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)  # pyright knows a coroutine function by a type of its own
T = TypeVar("T")


class Isolated(LoadingHandle, Generic[P, R_co]):
    """A function that runs in worker processes. Made by :func:`isolate`; see there for the options.

    ``f(x)`` blocks the thread, ``await f.aio(x)`` does not block the event loop, ``f.submit(x)`` returns a future. A
    coroutine function is awaited as before, and generators are streamed. Nothing is started before the first call or
    :meth:`load`. It is a context manager, for ``with`` and ``async with``: it loads on entry and closes on exit, on the
    last one if there are several at once.

    It is a handle as a guard is; what that does with a model, it does with the mold and its workers. With
    ``scope="host"`` they are those of all processes: ``reload``, ``unload`` and ``pause`` are for all of them, any of
    which can resume, and ``close`` leaves; the last one ends them. Over a pool they are those of all keys: ``load``
    loads nothing, and ``reload`` has nothing to wait for.
    """

    _made_by = "isolate(workers=2)(function)"
    _status = "modelguard.isolation.status:IsolationStatus"
    _what = "isolated function"

    def __init__(self, options: IsolationOptions, function: Callable[P, R_co], source: Source | PoolSource) -> None:
        functools.update_wrapper(self, function)
        super().__init__(options.name, ())
        self._options = options
        self._source = source
        self._finalizer: Any = None
        _supervisor.note_path()
        self._start()
        mark(self, coroutine=options.kind == "coroutine")
        status.functions.add(self)

    def _start(self, *, paused: bool = False) -> None:
        self._scope = _scope_of(self._options, self._source, paused=paused)
        self._sources = (self._scope,)
        # A mold imports a module that loads or reloads it, and would import that in the next mold.
        self._loadable = self._sources if _processes.role == "owner" else ()
        source = self._source
        self._reload_waits = not isinstance(source, PoolSource)
        key_of = source.pooled.key_of if isinstance(source, PoolSource) else None
        self._caller = Caller(self._options, self._scope, key_of)
        # Without anybody who could call it, as after a module was reloaded, its processes have no purpose.
        self._finalizer = weakref.finalize(self, self._scope.end_at_once)

    # Calls

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Compute the function in a worker. Blocks, unless it is a coroutine function.

        Raises:
            DeadlineExceeded: ``timeout`` has passed; the worker was killed. Or no worker became free within it.
            WorkerCrashed: The worker ended during the call.
            TransferRefused: The arguments or the result cannot be sent between processes.
            QueueFull, CircuitOpen: Refused at once; ``retry_after`` says when to try again.
            LoadFailed, Reloading: There is no mold.
            WouldDeadlock: On a running event loop (use :meth:`aio`), or while a mold imports the module.
            GuardClosed: After :meth:`close`.
            RemoteError: The function raised what cannot be pickled, or what would end an iteration or a task of the
                caller instead of reaching it, such as ``StopIteration``.
            Exception: What the function raised. Its ``__cause__`` has the traceback in the worker.
        """
        result: Any
        kind = self._options.kind
        if _processes.role != "owner":
            result = self._call_inside((args, kwargs))
        elif kind == "function":
            on_loop = asyncio._get_running_loop() is not None  # noqa: SLF001 - the public one raises where there is none
            if on_loop and not call_context.required():  # else a batch of one blocks the loop anyway, for its await
                why = "the call would block the running event loop"
                raise WouldDeadlock(self.name, why=why, fix="Write: await f.aio(...).")
            result = self._caller.call((args, kwargs), _limits())
        elif kind == "coroutine":
            result = self._await((args, kwargs))
        elif kind == "generator":
            result = self._caller.stream((args, kwargs), _limits())
        else:
            result = self._stream((args, kwargs))
        return result  # type: ignore[no-any-return]

    @overload
    async def aio(self: Isolated[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    async def aio(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    async def aio(self, /, *args: Any, **kwargs: Any) -> Any:
        """Compute one call without blocking the event loop. Arguments and errors are those of a call.

        Cancelling the task answers it at once, and takes the call out of the queue; one that a worker has begun runs to
        its end there. A call that waits holds no thread.
        """
        return await self._await((args, kwargs))

    @overload
    def submit(self: Isolated[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...
    @overload
    def submit(self, /, *args: P.args, **kwargs: P.kwargs) -> Future[R_co]: ...
    def submit(self, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Begin one call and return at once. Arguments and errors are those of a call.

        Cancelling the future takes the call out of the queue; one that a worker has begun runs to its end.
        """
        return self._submit((args, kwargs), awaited=False)

    def _submit(self, arguments: Arguments, *, awaited: bool) -> Future[Any]:
        if _processes.role != "owner":
            self._check_inside()
            reason = "a worker runs one call at a time. Call the function itself, or await its aio()"
            raise NotSupported(f"{self.name}.submit() in its own worker", reason=reason)
        self._refuse_streams()
        return self._caller.submit(arguments, _limits(), awaited=awaited)

    async def _await(self, arguments: Arguments) -> Any:
        if _processes.role != "owner":
            self._refuse_streams()
            result = self._call_inside(arguments)
            return await result if self._options.kind == "coroutine" else result
        waiting.require_loop("awaiting an isolated function")
        return await waiting.result(self._submit(arguments, awaited=True))

    async def _stream(self, arguments: Arguments) -> AsyncIterator[Any]:
        waiting.require_loop("awaiting an isolated function")
        opening = step = self._caller.open(arguments, _limits())
        thread = f"modelguard-isolated-{self.name}"
        try:
            items = await waiting.result(opening)
            while True:
                step = waiting.start(items.next, thread, SHARED.start)
                item = await waiting.result(step)
                if item is NO_ITEM:
                    return
                yield item
        except BaseException as error:
            closed = _close_after(step, opening)
            # Cancelled, or on a loop that is gone: the step that a worker has begun runs to its end.
            if isinstance(error, (Exception, GeneratorExit)) and waiting.on_any_loop():
                await waiting.result(closed)
            raise

    def _refuse_streams(self) -> None:
        if "generator" in self._options.kind:
            raise TypeError(f"{self.name}() is a generator function: iterate over a call of it")

    def _call_inside(self, arguments: Arguments) -> Any:
        """In a worker: a function may call itself, and runs on the model that is already there."""
        self._check_inside()
        args, kwargs = arguments
        return _processes.here(*args, **kwargs)

    def _check_inside(self) -> None:
        """Check that this is a worker of this function."""
        if _processes.role == "importing":
            why = "it is called while a mold imports the module"
            fix = "Put the calls of a script under: if __name__ == '__main__':"
            raise WouldDeadlock(self.name, why=why, fix=fix)
        if _processes.target is not self.isolated_function:
            reason = "a worker has only the model of its own function, and starts no workers of others"
            raise NotSupported(f"{self.name}() inside an isolated function", reason=reason)

    # Its state

    @property
    def function_kind(self) -> FunctionKind:
        """What a call gives: ``"function"``, ``"coroutine"``, ``"generator"`` or ``"async generator"``."""
        return self._options.kind

    @property
    def isolated_function(self) -> Callable[P, R_co]:
        """What runs in the workers: the function below ``@isolate``."""
        return self._source.function

    def source_for(self, key: Any) -> Source:
        """In a mold: what its workers run, and the guard that lends the model, or the pool's model of ``key``."""
        return self._source.for_key(key)

    @property
    def version(self) -> str | None:
        """The version of the model in the current mold, as its loader gave it; None if it gave none."""
        return self._scope.version

    def status(self) -> IsolationStatus:
        """Its state, its processes and its counts."""
        return self._scope.status()

    def __repr__(self) -> str:
        return f"<Isolated {self.name!r}>"

    # Its molds, beside what every handle has

    def rollback(self) -> None:
        """Go back to the mold that the current one has replaced, as :meth:`ModelGuard.rollback` does, at once.

        Needs a guard with ``keep_previous=True``: the previous mold and its workers stay alive, and take their memory.

        Raises:
            NoPreviousModel: None is kept, as of a pool or a host, or its processes have ended.
            GuardClosed: After :meth:`close`.
        """
        self._scope.rollback()

    def refuse_calls(self) -> None:
        """This process exits, and ends its molds: raise ``GuardClosed`` from now on. Waits for nothing."""
        self._scope.refuse_calls()

    # Processes and copies

    def renew_in_child(self) -> None:
        """In a forked child of this process: start again, since the parent's workers answer the parent."""
        self._finalizer.detach()
        self._scope.abandon()
        closed = self._scope.closed
        self._start(paused=self._scope.paused)
        if closed:
            self.refuse_calls()

    # By reference, as functions are pickled and copied.
    def __reduce__(self) -> str:
        return str(self.__qualname__)  # type: ignore[attr-defined]


def _close_after(step: Future[Any], opening: Future[Items]) -> Future[None]:
    """Close a stream in a thread, after the step that still runs; the future tells when it is closed."""
    closed: Future[None] = waiting.promise()

    def close() -> None:
        if not opening.cancelled() and opening.exception() is None:
            opening.result().close()

    step.add_done_callback(lambda _: waiting.start(close, CLOSE, SHARED.start, closed))
    return closed


def _scope_of(
    options: IsolationOptions, source: Source | PoolSource, *, paused: bool
) -> ProcessScope | PoolScope | HostScope:
    if isinstance(source, PoolSource):
        return PoolScope(options, source, paused=paused)
    guard_options = source.guard.engine.options
    if options.scope is None:
        return ProcessScope(options, MoldGuard(options, guard_options, paused=paused))
    from modelguard.isolation._host_scope import HostScope

    return HostScope(options, guard_options, paused=paused)


def _limits() -> CallTimes:
    now = time.monotonic()
    left = None if deadlines.current_scope.get() is None else deadlines.left()  # most calls have none
    return CallTimes(now, math.inf if left is None else now + left)


R = TypeVar("R")


class Decorator(Protocol):
    """What ``isolate(...)`` returns."""

    def __call__(self, function: Callable[P, R], /) -> Isolated[P, R]: ...


@_public.with_fixes(bounds="Bounds", scope="Host", breaker="Breaker")
def isolate(
    *others: Never,
    target: str | None = None,
    workers: int = 2,
    timeout: _units.Duration | None = 60.0,
    start: StartMethod = "fork",
    recycle_on: Policy | None = None,
    retry: bool = False,
    breaker: Breaker | None = None,
    bounds: Bounds | None = None,
    scope: ScopeName | Host = "process",
    name: str | None = None,
) -> Decorator:
    """Run a guarded function in worker processes, so that no load, leak, hang or crash of its model reaches this one.

    A fresh interpreter, the mold, imports the function's module, loads the guard's model, validates it, warms it up and
    passes the fork gate of :func:`modelguard.prefork.prepare`. Then it forks workers, which share the model's memory. A
    worker runs one call at a time. This process never loads the model. Linux only.

    The guard's policies decide. ``Uses``, ``MemoryGrowth``, ``MemoryLimit``, ``Errors`` and policies of your own are
    asked in each worker, and replace that worker by a fresh fork, which takes calls before the old worker ends.
    ``TTL``, ``Modified``, ``Changed`` and :meth:`Isolated.reload` make a new mold; the old one serves until the workers
    of the new one are ready.

    Decorate a function at the top level of a module::

        @isolate(workers=2, timeout="10s")
        @guard(load_model, reload_on=TTL("1h") | Uses(50_000))
        def entities(nlp, text: str) -> list[str]: ...

    Args:
        others: None; every option is passed by keyword.
        target: ``"module:function"``: what runs, if this process is not to import it. The decorated function gives its
            name and signature to callers, and has ``...`` for a body; the mold imports the module, and takes the model
            and its policies from the guard that it finds there. Default: the decorated function.
        workers: How many calls run at a time, each in a worker process. One more worker is kept ready, which takes the
            place of one that is replaced or has died; with ``start="spawn"`` only while one is replaced.
        timeout: The longest that a call may run in a worker, after which the worker is killed and the call gets
            ``DeadlineExceeded``; also the longest that a call waits for a free worker. Of a generator, each step.
            None: no limit.
        start: ``"fork"``: workers are forked from a mold and share its memory. ``"spawn"``: each worker is a fresh
            interpreter that loads the model for itself, for models that do not survive a fork (CUDA). Workers share no
            memory, and one takes as long to replace as the model takes to load.
        recycle_on: For functions without a guard: when to replace a worker (or, for ``TTL``, ``Modified`` and
            ``Changed``, all).
        retry: Run a call once more if its worker crashed. Only for functions that may safely run twice, and no
            generators.
        breaker: When calls are refused because workers crash or exceed ``timeout`` one after the other. Default:
            ``Breaker()``. It counts no errors, so it takes no ``ignore``, and no ``reload``.
        bounds: How many calls may wait, and how large their arguments and results may be. Default: ``Bounds()``, 256
            calls and 1 GB.
        scope: ``"process"``: the mold and the workers belong to this process, and end with it. ``"host"``: all
            processes of this user on this host that run the same code share them, under any server; they end with the
            last one. :class:`Host` bounds that to those that have a ``version`` in common, too.
        name: For events, logs and errors. Default: the function's module and name.

    Raises:
        InvalidOption: An option is invalid, or the function cannot be imported by name: it is a lambda, a method, or
            defined inside another function or in no file (a notebook, ``python -c``). Or there is no module of
            ``target``, or the decorated function has a body; whether it fits that one is seen by the first load, as a
            ``LoadFailed``.
        NotSupported: This is not Linux.
    """
    if others:
        fix = "Write @isolate() or @isolate(workers=2) above the function."
        raise InvalidOption("function", others[0], why="is no option: isolate takes keywords only", fix=fix)

    def decorate(function: Callable[P, R], /) -> Isolated[P, R]:
        _processes.check_supported()
        if target is None:
            _isolation_options.check_function(function, recycle_on, start)
            _isolation_options.warn_of_other_loaders(function)
        else:
            _isolation_options.check_stub(function, recycle_on, start)
        options = _isolation_options.parse(
            function,
            None if target is None else _isolation_options.stub_of(function, target, recycle_on),
            workers=workers,
            timeout=timeout,
            start=start,
            retry=retry,
            breaker=breaker,
            bounds=bounds,
            scope=scope,
            name=name,
        )
        source = _isolation_options.source_of(function, options.name, recycle_on)
        return Isolated(options, function, source)

    return decorate


_public.set_module(globals(), "modelguard")
